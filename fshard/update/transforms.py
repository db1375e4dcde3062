"""Transformations made of other transformations: `chain`, `by_label`, `masked`, `resting`, `with_hyperparams`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, OnMesh, mesh_device
from ..core import tree
from ..core.arguments import check_predicate, expect, shown, wrong
from ..core.differences import listed
from ..core.func_levels import depending, differentiates, refuse_derivative
from ..core.patterns import matches, names_in
from ..core.scalars import double
from ..core.storage import copied_aside
from ..core.tree import Tree
from ..layout.layout import Layout, Leaf
from ..layout.pieces import Parts, Views, copied, layout_of, packed, pick, put_part, write
from .base import (
    FoundInf,
    Label,
    Needs,
    Transform,
    TransformLike,
    apply_updates,
    as_transform,
    at,
    checked,
    choose,
    identity,
    num_made,
    start_count,
)


def chain(*txs: TransformLike) -> Transform:
    """Apply the transformations `txs` in sequence: each gets the updates of the previous one.

    ValueError for a transformation before `zero(grads="local")`: it would get one rank's gradients.

    >>> chain(clip(1.0), scale(-0.5)).update(torch.tensor(4.0), ((), ()))[0]
    tensor(-0.5000)
    """
    parts = [as_transform(tx) for tx in txs]
    if not parts:
        return identity()
    if any(tx.mesh is not None for tx in parts[1:]):
        raise ValueError(
            "optim.chain: zero(grads='local') adds up what each rank has, so what stands before it would be given one "
            "rank's gradients, not their sum. Put it inside: zero(chain(...), mesh, grads='local')."
        )

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        grads, states = _all_but_last(grads, state, params, extra)
        grads, last = parts[-1].update(grads, state[-1], params, **(_not_own(extra) if parts[1:] else extra))
        return grads, (*states, last)

    def _all_but_last(grads: Tree, state: Tree, params: Tree, extra: Mapping[str, object]) -> tuple[Tree, list[Tree]]:
        if not isinstance(state, tuple) or len(state) != len(parts):
            got = len(state) if isinstance(state, tuple) else type(state).__name__
            raise ValueError(f"optim.chain: expected the states of {len(parts)} transformations, got {got}")
        if len(parts) > 1:  # `Views` have no leaves
            grads, params = packed(grads), packed(params)
        new_states = []
        for tx, inner in zip(parts[:-1], state, strict=False):
            grads, new_inner = tx.update(grads, inner, params, **extra)
            new_states.append(new_inner)
            extra = _not_own(extra)
        return grads, new_states

    def fused(
        grads: Tree, state: Tree, params: Tree, found_inf: FoundInf | None, donate: bool, **extra: object
    ) -> tuple[Tree, Tree]:
        updates, states = _all_but_last(grads, state, params, extra)
        states = choose(found_inf, list(state[:-1]), states)
        if donate and any(tx.draws for tx in parts[:-1]):  # a user's state may share memory with parameters
            states = copied_aside(states, params)
        to_last = _not_own(extra) if states else extra
        params, last = parts[-1].step(updates, state[-1], params, found_inf, donate, **to_last)
        return params, (*states, last)

    *others, last = parts
    return last.with_fields(
        init=lambda params: tuple(tx.init(params) for tx in parts),
        update=update,
        fused=fused,
        over="elements" if all(tx.over == "elements" for tx in parts) else "tree",  # each part applies its own `over`
        labelled=last.labelled and all(map(_is_bare, others)),
        mesh=parts[0].mesh,
        views=True,
        parts=None if others else last.parts,
        draws=any(tx.draws for tx in parts),
    )


def _is_bare(tx: Transform) -> bool:
    """True if `tx` is elementwise without state: leaves of different labels do not interact."""
    return tx.over == "elements" and not tree.leaves(tx.init(torch.zeros(1, dtype=torch.float32, device="cpu")))


def _not_own(extra: Mapping[str, object]) -> Mapping[str, object]:
    """Later transformations must not overwrite their gradients: an earlier transformation may have kept these."""
    return {**extra, "own_grads": False} if "own_grads" in extra else extra


class HyperState(NamedTuple):
    """Hyper-parameters (0-d float64 tensors), number of updates made, and the optimizer's state."""

    hyperparams: dict[str, Tensor]
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    inner: Tree


def with_hyperparams(make: Callable[..., TransformLike], **hyperparams: object) -> Transform:
    """Return `make(**hyperparams)` with hyper-parameters as tensors in the state, to be changed between steps.

    Floats and tensors become 0-d tensors of the state. A schedule is evaluated at each update, and the state shows its
    value. Any other value goes to `make` as it is. A compiled step does not compile again for a changed tensor.

    >>> tx = with_hyperparams(scale, factor=-1.0)
    >>> state = tx.init(torch.tensor(0.0))
    >>> state = state._replace(hyperparams={"factor": torch.tensor(-3.0)})
    >>> tx.update(torch.tensor(2.0), state)[0]
    tensor(-6.)
    """
    if not callable(make):
        raise TypeError(f"optim.with_hyperparams: make: expected a function that makes an optimizer, got {shown(make)}")
    schedules = {name: value for name, value in hyperparams.items() if callable(value)}  # `at` checks their values
    values = {name: value for name, value in hyperparams.items() if isinstance(value, float | Tensor)}
    static = {name: value for name, value in hyperparams.items() if name not in schedules and name not in values}

    def built(current: Mapping[str, Tensor]) -> Transform:
        return as_transform(make(**current, **static))

    def begun(count: Tensor) -> dict[str, Tensor]:
        numbers = values | {name: at(schedule, count) for name, schedule in schedules.items()}
        # copied: the step overwrites a donated state
        return {name: double(number).to(count.device, copy=True) for name, number in numbers.items()}

    def init(params: Tree) -> HyperState:
        count = start_count(params)
        start = begun(count)
        return HyperState(start, count, built(start).init(params))

    def current(state: HyperState) -> dict[str, Tensor]:
        old = state.hyperparams
        scheduled = {name: double(at(schedule, state.count)) for name, schedule in schedules.items()}
        return {**old, **{name: value.to(old[name].device) for name, value in scheduled.items()}}

    # `extra` may have `found_inf`
    def update(grads: Tree, state: HyperState, params: Tree = None, **extra: Any) -> tuple[Tree, HyperState]:
        now = current(state)
        updates, inner = built(now).update(grads, state.inner, params, **extra)
        return updates, HyperState(now, state.count + num_made(extra.get("found_inf")), inner)

    def fused(
        grads: Tree, state: HyperState, params: Tree, found_inf: FoundInf | None, donate: bool, **extra: object
    ) -> tuple[Tree, HyperState]:
        now = current(state)
        params, inner = built(now).step(grads, state.inner, params, found_inf, donate, **extra)
        count = state.count + num_made(found_inf)
        return params, HyperState(choose(found_inf, state.hyperparams, now), count, inner)

    sample = built(begun(torch.zeros((), dtype=torch.float32, device="cpu")))  # its flags hold for all updates
    # a schedule has one count for all labels
    labelled, over = sample.labelled and not schedules, "elements" if sample.over == "elements" else "tree"
    tx = Transform(init, update, fused, over, labelled, sample.mesh, views=True, draws=False)
    return checked(tx, Needs("with_hyperparams", HyperState, sparse=True)).with_fields(draws=sample.draws)


# as for `by_label`
Labels = Callable[[str, Tensor], Label] | Tree


@dataclass(frozen=True)
class LabelState(OnMesh):
    """The state of each label's transformation, and its leaves' layout."""

    inner: dict[Label, Tree]
    layouts: tuple[tuple[Label, Layout], ...]

    @property
    def home(self) -> Layout | None:
        return self.layouts[0][1] if self.layouts else None


tree.register_fields(LabelState, ("inner",), ("layouts",))


def by_label(transforms: Mapping[Label, TransformLike], labels: Labels) -> Transform:
    """Apply to each leaf the transformation of its label in `transforms`.

    `labels` is a function `(path, tensor) -> label`, with a meta tensor of the leaf's shape and dtype; or a tree of
    labels, for leaves or subtrees. A tree's keys may be patterns as in `make_plan`; the first that fits a leaf counts.
    ValueError names a leaf without a label, a label without a transformation, and a tied leaf with another label at
    another path. A warning names frozen leaves if no trained leaf has their label.

    >>> tx = by_label({"fast": sgd(1.0), "slow": sgd(0.1)}, {"head": "fast", "**": "slow"})
    >>> params = {"body": torch.ones(1), "head": torch.ones(1)}
    >>> tx.update(params, tx.init(params), params)[0]
    {'body': tensor([-0.1000]), 'head': tensor([-1.])}
    """
    expect("by_label: transforms", transforms, isinstance(transforms, Mapping), "a dict of an optimizer for each label")
    check_labels("by_label: labels", labels)
    txs = {label: as_transform(tx) for label, tx in transforms.items()}

    def init(params: Tree) -> LabelState:
        layouts = tuple(_split_by_label(layout_of(params), txs, labels).items())
        return LabelState({label: txs[label].init(packed(pick(params, part))) for label, part in layouts}, layouts)

    def update(
        grads: Tree, state: LabelState, params: Tree = None, found_inf: FoundInf | None = None, **extra: object
    ) -> tuple[Tree, LabelState]:
        updates, inner, skips = tree.map(torch.zeros_like, grads), {}, flags_of(found_inf, dict(state.layouts))
        for label, part in _layouts(state, txs):
            picked = None if params is None else packed(pick(params, part))
            new, new_state = txs[label].update(packed(pick(grads, part)), state.inner[label], picked, **extra)
            skip = skips[label]
            updates = tree.map(lambda u, new=new: depending(u, new), updates)  # `put_part` writes `new` into `updates`
            # p + -0.0 has the bits of p; p + 0.0 does not if p is -0.0
            updates = put_part(updates, choose(skip, tree.map(lambda u: -torch.zeros_like(u), new), new), part)
            inner[label] = choose(skip, state.inner[label], new_state)
        return updates, LabelState(inner, state.layouts)

    def fused(
        grads: Tree, state: LabelState, params: Tree, found_inf: FoundInf | None, donate: bool, **extra: object
    ) -> tuple[Tree, LabelState]:
        updated, states = (params, state.inner) if donate else (copied(params), copied(state.inner))
        inner, skips = {}, flags_of(found_inf, dict(state.layouts))
        for label, part in _layouts(state, txs):
            picked, skip = pick(updated, part), skips[label]
            new, inner[label] = txs[label].step(pick(grads, part), states[label], picked, skip, donate=True, **extra)
            if differentiates(new):  # by a hyper-parameter: start again, without writes
                if donate:
                    refuse_derivative(new, f"optim.by_label, label {label!r}, with donate=True")
                params = packed(params)
                updates, new_state = update(packed(grads), state, params, found_inf, **extra)
                return apply_updates(params, updates), new_state
            if txs[label].draws and isinstance(picked, Parts):  # as in `chain`
                inner[label] = copied_aside(inner[label], picked)
            write(picked, new)  # into `updated`, unless the step has written to `picked`
        return updated, LabelState(inner, state.layouts)

    tx = Transform(init, update, fused, "tree", labelled=True, views=True, parts=txs, draws=False)
    return checked(tx, Needs("by_label", LabelState)).with_fields(draws=any(tx.draws for tx in txs.values()))


def masked(tx: TransformLike, mask: Labels) -> Transform:
    """Apply `tx` to the leaves with a true `mask`; return the gradients of other leaves unchanged.

    `mask` is a function or a tree of truth values, as the labels of `by_label`.

    >>> tx = masked(scale(-1.0), lambda path, leaf: leaf.ndim > 0)
    >>> grads = {"w": torch.ones(1), "s": torch.tensor(1.0)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([-1.]), 's': tensor(1.)}
    """
    return by_label({True: tx, False: identity()}, mask)


def resting(tx: TransformLike) -> Transform:
    """Apply `tx` to each leaf by itself, if its gradient is not zero; else the leaf and its state rest.

    A leaf rests if all elements of its gradient are exactly zero on all ranks, even if the loss read it; torch skips a
    leaf only if its gradient is None. No host read, one small collective. Each leaf has its own state and count, so
    norms, means and schedules in `tx` are those of single leaves. Put transformations of all leaves before or after
    `resting`, in a `chain`.

    >>> tx, params = resting(sgd(1.0, weight_decay=0.5)), {"a": torch.ones(1), "b": torch.ones(1)}
    >>> tx.step({"a": torch.ones(1), "b": torch.zeros(1)}, tx.init(params), params)[0]
    {'a': tensor([-0.5000]), 'b': tensor([1.])}
    """
    inner = as_transform(tx)

    def of(paths: Iterable[Label], label: Callable[[str], Label] = str) -> Transform:
        return by_label(dict.fromkeys(paths, inner), lambda path, leaf: label(path))

    def init(params: Tree) -> LabelState:
        layout = layout_of(params)
        places = zip(tree.leaf_paths(layout.spec), layout.leaf_at, strict=True)
        # tied leaves rest together
        first = {path: path if number is None else layout.leaves[number].path for path, number in places}
        return of((layout.leaves[number].path for number in layout.numbers), first.__getitem__).init(params)

    def update(grads: Tree, state: LabelState, params: Tree = None, **extra: object) -> tuple[Tree, LabelState]:
        return of(state.inner).update(grads, state, params, found_inf=_unreached(grads, state), **extra)

    def fused(
        grads: Tree, state: LabelState, params: Tree, found_inf: Tensor | None, donate: bool, **extra: object
    ) -> tuple[Tree, LabelState]:
        skip = _unreached(grads, state)
        if found_inf is not None:
            skip = {path: torch.maximum(flag, found_inf.to(flag.device)) for path, flag in skip.items()}
        return of(state.inner).step(grads, state, params, skip, donate, **extra)

    made = Transform(init, update, fused, "tree", views=True, draws=False)
    return checked(made, Needs("resting", LabelState)).with_fields(draws=inner.draws)


def _unreached(grads: Tree, state: LabelState) -> dict[Label, Tensor]:
    """Return, for each leaf, 1 if its gradient is zero on all ranks, else 0."""
    reached: dict[Label, Tensor] = {}
    mesh: AnyMesh = None
    for path, layout in state.layouts:
        part, mesh = pick(grads, layout), layout.mesh
        rows = [view for run in part.runs for view in run] if isinstance(part, Views) else part.tensors
        device = rows[0].device if rows else mesh_device(mesh)  # `zero` may have given this rank no part of the leaf
        nothing = torch.zeros((), dtype=torch.bool, device=device)
        reached[path] = torch.stack([nothing, *((row != 0).any() for row in rows)]).any().float()
    return tree.map(lambda flag: 1 - flag, consensus.any_rank(reached, mesh))


def check_labelled(tx: Transform) -> None:
    if not tx.labelled:
        raise ValueError(
            "skip_labels: this transformation does not keep labels apart: they share a norm, a mean or a count, so one "
            "label's overflow would change or skip the others. Expected optim.by_label, alone, in with_hyperparams "
            "without schedules, or last in a chain of what acts on elements and has no state. Clip by norm, count and "
            "average inside: by_label({'a': chain(clip_by_global_norm(1.0), adamw(lr)), ...}, labels)"
        )


def _split_by_label(layout: Layout, transforms: Mapping[Label, TransformLike], labels: Labels) -> dict[Label, Layout]:
    if not _is_function(labels):
        _check_patterns(layout, labels)
    _check_ties(layout, labels)
    label_of, of_label = labeller(labels, tree.leaf_paths(layout.spec)), dict[Label, list[int]]()
    for number in layout.numbers:
        leaf = layout.leaves[number]
        label = label_of(leaf)
        if label not in transforms:
            raise ValueError(
                f"by_label: leaf {leaf.path!r} has the label {label!r}, but there are transformations only for "
                f"{', '.join(map(repr, transforms))}"
            )
        of_label.setdefault(label, []).append(number)
    if len(of_label) < len(transforms):
        _warn_of_frozen(layout, [label for label in transforms if label not in of_label], labels)
    return {label: layout.pick(of_label[label]).prepared() for label in transforms if label in of_label}


def _warn_of_frozen(layout: Layout, unused: Sequence[Label], labels: Labels) -> None:
    match_of = _pattern_matcher(labels, tree.leaf_paths(layout.spec))
    for label in unused:
        chosen = [path for path in layout.frozen if (match_of(path) or ("", None))[1] == label]
        if chosen and label is not False:  # False: left alone by `masked`
            warnings.warn(
                f"by_label: no leaf that trains has the label {label!r}; frozen are {listed(chosen)}. If they shall "
                "train, make a plan in which they do: without frozen=, of parameters that require a gradient",
                stacklevel=2,
            )


def _pattern_matcher(labels: Labels, paths: Iterable[str]) -> Callable[[str], tuple[str, Label] | None]:
    """Return a function from a path to its pattern, or itself if `labels` is a function, and its label."""
    return partial(_label_by_path, labels) if _is_function(labels) else _matcher(labels, paths)


def _label_by_path(labels: Callable[[str, Tensor], Label], path: str) -> tuple[str, Label] | None:
    """Return a frozen leaf's path and label; None if the label depends on the shape."""
    try:
        said = [labels(path, torch.empty([2] * ndim, device="meta")) for ndim in (1, 2)]
    except Exception:  # the user's function knows no such leaf
        return None
    return (path, said[0]) if said[0] == said[1] else None


def _check_patterns(layout: Layout, labels: Tree) -> None:
    paths = tree.leaf_paths(layout.spec)
    leaves, names = [path.split(".") for path in paths], names_in(paths)
    for pattern in tree.paths(labels):
        if pattern and pattern != "**" and not any(_fits(path, pattern, names) for path in leaves):
            raise ValueError(
                f"by_label: the pattern {pattern!r} of the labels matches no leaf; the tree has "
                f"{', '.join(map(repr, paths[:6]))}"
            )


def _check_ties(layout: Layout, labels: Tree) -> None:
    """Raise ValueError if a tied leaf has another label at a later path.

    The check ignores "**", and functions that look at the shape or do not know the path.
    """
    paths = tree.leaf_paths(layout.spec)
    label_of = labeller(labels, paths)
    match_of = _pattern_matcher(labels, paths)
    for path, number in zip(paths, layout.leaf_at, strict=True):
        if number is None or path == (leaf := layout.leaves[number]).path:
            continue
        match, first = match_of(path), label_of(leaf)
        if match is not None and match[0] != "**" and match[1] != first:
            raise ValueError(
                f"by_label: leaf {path!r} is tied to {leaf.path!r}, and their labels are {match[1]!r} and {first!r}: "
                "give both the same"
            )


def _fits(path: Sequence[str], pattern: str, names: Container[str]) -> bool:
    return any(matches(path[:end], pattern, names) for end in range(len(path) + 1))


def check_labels(name: str, labels: Labels) -> None:
    if isinstance(labels, type | str | bool | int | float | set | frozenset | Tensor) or hasattr(
        labels, "named_parameters"
    ):
        expected = "a function (path, tensor) -> label, or a tree of labels whose keys may be patterns"
        raise TypeError(wrong(name, labels, expected))
    if _is_function(labels):
        check_predicate(name, labels, "(path, tensor) -> label")


def _is_function(labels: Labels) -> TypeGuard[Callable[[str, Tensor], Label]]:
    """Return whether labels are no tree: the class of a tree's node may have a `__call__`."""
    return callable(labels) and tree.flatten(labels)[1].is_leaf()


def labeller(labels: Labels, paths: Iterable[str]) -> Callable[[Leaf], Label]:
    """Return a function from leaf to label; `paths`: the whole tree's. ValueError for a leaf without a label."""
    if _is_function(labels):
        return lambda leaf: labels(leaf.path, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
    match_of = _matcher(labels, paths)

    def label_of(leaf: Leaf) -> Label:
        if (match := match_of(leaf.path)) is not None:
            return match[1]
        patterns = ", ".join(map(repr, tree.paths(labels)))
        raise ValueError(
            f"by_label: the labels miss the leaf {leaf.path!r}: they are for {patterns}. "
            'A last key "**" is for all the rest.'
        )

    return label_of


def _matcher(labels: Tree, paths: Iterable[str]) -> Callable[[str], tuple[str, Label] | None]:
    """Return a function from a path to the first fitting pattern, and its label."""
    flat, spec = tree.flatten(labels)
    pairs, names = [*zip(tree.leaf_paths(spec), flat, strict=True)], names_in(paths)

    def match_of(path: str) -> tuple[str, Label] | None:
        parts = path.split(".") if path else []
        return next((pair for pair in pairs if not pair[0] or _fits(parts, pair[0], names)), None)

    return match_of


def flags_of(found_inf: FoundInf | None, labels: Iterable[Label]) -> Mapping[Label, Tensor | None]:
    """The flag of each label. ValueError for a label without a flag, before anything is updated."""
    if not isinstance(found_inf, Mapping):
        return dict.fromkeys(labels, found_inf)
    if missing := [label for label in labels if label not in found_inf]:
        raise ValueError(f"optim.by_label: found_inf is for {', '.join(map(repr, found_inf))}, not for {missing[0]!r}")
    return found_inf


def _layouts(state: LabelState, transforms: Mapping[Label, TransformLike]) -> tuple[tuple[Label, Layout], ...]:
    if strange := [label for label, _ in state.layouts if label not in transforms]:
        raise ValueError(f"optim.by_label: the state was made by another one: it has the label {strange[0]!r}")
    return state.layouts
