"""Norms of trees and of their leaves, over all ranks, and trees multiplied by factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import comm, tree
from .comm import Axes, Mesh
from .kernels import beside, wide
from .parts import Layout, Parts, device_of, layout_of, pieces

_BLOCK = 1 << 16  # elements that stay in cache
_UNITS = (1.5 * 2.0**30, 1.5 * 2.0**7)  # added to a float64 these leave it multiples of 2^-22, of 2^-45


def _power_sums(tensors: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """The sum of p-th powers of magnitudes of each tensor (or their maximum): float64, on one device."""
    norms = [_norm(x.reshape(-1), p) if x.numel() else torch.zeros((), device=device) for x in tensors]
    sums = torch.stack([norm.double().to(device) for norm in norms])
    return sums if p == math.inf else sums**p


def _norm(x: Tensor, p: float) -> Tensor:
    if p == math.inf and not x.is_complex():  # on CPUs vector_norm takes a tenfold of the time for this one
        low, high = torch.aminmax(x)
        return torch.maximum(low.abs(), high.abs())
    return torch.linalg.vector_norm(x, p, dtype=torch.promote_types(x.dtype, torch.float32))


def _root(sums: Tensor, p: float) -> Tensor:
    return sums if p == math.inf else sums ** (1 / p)


def leaf_norms(x: Any, p: float = 2, layout: Layout | None = None) -> Tensor:
    """The p-norm of each of the layout's leaves (float64), the same on all ranks: one collective."""
    layout = layout or layout_of(x)
    mine = pieces(x, layout)
    sums = torch.zeros(len(layout.leaves), dtype=torch.float64, device=(device := device_of(x)))
    if mine:
        index = torch.tensor([number for number, _ in mine], device=device)
        powers = _power_sums([piece for _, piece in mine], p, device)
        sums.scatter_reduce_(0, index, powers, "amax" if p == math.inf else "sum")
    if layout.axes:
        mask = torch.tensor([n in layout.shared for n in range(len(layout.leaves))], device=device)
        everywhere = torch.where(mask, sums, 0)
        sums = comm.total(torch.where(mask, 0, sums), layout.mesh, layout.axes, _op(p), label="leaf norms")
        sums = sums + everywhere
    return _root(sums, p)


def _op(p: float) -> str:
    return "max" if p == math.inf else "sum"


def scaled(x: Any, factor: Tensor, own: bool = False) -> Any:
    """A tree times a 0-d factor; in place where the tree is the caller's own."""
    mesh, axes = (x.layout.mesh, x.layout.axes[-1:]) if isinstance(x, Parts) else (None, ())

    def one(row: Tensor) -> Tensor:
        by = beside(factor.to(wide(row.dtype)), row)
        # a new tensor this large would cost more in page faults than the product
        out = row if own else comm.buffer(mesh, axes, row.numel(), row, lent=False).view(row.shape)
        return torch.mul(row, by, out=out)

    return tree.map(one, x)


def scale_leaves_(x: Any, factors: Tensor, layout: Layout | None = None) -> Any:
    """Multiply every leaf by its factor, in place; of views packed copies, which the result then has."""
    x = tree.map(lambda row: row, x)
    by_leaf = factors.unbind()
    for number, piece in pieces(x, layout):
        piece.mul_(beside(by_leaf[number].to(wide(piece.dtype)), piece))
    return x


def global_norm(x: Any, p: float = 2) -> Tensor:
    """The p-norm of a whole tree, plain or sharded or both, leaves that all ranks hold counted once: one collective.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    if not p > 0:
        raise ValueError(f"global_norm: p={p}: expected a number above 0, or inf")
    worlds, device = _worlds(x), device_of(x)
    sums = []
    for (mesh, axes), rows in worlds.items():
        if rows or axes:
            powers = _power_sums(rows, p, device) if rows else torch.zeros(1, dtype=torch.float64, device=device)
            sums.append(comm.total(_joined(powers, p), mesh, axes, _op(p), label="norm"))
    wides = {wide(row.dtype) for rows in worlds.values() for row in rows}
    dtype = torch.float64 if torch.float64 in wides else torch.float32
    return _root(_joined(torch.stack(sums), p), p).to(dtype) if sums else torch.zeros(())


def exact_norm(x: Any) -> Tensor:
    """`global_norm(x)` whose bits depend on the elements alone: neither on their order nor on which rank has which.

    Squares, of elements scaled to be below 1, are rounded to multiples of 2^-22, the rests to multiples of 2^-45, and
    added in float64: without error while the sum is below 2^30. Finite elements; else their largest magnitude.

    >>> exact_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)

    Source: Demmel and Nguyen, Fast Reproducible Floating-Point Summation (2013).
    """
    worlds, device = _worlds(x), device_of(x)
    largest = global_norm(x, math.inf)
    _, exponent = torch.frexp(largest.double())
    factor = torch.ldexp(torch.ones((), dtype=torch.float64, device=device), (-exponent).clamp(max=1000))
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for (mesh, axes), rows in worlds.items():
        mine = [
            _binned(part, beside(factor, part)).to(device) for row in rows for part in row.reshape(-1).split(_BLOCK)
        ]
        sums += comm.total(torch.stack([torch.zeros_like(sums), *mine]).sum(0), mesh, axes, label="norm")
    norm = sums.sum().sqrt() / factor
    return torch.where(largest.isfinite(), norm, largest.double()).to(largest.dtype)


def _binned(x: Tensor, factor: Tensor) -> Tensor:
    """The sums of what squares are rounded to, and of the rests."""
    rest = torch.view_as_real(x) if x.is_complex() else x
    rest = (rest.double() * factor).square()
    sums = []
    for unit in _UNITS:
        rounded = (rest + unit) - unit
        sums.append(rounded.sum())
        rest = rest - rounded
    return torch.stack(sums)


def _worlds(x: Any) -> dict[tuple[Mesh, Axes], list[Tensor]]:
    """The rows of a tree, by what they are cut over."""
    worlds: dict[Any, list[Tensor]] = {(None, ()): []}
    for node in tree.tops(x, Parts):
        for row, mesh, axes in _rows(node):
            worlds.setdefault((mesh, axes), []).append(row)
    return worlds


def _rows(node: Any) -> Iterator[tuple[Tensor, Mesh, Axes]]:
    """The rows of a node, and over what each is cut."""
    if not isinstance(node, Parts):
        yield node, None, ()
        return
    layout = node.layout
    for number, row in enumerate(node.tensors):
        yield row, *((None, ()) if number in layout.shared_rows else (layout.mesh, layout.axes))


def _joined(powers: Tensor, p: float) -> Tensor:
    return powers.amax() if p == math.inf else powers.sum()
