"""Asynchronous collectives of a simulated world, which deliver results at `wait`, as on a GPU, and detect races.

Note [Late collectives]
    A collective on a GPU reads its input and writes its output at some time between its start and its wait. Simulated
    collectives on a CPU finish at once, so a program that reads the output too early, or writes to the input too early,
    is correct by chance. In a late world a collective keeps its result aside, fills its output with `poison`, and
    `wait` copies the result to the output. At the start, a collective must not read or write memory that an unfinished
    collective writes, and must not write memory that an unfinished collective reads. At the wait, input and output must
    be unchanged since the start. A collective that was not waited for is an error when the rank ends.
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
    """Raised for access to the memory of an unfinished collective, and for a collective that was never waited for."""


def poison(x: Tensor) -> Tensor:
    """Fill a tensor in place, and return it. Values are NaN (floating-point, complex), True, or integer bytes 0xA5."""
    number = 1 if x.dtype == torch.bool else 0xFF if x.dtype.is_floating_point or x.dtype.is_complex else 0xA5
    if x.is_contiguous():
        as_bytes(x).fill_(number)
    else:
        x.copy_(poison(torch.empty_like(x, memory_format=torch.contiguous_format)))
    return x


@dataclass(eq=False)
class Late:
    """An unfinished collective of a late world: an `Exchange` that writes its results to `writes` at `wait`."""

    call: Call
    where: str  # the line of user code that started the collective
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    results: Sequence[Tensor]
    parts: Sequence[Tensor]  # the result of `wait`
    beside: UnderWay

    def __post_init__(self) -> None:
        self._before = [as_bytes(x).clone() for x in (*self.reads, *self.writes)]

    def __str__(self) -> str:
        return f"{self.call}, started at {self.where}"

    def wait(self) -> Sequence[Tensor]:
        """Copy the results to their outputs, and return `parts`. Raises InFlightError if memory was changed."""
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
        """Do nothing: no memory is shared with another rank."""


class UnderWay:
    """The unfinished collectives of one rank of a late world: those started and not yet waited for."""

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
        """Start a collective that copies `results` to `writes` at its `wait`, which returns `parts`.

        Fills `writes` with poison. Raises InFlightError if memory overlaps with that of an unfinished collective.
        """
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
        """Remove a collective from the unfinished ones, and return whether it was among them."""
        return work in self._works and self._works.pop(work) is None

    def check_none(self) -> None:
        """Raise InFlightError if any collective is unfinished."""
        if self._works:
            named = "; ".join(str(work) for work in self._works)
            raise InFlightError(f"nobody has waited for {len(self._works)} collective(s): {named}")


def _overlap(x: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether `x` shares memory with any of `others`; all tensors are contiguous."""
    begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
    return any(y.data_ptr() < end and begin < y.data_ptr() + y.nbytes for y in others if x.numel() and y.numel())
