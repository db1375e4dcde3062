"""The reads of a function under `remat`: tensors from outside, and the inputs in their place.

Note [Reads]
    1. `remat` differentiates a function with respect to its inputs, so each tensor that the function reads becomes an
       input. Units of parameters report their reads (`Reads.unit`). A function mode sees any other tensor in an
       operator's arguments, and knows the tensor by identity. Inside a user's `torch.autograd.Function` or torch.jit
       the mode sees nothing: if a result of the first run then has a gradient, `remat` raises.
    2. The first run computes without derivatives. A computed tensor kept outside the results would lack its gradient:
       the run watches tensors computed from inputs, and raises if one outlives the run.
    3. A tensor from outside without a derivative is a constant. A later run may read the first run's constants, unless
       written to since, and tensors made by an earlier run (a cache). If the function makes tensors unseen by modes
       (torch.from_numpy), any unknown constant passes: it may be such a tensor.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..core import func_levels
from ..core.random import HOST, Place, accelerators, bookmark_of
from ..core.storage import address, is_inexact, writes
from ..core.tracing import RERUN, Args, Kwargs, Operator, assigned, is_tracing, unseen
from ..grad.tape import Tape
from ..sharding.access import Shown

# Private, here and below: no public function unwraps tensors of a transform (test_remat.py notices a removal)
_functorch = torch._C._functorch
_IN_PLACE = re.compile(r"[^_]_$|^__(setitem|i\w+)__$")  # functions writing to their first argument
_CUTS = {Tensor.detach, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
Positions = dict[Hashable, range]
KnownTensors = dict[int, weakref.ref[Tensor]]  # by `id`
MadeTensors = dict[int, tuple[weakref.ref[Tensor], int | None]]
_AS_ARGUMENT = "give it to the function as an argument"


class Reads(TorchFunctionMode):
    """One run of a function. The function gets `given` in place of the tensors it reads (Note [Reads])."""

    def __init__(self, given: Sequence[Tensor], outer: Reads | None = None):
        super().__init__()
        self.given = list(given)  # arguments, then tensors read
        # positions in `given`, by `id` of a tensor, or (tape, number) of a unit
        self.positions: Positions = {}
        self.outer = outer  # reads of a function around this one
        self.depth = _functorch.current_level() if func_levels.inside() else 0  # levels of torch.func around the run
        # tensors from outside with `writes`; after the run also tensors made by the run
        self.constants: MadeTensors = {}
        self.made: KnownTensors = {}
        self._memory = set[int]()  # addresses of tensors made in torch.func, some by no operator
        self._watched: KnownTensors = {}  # tensors computed from inputs with derivatives
        for x in self.given:
            self._add(x)
        # by generator: a function to restore the state before the run
        self.generators: dict[Place, Callable[[], object]] = {}
        self._shown: dict[Tape, Shown | None] = {}

    def run(self, fn: Callable[[], object]) -> object:
        """Run `fn`; then restore containers read before."""
        with assigned(RERUN, self), self:
            try:
                return fn()
            finally:
                for tape, shown in self._shown.items():
                    if tape.shown:
                        tape.shown.settle()
                    tape.shown = shown
                self._shown.clear()

    def unit(self, tape: Tape, number: int) -> Sequence[Tensor]:
        if tape not in self._shown:  # containers read before this run have other leaves
            self._shown[tape] = tape.shown
            if tape.shown:
                tape.shown.let_go()
                tape.shown.settle()
                tape.shown = Shown()
        if (tape, number) not in self.positions:
            self._gather(tape, number)
        return self._at((tape, number))

    def _at(self, key: Hashable) -> list[Tensor]:
        place = self.positions[key]
        return self.given[place.start : place.stop]

    def _gather(self, tape: Tape, number: int) -> None:
        refuse_other_reads()

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if RERUN.get() is not self:  # an inner `remat` runs
            return func(*args, **(kwargs or {}))
        args, kwargs = self._replaced(args), self._replaced(kwargs or {})
        if kwargs.get("generator") is not None:
            self._note_generator(kwargs["generator"])
        out = func(*args, **kwargs)
        self.note(func, args, kwargs, out)
        return out

    def _note_generator(self, place: Place) -> None:
        if place not in self.generators:
            with func_levels.aside():
                self.generators[place] = bookmark_of(place)
        if self.outer is not None:
            self.outer._note_generator(place)

    def note(self, func: Operator, args: Args, kwargs: Kwargs, out: object) -> None:
        before = list(_tensors((args, kwargs)))
        watched = self._watches(func, args, kwargs, before)
        inside = func_levels.inside()
        outside = {0, *map(_memory, (*self.given, *before))} - self._memory if inside else set()
        for x in _tensors(out):
            if inside:
                self._memory |= {_memory(x)} - outside
            if not _knows(self.made, x):
                self._add(x, watched and is_inexact(x))

    def _watches(self, func: Operator, args: Args, kwargs: Kwargs, before: Sequence[Tensor]) -> bool:
        return False

    def _add(self, x: Tensor, watched: bool = False) -> None:
        self.made[id(x)] = weakref.ref(x)
        if watched:
            self._watched[id(x)] = self.made[id(x)]

    def _is_made(self, x: Tensor) -> bool:
        return _knows(self.made, x) or bool(self._memory and _memory(x) in self._memory)

    def _living(self) -> MadeTensors:
        return {n: (ref, writes(func_levels.unwrapped(x))) for n, ref in self.made.items() if (x := ref()) is not None}

    def _replaced(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.instead_of(x)
        if type(x) in (tuple, list):
            return type(x)(map(self._replaced, x))
        return {name: self._replaced(y) for name, y in x.items()} if type(x) is dict else x

    def instead_of(self, x: Tensor) -> Tensor:
        """Return the input for a tensor from outside with derivatives; any other tensor itself."""
        if id(x) in self.positions:
            return self._at(id(x))[0]
        if getattr(type(x), "reads_itself", False) or self._is_made(x):
            return x
        is_known = self.outer is not None and self.outer.knows(x)
        if is_known or _functorch.maybe_get_level(x) <= self.depth:
            return self._from_outside(x)
        inner = _functorch.get_unwrapped(x)  # `x` belongs to a transform inside the function
        instead = self.instead_of(inner)
        if instead is inner:
            return x
        if not _functorch.is_batchedtensor(x):
            raise RuntimeError(
                f"fshard.remat: a transform of torch.func inside of the function differentiates by {_form(x)} from "
                f"outside of it: {_AS_ARGUMENT}"
            )
        return _functorch._add_batch_dim(instead, _functorch.maybe_get_bdim(x), _functorch.maybe_get_level(x))

    def knows(self, x: Tensor) -> bool:
        """True if this function, or a function around it, has read a tensor, even of an ended level."""
        return id(x) in self.positions or (self.outer is not None and self.outer.knows(x))

    def _from_outside(self, x: Tensor) -> Tensor:
        return x


class FirstReads(Reads):
    """The first run. `inputs`: the arguments, then all tensors read, with their derivatives."""

    def __init__(self, args: Iterable[Tensor], outer: Reads | None):
        # an outer function's mode does not see the arguments of `remat`
        self.inputs = [x if outer is None else outer.instead_of(x) for x in args]
        super().__init__([stripped(x) for x in self.inputs], outer)
        self._had_forward_mode = forward_ad._is_fwd_grad_enabled()
        self.kept: list[Tensor] = []  # kept alive, so no other tensor gets their ids
        self._versions = [writes(x) for x in map(func_levels.unwrapped, self.inputs)]
        for x, given in zip(self.inputs, self.given, strict=True):
            self._add(given, is_active(x))
        # the function may draw on any device
        for device in (HOST, *accelerators()):
            self._note_generator(device)

    def _gather(self, tape: Tape, number: int) -> None:
        with assigned(RERUN, self.outer):
            leaves = tape.touch(number)
        with assigned(RERUN, None):
            self._take((tape, number), leaves)

    def _take(self, key: Hashable, read: Sequence[Tensor]) -> None:
        self.positions[key] = range(len(self.given), len(self.given) + len(read))
        for x in read:
            self.inputs.append(x)
            self.given.append(stripped(x))
            self._versions.append(writes(func_levels.unwrapped(x)))
            self._add(self.given[-1], is_active(x))

    def _from_outside(self, x: Tensor) -> Tensor:
        true = x if self.outer is None else self.outer.instead_of(x)
        if not (is_active(true) or func_levels.is_wrapped(true)):
            if not (_passes(x) or _is_at(self.constants.get(id(x), (None,))[0], x)):
                self.constants[id(x)] = weakref.ref(x), writes(func_levels.unwrapped(x))
            return true
        self._take(id(x), [true])
        self.kept.append(x)
        return self.given[-1]

    def _watches(self, func: Operator, args: Args, kwargs: Kwargs, before: Sequence[Tensor]) -> bool:
        watched = func not in _CUTS and any(_knows(self._watched, x) for x in before)
        watched = watched and (torch.is_grad_enabled() or self.depth > 0 or self._in_function())
        if watched and (_IN_PLACE.search(getattr(func, "__name__", "")) or "out" in (kwargs or {})):
            self._note_write((kwargs or {}).get("out", args[0]))
        return watched

    def _in_function(self) -> bool:
        """True in a torch.autograd.Function's forward: gradients are off, but results have gradients."""
        # Private: unlike no_grad, torch also switches forward mode off (test_remat.py notices a change)
        return self._had_forward_mode and not (forward_ad._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())

    def _note_write(self, x: object) -> None:
        """Watch a written tensor; RuntimeError if from outside: its gradient would be lost."""
        for target in _tensors(x):
            base = target if target._base is None else target._base
            if not (self._is_made(base) or self._is_made(target)):
                raise RuntimeError(
                    f"fshard.remat: the function writes what it computes to {_form(target)} from outside of it: return "
                    "it as a result"
                )
            self._watched |= {id(x): self.made[id(x)] for x in (target, base) if _knows(self.made, x)}

    def end(self, others: Sequence[object]) -> tuple[Positions, MadeTensors, bool]:
        """Return (positions, constants, is_blind) for later runs. `is_blind`: modes missed some tensors.

        Before the call, drop all results but `others`, the results without derivatives.
        """
        self.given.clear()
        if self._left():
            gc.collect()  # cycles of a recursive function or a caught exception
            for x in self._left():
                raise RuntimeError(
                    f"fshard.remat: the function keeps {_form(x)}, which it has computed, beside its results (in a "
                    "list, an attribute, a container of parameters; an object that is no tree, as a generator, a "
                    "distribution or a closure, is no result): it would have no gradient. Return it as a result, or "
                    "keep x.detach()"
                )
        read = [(ref(), version) for ref, version in self.constants.values()]
        for constant, version in (*zip(self.inputs, self._versions, strict=True), *read):
            if constant is not None and writes(func_levels.unwrapped(constant)) != version:
                raise RuntimeError(
                    f"fshard.remat: the function writes in place to {_form(constant)} from outside of it, and would do "
                    "so again when it runs again: clone it first, and return the new value as a result (buffers of a "
                    "module: fshard.module.functionalize)"
                )
        # if a constant is gone, or is a result, the function made it unseen by modes
        is_blind = any(x is None or any(x is y for y in others) for x, _ in read)
        living = self._living()
        self.constants |= living
        if self.outer is not None:
            self.outer.made |= {number: ref for number, (ref, _) in living.items()}
        self.made.clear()
        return self.positions, self.constants, is_blind

    def _left(self) -> list[Tensor]:
        return [x for ref in self._watched.values() if (x := ref()) is not None]


class SecondReads(Reads):
    """A later run."""

    def __init__(self, inputs: Sequence[Tensor], positions: Positions, constants: MadeTensors, is_blind: bool):
        super().__init__(inputs)
        self.positions, self.constants, self._is_blind = positions, constants, is_blind
        self._seen = set[Hashable]()

    def _at(self, key: Hashable) -> list[Tensor]:
        self._seen.add(key)
        return super()._at(key)

    def _from_outside(self, x: Tensor) -> Tensor:
        ref, version = self.constants.get(id(x), (None, None))
        is_leaf = x.is_leaf and Tensor.requires_grad.__get__(x)  # type: ignore[attr-defined]
        if _is_at(ref, x):
            is_same = writes(func_levels.unwrapped(x)) == version
        else:
            is_same = _passes(x) or (self._is_blind and not is_leaf)
        if not is_same:
            refuse_other_reads()
        return x

    def check(self) -> None:
        if len(self._seen) < len(self.positions):
            refuse_other_reads()
        self.constants |= self._living()


def refuse_other_reads() -> NoReturn:
    raise RuntimeError(
        "fshard.remat: the function reads other tensors when it runs again, or one that was written to since. What it "
        "reads may depend on its arguments alone; what it makes of a tensor from outside by a torch.autograd.Function "
        f"is not known again: {_AS_ARGUMENT}. Parameters that torch.func.functional_call has given a module are gone "
        "when the backward runs: put `remat` around it, or use fshard.module.functionalize"
    )


def _knows(known: KnownTensors, x: Tensor) -> bool:
    return _is_at(known.get(id(x)), x)


def _is_at(ref: weakref.ref[Tensor] | None, x: Tensor) -> bool:
    return ref is not None and ref() is x


def _passes(x: Tensor) -> bool:
    """True for a buffer of one call of a module's function, or a tensor of torch.compile's trace."""
    return getattr(x, "of_call", False) or (isinstance(x, FakeTensor) and not is_tracing())


def _tensors(x: object) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _tensors(y)


def _form(x: Tensor) -> str:
    return f"a {x.dtype} tensor of shape {list(x.shape)}"


def _tensor_levels(x: Tensor) -> Iterator[Tensor]:
    yield x
    while func_levels.is_wrapped(x):
        x = _functorch.get_unwrapped(x)
        yield x


def _memory(x: Tensor) -> int:
    bottom = func_levels.unwrapped(x)
    return address(bottom) if bottom.layout is torch.strided else 0


def is_active(x: Tensor) -> bool:
    """True if a tensor has a gradient or a tangent, at any level of torch.func."""
    if not is_inexact(x):
        return False
    # `unseen`, as a trace would take unknown values in a scan's body for constants
    with unseen() if is_tracing() else nullcontext(), func_levels.aside() as levels:
        for y in _tensor_levels(x):
            level = _functorch.maybe_get_level(y)
            with func_levels.again(levels[len(levels) - level :] if level > 0 else ()):
                # Tensor's getter: a module's parameter always claims to require a gradient
                if Tensor.requires_grad.__get__(y) or (  # type: ignore[attr-defined]
                    not _functorch.is_batchedtensor(y) and forward_ad.unpack_dual(y).tangent is not None
                ):
                    return True
    return False


def stripped(x: Tensor) -> Tensor:
    """Return a tensor's values, still batched, without gradient or tangent at any level."""
    with func_levels.aside():
        return _stripped(x)


def _stripped(x: Tensor) -> Tensor:
    if _functorch.is_batchedtensor(x):
        batch = _functorch.maybe_get_bdim(x), _functorch.maybe_get_level(x)
        return _functorch._add_batch_dim(_stripped(_functorch.get_unwrapped(x)), *batch)
    return _stripped(_functorch.get_unwrapped(x)) if func_levels.is_wrapped(x) else x.detach()
