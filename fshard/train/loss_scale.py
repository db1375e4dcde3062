"""Loss scalers: immutable values that a step takes and returns.

Gradients in half precision may underflow to 0: the loss is multiplied by a scale, and gradients by the inverse scale.
Sources: Micikevicius et al., Mixed precision training (2018); torch.amp.GradScaler for the dynamic rule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import SupportsIndex, TypeVar

import torch
from torch import Tensor, nn

from ..comm import consensus
from ..comm.mesh import AnyMesh, axis_sizes
from ..core import scalars, tree
from ..core.arguments import check_whole, expect, is_number, shown
from ..core.losses import is_loss
from ..core.scalars import Number, double
from ..core.storage import is_inexact
from ..core.tracing import Args, Kwargs, Marked, Operator, kind_of, mark
from ..core.tree import Tree
from ..layout.layout import Leaf
from ..layout.pieces import Parts, device_of, layout_of, mesh_of, pieces
from ..update import kernels
from ..update.base import FoundInf, Label, any_found, check_found
from ..update.transforms import Labels, labeller

# fields that torch.amp.GradScaler lacks; with these values `DynamicLossScale` does the same
_BOUNDS = {"min_scale": 0.0, "max_scale": math.inf, "hysteresis": 1}

T = TypeVar("T")
K = TypeVar("K")


def _scaled(x: Tree, scale: Tensor) -> Tree:
    """Multiply each leaf by the scale, in the leaf's dtype; of a `Mean` or `Sum`, the total alone."""

    def times(path: str, leaf: Tree) -> Tree:
        if is_loss(leaf):
            return leaf.on_totals(partial(times, path))
        if not is_inexact(leaf):
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"scale: leaf {path!r}: expected a floating tensor, got {got}")
        return (leaf * scalars.beside(scale, leaf)).to(leaf.dtype)

    return tree.put_tops(x, is_loss, [times(path, leaf) for path, leaf in tree.paths_to(x, is_loss)])


class Unscaled(Marked):
    """A gradient divided by the loss scale: `unscale` refuses to divide it again.

    Deep copies and results of `detach` are `Unscaled`; other results, pickles and sparse gradients are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, fn: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> Tree:
        # private, but in torch's notes on extending torch; without it every result is an `Unscaled`
        with torch._C.DisableTorchFunctionSubclass():
            result = fn(*args, **(kwargs or {}))
        # nn.Parameter needs a `detach` that keeps the class
        return result.as_subclass(cls) if fn in (torch.detach, Tensor.detach) else result

    def _plain(self) -> Tensor:
        plain = self.detach().as_subclass(Tensor)
        return nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        plain = copy.deepcopy(self._plain(), memo)
        copied = plain if isinstance(self, nn.Parameter) else plain.as_subclass(Unscaled)
        return copied.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self._plain().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def _as_scale(scale: Number) -> Tensor:
    expect("a loss scale", scale, isinstance(scale, Tensor) or is_number(scale), "a number above 0, or a 0-d tensor")
    plain = scale.as_subclass(Tensor) if isinstance(scale, Tensor) else double(float(scale))
    if plain.dim():
        raise ValueError(f"a loss scale is a number or a 0-d tensor, got a tensor of shape {tuple(plain.shape)}")
    if not isinstance(scale, Tensor) and not 0 < scale < math.inf:
        raise ValueError(f"a loss scale is a finite number above 0, got {scale}")
    return plain.detach().to(torch.float32, copy=True)  # the caller may write to `scale`


def _check_between(scale: Number, least: float, most: float) -> None:
    if is_number(scale) and not least * (1 - 2**-23) <= scale <= most * (1 + 2**-23):
        raise ValueError(f"a loss scale={scale}: expected min_scale={least} <= scale <= max_scale={most}")


def _unscale(grads: Tree, scale: Tensor, own: bool, labels: Labels, mesh: AnyMesh) -> tuple[Tree, FoundInf]:
    _check_grads(grads)
    sparse = any(row.layout is torch.sparse_coo for row in tree.leaves(grads))
    if not own or sparse:  # dividing `_values` of an uncoalesced tensor in place would divide a copy
        grads = tree.map(lambda row: (row.coalesce() if row.layout is torch.sparse_coo else row).clone(), grads)
    meshes, by_label = _meshes(grads, mesh), dict[Label, Tensor]()
    if labels is not None:  # before the division: a scale below 1 may make finite values overflow
        nodes = tree.paths_to(grads, Parts)
        paths = [tree.joined(path, name) for path, node in nodes for name in tree.leaf_paths(layout_of(node).spec)]
        by_label = _not_finite_by(labeller(labels, paths), grads, meshes)
    found_inf = kernels.unscale_([_values(row) for row in tree.leaves(grads)], scale.double().reciprocal())
    grads = tree.map(lambda row: row if row.layout is torch.sparse_coo else mark(row, Unscaled), grads)
    return grads, by_label if labels is not None else _any_of_ranks(found_inf, meshes)


def _values(row: Tensor) -> Tensor:
    return row.coalesce().values() if row.layout is torch.sparse_coo else row


def _check_grads(grads: Tree) -> None:
    for number, row in enumerate(tree.leaves(grads)):
        if is_inexact(row) and not issubclass(kind_of(row), Unscaled):
            continue
        path = tree.paths(grads)[number]
        if is_inexact(row):
            raise ValueError(f"unscale: leaf {path!r} was unscaled already: use what unscale gave the first time")
        got = row.dtype if isinstance(row, Tensor) else type(row).__name__
        raise TypeError(f"unscale: leaf {path!r}: expected a gradient, a floating tensor, got {got}")


def _meshes(x: Tree, mesh: AnyMesh) -> list[AnyMesh]:
    axis_sizes(mesh)  # raises unless `mesh` is a mesh or None
    return [present for present in (mesh_of(x), mesh) if present is not None]


def _any_of_ranks(flags: T, meshes: Sequence[AnyMesh]) -> T:
    for mesh in meshes:
        flags = consensus.any_rank(flags, mesh)
    return flags


def _not_finite_by(key: Callable[[Leaf], K], x: Tree, meshes: Sequence[AnyMesh]) -> dict[K, Tensor]:
    """Return a `found_inf` for the leaves of each key, equal on all ranks."""
    flags, device = dict[K, list[Tensor]](), device_of(x)
    for path, node in tree.paths_to(x, Parts):
        layout = layout_of(node)
        keys = {
            n: key(replace(leaf, path=tree.joined(path, leaf.path)))
            for n, leaf in ((n, layout.leaves[n]) for n in layout.numbers)
        }
        # a flag for every key: all ranks compare the same keys, in one order
        for key_of_leaf in keys.values():
            flags.setdefault(key_of_leaf, [torch.zeros((), dtype=torch.float32, device=device)])
        for n, piece in pieces(node, layout):
            values = _values(piece)
            if values.numel() and is_inexact(values):
                flags[keys[n]].append(_not_finite(values).to(device))
    return _any_of_ranks({each: torch.stack(of_pieces).amax() for each, of_pieces in flags.items()}, meshes)


def _not_finite(x: Tensor) -> Tensor:
    low, high = torch.aminmax(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x)  # NaN if an element is NaN
    return (~(low.isfinite() & high.isfinite())).float()


def nonfinite_leaves(x: Tree, mesh: AnyMesh = None) -> list[str]:
    """Return the paths of leaves that are not finite on some rank: one collective, and the host waits for it.

    `x`: a tree of tensors, plain or sharded. `mesh`: for a plain tree, the ranks to ask (None: this rank alone). All
    ranks get the same paths.

    >>> nonfinite_leaves({"a": torch.tensor([1.0, torch.inf]), "b": torch.ones(2)})
    ['a']
    """
    for path, leaf in zip(tree.paths(x), tree.leaves(x), strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"nonfinite_leaves: leaf {path!r}: expected a tensor, got {shown(leaf)}")
    flags = _not_finite_by(lambda leaf: leaf.path, x, _meshes(x, mesh))
    on_host = torch.stack([*flags.values()]).tolist() if flags else []
    return [path for path, is_bad in zip(flags, on_host, strict=True) if is_bad]


@dataclass(frozen=True, init=False)
class StaticLossScale:
    """A fixed `scale`. A step skips the update if its scaled gradients are not finite.

    >>> StaticLossScale(8.0).scale(torch.tensor(2.0))
    tensor(16.)
    """

    value: Tensor  # the scale, 0-d, float32

    def __init__(self, scale: Number = 2.0**16):
        # a frozen dataclass forbids assignment
        vars(self).update(value=_as_scale(scale))

    def scale(self, x: Tree) -> Tree:
        """Multiply a tree by the scale, each leaf in its own dtype. TypeError for any but floating tensors."""
        return _scaled(x, self.value)

    def unscale(
        self, grads: Tree, *, own: bool = False, labels: Labels = None, mesh: AnyMesh = None
    ) -> tuple[Tree, Tree]:
        """Divide gradients by the scale; returns `(grads, found_inf)`.

        - `found_inf` (float32, 0-d): 1 if gradients are not finite on any rank (of the mesh of sharded or unreduced
          gradients).
        - `mesh`: the ranks to ask for plain gradients; None: this rank alone.
        - `labels`, as given to `optim.by_label`: `found_inf` is a dict, a tensor by label, for `by_label(...).step`.
        - `own`: divide in place.

        ValueError for gradients that were unscaled before.

        >>> StaticLossScale(4.0).unscale({"w": torch.tensor([8.0, 4.0])})
        ({'w': Unscaled([2., 1.])}, tensor(0.))
        """
        return _unscale(grads, self.value, own, labels, mesh)

    def adjust(self, found_inf: FoundInf) -> StaticLossScale:
        """Return this scaler."""
        check_found(found_inf)
        return self


@dataclass(frozen=True, init=False)
class DynamicLossScale(StaticLossScale):
    """A scale that shrinks when gradients overflow, and grows after `growth_interval` updates without an overflow.

    - `scale`: the first scale; by default 2^16, or the bound nearest to 2^16.
    - `growth_factor`, `backoff_factor`: the factors by which the scale grows and shrinks.
    - `growth_interval`: consecutive updates without an overflow until the scale grows.
    - `growth_tracker`: the number of such updates so far.
    - `min_scale`, `max_scale`: bounds of the scale; a `scale` outside is a ValueError.
    - `hysteresis`: the scale shrinks at the `hysteresis`-th overflow since it last grew, and at every later one (with
      1, at the first: torch.amp.GradScaler's rule).
    - `hysteresis_tracker`: overflows left until the scale shrinks; by default `hysteresis`.

    >>> scaler = DynamicLossScale(16.0, growth_interval=1)
    >>> scaler.adjust(torch.tensor(1.0)).value.item(), scaler.adjust(torch.tensor(0.0)).value.item()
    (8.0, 32.0)

    Source of the hysteresis: Megatron-LM's DynamicGradScaler.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    hysteresis: int
    growth_tracker: Tensor  # int32, 0-d
    hysteresis_tracker: Tensor  # int32, 0-d

    def __init__(
        self,
        scale: Number | None = None,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        growth_tracker: Tensor | int = 0,
        *,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        hysteresis_tracker: Tensor | int | None = None,
    ):
        factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
        for name, value in {**factors, "min_scale": min_scale, "max_scale": max_scale}.items():
            expect(f"DynamicLossScale: {name}", value, is_number(value), "a number")
        check_whole("DynamicLossScale: growth_interval", growth_interval, what="a number of updates")
        check_whole("DynamicLossScale: hysteresis", hysteresis, what="a number of overflows")
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                f"DynamicLossScale: expected growth_factor > 1 and 0 < backoff_factor < 1, got {growth_factor} and "
                f"{backoff_factor}"
            )
        if not 0 <= min_scale <= max_scale:
            raise ValueError(f"DynamicLossScale: expected 0 <= min_scale <= max_scale, got {min_scale} and {max_scale}")
        if scale is None:
            scale = min(max(2.0**16, min_scale), max_scale)
        plain = _as_scale(scale)
        _check_between(scale, min_scale, max_scale)
        overflows_left = hysteresis if hysteresis_tracker is None else hysteresis_tracker
        counts = [double(n).to(plain.device, torch.int32, copy=True) for n in (growth_tracker, overflows_left)]
        # in the order of fields
        values = (plain, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis, *counts)
        vars(self).update(zip((f.name for f in fields(self)), values, strict=True))

    def adjust(self, found_inf: FoundInf, new_scale: Number | None = None) -> DynamicLossScale:
        """Return the next step's scaler; `new_scale` sets its scale and keeps its counts. The host does not wait."""
        if new_scale is not None:
            _check_between(new_scale, self.min_scale, self.max_scale)
            return self._with(_as_scale(new_scale).to(self.value.device), self.growth_tracker, self.hysteresis_tracker)
        overflowed = any_found(found_inf).to(self.value.device, torch.bool)
        overflows_left = self.hysteresis_tracker - overflowed.int()
        num_finite = self.growth_tracker + 1
        grows = ~overflowed & (num_finite == self.growth_interval)
        larger, smaller = self.value * self.growth_factor, self.value * self.backoff_factor
        # as in torch.amp.GradScaler, a scale never grows to inf
        larger = torch.where(larger.isfinite(), larger.clamp(max=self.max_scale), self.value)
        smaller = torch.where(overflows_left > 0, self.value, smaller.clamp(min=self.min_scale))
        return self._with(
            torch.where(overflowed, smaller, torch.where(grows, larger, self.value)),
            torch.where(overflowed | grows, torch.zeros_like(num_finite), num_finite),
            torch.where(grows, torch.full_like(overflows_left, self.hysteresis), overflows_left.clamp(min=0)),
        )

    def _with(self, scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor) -> DynamicLossScale:
        new = object.__new__(DynamicLossScale)  # __init__ would copy every tensor
        changed = {"value": scale, "growth_tracker": growth_tracker, "hysteresis_tracker": hysteresis_tracker}
        vars(new).update(vars(self) | changed)
        return new

    def state_dict(self) -> dict[str, float]:
        """Return the state dict of torch.amp.GradScaler; the host waits. Dual: `load_state_dict`.

        The dict has `min_scale`, `max_scale` and `hysteresis` unless all three are defaults.

        >>> DynamicLossScale(8.0).state_dict()["scale"]
        8.0
        """
        named = {name: getattr(self, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
        saved = {"scale": self.value.item(), **named, "_growth_tracker": int(self.growth_tracker)}
        bounds = {name: getattr(self, name) for name in _BOUNDS}
        if bounds == _BOUNDS:
            return saved
        return {**saved, **bounds, "_hysteresis_tracker": int(self.hysteresis_tracker)}

    def load_state_dict(self, saved: Mapping[str, Tree]) -> DynamicLossScale:  # values from a file, checked by __init__
        """Return the saved scaler, with this scaler's bounds and hysteresis if torch.amp.GradScaler saved it.

        ValueError if the state dict is empty or lacks a value.

        >>> DynamicLossScale().load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()).value.item()
        8.0
        """
        if not saved:
            raise ValueError(
                "load_state_dict: the state dict is empty: it was saved by a scaler that was not enabled. NoLossScale "
                "loads it"
            )
        names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        if missing := [name for name in names if name not in saved]:
            raise ValueError(f"load_state_dict: the state dict lacks {missing[0]!r}; it has {', '.join(saved)}")
        bounds = {name: saved.get(name, getattr(self, name)) for name in _BOUNDS}
        overflows_left = saved.get("_hysteresis_tracker")
        loaded = DynamicLossScale(*(saved[name] for name in names), **bounds, hysteresis_tracker=overflows_left)
        return tree.map(lambda x: x.to(self.value.device), loaded)


@dataclass(frozen=True)
class NoLossScale:
    """No scaling, and no update is skipped. `metrics["found_inf"]` is 1 if a gradient is not finite.

    >>> NoLossScale().scale(torch.tensor(2.0))
    tensor(2.)
    """

    @property
    def value(self) -> Tensor:
        """The number 1, a 0-d float32 tensor."""
        return torch.ones((), dtype=torch.float32, device="cpu")

    def state_dict(self) -> dict[str, float]:
        """Return the state dict of a disabled torch.amp.GradScaler: {}."""
        return {}

    def load_state_dict(self, saved: Mapping[str, object]) -> NoLossScale:
        """Return this scaler."""
        return self

    def scale(self, x: Tree) -> Tree:
        """Return the tree times 1. TypeError for any but floating tensors."""
        return _scaled(x, self.value)

    def unscale(
        self, grads: Tree, *, own: bool = False, labels: Labels = None, mesh: AnyMesh = None
    ) -> tuple[Tree, Tensor]:
        """Return the gradients unchanged, and 0 as `found_inf`."""
        return grads, torch.zeros((), dtype=torch.float32, device=device_of(grads))

    def adjust(self, found_inf: FoundInf) -> NoLossScale:
        """Return this scaler."""
        check_found(found_inf)
        return self


tree.register_fields(StaticLossScale, ("value",))
tree.register_fields(
    DynamicLossScale,
    ("value", "growth_tracker", "hysteresis_tracker"),
    ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "hysteresis"),
)
tree.register_fields(NoLossScale, ())


LossScale = StaticLossScale | NoLossScale


def select(found_inf: Tensor, if_inf: Tree, if_finite: Tree) -> Tree:
    """Return `if_inf` if `found_inf` is 1, else `if_finite`. No host read.

    ValueError unless both are trees of one structure, with the same shapes and dtypes.

    >>> select(torch.tensor(1.0), {"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    {'w': tensor(1)}
    """
    check_found(found_inf, labelled=False)
    pairs, spec = tree.pairs("select: if_finite is not of the structure of if_inf", if_inf, if_finite)
    for number, (a, b) in enumerate(pairs):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
            alike = "expected two tensors of one shape and dtype"
            raise ValueError(f"select: leaf {tree.leaf_paths(spec)[number]!r}: {alike}, got {shown(a)} and {shown(b)}")
    return tree.unflatten(spec, [kernels.where(found_inf, a, b) for a, b in pairs])
