"""Prose: the package and its pages are read once, so each folder gets fewer words, and plainer ones."""

import re
from pathlib import Path

import pytest
from words import counted, page, relative

pytestmark = pytest.mark.law

ROOT = Path(__file__).parents[2]

# Words for each line of code, and relative words in 100: only ever less.
LIMITS = {
    "checkpoint": (2.10, 1.10),
    "cli": (1.93, 0.48),
    "comm": (2.96, 1.00),
    "compiler": (2.04, 1.61),
    "core": (2.13, 1.60),
    "derivatives": (2.41, 1.11),
    "files": (2.09, 0.85),
    "grad": (2.80, 0.61),
    "graph": (2.21, 1.53),
    "hosts": (2.25, 0.92),
    "layout": (2.39, 0.50),
    "module": (2.29, 0.89),
    "optim": (2.27, 0.42),
    "pictures": (1.94, 0.46),
    "plan": (2.74, 1.07),
    "planner": (2.09, 1.34),
    "sharding": (2.54, 0.93),
    "state": (2.40, 0.63),
    "testing": (2.22, 0.96),
    "train": (2.62, 0.92),
    "update": (2.42, 0.90),
    "watch": (2.15, 1.23),
    "whole": (1.93, 1.70),
    "zero_optimizer": (1.91, 0.84),
}
PAGES = 63050, 2.14  # words of all pages, and relative words in 100: only ever less


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
