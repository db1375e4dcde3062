"""All values that an observed step computes: results of its loss's operators, gradients, metrics and new parameters.

Note [Names of values]
    1. A name has five fields, separated by tabs: kind, name, unit, line of the user's code, and inputs. An operator's
       inputs: for each tensor argument the number of the operator that computed it, or "?" (the batch); leaves of
       parameters are left out.
    2. Operators are numbered from 0 in each forward, collectives from -2 down, because one device has none. An empty
       value of the kind "forward" begins the forward of a micro-batch or a slice: its name has the sizes of the mesh's
       axes, its line their names, its unit is "split" if leaves are split.
    3. Operators are calls by the user's program. Not recorded: calls by fshard or autograd, calls without tensors (a
       rank's row numbers), `torch.empty` and the like, and calls in compiled functions.
    4. Old parameters show how far the step moved a parameter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..comm.collectives import applied
from ..core import func_levels, losses, tree
from ..core.arguments import CODE, call_site, check_function
from ..core.losses import Mean, terms_of
from ..core.scalars import on_device
from ..core.tracing import UNROLLS, Args, Kwargs, Operator, assigned, is_tracing
from ..core.tree import Tree
from ..grad.grad import OBSERVER, empty_grads
from ..grad.tape import Tape, TapeUnit, UnitLeaves
from ..grad.travel import Gradients
from ..layout.pieces import device_of
from ..plan.plan import Plan, Slot
from ..sharding.sharded import Sharded, gather_params
from ..train.step import METRICS, TrainState

Observed = dict[str, list[Any]]  # "names" and "values", in order
COLLECTIVE = "collective"
LOSS = "the loss's "  # names of totals and counts
GRADIENT, SUM, METRIC, PARAMETER = "gradient on this rank of", "summed gradient of", "metric", "new parameter"
OLD = "old parameter"


def observed(
    step: Callable[..., tuple[TrainState, dict[str, Tree]]],
) -> Callable[..., tuple[tuple[TrainState, dict[str, Tree]], Observed]]:
    """Return `step'(state, batch, *args, **kwargs) -> ((state, metrics), seen)`: the step, and all its values.

    `seen` is {"names": list of str, "values": list of tensors}, in the program's order: results of the operators called
    by the loss, gradients of each leaf on this rank and summed over ranks, metrics, parameters. `torch.save` can write
    `seen`. The bits are an eager `step`'s. All values stay in memory. Parameters and gradients are gathered once more,
    so all ranks must observe, or none.

    For a graph write `jit(observed(step))`. TypeError for `observed(jit(step))`, and for anything but a step of
    `train_step`.

    >>> step = observed(train_step(lambda w, x: (w * x).sum(), sgd(0.5)))
    >>> _, seen = step(init_state(shard_of(torch.ones(2)), sgd(0.5)), torch.tensor([1.0, 2.0]))
    >>> [name.split()[0] for name in seen["names"]][4:]
    ['gradient', 'summed', 'metric', 'metric', 'metric', 'new', 'old']
    """
    check_function("observed: step", step, "step(state, batch)")

    def run(
        state: TrainState, batch: Tree, *args: Tree, **kwargs: Tree
    ) -> tuple[tuple[TrainState, dict[str, Tree]], Observed]:
        seen, before = Seen(), Seen()
        before.add_leaves(OLD, state.params)  # before the step, which may donate parameters
        with assigned(OBSERVER, seen):
            after, metrics = step(state, batch, *args, **kwargs)
        seen.check()
        for name in METRICS:
            seen.add(METRIC, name, metrics[name])
        seen.add_leaves(PARAMETER, after.params)
        return (after, metrics), {"names": seen.names + before.names, "values": seen.values + before.values}

    return run


class Seen:
    """The names and values of one call of a step (Note [Names of values])."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Tensor] = []
        self.lines: dict[str, str] = {}  # by unit, the line of the first operator that reads the unit
        self._traced = is_tracing()

    def __call__(self, *args: Any) -> Tape:
        is_here = is_tracing() == self._traced and not torch.compiler.is_compiling()
        return _ObservedTape(self, *args) if is_here else Tape(*args)  # in a graph made by the step, a plain tape

    def check(self) -> None:
        if not self.names:
            raise TypeError(
                "observed: expected a step of train_step that runs here, got one that is a graph, or none of ours: "
                "write jit(observed(step)), not observed(jit(step))"
            )

    def add(self, kind: str, name: str, value: Tensor, unit: str = "", line: str = "", inputs: str = "") -> None:
        self.names.append("\t".join(field.expandtabs(1) for field in (kind, name, unit, line, inputs)))
        with func_levels.aside(), torch.no_grad():
            self.values.append(func_levels.unwrapped(value).detach().clone())

    def add_leaf(self, kind: str, plan: Plan, slot: Slot, value: Tensor) -> None:
        unit = plan.units[slot.unit].name
        self.add(kind, slot.path, value, unit, self.lines.get(unit, ""))

    def add_leaves(self, kind: str, x: Sharded) -> None:
        whole = dict(tree.paths_to(gather_params(x), Tensor))
        for slot in backwards(x.plan):
            if isinstance(leaf := whole.get(slot.path), Tensor):  # frozen leaves have no gradient
                self.add_leaf(kind, x.plan, slot, leaf)

    def add_sums(self, grads: Sharded, share: Tensor | None, scaler: Tree) -> None:
        """Add gradients summed over ranks and micro-batches, and unscale all recorded gradients."""
        if self.names:
            self.add_leaves(SUM, grads)
        for number, name in enumerate(self.names):
            if name.startswith((GRADIENT, SUM)):
                x = self.values[number]
                scale = scaler.scale(torch.ones((), dtype=torch.float64, device=x.device))
                self.values[number] = x * (1 / scale if share is None else share / scale).to(x.dtype)

    def forget(self, start: int) -> None:
        del self.names[start:], self.values[start:]


def backwards(plan: Plan) -> Iterator[Slot]:
    """Return the leaves of a plan in the order of gradients, last unit first."""
    return iter(sorted(plan.slots, key=lambda slot: -slot.unit))


class _ObservedTape(Tape):
    def __init__(self, seen: Seen, params: Sharded, into: Gradients, *others: Any):
        plan = params.plan  # not the tape's plan, which may join small units
        self._seen, self._known, self._whole = seen, len(seen.names), plan
        self._gradients: dict[str, Tensor] = {}
        self._sums = empty_grads(params, plan.grads_over) if into.take else None
        if into.take:
            seen.forget(0)  # a step with `in_backward` and `clip_norm` has run its loss before, for the norm
        super().__init__(params, into, *others)

    def forward_once(self, loss: Callable[[Tree], object]) -> Any:
        seen, plan = self._seen, self._whole
        seen.forget(self._known)  # values of a first run, in which torch.func refused hooks
        sizes = "x".join(str(size) for _, size in plan.axes)
        is_split = any(slot.split is not None for slot in plan.slots)
        axes = ",".join(axis for axis, _ in plan.axes)
        seen.add("forward", sizes, torch.empty(0, device=device_of(self._params)), "split" * is_split, axes)
        self._operators = _Operators(seen)

        def watched(view: Tree) -> Any:
            # OBSERVER None: a loss inside this loss is not observed apart
            with assigned(OBSERVER, None), assigned(UNROLLS, True), self._operators:
                return loss(view)

        returned = super().forward_once(watched)
        self._operators.end(returned.kind, terms_of(returned.loss))
        return returned

    def enter(self, spec: tree.Spec, first: int) -> tuple[Tree, UnitLeaves | None]:
        child, leaves = super().enter(spec, first)
        self._note(first, leaves or ())
        return child, leaves

    def leaf(self, number: int) -> Tensor:
        leaf = super().leaf(number)
        self._note(number, [leaf])
        return leaf

    def _note(self, first: int, leaves: UnitLeaves) -> None:
        for number, leaf in enumerate(leaves, first):
            unit = self._whole.slots[self._whole.leaves[number]].unit
            self._operators.read(leaf, self._whole.units[unit].name)

    def reduce(self, unit: TapeUnit, grads: Sequence[Tensor | None]) -> None:
        if unit.gradients != "late":  # late gradients come here again, complete
            grads = unit.total(grads)
            for row, begin, end in unit.entry.reduced:
                for slot, grad in zip(row.leaves, grads[begin:end], strict=True):
                    if grad is not None:
                        more = grad.detach().to_dense()
                        self._gradients[slot.path] = self._gradients.get(slot.path, torch.zeros_like(more)) + more
        super().reduce(unit, grads)

    def _taken(self, unit: TapeUnit, kind: int, total: Tensor) -> Tensor:
        assert self._sums is not None
        self._sums.shard(unit.entry.unit, kind).copy_(total)
        return super()._taken(unit, kind, total)

    def finish(self) -> None:
        super().finish()
        plan = self._whole
        leaf_of = {plan.slots[slot].path: number for number, slot in enumerate(plan.leaves)}
        for slot in backwards(plan):
            if plan.kinds[slot.kind].trainable:
                none = torch.zeros_like(self.like(leaf_of[slot.path]))
                self._seen.add_leaf(GRADIENT, plan, slot, self._gradients.get(slot.path, none))
        self._gradients.clear()
        if self._sums is not None:
            self._seen.add_leaves(SUM, self._sums)


class _Operators(TorchFunctionMode):
    def __init__(self, seen: Seen):
        super().__init__()
        self._seen, self._unit, self._line, self._count, self._collective = seen, "", "", 0, -2
        # by `id` of a tensor: the number of its operator or collective, or a leaf's unit
        self._origins: dict[int, tuple[weakref.ref[Tensor], int | str]] = {}

    def read(self, leaf: Tensor, unit: str) -> None:
        self._origins[id(leaf)], self._unit = (weakref.ref(leaf), unit), unit

    def _origin(self, x: Tensor) -> int | str | None:
        made, origin = self._origins.get(id(x), (None, None))
        return origin if made is not None and made() is x else None

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():  # recording would break the graph at every operator
            return out
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # of an attribute, as x.T: take the attribute's name
            name = getattr(func.__self__, "__name__", name)
        given = [x for x in tree.leaves((args, dict(kwargs or {}))) if isinstance(x, Tensor)]
        results = given[:1] if name == "__setitem__" else out if isinstance(out, tuple | list) else (out,)
        results = [x for x in results if isinstance(x, Tensor) and x.layout is torch.strided]
        if func is applied:
            self._add(_collective_name(*args[1:]), given, results, COLLECTIVE)
        elif given and results and "empty" not in name:
            if not (file := _caller(sys._getframe(1))).startswith(CODE[0]):
                self._add(name, given, results)
            elif file == losses.__file__ and (origin := self._origin(given[0])) is not None:  # a factor of a Mean
                self._origins[id(results[0])] = weakref.ref(results[0]), origin
        return out

    def _add(self, name: str, given: Sequence[Tensor], results: Sequence[Tensor], kind: str = "operator") -> None:
        origins = [self._origin(x) for x in given]
        self._unit = next((unit for unit in origins if isinstance(unit, str)), self._unit)
        self._line = call_site()
        self._seen.lines.setdefault(self._unit, self._line)
        inputs = ",".join("?" if x is None else str(x) for x in origins if not isinstance(x, str))
        for x in results:
            is_collective = kind == COLLECTIVE
            self._origins[id(x)] = (weakref.ref(x), self._collective if is_collective else self._count)
            self._collective, self._count = self._collective - is_collective, self._count + (not is_collective)
            self._seen.add(kind, name, x, self._unit, self._line, inputs)

    def end(self, kind: type, terms: Sequence[Tree]) -> None:
        for number, term in enumerate(terms):
            of = Tensor if kind is Tensor else type(term)
            for what in ("total", "count")[: 1 + (of is Mean)]:
                x = getattr(term, what)
                made = self._origin(x) if isinstance(x, Tensor) else None
                value = x if what == "total" else on_device(x, term.total.device)
                inputs = str(made) if isinstance(made, int) else ""
                name = f"{LOSS}{what} {number} ({of.__name__})"
                self._seen.add("operator", name, value, self._unit, self._line, inputs)


def _collective_name(collective: Any, dims: tuple[int, int]) -> str:
    dim = f"dim={dims[0]}" if dims[0] == dims[1] else f"split={dims[0]}, join={dims[1]}"
    how = [collective.op] * (collective.op != "sum") + [dim] * any(dims) + ["sizes"] * (collective.sizes is not None)
    how += [f"by={collective.by}"] * bool(collective.by)
    return collective.kind + f"({', '.join(how)})" * bool(how) + f" over {collective.axis!r}"


def _caller(frame: Any) -> str:
    """Return the file that called the operator; torch's modules belong to the program."""
    while frame.f_code.co_filename.startswith(CODE[1]) and "modules" not in frame.f_code.co_filename:
        frame = frame.f_back
    return str(frame.f_code.co_filename)
