"""Norms and dot products of trees, over all ranks, and trees multiplied by factors.

Note [Exact sums]
    With `exact=True` the bits of a norm depend on the elements alone, neither on their order nor on their ranks.
    A first pass finds the largest element, by which all are scaled below 1. Each power is rounded to a multiple of
    2^-22 and its remainder to a multiple of 2^-45. float64 adds such multiples without rounding while the sum is below
    2^30 (Demmel and Nguyen, Fast Reproducible Floating-Point Summation, 2013).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from ..comm import collectives, primitives
from ..comm.mesh import AnyMesh, Axes
from ..core import tree
from ..core.arguments import check_positive, shown
from ..core.func_levels import depending, differentiates, refuse_derivative
from ..core.scalars import beside, wide
from ..core.storage import MOST, block_size, is_inexact
from ..core.tree import Tree
from .layout import Layout
from .pieces import Parts, Unreduced, device_of, layout_of, packed, pieces

T = TypeVar("T")
_CACHED_BLOCK = 1 << 16  # elements of a block that fits a CPU's cache
_SHORT_SUM = 1 << 12  # elements; float32 sums their powers accurately enough
_UNITS = (1.5 * 2.0**30, 1.5 * 2.0**7)  # adding, then subtracting a unit rounds to multiples of 2^-22, 2^-45


def _scale(largest: Tensor) -> Tensor:
    """Return the power of two (float64) to scale magnitudes below 1."""
    _, exponent = torch.frexp(largest.double())
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), (-exponent).clamp(max=1000))


def _binned(x: Tensor, p: float, scale: Tensor) -> Tensor:
    """Return the sums of rounded powers and of remainders: float64, (2,)."""
    sums = torch.zeros(2, dtype=torch.float64, device=x.device)
    for part in x.reshape(-1).split(block_size(x, _CACHED_BLOCK)):
        remainder = (part.abs().double() * beside(scale, part)) ** p  # (elements,), below 1
        for i, unit in enumerate(_UNITS):
            rounded = (remainder + unit) - unit
            sums[i] += rounded.sum()
            remainder = remainder - rounded  # exact: both are multiples of the remainder's last bit
    return sums.to(scale.device)


def _unbinned(sums: Tensor, p: float, scale: Tensor, largest: Tensor) -> Tensor:
    """Return the norm from sums of `_binned`, (..., 2); an infinite or NaN `largest` is the norm."""
    return torch.where(largest.isfinite(), sums.sum(-1) ** (1 / p) / scale, largest.double())


def _power_sums(tensors: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Return each tensor's sum of p-th powers (maximum for inf): float64, (tensors,)."""
    norms = [
        _norm(x.reshape(-1), p) if x.numel() else torch.zeros((), dtype=torch.float64, device=device) for x in tensors
    ]
    sums = torch.stack([norm.double().to(device) for norm in norms])
    return sums if p == math.inf else sums**p


def square_sum(x: Tensor) -> Tensor:
    return _power_sums([x], 2, x.device).sum()


def _norm(x: Tensor, p: float, most: int = MOST) -> Tensor:
    """Return the p-norm, (n,) -> (), accurate for any number of elements."""
    if x.numel() > most:
        return _norm(torch.stack([_norm(part, p, most) for part in x.split(most)]), p, most)
    if p == math.inf and not x.is_complex():  # on CPUs vector_norm is ten times slower for inf
        low, high = torch.aminmax(x)
        return torch.maximum(low.abs(), high.abs())
    dtype, num = torch.promote_types(x.dtype, torch.float32), x.numel() // _SHORT_SUM
    if x.device.type != "cpu" or not num:
        return torch.linalg.vector_norm(x, p, dtype=dtype)
    # vector_norm on CPUs has few accumulators: 2^28 float32 elements lose a fifth of the norm
    rows, tail = x[: num * _SHORT_SUM].view(num, _SHORT_SUM), x[num * _SHORT_SUM :]
    norms = [torch.linalg.vector_norm(rows, p, dim=1, dtype=dtype), torch.linalg.vector_norm(tail, p, dtype=dtype)]
    return torch.linalg.vector_norm(torch.cat([norm.view(-1).double() for norm in norms]), p)


def _root(sums: Tensor, p: float) -> Tensor:
    return sums if p == math.inf else sums ** (1 / p)


def leaf_norms(x: Tree, p: float = 2, layout: Layout | None = None, exact: bool = False) -> Tensor:
    """Return the p-norm of each leaf: (leaves,), float64, the same on all ranks, from one collective.

    `exact` is as in `global_norm`.
    """
    layout, zero = layout or layout_of(x), torch.zeros((), dtype=torch.float64, device=device_of(x))
    if not layout.leaves:
        return zero.new_zeros(0)
    if differentiates(x):
        return _smooth_leaf_norms(x, p, layout)
    local = pieces(x, layout)
    numbers = [number for number, _ in local]
    if exact and p != math.inf:
        largest = leaf_norms(x, math.inf, layout)
        scale = _scale(largest)
        powers = [_binned(piece, p, scale[number]) for number, piece in local]  # (2,) for each piece
        return _unbinned(_by_leaf(numbers, powers, "sum", layout, zero.expand(2)), p, scale, largest)
    powers = list(_power_sums([piece for _, piece in local], p, zero.device)) if local else []
    return _root(_by_leaf(numbers, powers, _op(p), layout, zero), p)


def _smooth_leaf_norms(x: Tree, p: float, layout: Layout) -> Tensor:
    """Differentiable `leaf_norms` of uncut leaves; `on_copies` (`whole/copies.py`) makes cut leaves whole."""
    if any(row.over for row in layout.rows):
        refuse_derivative(x, "norms of leaves")
    zero = torch.zeros((), dtype=torch.float64, device=device_of(x))
    sums = {number: _smooth_sum(piece, p).to(zero.device) for number, piece in pieces(x, layout)}
    return _smooth_root(torch.stack([sums.get(number, zero) for number in range(len(layout.leaves))]), p)


def _smooth_sum(x: Tensor, p: float) -> Tensor:
    """Return the sum of p-th powers (maximum for inf), float64, differentiable also at zero."""
    if x.is_complex() and p == 2:
        x = torch.view_as_real(x.resolve_conj())
    if p == math.inf:
        return (x.abs().amax() if x.numel() else x.abs().sum()).double()
    is_even = p % 2 == 0 and not x.is_complex()
    return ((x if is_even else x.abs()).double() ** p).sum()


def _smooth_root(sums: Tensor, p: float) -> Tensor:
    """`_root` with the derivative 0 at 0."""
    if p == math.inf:
        return sums
    is_zero = sums == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, sums) ** (1 / p))


def _by_leaf(numbers: Sequence[int], powers: Sequence[Tensor], op: str, layout: Layout, zero: Tensor) -> Tensor:
    """Combine values of each leaf's pieces over all ranks: (leaves, ...)."""
    of_leaf: list[list[Tensor]] = [[] for _ in layout.leaves]
    for number, power in zip(numbers, powers, strict=True):
        of_leaf[number].append(power)
    # no `scatter_add`: on GPUs its order of additions varies
    local = [_joined_pieces(values, op) if values else zero for values in of_leaf]
    if not layout.axes:
        return torch.stack(local)
    # elements on several ranks must count once
    counted = layout.counted - layout.shared
    cut = torch.stack([x if n in counted else zero for n, x in enumerate(local)])
    sums = primitives.total(cut, layout.mesh, layout.axes, op, label="leaf norms")
    return sums + torch.stack([x if n in layout.shared else zero for n, x in enumerate(local)])


def _joined_pieces(powers: Sequence[Tensor], op: str) -> Tensor:
    if len(powers) == 1:
        return powers[0]
    return torch.stack(tuple(powers)).amax(0) if op == "max" else torch.stack(tuple(powers)).sum(0)


def _op(p: float) -> str:
    return "max" if p == math.inf else "sum"


def scaled_by_norm(x: T, p: float, to_factor: Callable[[Tensor], Tensor], exact: bool, own: bool) -> T:
    """Multiply a tree by `to_factor` of its p-norm; differentiable."""
    if differentiates(x):
        return tree.map(lambda leaf, norm: _product(leaf, to_factor(norm)), x, _at_leaves(_one_norm(x, p), x))
    factor = to_factor(global_norm(x, p, exact))
    if differentiates(factor):
        return tree.map(lambda leaf: _product(leaf, factor), x)
    return scaled(x, factor, own)


def _product(x: Tensor, factor: Tensor) -> Tensor:
    return x * beside(factor.to(wide(x.dtype)), x)


def _at_leaves(value: Tensor, x: Tree) -> Tree:
    """Return `value` at each leaf; derivatives at leaves are added over cut axes."""
    known: dict[tuple[int, Axes], Tensor] = {}

    def varying(mesh: AnyMesh, axes: Axes) -> Tensor:
        if (id(mesh), axes) not in known:
            known[id(mesh), axes] = _varying(value, mesh, axes)
        return known[id(mesh), axes]

    def of(node: Parts | Tensor) -> Tree:
        if not isinstance(node, Parts):
            return value
        cut = [node.layout.cut_over.get(number, ()) for number in range(len(node.tensors))]
        return tree.unflatten(tree.flatten(node)[1], [varying(node.layout.mesh, axes) for axes in cut])

    return tree.map_tops(of, Parts, x)


def _varying(x: Tensor, mesh: AnyMesh, axes: Axes) -> Tensor:
    for axis in axes:
        x = collectives.of_one("vary", x, mesh, axis, label="norm")
    return x


def _total(x: Tensor, mesh: AnyMesh, axes: Axes, label: str, op: str = "sum") -> Tensor:
    if op == "max":  # the maximum, a constant, selects elements; equal maxima share the derivative
        largest = x.detach()
        for axis in axes:
            largest = collectives.of_one("total", largest, mesh, axis, label, op)
        is_largest = x == largest
        x = torch.where(is_largest, x, 0.0) / _total(is_largest.to(x.dtype), mesh, axes, label)
    for axis in axes:
        x = collectives.of_one("total", x, mesh, axis, label)
    return x


def scaled(x: T, factor: Tensor, own: bool = False) -> T:
    mesh, axes = (x.layout.mesh, x.layout.axes[-1:]) if isinstance(x, Parts) else (None, ())

    def multiplied(x: Tensor) -> Tensor:
        by = beside(factor.to(wide(x.dtype)), x)
        # reused memory: page faults of new memory cost more than the product
        out = x if own else primitives.buffer(mesh, axes, x.numel(), x, lent=False).view(x.shape)
        return torch.mul(x, by, out=out)

    return tree.map(multiplied, x)


def scale_leaves_(x: T, factors: Tensor, layout: Layout | None = None) -> T:
    if differentiates(factors):
        x = tree.map(lambda leaf: depending(leaf.clone(), factors), x)
    by_leaf = factors.unbind()
    for number, piece in pieces(x, layout):
        piece.mul_(beside(by_leaf[number].to(wide(piece.dtype)), piece))
    return x


def global_norm(x: Tree, p: float = 2, exact: bool = False) -> Tensor:
    """Return the p-norm of a whole tree `x`, plain or sharded or both: 0-d, from one collective.

    A leaf on all ranks counts once. The derivative is that of the sum of all ranks' results along axes that cut leaves:
    divide by the number of ranks along these axes. With `exact`, two collectives give bits independent of the number
    of ranks. `train_step(reduction="tree")` uses `exact`, and passes `exact_norms=True` to optimizers.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    check_positive("global_norm: p", p, tensors=False)
    _check_floating(x)
    if differentiates(x):
        return _norm_of_rank(x, p)
    by_axes, device = _by_axes(x), device_of(x)
    if exact and p != math.inf:
        largest = global_norm(x, math.inf)
        scale, binned = _scale(largest), torch.zeros(2, dtype=torch.float64, device=device)
        for mesh, axes, tensors in by_axes:
            local = torch.stack([torch.zeros_like(binned), *(_binned(t, p, scale) for t in tensors)]).sum(0)  # (2,)
            binned = binned + primitives.total(local, mesh, axes, label="norm")
        return _unbinned(binned, p, scale, largest).to(largest.dtype)
    sums = []
    for mesh, axes, tensors in by_axes:
        if tensors or axes:
            powers = _power_sums(tensors, p, device) if tensors else torch.zeros(1, dtype=torch.float64, device=device)
            sums.append(primitives.total(_joined(powers, p), mesh, axes, _op(p), label="norm"))
    return (_root(_joined(torch.stack(sums), p), p) if sums else torch.zeros((), device="cpu")).to(_norm_dtype(x))


def _norm_dtype(x: Tree) -> torch.dtype:
    # ranks without tensors return the same dtype
    dtypes = {wide(dtype) for node in tree.tops(x, Parts) for dtype in _dtypes(node)}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _norm_of_rank(x: Tree, p: float) -> Tensor:
    norm = _one_norm(x, p)
    known: dict[tuple[int, str], AnyMesh] = {}  # annotated: torch.compile traces no call of `dict[...]`
    for mesh, axes, _ in _by_axes(x):
        known |= {(id(mesh), axis): mesh for axis in axes}
    for (_, axis), mesh in known.items():
        norm = _varying(norm, mesh, (axis,))
    return norm


def _one_norm(x: Tree, p: float) -> Tensor:
    sums = [torch.zeros((), dtype=torch.float64, device=device_of(x))]
    for mesh, axes, tensors in _by_axes(x):
        local = _joined(torch.stack([sums[0], *(_smooth_sum(part, p).to(sums[0].device) for part in tensors)]), p)
        sums.append(_total(local, mesh, axes, "norm", _op(p)))
    return _smooth_root(_joined(torch.stack(sums), p), p).to(_norm_dtype(x))


def _check_floating(x: Tree) -> None:
    if tree.nodes(x, Unreduced):
        raise TypeError("global_norm: these gradients are each rank's own: fshard.reduce_grads gives the mesh's")
    for number, leaf in enumerate([x] if x is None else tree.tops(x, Parts)):
        if isinstance(leaf, Parts) or is_inexact(leaf):
            continue
        path = tree.paths_to(x, Parts)[number][0] if x is not None else ""
        got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
        raise TypeError(f"global_norm: leaf {path!r}: expected a floating tensor, got {got}")


def gram(trees: Sequence[Tree]) -> Tensor:
    """Return the dot products of k trees: (k, k), float64, from one collective."""
    total = torch.zeros(len(trees), len(trees), dtype=torch.float64, device=device_of(trees[0]))
    for of_trees in zip(*map(_by_axes, trees), strict=True):
        (mesh, axes, _), local = of_trees[0], torch.zeros_like(total)  # (k, k)
        for xs in zip(*(tensors for _, _, tensors in of_trees), strict=True):
            for parts in zip(*(x.reshape(-1).split(block_size(x, _CACHED_BLOCK)) for x in xs), strict=True):
                block = torch.stack(parts).double()  # (k, elements)
                local = local + (block @ block.T).to(local.device)
        total = total + primitives.total(local, mesh, axes, label="dot products")
    return total


def dot(x: Tree, y: Tree) -> Tensor:
    """Return the dot product of two trees, plain or sharded: 0-d, equal on all ranks, one collective for each mesh.

    Sums are in float64; the result has the widest dtype of the leaves, at least float32. The first factor of complex
    leaves is conjugated, as in torch.vdot. A leaf on all ranks, a replica and a tied leaf of a `Sharded` count once;
    padding does not count. The result is one value, not one for each rank: under torch.func.grad the derivative in `x`
    is `y`, cut like `x`, on any mesh. ValueError unless both trees have one structure and are cut alike.

    >>> dot({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 4.0])})
    tensor(11.)
    """
    x, y = packed(x), packed(y)
    _check_same_leaves(x, y)
    device, dtypes = device_of(x), [dtype for z in (x, y) for node in tree.tops(z, Parts) for dtype in _dtypes(node)]
    products = [torch.zeros((), dtype=torch.float64, device=device)]
    for (mesh, axes, of_x), (_, _, of_y) in zip(_by_axes(x), _by_axes(y), strict=True):
        local = [part for pair in zip(of_x, of_y, strict=True) for part in _products(*pair)]
        product = torch.stack([torch.zeros_like(products[0]), *(part.to(device) for part in local)]).sum()
        for axis in axes:
            product = collectives.of_one("total", product, mesh, axis, label="dot product")
        products.append(product)
    # ranks without tensors must return other ranks' dtype
    return torch.stack(products).sum().to(reduce(torch.promote_types, dtypes, torch.float32))


def _products(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float64)
    size = block_size(x, _CACHED_BLOCK)
    for a, b in zip(x.reshape(-1).split(size), y.reshape(-1).split(size), strict=True):
        yield (a.to(dtype).conj() * b.to(dtype)).sum()


def _check_same_leaves(x: Tree, y: Tree) -> None:
    if tree.nodes((x, y), Unreduced):
        raise TypeError("dot: these gradients are each rank's own: fshard.reduce_grads gives the mesh's")
    (named, spec), (others, other_spec) = ((tree.paths_to(z, Parts), tree.structure_above(z, Parts)) for z in (x, y))
    if spec != other_spec:
        raise ValueError(f"dot: y is not of the structure of x: {tree.difference(x, y)}")
    for (path, a), (_, b) in zip(named, others, strict=True):
        if not all(isinstance(leaf, Tensor | Parts) for leaf in (a, b)):
            raise TypeError(f"dot: leaf {path!r}: expected tensors, got {shown(a)} and {shown(b)}")
        at = f"dot: {f'leaf {path!r}' if path else 'y'}"
        if isinstance(a, Parts) != isinstance(b, Parts):
            raise ValueError(f"{at}: expected {_node_kind(a)}, as in x, got {_node_kind(b)}")
        if isinstance(a, Parts) and a.key != b.key:
            raise ValueError(
                f"{at}: expected leaves that are cut as in x, got {b} for {a}. Of parameters, `params.trainable` has "
                "the leaves that gradients have"
            )
        if isinstance(a, Tensor) and a.shape != b.shape:
            raise ValueError(f"{at}: expected shape {list(a.shape)}, as in x, got {list(b.shape)}")


def _node_kind(x: Parts | Tensor) -> str:
    return f"a {type(x).__name__}" if isinstance(x, Parts) else "a tensor"


def _by_axes(x: Tree) -> list[tuple[AnyMesh, Axes, list[Tensor]]]:
    """Return (mesh, axes, tensors cut over these axes); uncut tensors come first."""
    # by identity: a user's mesh may have no hash
    known: dict[tuple[int, Axes], tuple[AnyMesh, Axes, list[Tensor]]] = {(id(None), ()): (None, (), [])}
    for node in tree.tops(x, Parts):
        for axes in node.layout.cut_axes if isinstance(node, Parts) else ():
            # a rank without elements takes part in sums
            known.setdefault((id(node.layout.mesh), axes), (node.layout.mesh, axes, []))
        for part, mesh, axes in _filled_intervals(node):
            known.setdefault((id(mesh), axes), (mesh, axes, []))[2].append(part)
    return [*known.values()]


def _filled_intervals(node: Parts | Tensor) -> Iterator[tuple[Tensor, AnyMesh, Axes]]:
    """Yield (tensor, mesh, axes) of the filled intervals: padding may hold any values.

    If no elements are filled, yield an empty tensor: under vmap all ranks need results of one shape.
    """
    if not isinstance(node, Parts):
        yield node, None, ()
        return
    layout = node.layout
    for number, x in enumerate(node.tensors):
        axes = layout.cut_over.get(number, ())
        for start, stop in layout.filled.get(number, [(0, 0)]) if layout.flat else [(0, x.numel())]:
            yield (x if stop - start == x.numel() else x[start:stop]), layout.mesh if axes else None, axes


def _dtypes(node: Parts | Tensor) -> Iterable[torch.dtype]:
    if not isinstance(node, Parts):
        return [node.dtype]
    return [x.dtype for x in node.tensors] or [node.layout.leaves[n].dtype for n in node.layout.numbers]


def _joined(powers: Tensor, p: float) -> Tensor:
    return powers.amax() if p == math.inf else powers.sum()
