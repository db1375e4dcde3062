"""Compare a loss of split leaves with the plain loss: value and gradients, on simulated ranks, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.mesh import AnyMesh, rank_and_size
from ..core import tree
from ..core.arguments import check_positive
from ..core.random import seeded_by
from ..core.storage import is_inexact
from ..core.tree import Tree
from ..grad.grad import value_and_grad
from ..plan.planning import make_plan
from ..sharding.sharded import gather_params, shard_params
from .world import World

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
    leaves: Mapping[str, tuple[str, int] | tuple[str, int, int]],
    data: str | Sequence[str] = (),
    sizes: Sequence[int] = (2, 3),
    rtol: float = 1e-8,
) -> None:
    """Raise AssertionError unless a loss of split leaves has the value and the gradients of the plain loss.

    - `split(mesh)` returns the loss for a mesh; `plain` is the loss on one device. Losses are called with (params,
      batch, *args), and return no aux.
    - `params`: whole, on the host; losses are compared for these values, and for values nearby.
    - `batch`: equal on all ranks, but cut in dim 0 (`torch.tensor_split`) over the axes in `data`.
    - `leaves`, `data`: the arguments `split` and `data` of `make_plan`.
    - `sizes`: numbers of simulated ranks to try along the axes in `leaves` and `data`; several axes get unlike sizes.
    - `rtol`: allowed difference, as a part of the leaf's largest number. Floating-point tensors are cast to float64.

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
    AssertionError: same_loss: {'tensor': 2}, the params given: the loss: expected 72.0, got 36.0. A sum over ranks...
    """
    over = (data,) if isinstance(data, str) else tuple(data)
    axes = dict.fromkeys([*over, *(axis for axis, *_ in leaves.values())])
    check_positive("same_loss: rtol", rtol)
    if not axes or max(sizes, default=1) < 2 or rtol >= 1:
        given = f"leaves={leaves}, data={data!r}, sizes={sizes}, rtol={rtol}"
        raise ValueError(f"same_loss: expected an axis, a size above 1, and rtol below 1, got {given}")
    rows, *others = (tree.map(_nudged, x) for x in (batch, *args))

    def results(mesh: AnyMesh, loss: Callable[..., Tree], whole: Tree) -> dict[str, Tensor]:
        (rank, ranks), cut = rank_and_size(mesh, over), () if mesh is None else over
        plan = make_plan(whole, mesh, params_over=cut, grads_over=cut, state_over=cut, split=leaves, data=over or None)
        part = tree.map(lambda x: x.tensor_split(ranks)[rank] if isinstance(x, Tensor) and x.dim() else x, rows)
        with seeded_by(rank, "", torch.device("cpu")):
            value, grads = value_and_grad(loss)(shard_params(whole, plan), part, *others)
        named = tree.paths_to(gather_params(grads), Tensor)
        return {_LOSS: value} | {f"the gradient of leaf {path!r}": x for path, x in named if isinstance(x, Tensor)}

    for point, name in enumerate(("given", "nearby")):
        whole = tree.map(lambda x, point=point: _nudged(x, 0.1 * point), params)
        expected = results(None, plain, whole)
        for first in range(len(sizes)):  # several axes get unlike sizes
            sized = {axis: sizes[(first + i) % len(sizes)] for i, axis in enumerate(axes)}
            for got in World(axes=sized).run(lambda mesh, whole=whole: results(mesh, split(mesh), whole)):
                _compare(f"same_loss: {sized}, the params {name}", got, expected, rtol)


def _nudged(x: Tree, by: float = 0.0) -> Tree:
    """Return a leaf in float64 or complex128, times a factor 1 + `by` to 1 + 2 `by`; zeros become `by` to 2 `by`."""
    if not is_inexact(x):
        return x
    x = x.to(torch.complex128 if x.is_complex() else torch.float64)
    generator = torch.Generator().manual_seed(0)
    moved = by * (1 + torch.rand(x.shape, dtype=torch.float64, device="cpu", generator=generator))
    return torch.where(x == 0, moved, x * (1 + moved))


def _compare(where: str, got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    largest = {name: float(wanted.abs().max()) if wanted.numel() else 0.0 for name, wanted in expected.items()}
    least = 1e-6 * max(largest.values())  # zeros have rounding errors, too
    for name, wanted in expected.items():
        far = (got[name] - wanted).abs()
        if far.numel() and not far.max() <= rtol * max(largest[name], least):
            at = tuple(int(i) for i in torch.unravel_index(far.argmax(), far.shape))
            cause = _CAUSES[name == _LOSS] if math.isfinite(largest[name]) else "The plain loss has no value there"
            raise AssertionError(
                f"{where}: {name}{f', at {[*at]}' if at else ''}: expected {wanted[at].item()}, got "
                f"{got[name][at].item()}. {cause}"
            )
