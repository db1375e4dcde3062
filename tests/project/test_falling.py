"""Numbers of the package that only fall: each limit is what the package has now, and who lowers it writes it down."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.law

HOUSE = Path(__file__).parents[2] / "fshard"
SOURCES = {str(path.relative_to(HOUSE)): path.read_text() for path in sorted(HOUSE.rglob("*.py"))}
ENGINE = ("autograd.py", "chain.py", "tape.py", "travel.py", "under_way.py", "writes.py")  # one forward and backward

ATTRIBUTES = 78  # of the objects that hold one forward and backward; FSDP2 has 95
NAMES = 13  # top-level names that two files or more define
ANY = 120  # uses of typing.Any
IGNORED = 58  # lines whose types are not checked


def attributes(source: str) -> list[str]:
    """The attributes of a file's classes, as "Class.name", but for tuples, protocols and functions of autograd."""
    found = list[str]()
    for node in (x for x in ast.parse(source).body if isinstance(x, ast.ClassDef)):
        if any(ast.unparse(base).split(".")[-1] in ("NamedTuple", "Protocol", "Function") for base in node.bases):
            continue
        names = [name for statement in node.body for name in assigned(statement)]
        stored = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
        names += [x.attr for x in stored if isinstance(x.value, ast.Name) and x.value.id == "self"]
        found += [f"{node.name}.{name}" for name in dict.fromkeys(names) if not name.startswith("__")]
    return found


def assigned(node: ast.stmt) -> list[str]:
    """The plain names that a statement assigns or annotates."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def defined(source: str) -> Iterator[str]:
    """The top-level names that a file defines, but for type variables, which say nothing outside of a signature."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        value = getattr(node, "value", None)
        if not (isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")):
            yield from (name for name in assigned(node) if name != "__all__")


def twice(sources: Mapping[str, str]) -> list[str]:
    """The top-level names that two files or more define."""
    files = Counter(name for source in sources.values() for name in set(defined(source)))
    return sorted(name for name, number in files.items() if number > 1)


def uses_of_any(source: str) -> int:
    """The number of types that are `Any`."""
    return sum(isinstance(x, ast.Name) and x.id == "Any" for x in ast.walk(ast.parse(source)))


def ignored(source: str) -> int:
    """The number of comments that tell mypy to ignore a line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(x.type == tokenize.COMMENT and "type: ignore" in x.string for x in tokens)


def test_the_numbers_only_fall() -> None:
    """State that changes, words with two meanings and types that nothing checks would grow, a few with each change."""
    held = [name for file in ENGINE for name in attributes(SOURCES[f"grad/{file}"])]
    assert len(held) <= ATTRIBUTES, held
    assert len(names := twice(SOURCES)) <= NAMES, names
    assert sum(map(uses_of_any, SOURCES.values())) <= ANY
    assert sum(map(ignored, SOURCES.values())) <= IGNORED


def test_the_counters_count() -> None:
    """A counter that finds nothing would let everything pass."""
    source = (
        "T = TypeVar('T')\nLIMIT: Any = 1  # type: ignore\nclass A:\n    x: int\n    def f(self) -> Any:\n"
        "        self.y = 'type: ignore'\nclass B(NamedTuple):\n    z: int\ndef f(x: A) -> None: ...\n"
    )
    assert attributes(source) == ["A.x", "A.y"]
    assert twice({"a.py": source, "b.py": "T = TypeVar('T')\nB = f = 1\n"}) == ["B", "f"]
    assert (uses_of_any(source), ignored(source)) == (2, 1)
