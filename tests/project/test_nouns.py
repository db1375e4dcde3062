"""Nouns: the classes that say which elements of which leaf lie where. A reader must know all, so they get fewer."""

import ast
import functools
from pathlib import Path

import pytest

pytestmark = pytest.mark.law

PACKAGE = Path(__file__).parents[2] / "fshard"

LIMIT = 31  # only ever less: who takes nouns away lowers it

NOUNS: dict[str, list[str]] = {
    "layout/layout.py": ["Split", "Leaf", "Layout"],
    "layout/pieces.py": ["Parts", "Views", "Unreduced"],
    "whole/moves.py": ["Item", "Moves"],
    "layout/row.py": ["Row", "RowSplit", "Span"],
    "layout/rules.py": ["Rule", "RouteStep"],
    "plan/owners.py": ["Share", "TableLine"],
    "plan/plan.py": ["Kind", "Slot", "Unit", "Plan"],
    "sharding/schedule.py": ["View", "Entry", "Schedule"],
    "sharding/sharded.py": ["Sharded"],
    "zero_optimizer/flat.py": ["_Buckets"],
    "zero_optimizer/leaf.py": ["ZeroState"],
    "optim/matrix.py": ["Factors"],
    "checkpoint/contents.py": ["SavedSpan", "Contents"],
    "checkpoint/restoring.py": ["PieceRead"],
    "files/index.py": ["Piece", "IndexEntry"],
}

# What has such a field, or derives from a noun, and is none: what it is.
OTHERS: dict[str, dict[str, str]] = {
    "checkpoint/saving.py": {"_Writing": "an event"},
    "core/storage.py": {"MemoryRanges": "addresses of memory"},
    "files/safetensors_file.py": {"FileEntry": "bytes of a file"},
    "files/torch_dcp.py": {"ChunkRun": "a `Piece` of another format"},
    "files/zip_item.py": {"ZipItem": "bytes of a file", "_View": "bytes of a file"},
    "grad/autograd.py": {"SavedView": "a view as torch has it"},
    "grad/tape.py": {"Tape": "the units of one forward and backward"},
    "graph/bucketing.py": {"_FlatCollective": "nodes of a graph"},
    "graph/dataflow.py": {"GatherNodes": "nodes of a graph"},
    "graph/inspect.py": {"Flight": "nodes of a graph"},
    "layout/layout.py": {"Derived": "a memo"},
    "update/base.py": {"_Fields": "the fields of a transformation"},
    "plan/owners.py": {"Picture": "text"},
    "planner/estimate.py": {"_Reading": "nodes of a graph", "_Site": "a node of a graph"},
    "core/lazy.py": {"Attributes": "names"},
    "watch/guard.py": {"_Rest": "digests"},
    "watch/compare.py": {"Gap": "a difference"},
    "testing/oracle.py": {"_Whole": "whole tensors"},
    "testing/scheduler.py": {"Post": "a collective", "WorldRun": "an event"},
}

FIELDS = {
    *("begin", "start", "stop", "starts", "end", "numel", "offset", "row", "rows", "spans", "runs", "holders", "over"),
    *("places", "slots", "lengths", "interval", "layout"),
}


@functools.cache
def classes(source: str) -> list[ast.ClassDef]:
    """The classes of a module, nested ones included."""
    statements: list[ast.AST] = [ast.parse(source)]
    for node in statements:  # which grows
        statements += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return [node for node in statements if isinstance(node, ast.ClassDef)]


def fields(node: ast.ClassDef) -> set[str]:
    """The names that a class body annotates, and the attributes of `self` that `__init__` sets, without underscores."""
    names = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)]
    for method in (x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"):
        stored = [x for x in ast.walk(method) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
        names += [x.attr for x in stored if isinstance(x.value, ast.Name) and x.value.id == "self"]
    return {name.lstrip("_") for name in names}


def bases(node: ast.ClassDef) -> set[str]:
    """The names of the classes that a class derives from, without what is in brackets."""
    plain = (x.value if isinstance(x, ast.Subscript) else x for x in node.bases)
    return {x.attr if isinstance(x, ast.Attribute) else x.id for x in plain if isinstance(x, ast.Attribute | ast.Name)}


def like_nouns(source: str) -> set[str]:
    """The classes of a module that look like nouns: by a field, or by a class they derive from."""
    nouns = {name for names in NOUNS.values() for name in names}
    return {node.name for node in classes(source) if fields(node) & FIELDS or bases(node) & nouns}


SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_there_are_no_more_nouns_than_there_were() -> None:
    """A new word for what others say already would be one more that every reader has to learn."""
    listed = [(file, name) for file, names in NOUNS.items() for name in names]
    assert len(listed) == len(set(listed)) == LIMIT, "fewer: lower LIMIT; more: say it with the nouns there are"


def test_the_tables_list_what_there_is() -> None:
    """A class that looks like a noun is in one table, and one that is gone in none: a number of them would be wrong."""
    unlisted = {}
    for file, source in SOURCES.items():
        listed = {*NOUNS.get(file, ()), *OTHERS.get(file, ())}
        if found := like_nouns(source) - listed:
            unlisted[file] = found
    assert unlisted == {}, "a noun? Into NOUNS, which must not get longer. None? Into OTHERS, with a word why"
    gone = {}
    for table in (NOUNS, OTHERS):
        for file, names in table.items():
            there = {node.name for node in classes(SOURCES[file])} if file in SOURCES else set()
            if left := {*names} - there:
                gone[file] = left
    assert gone == {}, "take them from the table, and lower LIMIT"
    for file, others in OTHERS.items():
        assert {*others} <= like_nouns(SOURCES[file]), f"{file}: what looks like no noun needs no row in OTHERS"
        assert not {*others} & {*NOUNS.get(file, ())}, file


def test_the_check_of_nouns_can_fail() -> None:
    """A noun is seen by a field, by an attribute, private or not, and by what it derives from; others are not."""
    assert like_nouns("class A:\n    begin: int\n    shape: tuple[int, ...]") == {"A"}
    assert like_nouns("class A:\n    def __init__(self, x):\n        self.n, self._rows = x") == {"A"}
    assert like_nouns("def f():\n    class A(x.Sharded): pass\n    class B(Views[int]): pass") == {"A", "B"}
    assert like_nouns("class A(dict):\n    name: str\n    def rows(self):\n        self.row = 1") == set()
