"""Lowering a step with a few of its equal units, to compute the figures of the whole step.

Note [Depth]
    The time to lower a step grows with its number of units. Most networks read equal units in a loop. Such a step is
    lowered three times with a few units. If two conditions hold, the figures of the whole graph follow; otherwise the
    whole graph is lowered.

    1. With each further unit, forward and backward of the loss repeat one group of operator calls, a period, once more.
       Calls are recorded on meta tensors. A record has operator, shapes, numbers, and the age of the memory read
       (in calls since its writing). So a loss that treats its last units differently is noticed.
    2. After all compiler passes, graphs differ only by whole periods at the same places. The bytes at each node grow
       linearly with the number of units, and from period to period. Linear growth is largest at an end: so the peak is
       at a node of the smallest graph, or at a copy of this node in the first or last periods.
"""

from __future__ import annotations

import operator as python
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import tree
from ..core.arguments import call_site
from ..core.losses import read_loss
from ..core.storage import address
from ..core.tracing import Args, Kwargs, Operator, node_of
from ..core.tree import Tree
from ..plan.plan import Plan
from ..sharding.sharded import Sharded, whole_view
from ..train.accumulate import cut
from ..train.step import Step

_STANDARD = os.path.dirname(os.__file__) + os.sep  # Python's own library
_NEAR = 16  # calls; memory written longer ago has no age
Key = Hashable


@dataclass(frozen=True)
class Stack:
    """A list of equal children in a tree of parameters; `units[child]` are the names of a child's units."""

    path: str
    first: int  # number of the list's first leaf
    num_leaves: int
    units: tuple[tuple[str, ...], ...]

    @property
    def depth(self) -> int:
        return len(self.units)

    def place(self, unit: str) -> tuple[int, int] | None:
        """Return (child, number in the child) of a unit; None for a unit outside the stack."""
        pairs = ((child, names.index(unit)) for child, names in enumerate(self.units) if unit in names)
        return next(pairs, None)

    def general(self, unit: str) -> str:
        place = self.place(unit)
        return unit if place is None else unit.replace(f"{self.path}.{place[0]}", f"{self.path}.*", 1)


def stack_of(plan: Plan) -> Stack | None:
    """Return the plan's stack with the most leaves."""
    stacks = [
        Stack(".".join(path), first, spec.num_leaves, units)
        for path, spec, first in tree.walk(plan.spec)
        if spec.type in (list, tuple) and (units := _equal_units(plan, spec, first))
    ]
    return max(stacks, key=lambda stack: stack.num_leaves, default=None)


def _equal_units(plan: Plan, spec: tree.Spec, first: int) -> tuple[tuple[str, ...], ...]:
    """Return the units of each child of a list; () unless several children are equal and adjacent."""
    forms, units = set[object](), list[tuple[str, ...]]()
    for child, offset in tree.children(spec):
        numbers = plan.leaves[first + offset : first + offset + child.num_leaves]
        slots = [plan.slots[number] for number in numbers]
        if not slots:
            return ()
        base = slots[0].unit
        inside = [plan.units[number] for number in sorted({slot.unit for slot in slots})]
        at = [(n - numbers[0], x.unit - base, x.shape, x.kind, x.start) for n, x in zip(numbers, slots, strict=True)]
        of_units = [(unit.lengths, unit.keep_rule, unit.joined) for unit in inside]
        forms.add((child, *at, *of_units, base - sum(map(len, units))))
        units.append(tuple(unit.name for unit in inside))
    return tuple(units) if len(forms) == 1 and len(units) > 1 else ()


def depths_of(plan: Plan, stack: Stack) -> tuple[int, int, int]:
    """Return three numbers of units, enough to see memory near the first and last units.

    The numbers are larger if several units are gathered ahead (Note [Two units] in `plan/ahead.py`).
    """
    names, sizes = {*chain(*stack.units)}, plan.ahead.sizes
    unit = min(size for size, unit in zip(sizes, plan.units, strict=True) if unit.name in names)
    more = 2 * (2 * max(sizes) >= 3 * unit) if plan.prefetch is None else max(plan.prefetch - 1, 0)
    return 4 + more, 5 + more, 7 + more


def with_few(plan: Plan, stack: Stack, depth: int) -> Plan:
    def is_stack(x: object) -> bool:
        return isinstance(x, list | tuple) and tree.leaves(x) == [*range(stack.first, stack.first + stack.num_leaves)]

    numbers = tree.unflatten(plan.spec, range(len(plan.leaves)))
    kept, spec = tree.flatten(tree.map_tops(lambda x: x[:depth] if is_stack(x) else x, is_stack, numbers))
    gone = {name for names in stack.units[depth:] for name in names}
    units = {old: new for new, old in enumerate(n for n, unit in enumerate(plan.units) if unit.name not in gone)}
    slots = {old: new for new, old in enumerate(n for n, slot in enumerate(plan.slots) if slot.unit in units)}
    return replace(
        plan,
        spec=spec,
        leaves=tuple(slots[plan.leaves[number]] for number in kept),
        claims=tuple(units[plan.claims[number]] for number in kept),
        slots=tuple(replace(plan.slots[old], unit=units[plan.slots[old].unit]) for old in slots),
        units=tuple(plan.units[old] for old in units),
    )


def with_plan(args: Tree, old: Plan, new: Plan) -> Tree:
    """Move a step's arguments (tensors without memory) to the plan `new`."""

    def moved(x: object) -> object:
        if not isinstance(x, Sharded) or x.plan != old:
            return x
        if x.view.spec != old.spec:
            raise ValueError("a part of a sharded tree is an argument by itself")
        view = whole_view(new, x.view.over, x.view.kinds)
        rows = zip(view.kinds, x.tensors, strict=True)
        return Sharded(view, [row.new_empty(view.numel(kind)) for kind, row in rows])

    return tree.map_tops(moved, Sharded, args)


_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
Results = dict[Key, tuple[list[_Form], tree.Spec]]  # results of operators, by operator and arguments


def _tensor_key(x: Tensor) -> _Form:
    return x.shape, x.stride(), x.dtype


def _bare(x: object) -> object:
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


class _Recorder(TorchDispatchMode):
    """Record calls: operator, forms of tensors, other arguments, and the age of the memory read.

    A call recorded before runs no operator, but returns empty tensors, in a tenth of the time.
    """

    def __init__(self, results: Results) -> None:
        super().__init__()
        self.keys: list[Key] = []
        self._results = results
        self._written: dict[int, int] = {}  # number of the last writing call, by address

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        inputs = tree.leaves((args, kwargs or {}))
        if any(isinstance(x, Tensor) and not x.is_meta for x in inputs):  # a real tensor, read from a closure
            args, kwargs = tree.map(_bare, (args, kwargs or {}))
        key = func, *(_tensor_key(x) if isinstance(x, Tensor) else repr(x) for x in inputs)
        ago = [len(self.keys) - self._written.get(address(x), 0) for x in inputs if isinstance(x, Tensor)]
        self.keys.append((key, torch.is_grad_enabled(), *(n if n <= _NEAR else None for n in ago)))
        if key in self._results:
            forms, spec = self._results[key]
            out = tree.unflatten(spec, [torch.empty_strided(*x, dtype=kind, device="meta") for *x, kind in forms])
        else:
            out = func(*args, **(kwargs or {}))
            leaves, spec = tree.flatten(out)
            is_new = not any(x.alias_info for x in (*func._schema.arguments, *func._schema.returns))
            if is_new and all(isinstance(x, Tensor) for x in leaves):
                self._results[key] = [_tensor_key(x) for x in leaves], spec
        self._written |= {address(x): len(self.keys) for x in tree.leaves(out) if isinstance(x, Tensor)}
        return out


class Origin(NamedTuple):
    """The caller of a node's operator: the line of the user's code, or "", and True if autograd's backward ran."""

    line: str
    is_backward: bool


class _Origins(TorchDispatchMode):
    """Put an `Origin` into `meta` of each node. `caller`: the line that asked for the trace."""

    supports_higher_order_operators = True

    def __init__(self, caller: str) -> None:
        super().__init__()
        self._caller = caller

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        out = func(*args, **(kwargs or {}))
        nodes = [node for x in tree.leaves(out) if isinstance(x, Tensor) and (node := node_of(x))]
        if nodes and "origin" not in nodes[0].meta:
            line = call_site()
            line = "" if line == self._caller or line.startswith(_STANDARD) else line
            # Private: torch has no public way to ask whether autograd runs (test_estimate.py notices a removal).
            origin = Origin(line, torch._C._current_autograd_node() is not None)
            for node in nodes:
                node.meta["origin"] = origin
                for source in node.all_input_nodes if node.target is python.getitem else ():
                    source.meta["origin"] = origin
        return out


def noted(fn: Callable[..., Tree], caller: str, *args: Tree, **kwargs: Tree) -> Tree:
    with _Origins(caller):
        return fn(*args, **kwargs)


def calls(step: Step, plan: Plan, given: Sequence[Tree], results: Results) -> list[Key]:
    """Return the calls of operators in a step's loss and its backward, on meta tensors."""

    def whole(sharded: Sharded) -> Tree:
        kinds = [sharded.plan.kinds[slot.kind] for slot in sharded.plan.slots]
        forms = zip(map(sharded.plan.local_shape, sharded.plan.slots), kinds, strict=True)
        leaves = [torch.empty(shape, dtype=kind.precision.compute, device="meta") for shape, kind in forms]
        leaves = [x.requires_grad_(kind.trainable) for x, kind in zip(leaves, kinds, strict=True)]
        return tree.unflatten(sharded.plan.spec, [leaves[number] for number in sharded.plan.leaves])

    def bare(x: object) -> object:
        return whole(x) if isinstance(x, Sharded) else _bare(x)

    state, batch, *args, kwargs = given
    first = cut(tree.map(bare, batch), step.accumulate)[0]
    rest, keywords = tree.map_tops(bare, Sharded, ([*[state.extra] * step.with_extra, first, *args], kwargs))
    params = whole(Sharded(whole_view(plan, plan.params_over, range(len(plan.kinds))), []))
    with torch.device("meta"), torch.enable_grad(), _Recorder(results) as recorder:
        out = step.loss_fn(params, *rest, **keywords)
        total = read_loss(out[0] if isinstance(out, tuple) else out)[0].total
        trained = [x for x in dict.fromkeys(tree.leaves(params)) if x.requires_grad]
        torch.autograd.grad(total, trained, allow_unused=True)
    return recorder.keys


Runs = list[tuple[int, int]]  # of each group of equal periods: end in the shorter list, length of a period


def runs(short: Sequence[Key], long: Sequence[Key]) -> Runs | None:
    """Return the places where the longer list has one period more; None if the lists differ otherwise.

    If several periods fit at a place, take the period with the longest agreement after it.
    """
    places: Runs = []
    at = there = 0
    while there < len(long):
        same = _num_same(short[at:], long[there:])
        at, there = at + same, there + same
        periods = range(1, min(there, len(long) - there) + 1)
        repeated = [
            p for p in periods if long[there - p] == long[there] and long[there - p : there] == long[there : there + p]
        ]
        if not repeated:
            break
        period = max(repeated, key=lambda p: _num_same(short[at:], long[there + p :]))
        places.append((at, period))
        there += period
    return places if expanded(short, places, 1) == [*long] else None


def _num_same(short: Sequence[Key], long: Sequence[Key]) -> int:
    pairs = enumerate(zip(short, long, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(short), len(long)))


def expanded(short: Sequence[Key], places: Runs, times: int) -> list[Key]:
    """Return the list with `times` periods more in each group."""
    keys, before = list[Key](), 0
    for at, period in places:
        keys += [*short[before:at], *list(short[at - period : at]) * times]
        before = at
    return [*keys, *short[before:]]


Rows = Sequence[Mapping[str, int]]  # bytes by purpose, for each node of a graph


def images(graphs: Sequence[Rows], short: Sequence[Key], places: Runs, times: Sequence[int]) -> list[list[int]] | None:
    """Return images of all nodes that may have the most bytes. An image is a node's numbers in the three graphs.

    A node in a group of periods has two images, counted from the group's beginning and from its end. From each end,
    return images while bytes grow linearly with the number of periods. Return None if bytes between these images do
    not.
    """
    inside = {at for end, period in places for at in range(_first_period(short, end, period), end)}
    outside = [at for at in range(len(short)) if at not in inside]
    result = [[at + n * _before(places, at) for n in times] for at in outside]
    for end, period in places:
        nodes, before = range(_first_period(short, end, period), end), _before(places, end - 1)
        heads = [[at + n * before for n in times] for at in nodes]
        tails = [[at + n * (before + period) for n in times] for at in nodes]
        heads = heads[: _num_even(graphs, heads, times) // period * period]
        tails = tails[len(tails) - _num_even(graphs, tails[::-1], times) // period * period :]
        if not heads or not tails:
            return None
        between = range(heads[-1][-1] + 1, tails[0][-1])
        if not all(is_even([graphs[-1]] * 3, (i - period, i, i + period), (0, 1, 2)) for i in between):
            return None
        result += [*heads, *tails]
    return result


def _num_even(graphs: Sequence[Rows], candidates: Sequence[Sequence[int]], times: Sequence[int]) -> int:
    return next((n for n, image in enumerate(candidates) if not is_even(graphs, image, times)), len(candidates))


def _before(places: Runs, at: int) -> int:
    """Count the nodes inserted before `at` by one period more in each group."""
    return sum(period for end, period in places if end <= at)


def _first_period(keys: Sequence[Key], end: int, period: int) -> int:
    begin = end - period
    while begin >= period and keys[begin - period : begin] == keys[begin : begin + period]:
        begin -= period
    return begin


def is_even(graphs: Sequence[Rows], image: Sequence[int], times: Sequence[int]) -> bool:
    few, more, most = (rows[i] for rows, i in zip(graphs, image, strict=True))
    near, far = times[1] - times[0], times[2] - times[0]
    bytes_of = [[row.get(name, 0) for row in (few, more, most)] for name in {*few, *more, *most}]
    return all((second - first) * far == (third - first) * near for first, second, third in bytes_of)
