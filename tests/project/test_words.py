"""Prose: the package and its pages are read once, so each folder gets fewer words, and plainer ones."""

import re
from pathlib import Path

import pytest
from words import counted, page, relative

pytestmark = pytest.mark.law

ROOT = Path(__file__).parents[2]

# Words for each line of code, and relative words in 100: only ever less.
LIMITS = {
    "checkpoint": (2.2, 1.2),
    "cli": (2.0, 0.6),
    "comm": (3.1, 1.0),
    "compiler": (2.1, 1.7),
    "core": (2.2, 1.7),
    "derivatives": (2.5, 1.2),
    "elastic": (3.5, 0.4),
    "files": (2.2, 0.9),
    "grad": (2.9, 0.7),
    "graph": (2.3, 1.5),
    "hosts": (2.3, 1.0),
    "layout": (2.5, 0.5),
    "module": (2.4, 1.0),
    "optim": (2.4, 0.5),
    "parallel": (2.5, 1.0),
    "pictures": (2.0, 0.6),
    "plan": (2.8, 1.1),
    "planner": (2.2, 1.4),
    "sharding": (2.6, 1.1),
    "state": (2.5, 0.7),
    "testing": (2.4, 1.1),
    "train": (2.8, 1.0),
    "update": (2.5, 1.0),
    "watch": (2.3, 1.4),
    "whole": (2.0, 1.8),
    "zero_optimizer": (2.1, 0.9),
}
PAGES = 52_300, 1.7  # words of all pages, and relative words in 100: only ever less


@pytest.mark.parametrize("name", LIMITS)
def test_a_folder_says_no_more_than_it_did(name: str) -> None:
    """With each change a folder's docstrings and comments grow, until nobody reads them."""
    words = counted(sorted((ROOT / "fshard" / name).rglob("*.py")))
    most, most_relative = LIMITS[name]
    assert (words.a_line <= most, words.relative <= most_relative, words.questions) == (True, True, 0), words


def test_every_folder_has_a_limit() -> None:
    """A new folder may say what it likes."""
    assert {*LIMITS} == {path.parent.name for path in (ROOT / "fshard").glob("*/__init__.py")}


def test_the_pages_say_no_more_than_they_did() -> None:
    """With each change the pages grow, until nobody reads them."""
    text = "\n".join(page(path.read_text()) for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    assert len(text.split()) <= PAGES[0], len(text.split())
    assert relative(text) <= PAGES[1], relative(text)


def test_the_counter_counts(tmp_path: Path) -> None:
    """A counter that finds nothing would let everything pass."""
    path = tmp_path / "a.py"
    path.write_text('"""Which is it?"""\n\nx = 1  # what it says\ny = 2\n')
    words = counted([path])
    assert words == (3.0, pytest.approx(100 / 6), 1)
    assert page("a b\n```python\nx y z\n```\nc\n").split() == ["a", "b", "c"]


def test_the_glossary_names_the_files_of_its_words() -> None:
    """A reader who looks a word up finds a file that is gone, or more words than one learns."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \| `(?:fshard/)?([\w/]+\.py)` \|$", section, re.MULTILINE)
    assert 30 <= len(rows) <= 40
    assert [file for _, file in rows if not (ROOT / "fshard" / file).exists()] == []
