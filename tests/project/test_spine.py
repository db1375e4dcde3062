"""The spine and its wings: a file lies in a folder of the spine exactly if a plain program enters it.

A plain program makes a plan, shards parameters, makes a first state, and takes steps. The folders that its steps enter
are the spine; a reader of the engine reads these. Other features lie in wings, which import the spine. Both numbers of
this file only ever fall: what lies in the spine and is never entered, and imports that lead off it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import code_lines
from support.entered import HOUSE, entered
from support.worlds import gloo
from torch import Tensor
from torch.nn import functional as F

import fshard

pytestmark = pytest.mark.law

BESIDE = 6  # files in folders of the spine that a plain program never enters
BESIDE_LINES = 771  # of code in them
OFF = 12  # pairs of a file that it enters, and one that it does not and that the first imports

SOURCES = {str(path.relative_to(HOUSE)): path.read_text() for path in sorted(HOUSE.rglob("*.py"))}


def loss(p: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    """A small language model: an embedding, a stack of equal layers, a head."""
    x = p["embed"][batch["t"]]
    for layer in p["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    y = F.cross_entropy(x @ p["head"], batch["y"], reduction="none")
    return fshard.Mean(y.sum(), y.numel())


def plain(mesh: Any) -> list[set[str]]:
    """The files that a plain program enters: until its steps begin, and in its third step."""
    torch.manual_seed(0)
    layers = [{"w": torch.randn(8, 8) / 3, "b": torch.zeros(8)} for _ in range(5)]
    params = {"embed": torch.randn(10, 8), "layers": layers, "head": torch.randn(8, 10)}
    t, begun = torch.randint(0, 10, (8,)), list[Any]()
    batch = {"t": t, "y": (t + 1) % 10}

    def begin() -> None:
        tx, plan = fshard.optim.adamw(1e-2), fshard.make_plan(params, mesh, units=["layers.*"])
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        begun.extend((fshard.train_step(loss, tx, clip_norm=1.0), state))

    walks = [set().union(*entered(begin))]
    step, state = begun
    for _ in range(2):
        state, _ = step(state, batch)
    walks.append(set().union(*entered(lambda: step(state, batch))))
    return [{file for file, _ in walk} for walk in walks]


def imported(file: str, sources: dict[str, str]) -> Iterator[str]:
    """The files of the package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(sources[file])):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = Path(file).parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for path in (path for alias in node.names for path in (base / f"{alias.name}.py", base.with_suffix(".py"))):
                if str(path) in sources:
                    yield str(path)


def strays(spine: set[str], steps: set[str], sources: dict[str, str]) -> tuple[list[str], list[str]]:
    """Files of folders that steps enter which are not of the spine, and imports of others by files of the spine."""
    folders = {Path(file).parent for file in steps}
    beside = [x for x in sources if Path(x).parent in folders and x not in spine and not x.endswith("__init__.py")]
    inside = sorted(x for x in spine if x in sources and not x.endswith("__init__.py"))
    return beside, [f"{x} -> {y}" for x in inside for y in sorted({*imported(x, sources)} - spine)]


def test_the_spine_imports_few_files_that_a_plain_program_never_enters() -> None:
    """A reader of the engine would read features that a plain step does not need, and each would tug at it."""
    (begun, steps), (begun_too, steps_too) = gloo(plain)
    steps |= steps_too
    beside, off = strays(begun | begun_too | steps, steps, SOURCES)
    assert len(beside) <= BESIDE, beside
    assert sum(len(code_lines(SOURCES[file])) for file in beside) <= BESIDE_LINES, beside
    assert len(off) <= OFF, "\n".join(off)


def test_the_check_of_the_spine_can_fail() -> None:
    """A file beside the spine, or an import off it, is found: otherwise the law would say nothing."""
    sources = {"a/x.py": "def f():\n    from .y import g", "a/y.py": "", "b/z.py": "", "b/__init__.py": ""}
    assert strays({"a/x.py"}, {"a/x.py"}, sources) == (["a/y.py"], ["a/x.py -> a/y.py"])
    assert strays({"a/x.py", "a/y.py"}, {"a/x.py"}, sources) == ([], [])
    assert strays({"a/y.py"}, {"a/y.py"}, sources | {"a/y.py": "from ..b import z"}) == (
        ["a/x.py"],
        ["a/y.py -> b/z.py"],
    )
