"""Checks that a loss does not write in place to the parameters it is given: the new value would be lost.

Note [Writes in place]
    torch counts the in-place operations on a tensor and its views. Each gathered buffer of trainable leaves, and each
    frozen leaf, gets a counter of its own, which tells what was written to. The tape keeps an alias without memory that
    shares the counter, so watching keeps no buffer alive. But `batch_norm` updates running statistics without counting.
    Frozen leaves as small as such statistics are therefore copies, which are compared with their old values after the
    loss: any write is noticed, and the caller's tensors stay as they were. A write through `.data` to a larger leaf, or
    to a trainable one, is not noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..core.tracing import is_tracing

_SMALL = 1 << 16  # elements: running statistics and counters have fewer
_REMEDY = (
    "A loss changes nothing that it is given: work on a clone, and return its new value, as aux (has_aux=True) or, to "
    "have it in the next step, as extra (train_step(..., with_extra=True))."
)

# torch's own words for a write to a view that an autograd function returned, as `anchors.Bind` does
_VIEWS = ("was created inside a custom Function", "is the output of a function that returns multiple views")
_OF_LEAVES = re.compile(r"Output (\d+) of _?Bind(?:Backward)? is")
_CHANGED = " The parameters that were passed are changed by it: do not use them again."


class _Refusing(TorchFunctionMode):
    """ValueError if batch_norm would write to a leaf: for tracing, where there are no values to compare."""

    def __init__(self, frozen: dict[tuple[int, int], str]):
        super().__init__()
        self._frozen = frozen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _statistics(func, args, kwargs or {}):
            if isinstance(x, Tensor) and _place(x) in self._frozen:
                path = self._frozen[_place(x)]
                raise ValueError(f"the loss function: batch_norm would write to leaf {path!r} in place. {_REMEDY}")
        return func(*args, **(kwargs or {}))


def _place(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _statistics(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The running statistics that this call would update, if it is a batch_norm in training mode."""
    if getattr(func, "__name__", "").removeprefix("native_") != "batch_norm":
        return []
    at = 1 if func is F.batch_norm else 3  # torch.batch_norm and its kin take weight and bias first
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    return [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")] if training else []


class Writes:
    """Watches the tensors that a loss is given, and raises if it wrote to them."""

    def __init__(self) -> None:
        self._watched: list[tuple[Tensor, Sequence[Any], bool]] = []
        self._copies: list[tuple[Tensor, Tensor, Sequence[Any]]] = []
        self.bound: list[Sequence[Any]] = []  # the trainable slots of each unit, in the order of `Bind`'s results
        self._nothing: Tensor | None = None
        self._tracing = is_tracing()
        self._frozen: dict[tuple[int, int], str] = {}  # while a graph is traced

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """The block in which the loss runs: torch's errors about writes in place become errors that name the leaf."""
        with _Refusing(self._frozen) if self._tracing else nullcontext():
            try:
                yield
            except RuntimeError as failure:
                if not any(words in str(failure) for words in _VIEWS):
                    raise
                raise self._refused(str(failure)) from failure

    def _refused(self, words: str) -> ValueError:
        """The error for a write that torch refused with these words."""
        if written := self._counted():
            return _written(written)
        number = _OF_LEAVES.search(words)
        if number is None:
            return ValueError(
                "the loss function: it wrote in place to a view of a leaf it was given, or of one of several results "
                f"of an operator. {_REMEDY}"
            )
        at = int(number[1])
        leaves = {slots[at].path: slots[at] for slots in self.bound if at < len(slots)}
        return _written([(list(leaves.values()), False)])

    def watch(self, x: Tensor, slots: Sequence[Any], own: bool) -> Tensor:
        """An alias of `x`, the leaves `slots`, with a version counter of its own; `own`: the memory is the caller's."""
        x = x.data
        counter = x.detach()
        if not self._tracing:  # fake tensors have no memory
            if self._nothing is None:
                self._nothing = x.new_empty(0)
            counter.data = self._nothing
        self._watched.append((counter, slots, own))
        return x

    def frozen(self, leaves: Sequence[Tensor], slots: Sequence[Any], own: bool) -> list[Tensor]:
        """The frozen leaves of one unit and kind, each watched by itself; small ones are copies."""
        found, small = list(leaves), [n for n, x in enumerate(leaves) if x.dim() < 2 and x.numel() <= _SMALL]
        if self._tracing:
            self._frozen.update((_place(found[n]), slots[n].path) for n in small)
        elif small:
            flat = torch.cat([leaves[n].reshape(-1) for n in small])
            self._copies.append((flat, flat.clone(), [slots[n] for n in small]))
            for n, copy in zip(small, flat.split([leaves[n].numel() for n in small]), strict=True):
                found[n] = copy.view(leaves[n].shape)
        copied = () if self._tracing else small
        return [self.watch(x, [slots[n]], own and n not in copied) for n, x in enumerate(found)]

    def check(self) -> None:
        """Raise ValueError if anything was written to since it was watched."""
        written = self._counted()
        for flat, before, slots in self._copies:
            written += _changed(flat.detach().view(torch.uint8), before.view(torch.uint8), slots)
        if written:
            raise _written(written)
        self._watched.clear()
        self._copies.clear()

    def _counted(self) -> list[tuple[Sequence[Any], bool]]:
        """The leaves, or groups of leaves with one counter, that were written to."""
        counted = [w for w in self._watched if not w[0].is_inference()]  # under inference_mode torch counts nothing
        return [(slots, own) for counter, slots, own in counted if counter._version]


def _changed(now: Tensor, before: Tensor, slots: Sequence[Any]) -> list[tuple[Sequence[Any], bool]]:
    """The leaves whose bytes differ. On an accelerator a device-side assertion instead."""
    if now.device.type != "cpu":  # the host does not wait: the device stops with these words if they differ
        torch._assert_async((now == before).all(), str(_written([(slots, False)])))
        return []
    if torch.equal(now, before):
        return []
    sizes = [slot.numel * (now.numel() // sum(slot.numel for slot in slots)) for slot in slots]
    pairs = zip(now.split(sizes), before.split(sizes), slots, strict=True)
    return [([slot], False) for a, b, slot in pairs if not torch.equal(a, b)]


def _written(found: Sequence[tuple[Sequence[Any], bool]]) -> ValueError:
    """The error for the leaves, or groups of which one leaf is meant, with whether the memory is the caller's."""
    names = dict.fromkeys(_named(slots) for slots, _ in found)
    changed = _CHANGED if any(own for _, own in found) and not is_tracing() else ""
    return ValueError(f"the loss function: it wrote in place to leaf {' and '.join(names)}.{changed} {_REMEDY}")


def _named(slots: Sequence[Any]) -> str:
    names = ", ".join(repr(slot.path) for slot in slots[:4]) + ", ..." * (len(slots) > 4)
    return names if len(slots) == 1 else f"(one of {names})"
