"""The messages that docs/debug.md quotes of fshard are those of fshard."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "debug.md"
HOLE = "\0"  # for what an f-string fills in


def texts(source: str) -> Iterator[str]:
    """The string constants of a module, and its f-strings with holes; no docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    documents = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if node in documents:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(x.value) if isinstance(x, ast.Constant) else HOLE for x in node.values)


def quoted() -> list[str]:
    """The first cells of the tables of fshard's own messages."""
    ours = PAGE.read_text().partition("### torch, torchrun")[0]
    return re.findall(r"(?m)^\| `([^`]+)` \|", ours)


def occurs(message: str, sources: list[str]) -> bool:
    """Whether one text has the parts of a message in this order, where `...` stands for anything."""
    pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
    return any(pattern.search(text) for text in sources)


SOURCES = [text for path in (ROOT / "fshard").rglob("*.py") for text in texts(path.read_text())]


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_fshards(message: str) -> None:
    """A reader would search the page for a message, and not find it, because it is another one now."""
    assert occurs(message, SOURCES)


def test_many_messages_are_quoted_and_others_are_not_found() -> None:
    """The test above would see no messages, or find any text."""
    assert len(quoted()) >= 40
    assert not occurs("the mesh has too many axis names", SOURCES)
    assert f"a {HOLE} b" in texts('y = f"a {x} b"')
