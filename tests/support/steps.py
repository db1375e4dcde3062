"""A tiny model in two units, its training steps, and the same steps compiled."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fshard
from fshard import optim, tree
from fshard.comm.mesh import Mesh
from fshard.core.tree import Tree
from fshard.train.loss_scale import LossScale
from fshard.watch.recording import AnyStep

from .models import rand, same_bits

# Importing inductor warns of torch's own use of torch.jit: a DeprecationWarning, since torch 2.14 a FutureWarning.
QUIET = "ignore:.*torch.jit.script"
UNITS = ["a", "c"]
# Plans of a guard's tests, whose tree has a leaf "b".
GUARDED: dict[str, dict[str, Any]] = {
    "full": {},
    "zero 2": {"params_over": ()},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "some whole": {"whole": "b"},
}
# An optimizer whose compiled update has the eager one's bits.
EXACT = optim.rmsprop(0.1, momentum=0.9)


def params(dtype: torch.dtype = torch.float64) -> dict[str, Tree]:
    """Two layers."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {"a": {"w": (4, 4), "b": (4,)}, "c": {"w": (4, 4)}}
    return {k: {n: rand(*s, seed=len(k + n) + s[0], dtype=dtype) for n, s in v.items()} for k, v in shapes.items()}


def batch(step: int, rank: int, gain: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """One rank's data; the number of rows differs by rank."""
    rows = 4 + 2 * rank
    return {"x": rand(rows, 4, seed=100 * step + rank, dtype=dtype), "gain": torch.full((rows,), gain, dtype=dtype)}


def loss(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """The mean over all rows; a large gain overflows."""
    h = torch.tanh(b["x"].to(p["a"]["w"].dtype) @ p["a"]["w"] + p["a"]["b"])
    y = torch.tanh(h @ p["c"]["w"]).square().sum(1)
    return fshard.Mean((y * b["gain"]).sum(), len(y))


def start(
    mesh: Mesh,
    tx: optim.Transform = EXACT,
    scale: LossScale | None = None,
    plan: dict[str, Any] | None = None,
    loss_fn: Callable[..., Tree] = loss,
    whole: Tree = None,
    extra: Tree = None,
    **kw: Any,
) -> tuple[fshard.TrainState, AnyStep]:
    """A state and a step."""
    whole = params() if whole is None else whole
    laid = fshard.make_plan(whole, mesh, **{"units": UNITS, **(plan or {})})
    state = fshard.init_state(fshard.shard_params(whole, laid), tx, scale, seed=7, extra=extra)
    return state, fshard.train_step(loss_fn, tx, **kw)


def rank_of(mesh: Mesh) -> int:
    """This rank's number."""
    return 0 if mesh is None else mesh.get_rank()


def same_shapes(a: Tree, b: Tree) -> bool:
    """Two trees of one structure, of tensors of the same shapes, strides and dtypes."""
    (xs, one), (ys, other) = tree.flatten(a), tree.flatten(b)
    kinds = [[(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in leaves] for leaves in (xs, ys)]
    return one == other and kinds[0] == kinds[1]


def apart(a: Tree, b: Tree) -> float:
    """How far two trees are apart at most, by a leaf's largest if above 1; what is not finite must be the same."""
    far = 0.0
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        assert same_bits(x.isfinite(), y.isfinite())
        gap, size = (torch.where(y.isfinite(), z, 0).abs() for z in (x.double() - y.double(), y.double()))
        far = max(far, float(gap.max() / size.max().clamp(min=1)) if x.numel() else 0.0)
    return far


def alike(
    mesh: Mesh,
    compiled: Callable[[AnyStep], AnyStep],
    num_steps: int = 3,
    overflow: int | None = None,
    dtype: torch.dtype = torch.float64,
    **kw: Any,
) -> tuple[bool, float, tuple[list[dict[str, Tree]], fshard.TrainState]]:
    """Some steps as they are, and compiled, each on its own results: same bits? how far apart? the last metrics."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    state, step = start(mesh, **kw)
    other, fast, bits, far, rows = state, compiled(step), True, 0.0, []
    for i in range(num_steps):
        data = batch(i, rank_of(mesh), torch.inf if i == overflow else 1.0, dtype)
        state, row = step(state, data)
        other, row2 = fast(other, data)
        assert same_shapes((state, row), (other, row2))
        bits, far = bits and same_bits((state, row), (other, row2)), max(far, apart((state, row), (other, row2)))
        rows.append(row)
    return bits, far, (rows, state)
