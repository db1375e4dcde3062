"""Differentiable collectives over a mesh axis, closed under torch.func: grad, vjp, jvp, vmap, to any order.

A collective is a linear map on the stack of all ranks' values, and its derivative is the true adjoint of that map:
differentiating on every rank gives the gradient of the *sum of all ranks' outputs*. For the gradient of one replicated
number, divide by the number of ranks, or use a loss that returns `fshard.Mean`.

In the terms of JAX's shard_map and of spmd_types a value along an axis is *replicated* (equal on all ranks; each rank
holds one summand of its gradient), *invariant* (equal on all ranks, and so is its gradient), *varying* (different on
each rank) or *partial* (each rank holds one summand of the value):

| collective | in -> out | transpose |
|---|---|---|
| all_gather | varying -> replicated | reduce_scatter |
| reduce_scatter | partial -> varying | all_gather |
| all_reduce | partial -> replicated | all_reduce |
| vary | invariant -> varying | total |
| total | varying -> invariant | vary |
| all_to_all | varying -> varying | all_to_all |
| broadcast | varying -> replicated | reduce to the source |

Sources: the table of transposes in JAX's shard_map design (jep/17111), and Griewank and Walther, Evaluating
Derivatives, on adjoints of linear maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import check_whole, wrong
from ..core.lazy import Branch
from ..core.tree import Tree
from . import primitives
from .announce import CallInBlocks, kept
from .mesh import AnyMesh
from .ranks import Pending

T = TypeVar("T")  # a tensor or a tree
_TRANSPOSES = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "vary": "total",
    "total": "vary",
    "all_to_all": "all_to_all",
    "broadcast": "reduce",
    "reduce": "broadcast",
}


@dataclass(frozen=True)
class _Collective:
    """A collective as a linear map: which one, along which axis of which mesh."""

    kind: str
    mesh: AnyMesh
    axis: str
    label: str = ""
    op: str = "sum"
    src: int = 0

    def run(self, x: Tensor) -> Tensor:
        """Return the collective's result for one leaf. This rank waits for its peers here."""
        ranks = primitives.along(self.mesh, self.axis)
        if self.kind == "vary":
            return x.view_as(x)  # not `x` itself: autograd would not make that a result of this function
        x = x.resolve_conj().resolve_neg()  # the memory of lazy views has different bits, and memory is sent
        if self.kind == "broadcast":
            return primitives.broadcast(x, ranks, self.src, self.label).wait()
        if self.kind == "reduce":
            reduced = primitives.all_reduce(x, ranks, self.label).wait()
            # Not an `if`: in a graph the nodes of all ranks must be the same, but for constants.
            is_source = torch.full((), ranks.rank == self.src, dtype=torch.bool, device=reduced.device)
            return torch.where(is_source, reduced, torch.zeros_like(reduced))  # NaN stays on the source
        if self.kind in ("all_reduce", "total"):
            return primitives.all_reduce(x, ranks, self.label, op=self.op).wait()
        start: Callable[..., Pending] = getattr(primitives, self.kind)
        return start(x, ranks, self.label).wait()

    def transpose(self) -> _Collective:
        """Return the collective that maps gradients of the result to gradients of the input."""
        if self.op != "sum":
            raise NotImplementedError(
                f"all_reduce(op={self.op!r}) has no derivative: it is not linear. Use it on values that need none "
                "(x.detach()), or build what you need from all_gather."
            )
        return replace(self, kind=_TRANSPOSES[self.kind])


class _Context(Protocol):
    """The values that the forward of a collective keeps for its backward and its jvp."""

    collective: _Collective
    call: CallInBlocks


class _Apply(torch.autograd.Function):
    """One autograd rule for all collectives: the jvp of a linear map applies the map, the vjp applies its transpose."""

    @staticmethod
    def forward(x: Tensor, collective: _Collective) -> Tensor:
        return collective.run(x)

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Tensor, _Collective], output: Tensor) -> None:
        ctx.collective, ctx.call = inputs[1], kept()

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.call(_Apply.apply, grad, ctx.collective.transpose()), None

    @staticmethod
    def jvp(ctx: _Context, tangent: Tensor, _: None) -> Tensor:
        ctx.collective.transpose()  # raises for max and min, which are not linear
        return _Apply.apply(tangent, ctx.collective)

    @staticmethod
    def vmap(info: object, in_dims: tuple[int, None], x: Tensor, collective: _Collective) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], -1)  # (..., batch): every collective acts along dim 0
        if collective.kind in ("reduce_scatter", "all_to_all"):
            # without the dim of the batch, which the user's function does not see
            primitives.check_divides(x.shape[:-1], primitives.along(collective.mesh, collective.axis))
        return _Apply.apply(x, collective), -1


def _over(x: T, collective: _Collective) -> T:
    """Apply a collective to every leaf of a tree, after all checks: who raises later would leave others waiting."""
    primitives.along(collective.mesh, collective.axis)
    check_whole(f"{collective.kind}: src", collective.src, least=-(2**63), what="a rank")
    if not isinstance(collective.label, str):
        raise TypeError(f"{collective.kind}: {wrong('label', collective.label, 'a word')}")
    _check_parts(x, collective)
    leaves, spec = tree.flatten(x)
    for path, leaf in zip(tree.paths(spec), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{collective.kind}: leaf {path!r}: expected a tensor, got {type(leaf).__name__}")
        if leaf.layout is not torch.strided:
            layout = f"got layout {leaf.layout}. Use .to_dense()."
            raise ValueError(f"{collective.kind}: leaf {path!r}: expected a dense tensor, {layout}")
        if collective.kind in ("all_reduce", "reduce_scatter"):
            primitives.check_combines(collective.kind, collective.op, leaf.dtype, f": leaf {path!r}")
    if collective.kind == "all_gather":
        leaves = [leaf.reshape(1) if leaf.dim() == 0 else leaf for leaf in leaves]  # () -> (1,)
    return tree.unflatten(spec, [_Apply.apply(leaf, collective) for leaf in leaves])


def _check_parts(x: Tree, collective: _Collective) -> None:
    """Raise TypeError if `x` has a `Sharded` that is cut along this axis, or that the collective would resize."""
    kind, axis = collective.kind, collective.axis
    for path, part in tree.paths_to(x, Branch):
        over = getattr(getattr(part, "view", None), "over", ())
        resizes = kind in ("all_gather", "reduce_scatter", "all_to_all")
        if isinstance(part, Branch) and (resizes or (axis in over and kind != "vary")):
            raise TypeError(
                f"{kind}: {f'leaf {path!r}' if path else 'x'}: expected tensors that are whole along {axis!r}, got a "
                f"{type(part).__name__}: each rank holds a part of it. fshard.gather_params gives whole ones; "
                "fshard.reduce_grads reduces gradients."
            )


def all_gather(x: T, mesh: AnyMesh, axis: str, label: str = "") -> T:
    """Concatenate the tensors of all ranks along dim 0: (n, ...) -> (W n, ...), varying -> replicated.

    `x` is a tensor or a tree; a scalar counts as one row. The ranks are those along `axis`; `label` names the call in
    errors and in a `tally`. Transpose: `reduce_scatter`.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: all_gather(torch.tensor([mesh.get_rank()]), mesh, "shard").tolist(), shard=2)
    [[0, 1], [0, 1]]
    """
    return _over(x, _Collective("all_gather", mesh, axis, label))


def reduce_scatter(x: T, mesh: AnyMesh, axis: str, label: str = "") -> T:
    """Sum over ranks, in rank order, and keep this rank's part: (W n, ...) -> (n, ...), partial -> varying.

    `x` is a tensor or a tree; dim 0 must divide by the number of ranks (ValueError); `axis` and `label` as for
    `all_gather`. Transpose: `all_gather`.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: reduce_scatter(torch.tensor([1, 2]), mesh, "shard").tolist(), shard=2)
    [[2], [4]]
    """
    return _over(x, _Collective("reduce_scatter", mesh, axis, label))


def all_reduce(x: T, mesh: AnyMesh, axis: str, op: Literal["sum", "max", "min"] = "sum", label: str = "") -> T:
    """All-reduce by sum, max or min, in rank order: (...) -> (...), partial -> replicated.

    `x` is a tensor or a tree, `op` "sum", "max" or "min"; `axis` and `label` as for `all_gather`. The sum is its own
    transpose. Max and min have no derivative (NotImplementedError).

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: all_reduce(torch.tensor(1.5), mesh, "shard").item(), shard=2)
    [3.0, 3.0]
    """
    return _over(x, _Collective("all_reduce", mesh, axis, label, op))


def vary(x: T, mesh: AnyMesh, axis: str, label: str = "") -> T:
    """Mark that ranks use a replicated value differently: identity in the forward, sum over ranks in the backward.

    `x` is a tensor or a tree, invariant -> varying (JAX's pvary); `axis` and `label` as for `all_gather`. Its transpose
    is the sum that JAX calls psum.

    >>> from fshard.testing import simulate
    >>> def grad_of_sum(mesh):
    ...     scale = mesh.get_rank() + 1.0
    ...     return torch.func.grad(lambda w: scale * vary(w, mesh, "shard"))(torch.tensor(1.0)).item()
    >>> simulate(grad_of_sum, shard=2)
    [3.0, 3.0]
    """
    return _over(x, _Collective("vary", mesh, axis, label))


def total(x: T, mesh: AnyMesh, axis: str, label: str = "") -> T:
    """Sum over ranks to one value, which exists once: (...) -> (...), varying -> invariant (JAX's psum).

    `x` is a tensor or a tree. Transpose: `vary`. Where `all_reduce` has one result for each rank, of which gradients
    are summed, the gradient of this result is one value, too.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: total(torch.tensor(1.5), mesh, "shard").item(), shard=2)
    [3.0, 3.0]
    """
    return _over(x, _Collective("total", mesh, axis, label))


def all_to_all(x: T, mesh: AnyMesh, axis: str, label: str = "") -> T:
    """Send part p of dim 0 to rank p: (W n, ...) -> (W n, ...), varying -> varying.

    `x` is a tensor or a tree; dim 0 must divide by the number of ranks (ValueError); `axis` and `label` as for
    `all_gather`. `all_to_all` is its own inverse and its own transpose.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: all_to_all(torch.arange(2) + 10 * mesh.get_rank(), mesh, "shard").tolist(), shard=2)
    [[0, 10], [1, 11]]
    """
    return _over(x, _Collective("all_to_all", mesh, axis, label))


def broadcast(x: T, mesh: AnyMesh, axis: str, src: int = 0, label: str = "") -> T:
    """Copy the tensor of rank `src` to all ranks of the axis: (...) -> (...), varying -> replicated.

    `x` is a tensor or a tree, with the same shapes on all ranks; `src` is a number along the axis; `axis` and `label`
    as for `all_gather`. Transpose: the sum over ranks on `src`, zeros on the other ranks.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: broadcast(torch.tensor(mesh.get_rank()), mesh, "shard", src=1).item(), shard=2)
    [1, 1]
    """
    return _over(x, _Collective("broadcast", mesh, axis, label, src=src))
