"""Gradient transformations: pairs of pure functions over trees, as in optax.

`init(params) -> state`; `update(grads, state, params, **extra) -> (updates, state)`; `apply_updates(params, updates)`.
A transformation sends nothing itself. Its trees are plain, or `Parts` (`layout/pieces.py`) if other ranks have some of
the elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh
from ..core import func_levels, tree
from ..core.arguments import (
    check_flags,
    check_function,
    check_hyperparams,
    check_positive,
    check_rate,
    check_word,
    shown,
    wrong,
)
from ..core.scalars import Number, beside
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.norms import scaled_by_norm
from ..layout.pieces import Parts, Views, copied, device_of, packed, structure_key
from ..layout.row import joined_row
from ..whole.updates import at_once, in_trees, on_leaves, row_by_row, unwritten
from . import kernels

T = TypeVar("T")

# from the number of updates made (float64, 0-d) to a hyper-parameter
Schedule = Callable[[Tensor], Number]

# Not `Hashable`: for mypy, a dict[str, X] is no Mapping[Hashable, X].
Label: TypeAlias = Any

# a 0-d tensor, 1 to skip an update, else 0; or a dict of such tensors by label
FoundInf = Tensor | Mapping[Label, Tensor]


class TransformLike(Protocol):
    """An object with functions `init` and `update`: a `Transform`, or an optimizer of TorchOpt."""

    @property
    def init(self) -> Callable[[Tree], Tree]: ...

    @property
    def update(self) -> Callable[..., tuple[Tree, Tree]]: ...


class _Fields(NamedTuple):
    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    fused: Callable[..., tuple[Tree, Tree]] | None
    over: str
    labelled: bool
    mesh: AnyMesh
    views: bool
    parts: Mapping[Label, Transform] | None
    draws: bool


class Transform(_Fields):
    """A gradient transformation: `init`, `update`, and optionally a fused twin of `update`.

    - `init(params) -> state`
    - `update(grads, state, params, **extra) -> (updates, state)`
    - `fused(grads, state, params, found_inf, donate, **extra) -> (params, state)`: `update` and `apply_updates` in one
      kernel, in place on copies, or with `donate` on the arguments themselves; no change if `found_inf` is 1
    - `over`: the trees that `init` and `update` get for sharded parameters. "leaves" (default): whole leaves, each on
      one rank; `fused` is not called. "elements": flat rows of many leaves, for updates of each element by itself.
      "tree": the sharded tree itself; `fshard.optim.global_norm` accepts a sharded tree
    - `labelled`: `found_inf` may be a dict by label, and is a keyword argument of `update` (`by_label`)
    - `mesh`: the mesh over which `step` combines `found_inf`
    - `views`: `fused` takes `Views` of parameters and gradients (`fshard.layout.pieces`) and writes to the views;
      otherwise `fused` gets packed copies
    - `parts`: the transformation of each label, for the label's leaves alone (`by_label`)
    - `draws`: the functions may draw random numbers; a step seeds them
    - `elementwise=True`: an older name of `over="elements"`

    `update` and `fused` ignore unknown arguments in `extra`. With `own_grads=True` they may overwrite the gradients;
    with `exact_norms=True` their norms must have the same bits on any number of ranks (`global_norm(tree,
    exact=True)`). ValueError for another word in `over`, and for an update that writes to its arguments. With
    over="leaves", `init` over several ranks raises ValueError if a leaf's update depends on other leaves.

    >>> by_norm = lambda grads, state, params=None, **extra: (tree.map(lambda g: g / g.norm(), grads), state)
    >>> tx = optim.Transform(lambda params: (), by_norm)
    >>> tx.update({"w": torch.tensor([3.0, 4.0])}, ())[0]
    {'w': tensor([0.6000, 0.8000])}
    """

    __slots__ = ()

    def __new__(
        cls,
        init: Callable[[Tree], Tree],
        update: Callable[..., tuple[Tree, Tree]],
        fused: Callable[..., tuple[Tree, Tree]] | None = None,
        over: str | None = None,
        labelled: bool = False,
        mesh: AnyMesh = None,
        views: bool = False,
        parts: Mapping[Label, Transform] | None = None,
        draws: bool = True,
        *,
        elementwise: bool | None = None,
    ) -> Self:
        over = _over(over, elementwise)
        if draws:
            init, update = in_trees(init, over != "leaves"), unwritten(update)
        if over == "leaves":
            init, update = on_leaves(init, update)
            fused = None
        elif draws:
            run = row_by_row if over == "elements" else at_once
            update, fused = run(update), None if fused is None else run(fused)
            views = False  # random numbers are drawn tensor by tensor, and views are parts of tensors
        return super().__new__(cls, init, update, fused, over, labelled, mesh, views, parts, draws)

    @property
    def elementwise(self) -> bool:
        """True if `over` is "elements"."""
        return self.over == "elements"

    def _replace(self, **changes: object) -> Self:
        """Replace fields by the user's, with the checks of the constructor."""
        return type(self)(**{**self._asdict(), "draws": True, **changes})

    def with_fields(self, **changes: Any) -> Self:
        """Replace fields by this package's own, without checks."""
        return super()._replace(**changes)

    def step(
        self,
        grads: Tree,
        state: Tree,
        params: Tree,
        found_inf: FoundInf | None = None,
        donate: bool = False,
        **extra: object,
    ) -> tuple[Tree, Tree]:
        """New parameters and state, or if `found_inf` (0-d) is 1 the old parameters and state; no host read.

        `found_inf` may be a dict of such tensors by label. A `labelled` transformation skips the labels with a 1; any
        other transformation skips the whole update if one tensor is 1. With `donate`, params and state may be updated
        in place, and must not be used again. Under a derivative, `step` runs `update` and `apply_updates`.

        >>> from fshard.optim import sgd
        >>> tx = sgd(0.5)
        >>> tx.step(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
        tensor(0.)
        """
        found_inf = consensus.any_rank(found_inf, self.mesh)
        if found_inf is not None and not self.labelled:
            found_inf = any_found(found_inf)
        # a compiler fuses the formulas, and a kernel has no derivative
        if self.fused is None or is_tracing() or func_levels.differentiates((grads, state, params, extra)):
            if is_tracing() and isinstance(grads, Views) and isinstance(params, Parts):
                return self._by_parts(grads, state, params, found_inf, extra)
            return self._applied(packed(grads), state, packed(params), found_inf, extra)
        if isinstance(params, Views) and not self.views:
            state = state if donate else copied(state)
            params, donate = packed(params), True  # packed copies belong to this call
        return self.fused(grads if self.views else packed(grads), state, params, found_inf, donate, **extra)

    def _by_parts(
        self, grads: Views, state: Tree, params: Parts, found_inf: FoundInf | None, extra: Mapping[str, object]
    ) -> tuple[Tree, Tree]:
        """Update each of the tensors in which gradients are. If a graph donates the state, it joins no parts."""
        bounds = [[*pairwise(accumulate((x.numel() for x in run), initial=0))] for run in grads.runs]

        def cut(x: Tree) -> Tree:
            if not isinstance(x, Parts):
                return x
            return [row[start:stop] for row, of in zip(x.tensors, bounds, strict=True) for start, stop in of]

        def joined(old: Tree, new: Tree) -> Tree:
            if not isinstance(old, Parts):
                return new
            parts = iter(new)
            return grads.make(old.key, [joined_row([next(parts) for _ in of]) for of in bounds])

        fine, old = tree.map_tops(cut, Parts, (params, state))
        new = self._applied([g for run in grads.runs for g in run], old, fine, found_inf, extra)
        return tree.map_tops(joined, Parts, (params, state), new)

    def _applied(
        self, grads: Tree, state: Tree, params: Tree, found_inf: FoundInf | None, extra: Mapping[str, object]
    ) -> tuple[Tree, Tree]:
        if isinstance(found_inf, Mapping):  # `update` skips by label
            updates, new_state = self.update(grads, state, params, found_inf=found_inf, **extra)
            return apply_updates(params, updates), new_state
        updates, new_state = self.update(grads, state, params, **extra)
        return choose(found_inf, params, apply_updates(params, updates)), choose(found_inf, state, new_state)


def _over(over: str | None, elementwise: bool | None) -> str:
    check_word("optim.Transform: over", "leaves" if over is None else over, ("leaves", "elements", "tree"))
    if elementwise is not None:
        check_flags(**{"optim.Transform: elementwise": elementwise})
        if over is not None and elementwise != (over == "elements"):
            raise ValueError(
                f"optim.Transform: over={over!r} with elementwise={elementwise}, an older name of over='elements': "
                "expected one of them. Leave elementwise out"
            )
    return over or ("elements" if elementwise else "leaves")


def choose(found_inf: FoundInf | None, old: T, new: T) -> T:
    """`old` if `found_inf` is 1, else `new`; no host read."""
    return new if found_inf is None else kernels.each_where(any_found(found_inf), old, new)


def any_found(found_inf: FoundInf) -> Tensor:
    check_found(found_inf)
    return found_inf if isinstance(found_inf, Tensor) else torch.stack([*found_inf.values()]).amax()


def check_found(found_inf: object, labelled: bool = True) -> None:
    flags = [*found_inf.values()] if labelled and isinstance(found_inf, Mapping) else [found_inf]
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    if not tensors or len(tensors) < len(flags):
        gives = "unscale gives (grads, found_inf), in this order"
        raise TypeError(
            wrong("found_inf", found_inf, "a 0-d tensor" + ", or a dict of one for each label" * labelled, gives)
        )
    for flag in tensors:
        if flag.dim():
            raise ValueError(wrong("found_inf", flag, "a 0-d tensor", "Use found_inf.any()"))


def num_made(found_inf: FoundInf | None) -> Tensor | int:
    """The number of updates made: 0 if `found_inf` skips all labels, else 1."""
    if isinstance(found_inf, Mapping):
        found_inf = torch.stack([*found_inf.values()]).amin()
    return 1 if found_inf is None else 1 - found_inf


def as_transform(tx: TransformLike) -> Transform:
    """`tx` as a Transform; TorchOpt then updates nothing in place."""
    if isinstance(tx, Transform):
        return tx
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise TypeError(
            f"tx: expected an optimizer, a pair of functions init and update, got {shown(tx)}. "
            "For an optimizer class of torch.optim write fshard.optim.from_torch(torch.optim.X, ...)."
        )
    if getattr(tx.update, "__module__", "").startswith("optax"):
        remedy = "use the one of that name in fshard.optim, or in TorchOpt"
        raise TypeError(f"tx: {shown(tx)} is of optax, whose functions take arrays of JAX: {remedy}")
    known = inspect.signature(tx.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    by_order = [p for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_place = "params" not in known and len(by_order) > 2
    by_name = not by_place and ("params" in known or takes_any)  # TorchOpt takes parameters by name alone
    pure = {"inplace": False} if "inplace" in known else {}  # TorchOpt updates in place by default

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        given = {"params": params} if by_name else {}
        more = {name: x for name, x in extra.items() if takes_any or name in known}
        return tx.update(grads, state, *[params] * by_place, **given, **pure, **more)

    return Transform(tx.init, wraps(tx.update)(update))


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return params + updates, leaf by leaf, in the dtype of params; a leaf whose update is None stays.

    ValueError for updates of another structure, and for an update that is not a tensor, differs from its parameter in
    shape, or is complex where the parameter is real.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.5)})
    {'w': tensor(0.5000)}
    """
    pairs, spec = tree.pairs("apply_updates: updates are not of the structure of params", params, updates)
    for number, (p, u) in enumerate(pairs):
        if u is not None and (misfit := _unlike_param(u, p)):
            raise ValueError(f"apply_updates: the update of leaf {tree.leaf_paths(spec)[number]!r} {misfit}")
    # the sum may promote to float32: one rounding, at the end
    return tree.unflatten(spec, [p if u is None else (p + u).to(p.dtype) for p, u in pairs])


def _unlike_param(x: object, p: Tensor) -> str | None:
    if not isinstance(x, Tensor):
        return f"is no tensor: got {shown(x)}"
    if x.shape != p.shape:
        return f"has shape {list(x.shape)}, the parameter {list(p.shape)}"
    return "is complex, the parameter real: take its .real part" if x.is_complex() and not p.is_complex() else None


def start_count(params: Tree) -> Tensor:
    """A count of 0: 0-d float32, as torch's fused kernels take."""
    return torch.zeros((), dtype=torch.float32, device=device_of(params))


def at(value: Number | Schedule, count: Tensor) -> Number:
    """A number, or a schedule's value at `count`; the schedule gets `count` in float64."""
    if callable(value):
        value = value(count.double())
        check_rate(value)
    return value


@dataclass(frozen=True)
class Needs:
    """Checks of a transformation's arguments; errors contain `name`."""

    name: str
    state_type: type | None = None
    params: bool = False
    sparse: bool = False  # takes sparse gradients
    real: bool = False  # takes real leaves alone

    def check(self, grads: Tree, state: object, params: Tree) -> None:
        if self.state_type is not None and not isinstance(state, self.state_type):
            raise ValueError(
                f"optim.{self.name}: expected the state of its own init ({self.state_type.__name__}), got "
                f"{type(state).__name__}: this state was made by another optimizer"
            )
        if params is None and self.params:
            raise ValueError(f"optim.{self.name}: its update needs the parameters: call update(grads, state, params)")
        if params is not None and structure_key(params) != structure_key(grads):
            unlike = tree.difference(params, grads)
            raise ValueError(f"optim.{self.name}: gradients are not of the structure of parameters: {unlike}")
        # `Parts` of equal structure have equal layouts and shapes
        pairs = zip(tree.tops(grads, Parts), tree.tops(grads if params is None else params, Parts), strict=True)
        for number, (g, p) in enumerate(pairs):
            if wrong := self._wrong(g, p):
                path = tree.paths_to(grads, Parts)[number][0]
                raise ValueError(f"optim.{self.name}: the gradient of leaf {path!r} {wrong}")

    def _wrong(self, g: Tree, p: Tree) -> str | None:
        """An error text about a leaf's gradient or the rows of `Parts`, or None."""
        if isinstance(g, Parts | Views):
            runs = g.runs if isinstance(g, Views) else [g.tensors]
            has_complex = any(view.is_complex() for run in runs for view in run)
            return "is complex, which this takes none of" if self.real and has_complex else None
        if unlike := _unlike_param(g, p):
            return unlike
        if g.layout is not torch.strided and not self.sparse:
            return "is sparse, which only sgd without momentum and weight decay takes. Make it dense with .to_dense()"
        return "is complex, which this takes none of" if self.real and g.is_complex() else None


def checked(tx: Transform, needs: Needs) -> Transform:
    def update(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        needs.check(grads, state, params)
        return tx.update(grads, state, params, **extra)

    def fused(
        grads: Tree, state: Tree, params: Tree, found_inf: Tensor | None, donate: bool, **extra: object
    ) -> tuple[Tree, Tree]:
        needs.check(grads, state, params)
        assert tx.fused is not None
        return tx.fused(grads, state, params, found_inf, donate, **extra)

    return tx.with_fields(update=update, fused=None if tx.fused is None else fused)


def _stateless(
    name: str, update: Callable[[Tree, Tree], Tree], params: bool = False, sparse: bool = False, real: bool = False
) -> Transform:
    def with_state(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        return update(grads, params), state

    tx = Transform(lambda params: (), with_state, over="elements", draws=False)
    return checked(tx, Needs(name, None, params, sparse, real))


def identity() -> Transform:
    """The gradients unchanged.

    >>> identity().update(torch.tensor(2.0), ())[0]
    tensor(2.)
    """
    return _stateless("identity", lambda grads, params: grads, sparse=True)


def _times(grads: Tree, factor: Number) -> Tree:
    # a 0-d gradient times a 0-d float64 factor promotes to float64
    return tree.map(lambda g: (g * beside(factor, g)).to(g.dtype), grads)


def scale(factor: Number) -> Transform:
    """Multiply gradients by a number: u = factor g.

    >>> scale(-0.5).update(torch.tensor(2.0), ())[0]
    tensor(-1.)
    """
    check_hyperparams("scale", factor=factor)
    return _stateless("scale", lambda grads, params: _times(grads, factor), sparse=True)


class CountState(NamedTuple):
    """Number of updates made (float32, 0-d)."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count


def scale_by_schedule(schedule: Schedule) -> Transform:
    """Multiply gradients by a scheduled number: u = schedule(number of updates made) g.

    >>> tx = scale_by_schedule(lambda count: 1 / (count + 1))
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)))
    (tensor(2.), CountState(count=tensor(1.)))
    """

    check_function("optim.scale_by_schedule: schedule", schedule, "schedule(count)")

    def update(grads: Tree, state: CountState, params: Tree = None, **extra: object) -> tuple[Tree, CountState]:
        return _times(grads, at(schedule, state.count)), CountState(state.count + 1)

    tx = Transform(lambda params: CountState(start_count(params)), update, over="elements", draws=False)
    return checked(tx, Needs("scale_by_schedule", CountState, sparse=True))


def add_decayed_weights(weight_decay: Number) -> Transform:
    """Add weight decay to gradients: u = g + weight_decay p.

    >>> add_decayed_weights(0.5).update(torch.tensor(2.0), (), torch.tensor(4.0))[0]
    tensor(4.)
    """
    check_hyperparams("add_decayed_weights", weight_decay=weight_decay)

    def decayed(grads: Tree, params: Tree) -> Tree:
        return tree.map(lambda g, p: g + beside(weight_decay, p) * p, grads, params)

    return _stateless("add_decayed_weights", decayed, params=True)


def clip(max_magnitude: Number) -> Transform:
    """Clip every element to [-max_magnitude, max_magnitude], as torch.nn.utils.clip_grad_value_.

    >>> clip(1.0).update(torch.tensor([-3.0, 0.5]), ())[0]
    tensor([-1.0000,  0.5000])
    """
    check_positive("optim.clip: max_magnitude", max_magnitude)

    def clipped(g: Tensor) -> Tensor:
        bound = beside(max_magnitude, g)
        return g.clamp(-bound, bound)

    return _stateless("clip", lambda grads, params: tree.map(clipped, grads), real=True)


def clip_factor(norm: Tensor, max_norm: Number) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), 0-d or (leaves,), as torch.nn.utils.clip_grad_norm_."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_by(name: str, max_norm: Number, p: float, clipped: Callable[[Tree, bool, bool], Tree]) -> Transform:
    """Clip by `clipped(grads, own_grads, exact_norms)`, without state."""
    check_positive(f"optim.{name}: max_norm", max_norm)
    check_positive(f"optim.{name}: p", p, tensors=False)

    def update(
        grads: Tree,
        state: Tree,
        params: Tree = None,
        own_grads: bool = False,
        exact_norms: bool = False,
        **extra: object,
    ) -> tuple[Tree, Tree]:
        return clipped(grads, own_grads, exact_norms), state

    return checked(Transform(lambda params: (), update, over="tree", draws=False), Needs(name))


def clip_by_global_norm(max_norm: Number, p: float = 2) -> Transform:
    """Multiply gradients by min(1, max_norm / (norm + 1e-6)), with the p-norm of the whole tree.

    As torch.nn.utils.clip_grad_norm_, in one small collective. `p` is above 0, or inf. A leaf that every rank has
    counts once.

    >>> clip_by_global_norm(1.0).update(torch.tensor([3.0, 4.0]), ())[0]
    tensor([0.6000, 0.8000])
    """

    def clipped(grads: Tree, own_grads: bool, exact_norms: bool) -> Tree:
        return scaled_by_norm(grads, p, lambda norm: clip_factor(norm, max_norm), exact_norms, own_grads)

    return clip_by("clip_by_global_norm", max_norm, p, clipped)
