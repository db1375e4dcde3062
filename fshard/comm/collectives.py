"""Differentiable collectives over a mesh axis, closed under torch.func: grad, vjp, jvp, vmap, to any order.

A collective is a linear map on the stack of all ranks' values; its backward is the adjoint. So differentiating on every
rank gives the gradient of the *sum of all ranks' outputs*. For one replicated number's gradient, divide by the number
of ranks, or return `fshard.Mean` from the loss.

Along an axis a value is *replicated* (equal on all ranks; each rank holds one summand of the gradient), *invariant*
(equal, with equal gradients), *varying* (different) or *partial* (each rank holds one summand), as in JAX's shard_map:

| collective | in -> out | transpose |
|---|---|---|
| all_gather | varying -> replicated | reduce_scatter |
| reduce_scatter | partial -> varying | all_gather |
| all_reduce | partial -> replicated | all_reduce |
| vary | invariant -> varying | total |
| total | varying -> invariant | vary |
| all_to_all | varying -> varying | all_to_all, `split` and `join` swapped, sizes too |
| shift | varying -> varying | shift by -`by` |
| broadcast | varying -> replicated | reduce to the source |

`dim`, `split` and `join` do not count the batch dims of vmap.

Sources: JAX's shard_map design (jep/17111); Griewank and Walther, Evaluating Derivatives, on adjoints.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..core import tree
from ..core.arguments import check_flags, check_whole, wrong
from ..core.lazy import Branch
from ..core.losses import running
from ..core.tree import Tree
from . import primitives
from .announce import CallInBlocks, kept
from .mesh import AnyMesh, adapted, num_ranks
from .ranks import Pending, Ranks

T = TypeVar("T")
PartSizes = tuple[Sequence[int], Sequence[int]]  # lengths sent to, and received from, each of W ranks
_TRANSPOSES = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "vary": "total",
    "total": "vary",
    "all_to_all": "all_to_all",
    "shift": "shift",
    "broadcast": "reduce",
    "reduce": "broadcast",
}


@dataclass(frozen=True)
class _Collective:
    kind: str
    mesh: AnyMesh
    axis: str
    label: str = ""
    op: str = "sum"
    src: int = 0
    sizes: PartSizes | None = None
    by: int = 0
    wrap: bool = True

    def run(self, x: Tensor) -> Tensor:
        ranks = primitives.along(self.mesh, self.axis)
        if self.kind == "vary":
            return x.view_as(x)  # an autograd function must not return its input
        x = x.resolve_conj().resolve_neg()  # a lazy view's memory has the old bits
        if self.kind == "broadcast":
            return primitives.broadcast(x, ranks, self.src, self.label).wait()
        if self.kind == "reduce":
            reduced = primitives.all_reduce(x, ranks, self.label).wait()
            # an `if` would give ranks different graphs
            is_source = torch.full((), ranks.rank == self.src, dtype=torch.bool, device=reduced.device)
            return torch.where(is_source, reduced, torch.zeros_like(reduced))  # NaN stays on the source
        if self.kind == "shift":
            return _shifted(x.contiguous(), ranks, self)
        if self.sizes is not None:
            return primitives.deal(x, self.sizes, ranks, self.label).wait()
        if self.kind in ("all_reduce", "total"):
            return primitives.all_reduce(x, ranks, self.label, op=self.op).wait()
        start: Callable[..., Pending] = getattr(primitives, self.kind)
        return start(x, ranks, self.label).wait()

    def transpose(self) -> _Collective:
        if self.op != "sum":
            raise NotImplementedError(
                f"all_reduce(op={self.op!r}) has no derivative: it is not linear. Use it on values that need none "
                "(x.detach()), or build what you need from all_gather."
            )
        sizes = None if self.sizes is None else self.sizes[::-1]
        return replace(self, kind=_TRANSPOSES[self.kind], sizes=sizes, by=-self.by)


def _shifted(x: Tensor, ranks: Ranks, shift: _Collective) -> Tensor:
    def rows(peer: int) -> list[int]:
        is_there = shift.wrap or 0 <= peer < ranks.size
        return [int(is_there and rank == peer % ranks.size) for rank in range(ranks.size)]

    # for ranks without a sender; all allocate zeros: equal graphs
    place = x.new_empty(x.shape) if shift.wrap else x.new_zeros(x.shape)
    sizes, words = (rows(ranks.rank + shift.by), rows(ranks.rank - shift.by)), f", by={shift.by}, wrap={shift.wrap}"
    primitives.deal(x[None], sizes, ranks, shift.label, place[None], "shift", words).wait()
    return place


class _Context(Protocol):  # autograd's
    collective: _Collective
    call: CallInBlocks


class _Apply(torch.autograd.Function):
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
        ctx.collective.transpose()  # raises for max and min
        return _Apply.apply(tangent, ctx.collective)

    @staticmethod
    def vmap(info: object, in_dims: tuple[int, None], x: Tensor, collective: _Collective) -> tuple[Tensor, int]:
        # batch last: collectives act along dim 0
        return _Apply.apply(x.movedim(in_dims[0], -1), collective), -1


def _mapped(x: T, collective: _Collective, split: int = 0, join: int | None = None) -> T:
    """Apply a collective along `split` to every leaf; concatenate along `join` (None: `split`).

    All checks come first: if a rank raised after a collective, other ranks would wait for it.
    """
    kind, dims = collective.kind, (split, split if join is None else join)
    collective = replace(collective, mesh=adapted(collective.mesh))  # once, for the backward, too
    if collective.mesh is None and (loss := running()) and (ranks_of_loss := num_ranks(loss.mesh)) > 1:
        told = f"expected the loss's mesh of {ranks_of_loss} ranks, got None: each rank takes its own value"
        warnings.warn(f"{kind}: {told}. Give the mesh as an argument: step(state, batch, mesh)", stacklevel=3)
    ranks = None if collective.mesh is None else primitives.along(collective.mesh, collective.axis)
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    for dim in dims:
        check_whole(f"{kind}: dim", dim, least=-(2**63), what="the number of a dim")
    if not isinstance(collective.label, str):
        raise TypeError(f"{kind}: {wrong('label', collective.label, 'a word')}")
    if collective.sizes is not None:
        _check_sizes(collective.sizes, rank, size)
    _check_parts(x, collective)
    leaves, spec = tree.flatten(x)
    if kind == "all_gather":
        leaves = [leaf.reshape(1) if isinstance(leaf, Tensor) and leaf.dim() == 0 else leaf for leaf in leaves]
    for path, leaf in zip(tree.leaf_paths(spec), leaves, strict=True):
        _check_leaf(f"{kind}: leaf {path!r}", leaf, collective, dims, size)
    return tree.unflatten(spec, [_along_dims(leaf, collective, dims) for leaf in leaves])


def _along_dims(x: Tensor, collective: _Collective, dims: tuple[int, int]) -> Tensor:
    if collective.mesh is None:
        is_lost = collective.kind == "shift" and collective.by != 0 and not collective.wrap
        lost = x.new_ones((), dtype=torch.bool)
        return torch.where(lost, torch.zeros_like(x), x) if is_lost else x  # 0 * x would keep NaN
    return applied(x, collective, dims)


def applied(x: Tensor, collective: _Collective, dims: tuple[int, int]) -> Tensor:
    """Apply a collective on several ranks. A TorchFunctionMode sees this call, but no autograd function."""
    if has_torch_function((None,)):
        return handle_torch_function(applied, (), x, collective, dims)
    split, join = (dim % max(1, x.dim()) for dim in dims)
    if split != join:  # parts (W, ...)
        size = primitives.along(collective.mesh, collective.axis).size
        parts = x.unflatten(split, (size, x.shape[split] // size)).movedim(split, 0)
        return _Apply.apply(parts, collective).movedim(0, join).flatten(join, join + 1)
    return _Apply.apply(x.movedim(split, 0), collective).movedim(0, split) if split else _Apply.apply(x, collective)


def _check_leaf(name: str, x: object, collective: _Collective, dims: tuple[int, int], size: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}. Use .to_dense().")
    if collective.kind in ("all_reduce", "reduce_scatter"):
        primitives.check_combines(collective.kind, collective.op, x.dtype, name.removeprefix(collective.kind))
    if collective.kind not in ("all_gather", "reduce_scatter", "all_to_all"):
        return
    for dim in dims:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"{name}: expected a tensor with a dim {dim}, got one of shape {tuple(x.shape)}")
    split, join = (dim % x.dim() for dim in dims)
    if collective.sizes is not None and split != join:
        raise ValueError(f"{name}: sizes are lengths of one dim: expected split and join alike, got {dims}")
    if collective.sizes is not None and sum(collective.sizes[0]) != x.shape[split]:
        expected = f"lengths of parts of dim {split} of shape {tuple(x.shape)}"
        raise ValueError(f"{name}: {wrong('sizes[0]', collective.sizes[0], expected)}")
    if collective.sizes is None and collective.kind != "all_gather":
        primitives.check_divides(x.shape, size, collective.axis, split, f"{name}: ")


def _check_sizes(sizes: PartSizes, rank: int, size: int) -> None:
    for lengths in sizes:
        for number in lengths:
            check_whole("all_to_all: sizes", number, least=0, what="the length of a part")
    sent, received = sizes
    if (len(sent), len(received)) != (size, size) or sent[rank] != received[rank]:
        expected = f"(sent, received), {size} lengths each, and alike for rank {rank} itself"
        raise ValueError(f"all_to_all: {wrong('sizes', sizes, expected)}")


def _check_parts(x: Tree, collective: _Collective) -> None:
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


def all_gather(x: T, mesh: AnyMesh, axis: str, label: str = "", *, dim: int = 0) -> T:
    """Concatenate the tensors of all ranks along a dim: (n, ...) -> (W n, ...), varying -> replicated.

    - `x`: a tensor or a tree, of the same shapes on all ranks; a scalar counts as one row.
    - `mesh`, `axis`: the ranks; mesh=None is one rank, whatever the axis, and a warning in a loss on several ranks.
    - `label`: the name of the call in errors and in a `tally`.
    - `dim`: a dim of every leaf (else a ValueError), counted from the end if negative; dim 0 needs no copy.

    Transpose: `reduce_scatter`.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: all_gather(torch.tensor([mesh.get_rank()]), mesh, "shard").tolist(), shard=2)
    [[0, 1], [0, 1]]
    """
    return _mapped(x, _Collective("all_gather", mesh, axis, label), dim)


def reduce_scatter(x: T, mesh: AnyMesh, axis: str, label: str = "", *, dim: int = 0) -> T:
    """Sum over ranks, in rank order, and keep this rank's part: (W n, ...) -> (n, ...), partial -> varying.

    `x`, `mesh`, `axis`, `label` and `dim` as for `all_gather`; W must divide dim `dim` (ValueError). Transpose:
    `all_gather`.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: reduce_scatter(torch.tensor([1, 2]), mesh, "shard").tolist(), shard=2)
    [[2], [4]]
    """
    return _mapped(x, _Collective("reduce_scatter", mesh, axis, label), dim)


def all_reduce(x: T, mesh: AnyMesh, axis: str, op: Literal["sum", "max", "min"] = "sum", label: str = "") -> T:
    """All-reduce in rank order: (...) -> (...), partial -> replicated.

    `x`, `mesh`, `axis` and `label` as for `all_gather`. op="sum" is its own transpose; "max" and "min" have no
    derivative (NotImplementedError).

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: all_reduce(torch.tensor(1.5), mesh, "shard").item(), shard=2)
    [3.0, 3.0]
    """
    return _mapped(x, _Collective("all_reduce", mesh, axis, label, op))


# torch reads the signature at each call
_Apply.forward.__signature__ = inspect.signature(_Apply.forward)  # type: ignore[attr-defined]


def of_one(kind: str, x: T, mesh: AnyMesh, axis: str, label: str = "", op: str = "sum") -> T:
    return _mapped(x, _Collective(kind, mesh, axis, label, op))


def _refuse_in_loss(kind: str, advice: str) -> None:
    if running():
        raise RuntimeError(
            f"{kind}: expected no call inside a loss, where parameters that are whole along an axis are not one value, "
            f"but one on each rank, whose gradients are summed. {advice}; {kind} is for torch.func outside of a loss"
        )


def vary(x: T, mesh: AnyMesh, axis: str, label: str = "") -> T:
    """Mark an invariant value as used differently by ranks: identity in the forward, sum in the backward.

    invariant -> varying (JAX's pvary); `x`, `mesh`, `axis` and `label` as for `all_gather`. Transpose: `total`.
    RuntimeError in the loss of a step, of `value_and_grad`, `evaluate` or `hvp`: a loss's parameters are varying.

    >>> from fshard.testing import simulate
    >>> def grad_of_sum(mesh):
    ...     scale = mesh.get_rank() + 1.0
    ...     return torch.func.grad(lambda w: scale * vary(w, mesh, "shard"))(torch.tensor(1.0)).item()
    >>> simulate(grad_of_sum, shard=2)
    [3.0, 3.0]
    """
    _refuse_in_loss("vary", "Leave it out")
    return of_one("vary", x, mesh, axis, label)


def total(x: T, mesh: AnyMesh, axis: str, label: str = "") -> T:
    """Sum over ranks to one value, shared by all ranks: (...) -> (...), varying -> invariant (JAX's psum).

    The backward of `all_reduce` sums the gradients of all ranks' results; the result of `total` has one gradient.
    RuntimeError in a loss, as for `vary`. Transpose: `vary`.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: total(torch.tensor(1.5), mesh, "shard").item(), shard=2)
    [3.0, 3.0]
    """
    _refuse_in_loss("total", "Use all_reduce")
    return of_one("total", x, mesh, axis, label)


def all_to_all(
    x: T, mesh: AnyMesh, axis: str, label: str = "", *, split: int = 0, join: int = 0, sizes: PartSizes | None = None
) -> T:
    """Cut dim `split`, send part p to rank p, and concatenate received parts along `join`: varying -> varying.

    `x`, `mesh`, `axis` and `label` as for `all_gather`. Parts are equal: W must divide dim `split` (ValueError).
    For split=1, join=0: (s, h) -> (W s, h / W). Transpose and inverse: `split` and `join` swapped.

    `sizes` = (sent, received) are the lengths of unequal parts, W lengths each, zeros allowed; then `split` and `join`
    must be one dim (ValueError). MismatchError if ranks' sizes disagree, over gloo's sockets only in checked calls
    (`fshard.check`). Transpose: sent and received swapped.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: all_to_all(torch.arange(2) + 10 * mesh.get_rank(), mesh, "shard").tolist(), shard=2)
    [[0, 10], [1, 11]]
    >>> def uneven(mesh):
    ...     sizes = [([0, 3], [0, 1]), ([1, 0], [3, 0])][mesh.get_rank()]
    ...     return all_to_all(torch.arange(sum(sizes[0])), mesh, "shard", sizes=sizes).tolist()
    >>> simulate(uneven, shard=2)
    [[0], [0, 1, 2]]
    """
    if sizes is not None:
        is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
        if not is_pair or not all(isinstance(lengths, list | tuple) for lengths in sizes):
            raise TypeError(f"all_to_all: {wrong('sizes', sizes, 'two lists of lengths, (sent, received)')}")
        sizes = tuple(sizes[0]), tuple(sizes[1])
    return _mapped(x, _Collective("all_to_all", mesh, axis, label, sizes=sizes), split, join)


def shift(x: T, mesh: AnyMesh, axis: str, by: int = 1, *, wrap: bool = True, label: str = "") -> T:
    """Send the tensor of rank r to rank r + `by`: (...) -> (...), varying -> varying (JAX's ppermute by a constant).

    `by` is any whole number; `x`, `mesh`, `axis` and `label` as for `all_gather`. Ranks are a ring, or with wrap=False
    a line: ranks without a sender get zeros. Transpose: `shift` by -`by`.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: shift(torch.tensor(mesh.get_rank() + 1), mesh, "shard").item(), shard=3)
    [3, 1, 2]
    >>> simulate(lambda mesh: shift(torch.tensor(mesh.get_rank() + 1), mesh, "shard", -1, wrap=False).item(), shard=3)
    [2, 3, 0]
    """
    check_whole("shift: by", by, least=-(2**63), what="a number of ranks")
    check_flags(**{"shift: wrap": wrap})
    return _mapped(x, _Collective("shift", mesh, axis, label, by=by, wrap=wrap))


def broadcast(x: T, mesh: AnyMesh, axis: str, src: int = 0, label: str = "") -> T:
    """Copy the tensor of rank `src` to all ranks of the axis: (...) -> (...), varying -> replicated.

    `x`, `mesh`, `axis` and `label` as for `all_gather`. Transpose: the sum over ranks for `src`, zeros for the others.

    >>> from fshard.testing import simulate
    >>> simulate(lambda mesh: broadcast(torch.tensor(mesh.get_rank()), mesh, "shard", src=1).item(), shard=2)
    [1, 1]
    """
    check_whole("broadcast: src", src, least=-(2**63), what="a rank")
    return _mapped(x, _Collective("broadcast", mesh, axis, label, src=src))
