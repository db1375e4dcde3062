"""Try on a small tree if an update of a leaf depends on other leaves: ranks that own leaves see no others.

Clips act only above a threshold, so a trial's gradients have several magnitudes, and one leaf's are infinite or NaN. A
trial does not find an update that reads other leaves only after many steps, or at other magnitudes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import num_ranks
from ..core import tree
from ..core.differences import Form
from ..core.func_levels import unwrapped
from ..core.random import SameDraws, bookmark
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.layout import Layout, Leaf
from ..layout.pieces import Misplaced, Parts, device_of, reshaped
from ..layout.rules import Rule
from .described import Alone, Communicated, check_shapes, is_listed, made_up, named
from .moves import on_rank

_MAGNITUDES = *((m, m, m) for m in (1.0, 1e-4, 1e4, 1e8)), (torch.inf, torch.nan, 1.0)  # of gradients
_LEAVES = 6  # leaves of the small tree
_LARGEST = 1 << 14  # elements of a leaf; each dim of a larger leaf is cut to `_SIDE`
_SIDE = 8


class _Found(NamedTuple):
    drew: bool
    depends: bool
    communicated: bool = False
    state: bool = False  # only the state depends on other leaves
    error: Exception | None = None


def check_alone(init: Callable[[Tree], Tree], update: Callable[..., tuple[Tree, Tree]], nodes: Sequence[Parts]) -> None:
    """ValueError if the update of a leaf depends on other leaves, on several ranks or with random numbers.

    An update that draws random numbers is run leaf by leaf. No error if the update fails on the trial's whole tree
    (because it needs further arguments, say).
    """
    device = device_of([*nodes])
    if is_tracing() or torch.compiler.is_compiling() or device.type == "meta":
        return
    several = any(num_ranks(x.mesh) > 1 for x in nodes)
    findings = [_tried(init, update, x.layout, device) for x in nodes]
    for each in findings:
        alone = each.depends or (each.communicated and each.drew)
        if alone and (several or each.drew):
            why = "each rank sees only the leaves that it owns" if several else "leaves are updated one by one"
            raise ValueError(
                f"{named(update)}: its {'state' if each.state else 'update'} of a leaf depends on other leaves (on a "
                f"norm, or if all are finite)"
                f"{' and draws random numbers' * each.drew}, but {why}. Write it as optim.Transform(init, update, "
                "over='tree') with fshard's norms (optim.global_norm; over=tx.over for what wraps a tx); to clip by "
                "the norm of all gradients use optim.clip_by_global_norm or train_step(clip_norm=)."
                f"{' Draw in a transformation of its own (optim.chain).' * each.drew}"
            ) from each.error


def _tried(
    init: Callable[[Tree], Tree], update: Callable[..., tuple[Tree, Tree]], layout: Layout, device: torch.device
) -> _Found:
    forms = _chosen([layout.leaves[n] for n in layout.numbers], layout.numbers)
    if len(forms) < 2:
        return _Found(False, False)
    whole = replace(on_rank(reshaped(on_rank(layout.pick(forms)), forms)), mesh=None, axes=())
    mesh = Alone(device.type, shard=2)
    needed = {name: torch.ones((), device=device) for name in _needed(update)}
    runs = partial(_trial_steps, init, update, device, needed, min(forms))
    restore, same = bookmark(device), SameDraws(device)
    try:
        with same:
            for magnitudes in _MAGNITUDES:
                try:
                    together = [*runs(whole, magnitudes)]
                except Misplaced:
                    raise
                except Exception:  # perhaps magnitudes that it refuses
                    continue
                for number, n in enumerate(span.leaf for span in whole.mine):
                    picked = whole.pick([n])
                    rows = tuple(replace(row, rule=Rule(("shard",), at=0)) for row in picked.rows)
                    alone = [*runs(replace(picked, mesh=mesh, axes=("shard",), rows=rows), magnitudes)]
                    for of_all, single in zip(together, alone, strict=True):
                        same_updates = _alike(of_all[0], single[0], number, len(forms))
                        if not same_updates or not _alike(of_all[1], single[1], number, len(forms)):
                            return _Found(same.drew, depends=True, state=same_updates)
    except Misplaced:
        raise
    except Communicated:
        return _Found(same.drew, depends=False, communicated=True)
    except Exception as error:
        return _Found(same.drew, depends=True, error=error)
    finally:
        restore()
    return _Found(same.drew, depends=False)


def _chosen(leaves: Sequence[Leaf], numbers: Sequence[int]) -> dict[int, Form]:
    """Choose up to `_LEAVES` leaves, first the smallest with each number of dims; cut large leaves."""
    by_dims: dict[int, list[int]] = {}
    order = sorted(zip(leaves, numbers, strict=True), key=lambda pair: (pair[0].numel, pair[1]))
    for leaf, n in order:
        if leaf.numel:
            by_dims.setdefault(len(leaf.shape), []).append(n)
    ranked = sorted((place, n) for group in by_dims.values() for place, n in enumerate(group))
    form_of = {n: leaf for leaf, n in order}
    return {n: _small_form(form_of[n]) for n in sorted(n for _, n in ranked[:_LEAVES])}


def _small_form(leaf: Leaf) -> Form:
    small = leaf.numel <= _LARGEST
    return Form(leaf.shape if small else tuple(min(size, _SIDE) for size in leaf.shape), leaf.dtype)


def _needed(update: Callable[..., object]) -> list[str]:
    try:
        known = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in known if p.kind is p.KEYWORD_ONLY and p.default is p.empty]


def _trial_steps(
    init: Callable[[Tree], Tree],
    update: Callable[..., tuple[Tree, Tree]],
    device: torch.device,
    needed: dict[str, Tensor],
    bad: int,
    layout: Layout,
    magnitudes: Sequence[float],
) -> Iterator[tuple[Tree, Tree]]:
    """Yield (updates, state) of each step; only leaf `bad` gets infinite or NaN gradients."""

    def made(seed: int, scale: float) -> Parts:
        scales = {s.leaf: scale if isfinite(scale) or s.leaf == bad else 1.0 for s in layout.mine}
        return Parts(layout, [made_up(layout.leaves[n], 8 * n + seed, x).to(device) for n, x in scales.items()])

    state = init(made(0, 1.0))
    for number, magnitude in enumerate(magnitudes):
        before = state
        updates, state = update(made(number + 1, magnitude), state, made(0, 1.0), **needed)
        check_shapes(update, before, state)
        yield updates, tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)


def _alike(x: Tree, y: Tree, number: int, num: int) -> bool:
    """True if `x`, the result of `num` leaves, has at leaf `number` the values of `y`, the result of this leaf."""
    if isinstance(x, Parts) and isinstance(y, Parts):
        return len(x.tensors) == num and len(y.tensors) == 1 and _equal(x.tensors[number], y.tensors[0])
    if is_listed(x, y, num):
        return _alike(x[number], y[0], number, num)
    (inside, kind), (other, other_kind) = tree.opened(x), tree.opened(y)
    if inside is None or other is None:
        return _equal(x, y)
    return (
        type(x) is type(y)
        and bool(kind == other_kind)
        and [name for name, _ in inside] == [name for name, _ in other]
        and all(_alike(a, b, number, num) for (_, a), (_, b) in zip(inside, other, strict=True))
    )


def _equal(x: Tree, y: Tree) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return bool(x == y or (x != x and y != y))  # NaN equals NaN
    x, y = unwrapped(x), unwrapped(y)  # a closure may have a learning rate batched by vmap
    if x.shape != y.shape or x.dtype != y.dtype or not (x.is_floating_point() or x.is_complex()):
        return x.dtype == y.dtype and torch.equal(x, y)
    return torch.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True)
