"""Sizes of fshard and of what it is compared with, counted alike, for the table of docs/comparison.md.

`python tools/sizes.py` counts what is installed and writes its rows; `--deepspeed FOLDER`, the folder `deepspeed` of
its sources, counts DeepSpeed as well. A row of what is not there stays as it is.
"""

import argparse
import ast
import functools
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "comparison.md"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
STEP = ("core", "comm", "hosts", "layout", "plan", "sharding", "grad", "update", "train")  # folders of a step
GROUPS = ("optim", "checkpoint", "testing", "module")  # packages of fshard whose names are public, too
SHARDING = ("mesh", "named_sharding", "partition_spec", "sharding", "sharding_impls", "sharding_specs", "shard_map")


@dataclass(frozen=True)
class Subject:
    """A row of the table: its files, and the modules whose names users import."""

    name: str
    folder: Path
    files: tuple[str, ...]  # patterns in the folder
    doors: tuple[str, ...]  # files whose public names count, if `files` define them
    but: tuple[str, ...] = ()  # patterns of files that do not belong to it


@dataclass(frozen=True)
class Size:
    """What is counted of a subject."""

    lines: int
    names: int
    methods: int
    longest: int
    function: str


@functools.cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def documented(source: str) -> list[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """The module and what is defined in it, each with a docstring."""
    nodes = [x for x in ast.walk(_parsed(source)) if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return [x for x in nodes if ast.get_docstring(x) is not None]


@functools.cache
def code_lines(source: str) -> frozenset[int]:
    """The lines of a module that are code: not blank, no comment, no docstring."""
    texts = {
        line for node in documented(source) for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in NO_CODE]
    return frozenset(line for token in tokens for line in range(token.start[0], token.end[0] + 1)) - texts


def longest(source: str) -> tuple[int, str]:
    """The function with the most lines of code, functions inside it included: their number, and its name."""
    lines, found = code_lines(source), (0, "")
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = max(found, (len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1))), node.name))
    return found


def _defined(source: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    return {x.name: x for x in _parsed(source).body if isinstance(x, ast.FunctionDef | ast.ClassDef)}


def exported(source: str) -> set[str]:
    """The names of `__all__`; without one, what the module defines, and what it imports as itself or from beside it."""
    found = set(_defined(source))
    for node in _parsed(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names if node.level or alias.asname == alias.name)
    return found


def size(subject: Subject) -> Size:
    """A subject, counted."""
    out = {path for pattern in subject.but for path in subject.folder.glob(pattern)}
    paths = {path for pattern in subject.files for path in subject.folder.glob(pattern)} - out
    sources = [path.read_text() for path in sorted(paths)]
    doors = {name for door in subject.doors for name in exported((subject.folder / door).read_text())}
    found = {name: node for source in sources for name, node in _defined(source).items()}
    public = {name: node for name, node in found.items() if name in doors and not name.startswith("_")}
    members = [x for node in public.values() if isinstance(node, ast.ClassDef) for x in node.body]
    methods = [x for x in members if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")]
    lines = sum(len(code_lines(source)) for source in sources)
    return Size(lines, len(public), len(methods), *max(map(longest, sources)))


def _folder(package: str) -> Path | None:
    """Where an installed package lies."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def house() -> Iterator[Subject]:
    """The rows of fshard."""
    fshard = Path(__file__).parents[1] / "fshard"
    doors = ("__init__.py", *(f"{name}/__init__.py" for name in GROUPS))
    modules = ("tree.py", "wire.py", "collectives.py", "reduction.py")
    yield Subject("fshard: a step and its sharding", fshard, tuple(f"{name}/*.py" for name in STEP), ("__init__.py",))
    yield Subject("fshard: all", fshard, ("**/*.py",), (*doors, *modules))


def others(deepspeed: Path | None) -> Iterator[Subject]:
    """The rows of what fshard is compared with, as far as it is here."""
    torch, optax, jax = (_folder(name) for name in ("torch", "optax", "jax"))
    assert torch is not None
    fsdp, optim = torch / "distributed" / "fsdp", torch / "distributed" / "optim"
    zero, scaler = "zero_redundancy_optimizer.py", "sharded_grad_scaler.py"
    yield Subject("FSDP2", fsdp, ("_fully_shard/*.py",), ("__init__.py",))
    yield Subject("FSDP1", fsdp, ("*.py",), ("__init__.py", "wrap.py"), (scaler,))
    yield Subject("ZeroRedundancyOptimizer", optim, (zero,), (zero,))
    yield Subject("ShardedGradScaler", fsdp, (scaler,), (scaler,))
    if deepspeed is not None:
        zero_files = ("__init__.py", "runtime/zero/*.py", "runtime/engine.py")
        doors = ("__init__.py", "runtime/zero/__init__.py")
        yield Subject("DeepSpeed ZeRO", deepspeed, zero_files, doors, ("runtime/zero/test.py",))
    if jax is not None and optax is not None:
        files = tuple(f"_src/{name}.py" for name in SHARDING)
        yield Subject("JAX's sharding", jax, files, ("sharding.py", "__init__.py"))
        yield Subject("optax", optax, ("**/*.py",), ("__init__.py",), ("**/*_test.py",))


def row(subject: Subject) -> str:
    """A row of the table; lines in hundreds, because they change with every commit."""
    found = size(subject)
    function = f"{found.longest} (`{found.function}`)"
    return f"| {subject.name} | {round(found.lines, -2):,} | {found.names} | {found.methods} | {function} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", type=Path)
    before, title, text = PAGE.read_text().partition("## How large each is")
    for subject in (*house(), *others(parser.parse_args().deepspeed)):
        text = re.sub(rf"(?m)^\| {re.escape(subject.name)} \|.*$", row(subject), text, count=1)
        print(row(subject))
    PAGE.write_text(before + title + text)
    print({name: version(name) for name in ("torch", "jax", "optax")})
