"""Any optimizer class of torch.optim, or of the user's, as a pure transformation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import func_levels, tree
from ..core.differences import Form
from ..core.scalars import double
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parts, clear_padding_, copied, layout_of, pieces, reshaped
from ..state.torch_format import BEGUN, TorchState
from ..update.base import Needs, Transform, checked, choose
from .matrix import whole_leaves

# elementwise classes; all other classes get whole leaves
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
OfLeaf = dict[str, Tensor]  # a torch optimizer's state of one parameter
Numbers = dict[str, Tensor | float]  # an `OfLeaf` of a user's class, with numbers
Settings: TypeAlias = Mapping[str, Any]  # arguments of an optimizer class
# `run(grads, state, params, extra)` runs the class's own step, which writes to `params`, and returns the new state
Run = Callable[[Tree, TorchState, Tree, Settings], TorchState]


def from_torch(cls: type[Optimizer], **hyperparams: object) -> Transform:
    """Run an optimizer class of torch.optim, or one of yours, `cls(params, **hyperparams)`, as a transformation.

    `step` gives exactly the parameters of the class's own step. That step must need no closure and take dense
    gradients. The class may keep only tensors and numbers, for each parameter by itself (`self.state[p]`). Your
    classes, and torch's classes that are not elementwise (Muon, Adafactor), get whole leaves, however the parameters
    are cut. `update` passes further arguments to the class's step by name. To see the class's state, fshard makes trial
    steps, with 1.0 for arguments without a default. For parameter groups, give `by_label` one `from_torch` for each
    group.

    ValueError for a class that cannot be a pure function; for LBFGS use `lbfgs`.

    >>> tx = from_torch(torch.optim.SGD, lr=0.5)
    >>> tx.step(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(0.)
    """
    _check_class(cls)
    settings: Settings = hyperparams
    if cls not in vars(torch.optim).values():
        return whole_leaves(_of_user(cls, settings))
    try:
        cls([torch.zeros(1, 1, dtype=torch.float32, device="cpu")], **settings)
    except (TypeError, ValueError) as refused:
        raise type(refused)(f"from_torch: torch.optim.{cls.__name__} refuses these arguments: {refused}") from refused
    if cls.__name__ in _ELEMENTWISE:
        return _on_rows(cls, settings)
    return whole_leaves(_on_leaves(cls, settings))


def _on_rows(cls: type[Optimizer], hyperparams: Settings) -> Transform:
    dummy = torch.zeros(1, dtype=torch.float32, device="cpu")  # for a rank without rows
    scalars = {name for name, x in _begin(cls, hyperparams, dummy).items() if not x.dim()}

    def init(params: Tree) -> TorchState:
        entries = [_begin(cls, hyperparams, row) for row in tree.leaves(params)]
        return _like_params(entries, params, entries[0] if entries else _begin(cls, hyperparams, dummy), scalars)

    def run(grads: Tree, state: TorchState, params: Tree, extra: Settings) -> TorchState:
        # `.grad` must not be set on the caller's tensors
        rows = [row.detach() for row in tree.leaves(params)]
        if not rows:  # a rank without parameters still counts updates
            begun = _begin(cls, hyperparams, dummy) | {name: x.clone() for name, x in state.scalars.items()}
            (entry,) = _stepped(cls, hyperparams, [dummy.clone()], [torch.zeros_like(dummy)], [begun])
            return TorchState(state.tensors, {name: entry[name] for name in state.scalars})
        entries = _stepped(cls, hyperparams, rows, tree.leaves(grads), _by_row(state, len(rows)))
        return _like_params(entries, params, entries[0], scalars)

    return _adapted(cls, hyperparams, init, run)


def _on_leaves(cls: type[Optimizer], hyperparams: Settings) -> Transform:
    """Run a class of torch.optim on whole leaves; its state may have other shapes than the leaves."""

    def init(params: Tree) -> TorchState:
        return TorchState(_first_by_name(params, partial(_begin, cls, hyperparams), "meta"), {})

    def run(grads: Tree, state: TorchState, params: Tree, extra: Settings) -> TorchState:
        rows, layout = [row.detach() for row in tree.leaves(params)], layout_of(params)
        if not rows:  # torch makes no optimizer without parameters
            return state
        new_entries = _stepped(cls, hyperparams, rows, tree.leaves(grads), _entries_by_leaf(state, layout))
        return TorchState(_next_by_name(state, layout, new_entries), {})

    return _adapted(cls, hyperparams, init, run)


def _stepped(
    cls: type[Optimizer], hyperparams: Settings, rows: list[Tensor], grads: Sequence[Tensor], entries: Sequence[OfLeaf]
) -> list[OfLeaf]:
    """Step in place on `rows`; return each row's new state."""
    optimizer = cls(rows, **hyperparams)
    for row, g, entry in zip(rows, grads, entries, strict=True):
        # torch takes real views of complex tensors; a lazily conjugated tensor (z.conj()) has no real view
        row.grad = g.detach().to(row.dtype).resolve_conj()
        optimizer.state[row] = entry if entry.get(BEGUN, True) else {}
    optimizer.step()
    begun = [{BEGUN: double(1.0)} if BEGUN in entry else {} for entry in entries]
    return [optimizer.state[row] | more for row, more in zip(rows, begun, strict=True)]


def _adapted(cls: type[Optimizer], hyperparams: Settings, init: Callable[[Tree], TorchState], run: Run) -> Transform:
    """`run` as a transformation; `run` gets copies of parameters and state, unless donated."""

    def fused(
        grads: Tree, state: TorchState, params: Tree, found_inf: Tensor | None, donate: bool, **extra: object
    ) -> tuple[Tree, TorchState]:
        if func_levels.differentiates((grads, state, params, extra, hyperparams)):
            raise TypeError(
                f"from_torch: the step of {cls.__name__} has no derivative: expected tensors that need none, outside "
                "of torch.func's transforms. Detach them (x.detach(), torch.no_grad()), or use a transformation of "
                "fshard.optim, which is differentiable"
            )
        # `found_inf` may ask for the old values, so these are copied even if donated
        new_params, inner = (params, state) if donate and found_inf is None else copied((params, state))
        new_state = run(grads, inner, new_params, extra)
        return choose(found_inf, params, new_params), choose(found_inf, state, new_state)

    def update(grads: Tree, state: TorchState, params: Tree = None, **extra: object) -> tuple[Tree, TorchState]:
        new_params, new_state = fused(grads, state, params, None, False, **extra)
        return tree.map(torch.sub, new_params, params), new_state

    return checked(Transform(init, update, fused, "tree", draws=False), Needs("from_torch", TorchState, params=True))


def _check_class(cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls.__name__ in ("LBFGS", "SparseAdam"):
        reasons = {"LBFGS": "its step needs a closure. Use lbfgs", "SparseAdam": "it takes sparse gradients alone"}
        why = reasons.get(getattr(cls, "__name__", ""), "it is no optimizer of torch.optim's kind")
        if isinstance(cls, Optimizer):
            why = f"it is one already: give its class, without parameters: from_torch({type(cls).__name__}, lr=...)"
        name = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        raise ValueError(f"from_torch: cannot run {name!r} as a transformation: {why}")


def _begin(cls: type[Optimizer], hyperparams: Settings, row: Tensor) -> OfLeaf:
    """The state before a parameter's first update."""
    row = row.detach()
    optimizer: Any = cls([row], **hyperparams)  # each class has `_init_group`, `Optimizer` has not
    row.grad = torch.zeros_like(row)
    # private, but every class of torch.optim fills its state like this (test_authority.py)
    num_lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(num_lists)))
    entry = dict(optimizer.state[row])
    group = optimizer.param_groups[0]
    if cls.__name__ == "SGD" and group["momentum"]:
        entry["momentum_buffer"] = torch.zeros_like(row)  # the first update is the same as from torch's None
        if group["dampening"]:  # torch dampens a gradient unless the buffer is None
            entry[BEGUN] = double(0.0)
    if strange := [name for name, x in entry.items() if not isinstance(x, Tensor)]:
        raise ValueError(f"from_torch: {cls.__name__} keeps {strange[0]!r}, which is no tensor: it cannot be a value")
    return entry


def _like_params(entries: Sequence[OfLeaf], params: Tree, first: OfLeaf, scalars: set[str]) -> TorchState:
    """Return entries as trees like `params`. `first`: an entry with all names."""
    spec = tree.flatten(params)[1]
    tensors = {n: tree.unflatten(spec, [entry[n] for entry in entries]) for n in first if n not in scalars}
    return TorchState({n: clear_padding_(x) for n, x in tensors.items()}, {n: first[n] for n in first if n in scalars})


def _first_by_name(params: Tree, begin: Callable[[Tensor], OfLeaf], device: str) -> dict[str, Parts]:
    """The first state of this rank's leaves; every rank makes all leaves' state on `device`, to learn shapes."""
    rows, layout = tree.leaves(params), layout_of(params)
    leaves = {n: layout.leaves[n] for n in layout.numbers}
    shapes = {n: begin(torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)) for n, leaf in leaves.items()}
    local_entries = {s.leaf: begin(rows[s.tensor]) for s in layout.mine}
    names = dict.fromkeys(name for entry in shapes.values() for name in entry)
    return {name: _pieces_of(name, layout, shapes, local_entries) for name in names}


def _next_by_name(state: TorchState, layout: Layout, entries: Sequence[OfLeaf]) -> dict[str, Parts]:
    entry_of = dict(zip((s.leaf for s in layout.mine), entries, strict=True))
    layouts = {name: old.layout for name, old in state.tensors.items()}
    return {name: Parts(of, [entry_of[s.leaf][name] for s in of.mine]) for name, of in layouts.items()}


def _pieces_of(name: str, layout: Layout, shapes: Mapping[int, OfLeaf], local_entries: Mapping[int, OfLeaf]) -> Parts:
    """The state of one name; some leaves may lack this name."""
    forms = {n: Form(tuple(entry[name].shape), entry[name].dtype) for n, entry in shapes.items() if name in entry}
    part = reshaped(layout, forms)
    return Parts(replace(part, source=(name, part.source)), [local_entries[s.leaf][name] for s in part.mine])


def _by_row(state: TorchState, num_rows: int) -> list[OfLeaf]:
    """Each row's state, with copies of 0-d tensors: a step writes to these."""
    columns = {name: tree.leaves(x) for name, x in state.tensors.items()}
    rows = ({name: column[i] for name, column in columns.items()} for i in range(num_rows))
    return [row | {name: x.clone() for name, x in state.scalars.items()} for row in rows]


def _entries_by_leaf(state: TorchState, layout: Layout) -> list[OfLeaf]:
    entries: dict[int, OfLeaf] = {s.leaf: {} for s in layout.mine}
    for name, x in state.tensors.items():
        for number, leaf in pieces(x):
            entries[number][name] = leaf
    return [*entries.values()]


def _of_user(cls: type[Optimizer], hyperparams: Settings) -> Transform:
    """Run a user's class. A trial step with zero gradients shows its shapes; the first real step makes the state."""
    _check_independent(cls, hyperparams)
    first = _first_step(cls, hyperparams, torch.zeros(2, 2, dtype=torch.float32, device="cpu"))
    # the state has 0-d tensors for Python numbers
    numbers = {n: type(x) for n, x in first.items() if not isinstance(x, Tensor)}
    known, needed = inspect.signature(cls.step).parameters.keys() - {"self", "closure"}, _needed_arguments(cls)

    def begin(row: Tensor) -> OfLeaf:
        return {name: _value_tensor(x) for name, x in _first_step(cls, hyperparams, row).items()}

    def init(params: Tree) -> TorchState:
        return TorchState(_first_by_name(params, begin, "cpu"), {BEGUN: double(0.0)})

    def run(grads: Tree, state: TorchState, params: Tree, extra: Settings) -> TorchState:
        if missing := [name for name in needed if name not in extra]:
            raise ValueError(
                f"from_torch: the step of {cls.__name__} needs {missing[0]!r}: call update(grads, state, params, "
                f"{missing[0]}=...)"
            )
        rows, layout = [row.detach() for row in tree.leaves(params)], layout_of(params)
        entries = list[OfLeaf]()
        begun = bool(state.scalars[BEGUN])  # on the CPU: no wait for a device
        if rows:
            optimizer = cls(rows, **hyperparams)
            for row, g, entry in zip(rows, tree.leaves(grads), _entries_by_leaf(state, layout), strict=True):
                row.grad = g.detach().to(row.dtype, copy=True).resolve_conj()  # a class may write to `grad`
                if begun:  # the class expects no state at its first step
                    optimizer.state[row] = {n: numbers[n](x) if n in numbers else x for n, x in entry.items()}
            aliases = [row.detach() for row in rows]
            optimizer.step(**{name: value for name, value in extra.items() if name in known})
            for alias, row in zip(aliases, rows, strict=True):
                if row.data_ptr() != alias.data_ptr():  # a class may give its parameter new memory (p.data = ...)
                    alias.copy_(row)
            entries = [{name: _value_tensor(x) for name, x in optimizer.state[row].items()} for row in rows]
        _check_kept_names(cls, {name for entry in entries for name in entry}, state)
        return TorchState(_next_by_name(state, layout, entries), {BEGUN: double(1.0)})

    return _adapted(cls, hyperparams, init, run)


def _needed_arguments(cls: type[Optimizer]) -> list[str]:
    _, *arguments = inspect.signature(cls.step).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    if "closure" in needed:
        raise ValueError(f"from_torch: cannot run {cls.__name__!r} as a transformation: its step needs a closure")
    return needed


def _try_step(optimizer: Optimizer) -> None:
    """Call the optimizer's step, with 1.0 for each argument without a default."""
    cls, step = type(optimizer), cast("Callable[..., object]", optimizer.step)
    needed = _needed_arguments(cls)
    try:
        step(**{name: torch.ones((), dtype=torch.float32, device="cpu") for name in needed})
    except Exception as failure:
        if not needed:
            raise
        raise ValueError(
            f"from_torch: the step of {cls.__name__} failed with 1.0 for {needed[0]!r} ({type(failure).__name__}: "
            f"{failure}): give {needed[0]!r} a default, with which a step shows what state the class keeps"
        ) from failure


def _check_independent(cls: type[Optimizer], hyperparams: Settings) -> None:
    """ValueError if a parameter's update depends on other parameters: these may be on other ranks."""

    def stepped(*starts: Tensor) -> list[Tensor]:
        rows = [start.clone() for start in starts]
        optimizer = cls(rows, **hyperparams)
        for row, start in zip(rows, starts, strict=True):
            row.grad = start + 1
        _try_step(optimizer)
        return rows

    starts = [torch.arange(1.0, 5.0, dtype=torch.float32, device="cpu").view(2, 2) * scale for scale in (1.0, -3.0)]
    together, alone = stepped(*starts), [stepped(start)[0] for start in starts]
    if not all(torch.allclose(a, b) for a, b in zip(together, alone, strict=True)):
        raise ValueError(
            f"from_torch: {cls.__name__} updates a parameter otherwise beside others than alone (by a norm of all, by "
            "their order, or at random), and ranks have different ones: write it as an fshard.optim.Transform"
        )


def _check_kept_names(cls: type[Optimizer], names: set[str], state: TorchState) -> None:
    if late := names - state.tensors.keys():
        raise ValueError(
            f"from_torch: {cls.__name__} keeps {min(late)!r} of a parameter, which its first step with a gradient of "
            "zero did not make: make all of self.state[p] in the first step"
        )


def _value_tensor(x: Tensor | float) -> Tensor:
    return x if isinstance(x, Tensor) else double(x) if isinstance(x, float) else torch.tensor(x, device="cpu")


def _first_step(cls: type[Optimizer], hyperparams: Settings, row: Tensor) -> Numbers:
    """The state after a step with zero gradient. ValueError if a transformation cannot keep it."""
    row = row.detach().clone()
    optimizer = cls([row], **hyperparams)
    row.grad, before = torch.zeros_like(row), _of_all(optimizer)
    _try_step(optimizer)
    lost = [f"changes its {name}" for name, text in _of_all(optimizer).items() if before.get(name) != text]
    if lost := [*lost, *(f"keeps state[{key!r}]" for key in optimizer.state if key is not row)]:
        raise ValueError(
            f"from_torch: {cls.__name__} {lost[0]}, which belongs to no parameter, and would be lost: keep it in "
            "self.state[p] of each"
        )
    entry = dict(optimizer.state[row])
    if strange := [name for name, x in entry.items() if not isinstance(x, Tensor | int | float)]:
        raise ValueError(
            f"from_torch: {cls.__name__} keeps {strange[0]!r} of a parameter: expected a tensor or a number, got "
            f"{type(entry[strange[0]]).__name__}"
        )
    return entry


def _of_all(optimizer: Optimizer) -> dict[str, str]:
    """Return hyper-parameters and attributes as text, without parameters and their states."""
    (group,) = optimizer.param_groups
    settings = {f"param_groups[0][{name!r}]": value for name, value in group.items() if name != "params"}
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    return {name: repr(value) for name, value in (settings | attributes).items()}
