"""Compare a loss of split leaves with the plain loss: value and gradients, on simulated ranks, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..comm.mesh import AnyMesh, rank_and_size
from ..core import tree
from ..core.arguments import check_positive
from ..core.random import seeded_by
from ..core.storage import is_inexact
from ..core.tracing import assigned
from ..core.tree import Tree
from ..grad.grad import OBSERVER, value_and_grad
from ..plan.planning import make_plan
from ..sharding.sharded import gather_params, shard_params
from ..watch.first_difference import departure
from ..watch.observed import Observed, Seen
from .world import World

SplitLeaves = Mapping[str, tuple[str, int] | tuple[str, int, int]]

_LOSS = "the loss"
_CAUSES = (
    "The loss is right here: it may be another for other parameters (a bias of zeros that counts twice), or a backward "
    "of its own, or a collective that is not fshard's, is not the adjoint of its forward",
    "A sum over ranks lacks, or comes twice; or a total is a part along an axis, and its count is not; or ranks drew "
    "other numbers",
)


def same_loss(
    split: Callable[[AnyMesh], Callable[..., Tree]],
    plain: Callable[..., Tree],
    params: Tree,
    batch: Tree,
    *args: Tree,
    leaves: SplitLeaves | Callable[..., SplitLeaves],
    data: str | Sequence[str] | Mapping[str, int] = (),
    axes: str | Sequence[str] = (),
    sizes: Sequence[int] = (2, 3),
    rtol: float = 1e-8,
) -> None:
    """Raise AssertionError unless a loss of split leaves has the value and the gradients of the plain loss.

    - `split(mesh)` returns the loss for a mesh; `plain` is the loss on one device. Losses are called with (params,
      batch, *args), and return no aux.
    - `params`: whole, on the host; losses are compared for these values, and for values nearby.
    - `batch`: equal on all ranks, but cut (`torch.tensor_split`) over the axes in `data`, in dim 0 or `data[axis]`.
    - `leaves`, `data`: the arguments `split` and `data` of `make_plan`, or a function `leaves(mesh, *axes)`.
    - `axes`: further axes of the mesh: of a function `leaves`, or axes without split leaves.
    - `sizes`: numbers of simulated ranks to try along all axes; several axes get unlike sizes.
    - `rtol`: allowed difference, as a part of the leaf's largest number. Floating-point tensors are cast to float64.

    If the loss is wrong, the error names the first wrong line, and a collective that is missing or too many: on each
    line, ranks' values must be equal to the plain value, or its parts, or summands. `plain` must run the same lines, as
    `split(None)` does.

    Ranks with equal batches draw equal random numbers; without `data`, the plain loss draws the same. Unequal gradients
    show faults of a backward that you wrote, or of another library's collective. ValueError if no mesh of several ranks
    would be tried.

    >>> def loss(mesh):
    ...     return lambda p, x: all_reduce((x @ p["up"]) @ p["down"], mesh, "tensor").sum()
    >>> params, split = {"up": torch.ones(2, 6), "down": torch.ones(6, 2)}, {"up": ("tensor", 1), "down": ("tensor", 0)}
    >>> same_loss(loss, loss(None), params, torch.ones(3, 2), leaves=split)
    >>> unsummed = lambda mesh: lambda p, x: (x @ p["up"] @ p["down"]).sum()
    >>> same_loss(unsummed, loss(None), params, torch.ones(3, 2), leaves=split)
    Traceback (most recent call last):
    AssertionError: same_loss: {'tensor': 2}, the params given: the loss: expected 72.0, got 36.0. First wrong is...
    """
    cut = dict.fromkeys([data] if isinstance(data, str) else data, 0) | dict(data if isinstance(data, Mapping) else {})
    more = (axes,) if isinstance(axes, str) else tuple(axes)
    known = () if callable(leaves) else [axis for axis, *_ in leaves.values()]
    named = dict.fromkeys([*cut, *known, *more])
    check_positive("same_loss: rtol", rtol)
    if not named or max(sizes, default=1) < 2 or rtol >= 1:
        given = f"leaves={leaves}, data={data!r}, axes={axes!r}, sizes={sizes}, rtol={rtol}"
        raise ValueError(f"same_loss: expected an axis, a size above 1, and rtol below 1, got {given}")
    rows, *others = (tree.map(_nudged, x) for x in (batch, *args))

    def results(mesh: AnyMesh, loss: Callable[..., Tree], whole: Tree) -> dict[str, Tensor]:
        over, part = () if mesh is None else tuple(cut), rows
        cuts = None if mesh is None else leaves(mesh, *more) if callable(leaves) else leaves
        plan = make_plan(whole, mesh, params_over=over, grads_over=over, state_over=over, split=cuts, data=over)
        for axis, dim in cut.items():
            part = tree.map(partial(_rows_of, *rank_and_size(mesh, axis), dim), part)
        with seeded_by(rank_and_size(mesh, over)[0], "", torch.device("cpu")):
            value, grads = value_and_grad(loss)(shard_params(whole, plan), part, *others)
        named = tree.paths_to(gather_params(grads), Tensor)
        return {_LOSS: value} | {f"the gradient of leaf {path!r}": x for path, x in named if isinstance(x, Tensor)}

    def seen(mesh: AnyMesh, loss: Callable[..., Tree], whole: Tree) -> Observed:
        with assigned(OBSERVER, watcher := Seen()):
            results(mesh, loss, whole)
        return {"names": watcher.names, "values": watcher.values}

    points = {name: tree.map(partial(_nudged, by=by), params) for name, by in (("given", 0.0), ("nearby", 0.1))}
    for name, whole in points.items():
        expected = results(None, plain, whole)
        for first in range(len(sizes)):  # several axes get unlike sizes
            world = World(axes={axis: sizes[(first + i) % len(sizes)] for i, axis in enumerate(named)})
            each = world.run(lambda mesh, whole=whole: results(mesh, split(mesh), whole))
            if unlike := next(filter(None, (_first_unequal(got, expected, rtol) for got in each)), None):
                ranks = world.run(lambda mesh: seen(mesh, split(mesh), points["nearby"]))
                first_wrong = departure(ranks, seen(None, plain, points["nearby"]), rtol)
                text, cause = unlike
                why = f"First wrong is {first_wrong}" if first_wrong and first_wrong.kind == "operator" else cause
                raise AssertionError(f"same_loss: {world.axes}, the params {name}: {text}. {why}")


def _rows_of(rank: int, ranks: int, dim: int, x: Tree) -> Tree:
    return x.tensor_split(ranks, dim)[rank] if isinstance(x, Tensor) and -x.dim() <= dim < x.dim() else x


def _nudged(x: Tree, by: float = 0.0) -> Tree:
    """Return a leaf in float64 or complex128, times a factor 1 + `by` to 1 + 2 `by`; zeros become `by` to 2 `by`."""
    if not is_inexact(x):
        return x
    x = x.to(torch.complex128 if x.is_complex() else torch.float64)
    generator = torch.Generator().manual_seed(0)
    moved = by * (1 + torch.rand(x.shape, dtype=torch.float64, device="cpu", generator=generator))
    return torch.where(x == 0, moved, x * (1 + moved))


def _first_unequal(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> tuple[str, str] | None:
    """Return the first difference, and its possible causes."""
    largest = {name: float(wanted.abs().max()) if wanted.numel() else 0.0 for name, wanted in expected.items()}
    least = 1e-6 * max(largest.values())  # zeros have rounding errors, too
    for name, wanted in expected.items():
        far = (got[name] - wanted).abs()
        if far.numel() and not far.max() <= rtol * max(largest[name], least):
            at = tuple(int(i) for i in torch.unravel_index(far.argmax(), far.shape))
            cause = _CAUSES[name == _LOSS] if math.isfinite(largest[name]) else "The plain loss has no value there"
            place = f", at {[*at]}" if at else ""
            return f"{name}{place}: expected {wanted[at].item()}, got {got[name][at].item()}", cause
    return None
