"""Collectives that deliver late: what a GPU's may do between their start and their wait, in a simulated world.

Note [Late collectives]
    A collective on a GPU reads its input and writes its output at some time between its start and its wait. On a CPU
    its output is there at once, so a program that reads it too early, or writes to the input too early, is right by
    luck. In a late world the result of a collective is kept aside when it starts, its places are filled with `poison`,
    and `wait` brings the result. At the start a collective may not read or write memory that another one under way
    writes, nor write what one reads; at the wait its input and its places must be what they were. What nobody has
    waited for is an error when the rank ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.log import Call
from ..core.bits import as_bytes
from ..core.callsite import call_site


class InFlightError(RuntimeError):
    """What a collective under way reads or writes was touched, or nobody has waited for it."""


def poison(x: Tensor) -> Tensor:
    """Fill a tensor, in place: with NaN, of whole numbers every byte with 0xA5, of truth values with True."""
    number = 1 if x.dtype == torch.bool else 0xFF if x.dtype.is_floating_point or x.dtype.is_complex else 0xA5
    if x.is_contiguous():
        as_bytes(x).fill_(number)
    else:
        x.copy_(poison(torch.empty_like(x, memory_format=torch.contiguous_format)))
    return x


@dataclass(eq=False)
class Late:
    """A collective under way in a late world; an exchange, whose places are filled when it is waited for."""

    call: Call
    where: str  # the user's line that started it
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    results: Sequence[Tensor]
    parts: Sequence[Tensor]  # what `wait` gives
    beside: UnderWay

    def __post_init__(self) -> None:
        self._before = [as_bytes(x).clone() for x in (*self.reads, *self.writes)]

    def __str__(self) -> str:
        return f"{self.call}, started at {self.where}"

    def wait(self) -> Sequence[Tensor]:
        """The results, in their places."""
        if not self.beside.end(self):
            return self.parts
        for number, (x, before) in enumerate(zip((*self.reads, *self.writes), self._before, strict=True)):
            if not torch.equal(as_bytes(x), before):
                what = "what it sends" if number < len(self.reads) else "the place of its result"
                raise InFlightError(f"{self} was under way when {what} was written to: wait for it first")
        with torch.no_grad():
            for place, result in zip(self.writes, self.results, strict=True):
                place.copy_(result)
        return self.parts

    def done(self) -> None:
        """Nothing is shared with another rank."""


class UnderWay:
    """The collectives that a rank of a late world has started and not waited for."""

    def __init__(self) -> None:
        self._works: dict[Late, None] = {}

    def start(
        self,
        call: Call,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        results: Sequence[Tensor],
        parts: Sequence[Tensor],
    ) -> Late:
        """Have results arrive in `writes` when they are waited for, which gives `parts`."""
        reads = list({id(x): x for x in reads}.values())
        self._check(call, reads, writes)
        with torch.no_grad():
            for place in writes:
                poison(place)
        work = Late(call, call_site(), reads, writes, results, parts, self)
        self._works[work] = None
        return work

    def _check(self, call: Call, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        if any(_overlap(x, writes) for x in reads):
            raise InFlightError(f"{call} at {call_site()} would send from memory that it receives into")
        for work in self._works:
            if any(_overlap(x, work.writes) for x in reads):
                raise InFlightError(f"{call} at {call_site()} would send what is still to arrive by {work}")
            if any(_overlap(x, [*work.reads, *work.writes]) for x in writes):
                raise InFlightError(f"{call} at {call_site()} would write to memory of {work}, which is under way")

    def end(self, work: Late) -> bool:
        """Remove a collective; returns whether it was under way."""
        return work in self._works and self._works.pop(work) is None

    def check_none(self) -> None:
        """InFlightError if anything is still under way."""
        if self._works:
            named = "; ".join(str(work) for work in self._works)
            raise InFlightError(f"nobody has waited for {len(self._works)} collective(s): {named}")


def _overlap(x: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether `x` shares memory with any of `others`, all contiguous."""
    begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
    return any(y.data_ptr() < end and begin < y.data_ptr() + y.nbytes for y in others if x.numel() and y.numel())
