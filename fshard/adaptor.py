"""Any optimizer class of torch.optim as a pure transformation: its state goes in and comes out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree
from .parts import Layout, Leaf, Pieces, clear_padding_, layout_of
from .transform import Needs, Transform, checked, choose
from .wholeleaf import whole_leaves

# Those of torch.optim that act on every element by itself; all others are given whole leaves.
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")

Entry = dict[str, Any]  # what a torch optimizer keeps of one parameter


class TorchState(NamedTuple):
    """What the class keeps, by torch's names: trees like the parameters, and 0-d tensors that are the same for all."""

    tensors: dict[str, Any]
    scalars: dict[str, Tensor]


def from_torch(cls: Any, **hyperparams: Any) -> Transform:
    """An optimizer class of torch.optim, `cls(params, **hyperparams)`, as a transformation.

    `step` gives exactly the parameters the class would. Every class works whose step needs no closure and takes dense
    gradients. Those that look at whole leaves (Muon, Adafactor) are given them, wherever the parameters are cut. For
    parameter groups give `by_label` one of these for each.

    >>> tx = from_torch(torch.optim.SGD, lr=0.5)
    >>> tx.step(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(0.)
    """
    _check_class(cls)
    elementwise = cls.__name__ in _ELEMENTWISE
    scalars = {n for n, x in _begin(cls, hyperparams, torch.zeros(1)).items() if not x.dim()} if elementwise else set()

    def init(params: Any) -> TorchState:
        rows = tree.leaves(params)
        if elementwise:
            begun = [_begin(cls, hyperparams, row) for row in rows] or [_begin(cls, hyperparams, torch.zeros(1))]
            return _like_params(begun if rows else begun[:0], params, begun[0], scalars)
        layout = layout_of(params)
        shapes = {n: _begin(cls, hyperparams, _meta(layout.leaves[n])) for n in layout.numbers}
        held = {s.leaf: _begin(cls, hyperparams, rows[s.row]) for s in layout.mine}
        names = dict.fromkeys(name for entry in shapes.values() for name in entry)
        return TorchState({name: _entries_of(name, layout, shapes, held) for name in names}, {})

    def run(grads: Any, state: TorchState, params: Any) -> TorchState:
        """The class's own step, in place on `params`."""
        rows = [row.detach() for row in tree.leaves(params)]
        if not rows:
            return state
        optimizer = cls(rows, **hyperparams)
        for row, g, entry in zip(rows, tree.leaves(grads), _by_row(state, params), strict=True):
            row.grad = g.detach().to(row.dtype)
            optimizer.state[row] = entry
        optimizer.step()
        after = [optimizer.state[row] for row in rows]
        if elementwise:
            return _like_params(after, params, after[0], scalars)
        number = {s.leaf: s.row for s in layout_of(params).mine}
        tensors = {
            name: Pieces(old.layout, [after[number[s.leaf]][name] for s in old.layout.mine])
            for name, old in state.tensors.items()
        }
        return TorchState(tensors, {})

    def fused(
        grads: Any, state: TorchState, params: Any, found_inf: Tensor | None, donate: bool, **extra: Any
    ) -> tuple[Any, TorchState]:
        new, inner = (params, state) if donate and found_inf is None else tree.map(torch.clone, (params, state))
        after = run(grads, inner, new)
        if found_inf is not None and after.tensors.keys() != state.tensors.keys():
            # SGD with dampening begins its momentum with its first update: whether this is one must be read
            return (params, state) if bool(found_inf) else (new, after)
        return choose(found_inf, (params, state), (new, after))

    def update(grads: Any, state: TorchState, params: Any = None, **extra: Any) -> tuple[Any, TorchState]:
        new, after = fused(grads, state, params, None, False)
        return tree.map(torch.sub, new, params), after

    tx = checked(Transform(init, update, fused), Needs("from_torch", TorchState, params=True))
    return tx if elementwise else whole_leaves(tx)


def _check_class(cls: Any) -> None:
    # Private, but the way every class of torch.optim fills its state (test_authority.py notices when it is not).
    if not hasattr(cls, "_init_group") or cls.__name__ in ("LBFGS", "SparseAdam"):
        reasons = {"LBFGS": "its step needs a closure", "SparseAdam": "it takes sparse gradients alone"}
        why = reasons.get(getattr(cls, "__name__", ""), "it is no optimizer of torch.optim's kind")
        raise ValueError(f"from_torch: cannot run {getattr(cls, '__name__', cls)!r} as a transformation: {why}")


def _begin(cls: Any, hyperparams: Mapping[str, Any], row: Tensor) -> Entry:
    """What the class keeps of a parameter before its first update."""
    row = row.detach()
    optimizer, row.grad = cls([row], **hyperparams), torch.zeros_like(row)
    num_lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(num_lists)))
    entry = dict(optimizer.state[row])
    group = optimizer.param_groups[0]
    if cls.__name__ == "SGD" and group["momentum"] and not group["dampening"]:
        entry["momentum_buffer"] = torch.zeros_like(row)  # as what torch makes of none
    if strange := [name for name, x in entry.items() if not isinstance(x, Tensor)]:
        raise ValueError(f"from_torch: {cls.__name__} keeps {strange[0]!r}, which is no tensor: it cannot be a value")
    return entry


def _meta(leaf: Leaf) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _like_params(entries: Sequence[Entry], params: Any, first: Entry, scalars: set[str]) -> TorchState:
    spec = tree.flatten(params)[1]
    tensors = {n: tree.unflatten(spec, [entry[n] for entry in entries]) for n in first if n not in scalars}
    return TorchState({n: clear_padding_(x) for n, x in tensors.items()}, {n: first[n] for n in first if n in scalars})


def _entries_of(name: str, layout: Layout, shapes: Mapping[int, Entry], held: Mapping[int, Entry]) -> Pieces:
    """One thing a class keeps of whole leaves: of any shapes, for those leaves it keeps it of."""
    known = {n: entry[name] for n, entry in shapes.items() if name in entry}
    leaves = [
        replace(leaf, shape=tuple(known[n].shape), dtype=known[n].dtype) if n in known else leaf
        for n, leaf in enumerate(layout.leaves)
    ]
    part = layout.pick(known)
    spans = tuple(replace(s, numel=known[s.leaf].numel()) for s in part.spans)
    part = replace(part, source=(name, part.source), leaves=tuple(leaves), spans=spans, origin=None)
    return Pieces(part, [held[s.leaf][name] for s in part.mine])


def _by_row(state: TorchState, params: Any) -> list[Entry]:
    rows = tree.leaves(params)
    if state.scalars or not any(isinstance(x, Pieces) and not x.layout.flat for x in state.tensors.values()):
        columns = {name: tree.leaves(x) for name, x in state.tensors.items()}
        scalars = [{name: x.clone() for name, x in state.scalars.items()} for _ in rows]
        return [{name: xs[i] for name, xs in columns.items()} | scalars[i] for i in range(len(rows))]
    numbers = [s.leaf for s in layout_of(params).mine]
    entries: dict[int, Entry] = {n: {} for n in numbers}
    for name, x in state.tensors.items():
        for span, row in zip(x.layout.mine, x.tensors, strict=True):
            entries[span.leaf][name] = row
    return [entries[n] for n in numbers]
