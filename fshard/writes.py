"""What a loss writes in place to the parameters it is given: an error, for the value would be lost.

Note [Version counters]
    torch counts the in-place operations on a tensor and its views. Each gathered buffer of trainable leaves, and each
    frozen leaf, is given a counter of its own, so that it is known what was written to; an alias without memory shares
    the counter, so that watching keeps no buffer alive. `batch_norm` updates running statistics without counting, so
    a frozen leaf that could be one refuses that call. Where parameters are not gathered, so that leaves are memory of
    the caller's, small frozen ones are copied: the caller's stay as they were. Writes through `.data` are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .nodes import is_tracing

_SMALL = 1 << 16  # elements: running statistics and counters are fewer

_REMEDY = (
    "A loss changes nothing that it is given: work on a clone, and return its new value, as aux (has_aux=True) or, to "
    "have it in the next step, as extra (train_step(..., with_extra=True))."
)
_CHANGED = " The parameters that were passed are changed by it: do not use them again."


class _Guarded(Tensor):
    """A frozen 1-D leaf; what is computed with it are plain tensors. ValueError if batch_norm would write to it."""

    path: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _statistics(func, args, kwargs or {}):
            if isinstance(x, _Guarded):
                raise _refusal(x.path)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Refusing(TorchFunctionMode):
    """The same while a graph is traced: fake tensors can be of no other class."""

    def __init__(self, frozen: dict[tuple[int, int], str]):
        super().__init__()
        self._frozen = frozen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _statistics(func, args, kwargs or {}):
            if isinstance(x, Tensor) and _place(x) in self._frozen:
                raise _refusal(self._frozen[_place(x)])
        return func(*args, **(kwargs or {}))


def _place(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _refusal(path: str) -> ValueError:
    return ValueError(f"the loss function: batch_norm would write to leaf {path!r} in place. {_REMEDY}")


def _statistics(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The running statistics that a call updates."""
    if getattr(func, "__name__", "").removeprefix("native_") != "batch_norm":
        return []
    at = 1 if func is F.batch_norm else 3  # torch's own take weight and bias first
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    return [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")] if training else []


class Writes:
    """The tensors a loss was given, and whether it wrote to them."""

    def __init__(self) -> None:
        self._watched: list[tuple[Tensor, Sequence[Any], bool]] = []
        self._nothing: dict[torch.device, Tensor] = {}
        self._frozen: dict[tuple[int, int], str] = {}  # while a graph is traced

    def refusing(self) -> AbstractContextManager[Any]:
        """The block in which the loss runs."""
        return _Refusing(self._frozen) if is_tracing() else nullcontext()

    def watch(self, x: Tensor, slots: Sequence[Any], own: bool) -> Tensor:
        """What has these slots, with a version counter of its own; `own`: it is memory of the parameters passed."""
        x = x.data
        counter = x.detach()
        if not is_tracing():  # fake tensors have no memory
            counter.data = self._nothing.setdefault(x.device, x.new_empty(0))
        self._watched.append((counter, slots, own))
        return x

    def frozen(self, leaf: Tensor, slot: Any, own: bool) -> Tensor:
        """A frozen leaf, watched by itself."""
        if own and leaf.dim() < 2 and leaf.numel() <= _SMALL and not is_tracing():
            leaf, own = leaf.clone(), False  # what is written to is not the caller's
        leaf = self.watch(leaf, [slot], own)
        if leaf.dim() != 1 or not leaf.is_floating_point():
            return leaf
        if is_tracing():
            self._frozen[_place(leaf)] = slot.path
            return leaf
        guarded = leaf.as_subclass(_Guarded)
        guarded.path = slot.path
        return guarded

    def check(self) -> None:
        """ValueError if anything was written to since it was watched."""
        for counter, slots, own in self._watched:
            if counter._version:
                named = ", ".join(repr(slot.path) for slot in slots[:4]) + ", ..." * (len(slots) > 4)
                which = f"leaf {named}" if len(slots) == 1 else f"one of the leaves {named}"
                changed = _CHANGED if own and not is_tracing() else ""
                raise ValueError(f"the loss function: {which} was written to in place.{changed} {_REMEDY}")
        self._watched.clear()
