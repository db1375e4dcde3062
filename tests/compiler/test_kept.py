"""`fshard.jit(donate=True)` of functions whose results keep what the donated argument held."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.optimizers import TRANSFORMS
from support.steps import QUIET, batch, rank_of, start
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import optim, tree

pytestmark = pytest.mark.filterwarnings(QUIET)


def filled(x: Tensor) -> Tensor:
    """The values of `x` in memory that had none."""
    y = torch.empty_like(x)
    y.copy_(x)
    return y


def partly_filled(x: Tensor) -> Tensor:
    """A copy of `x` with other values in one row."""
    y = x.clone()
    y[:1] = 7
    return y


# What a result keeps of a donated input of shape (4, 4) of whole numbers.
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "itself again": lambda x: x,
    "a view": lambda x: x.view(2, 8),
    "reshaped": lambda x: x.reshape(16),
    "transposed": lambda x: x.t(),
    "a slice": lambda x: x[1:3],
    "a column": lambda x: x[:, 1],
    "a clone": torch.clone,
    "a part of a clone": lambda x: x.clone()[1:3],
    "added to": lambda x: x + 0,
    "a term": lambda x: x * x + 1,
    "a sum": lambda x: x.sum(0),
    "a sum of one": lambda x: x.unsqueeze(0).sum(0),
    "narrowed": lambda x: x.bfloat16(),
    "widened and narrowed": lambda x: x.double().float(),
    "as bits": lambda x: x.view(torch.int32),
    "joined of one": lambda x: torch.cat([x]),
    "joined of all": lambda x: torch.cat(x.split([1, 3], dim=1), dim=1),
    "joined and split": lambda x: torch.cat([x, x]).split(4)[0],
    "stacked": lambda x: torch.stack([x])[0],
    "repeated once": lambda x: x.repeat(1, 1),
    "expanded": lambda x: x.expand(4, 4).clone(),
    "padded by nothing": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "put into": lambda x: torch.slice_scatter(torch.zeros_like(x), x),
    "filled": filled,
    "partly filled": partly_filled,
    "to the first power": lambda x: x.pow(1),
    "rounded": lambda x: x.int().round(),
    "turned": lambda x: torch.rot90(x, 0),
    "a copy of a view": lambda x: torch.view_copy(x, (16,)),
    "dropped out": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "chosen": lambda x: torch.where(x > 3, x, 0),
}


def rotated(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A state that keeps, in each kind, what its first leaf was, and swaps fields; and some beside it."""
    a, b, h, i, y, z = (state[name] for name in "abhiyz")
    kept = {name: fn(a) for name, fn in KEPT.items()}
    numbers = {"rounded": i.round(), "narrowed": b.float().bfloat16(), "same": i.to(i.dtype, copy=True)}
    new = {"a": 2 * a + 1, "b": b + 1, "h": [a + y, *h[:-1]], "i": i + 1, "kept": kept, "n": numbers, "y": z, "z": y}
    return new, {"a": a, "joined": KEPT["joined of all"](a), "part": a[1:], "h": h, "n": numbers}


@pytest.mark.parametrize("how", ["aot_eager", "inductor", "saved"])
def test_a_result_keeps_what_was_before(how: str, tmp_path: Path) -> None:
    """A compiler drops a copy that repeats an argument; a result would be what was written over the argument."""
    x = torch.arange(16.0).view(4, 4)
    first = {"a": x, "b": x.bfloat16(), "h": [x + 1, x + 2, x + 3], "i": torch.arange(3), "y": x + 4, "z": x + 5}
    state = tree.map(torch.clone, rotated(first)[0])
    given = tree.map(torch.clone, state)
    options = {"artifact": tmp_path / "file"} if how == "saved" else {"backend": how}
    run = fshard.jit(rotated, donate=True, **options)
    for _ in range(3):
        state, more = rotated(state)
        given, found = run(given)
        expected, paths = tree.leaves((state, more)), tree.paths((state, more))
        pairs = zip(paths, expected, tree.leaves((given, found)), strict=True)
        assert [path for path, a, b in pairs if not same_bits(a, b)] == []


def keeper(over: Any) -> optim.Transform:
    """An optimizer whose state has the parameters of the last two steps, and the last gradients."""

    def init(p: Any) -> Any:
        return [tree.map(torch.clone, p) for _ in range(3)]

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        return tree.map(lambda g, p, old, last: g + (p - old) / 2 + last / 4, g, p, s[1], s[2]), [p, s[0], g]

    return optim.Transform(init, update, over=over)


def is_matrix(path: str, leaf: Tensor) -> bool:
    return leaf.ndim > 1


PARTS: dict[str, Callable[[optim.Transform], optim.Transform]] = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optim.chain(optim.scale(0.5), tx),
    "by_label": lambda tx: optim.by_label({True: tx, False: optim.scale(0.5)}, is_matrix),
    "masked": lambda tx: optim.masked(tx, is_matrix),
}


OVERS = ("elements", "leaves", "tree")
EACH = [(part, over) for part in PARTS for over in OVERS]


def linear(p: Any, x: Tensor) -> fshard.Mean:
    """A loss whose gradients are whole numbers over a power of two: no order of a sum rounds."""
    return fshard.Mean((x @ p["w"]).sum() + (x @ p["b"]).sum(), len(x))


@pytest.mark.parametrize(
    ("backend", "shard", "parts"),
    [
        ("aot_eager", None, EACH),
        ("aot_eager", 2, EACH[::5]),
        ("inductor", None, EACH[::5]),
        ("inductor", 2, EACH[4::5]),
    ],
)
def test_an_optimizer_keeps_the_parameters_of_before(backend: str, shard: int | None, parts: Any) -> None:
    """A state that keeps parameters would have those of the next step."""
    tx = optim.chain(*(PARTS[part](keeper(over)) for part, over in parts), optim.scale(-0.5))

    def law(mesh: Any) -> None:
        warnings.filterwarnings("ignore", ".*torch.jit.script")
        whole = {"w": torch.ones(4, 2, dtype=torch.float64), "b": torch.ones(4, dtype=torch.float64)}
        state, step = start(mesh, tx, plan={"units": None}, loss_fn=linear, whole=whole)
        given, fast = tree.map(torch.clone, state), fshard.jit(step, donate=True, backend=backend)
        for i in range(3):
            data = torch.arange(8.0, dtype=torch.float64).view(2, 4) + i + rank_of(mesh)
            state, row = step(state, data)
            given, row2 = fast(given, data)
            assert same_bits((given, row2), (state, row))

    law(None) if shard is None else simulated(law, shard=shard)


def test_a_plain_step_copies_nothing() -> None:
    """A step whose results keep no input would copy values that it has computed."""
    for tx in (optim.adamw(0.1), TRANSFORMS["from_torch-Rprop"]()):
        state, step = start(None, tx)
        texts = [fshard.jit(step, donate=x).lower(state, batch(0, 0)).as_text() for x in (False, True)]
        assert texts[0].count("= fshard.materialize") == texts[1].count("= fshard.materialize")
