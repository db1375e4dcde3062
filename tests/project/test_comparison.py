"""What docs/comparison.md says of sizes and of torch is so."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sizes import PAGE, Subject, code_lines, exported, house, longest, row, size

pytestmark = pytest.mark.law

TORCH = Path(torch.__file__).parent / "distributed"


def cells(line: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.strip("|\n").split("|")]


@pytest.mark.parametrize("subject", [*house()], ids=lambda subject: subject.name)
def test_the_sizes_of_fshard_are_those_of_the_page(subject: Subject) -> None:
    """The page would say that fshard is smaller than it is."""
    text = PAGE.read_text().partition("## How large each is")[2]
    (line,) = re.findall(rf"(?m)^\| {re.escape(subject.name)} \|.*$", text)
    (name, lines, *others), (_, now, *others_now) = cells(line), cells(row(subject))
    assert others == others_now, f"{name}: run python tools/sizes.py"
    assert int(lines.replace(",", "")) == pytest.approx(int(now.replace(",", "")), rel=0.02), "python tools/sizes.py"


SOURCE = '''"""A module."""

import other as other
from .beside import near
from elsewhere import far, same as same


class Public:
    """Two lines
    of text."""

    def method(self):
        # a comment
        def inner():
            return 1

        return inner()

    def _private(self): ...


def function(): return 1
'''


def test_what_is_counted(tmp_path: Path) -> None:
    """Comments or texts would be counted, or private names, or names that other files define."""
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "door.py").write_text("from .one import Public, function\n")
    assert len(code_lines(SOURCE)) == 10
    assert longest(SOURCE) == (4, "method")
    assert exported(SOURCE) == {"Public", "function", "near", "same"}
    assert exported('from .x import a\n__all__ = ["b"]\n') == {"b"}
    subject = Subject("x", tmp_path, ("*.py",), ("door.py",), ("door.py",))
    found = size(subject)
    assert (found.lines, found.names, found.methods, found.longest) == (10, 2, 1, 4)
    assert size(replace(subject, but=())).lines == 11


def test_what_torch_says_is_quoted() -> None:
    """A quotation of torch on the page would not be in the file that the page names."""
    quoted = re.findall(r'"([^"]+)" in `(fsdp/[\w/]+\.py)`', PAGE.read_text())
    assert quoted
    for words, file in quoted:
        assert words in (TORCH / file).read_text(), file
