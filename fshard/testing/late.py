"""Asynchronous collectives of a simulated world, which deliver results at `wait`, as on a GPU, and detect races.

Note [Late collectives]
    A collective on a GPU reads input and writes output at any time between start and wait. Simulated collectives finish
    at once, so a program that uses the memory before the wait is right by chance. A late world raises for such uses:

    1. A collective that starts may not read outputs of an unfinished collective, nor write to inputs or outputs of one.
       Then the new collective keeps its result aside, and fills its output with `poison`.
    2. At the wait, the collective's input and output must be unchanged; then the output gets the result.
    3. When a rank ends, it must have waited for all its collectives.
    4. Peers may read lent memory (Note [Lent memory] in `comm/ranks.py`) after this rank has waited. So data sent from
       lent memory must be unchanged when the memory is freed, or when the rank ends.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.ranks import Call
from ..core.storage import as_bytes, from_bytes

_ALIGNED = 64  # bytes, as torch aligns: the bits of a matrix product may depend on alignment


class InFlightError(RuntimeError):
    """Raised for access to memory of an unfinished collective, and for a collective without a wait."""


def poison(x: Tensor) -> Tensor:
    """Fill a tensor in place with NaN, True, or bytes 0xA5 (integers), and return it."""
    number = 1 if x.dtype == torch.bool else 0xFF if x.dtype.is_floating_point or x.dtype.is_complex else 0xA5
    if x.is_contiguous():
        as_bytes(x).fill_(number)
    else:
        x.copy_(poison(torch.empty_like(x, memory_format=torch.contiguous_format)))
    return x


@dataclass(eq=False)
class Late:
    """An unfinished collective of a late world (an `Exchange` of `comm/ranks.py`): `wait` writes its results."""

    call: Call
    where: str  # line of user code
    sends: Sequence[Tensor]
    reads: Sequence[Tensor]  # `sends`; of a gather, without this rank's tensor, which is in `writes`
    writes: Sequence[Tensor]
    results: Sequence[Tensor]
    parts: Sequence[Tensor]  # the result of `wait`
    beside: UnderWay
    before: Sequence[Tensor] = ()  # bytes of `reads` and `writes` at the start

    def __str__(self) -> str:
        return f"{self.call}, started at {self.where}"

    def wait(self) -> Sequence[Tensor]:
        """Copy results to outputs. InFlightError if memory was changed."""
        if not self.beside.end(self):
            return self.parts
        for number, (x, before) in enumerate(zip((*self.reads, *self.writes), self.before, strict=True)):
            if not torch.equal(as_bytes(x), before):
                what = "what it sends" if number < len(self.reads) else "the place of its result"
                raise InFlightError(f"{self} was under way when {what} was written to: wait for it first")
        with torch.no_grad():
            for place, result in zip(self.writes, self.results, strict=True):
                place.copy_(result)
        self.beside.lent.sent(self)
        return self.parts

    def done(self) -> None:
        """Do nothing: ranks share no memory."""


class _Memory:
    def __init__(self, size: int):
        memory = bytearray(size + _ALIGNED)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _ALIGNED
        self.bytes, self.sent = memoryview(memory)[start : start + size], list[tuple[str, int, bytes]]()

    def changed(self) -> list[str]:
        # compares bytes, not tensors: a finalizer may run while operators of torch are traced
        return [name for name, begin, data in self.sent if self.bytes[begin : begin + len(data)] != data]


class Lent:
    """One rank's lent memory (Note [Lent memory] in `comm/ranks.py`)."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}  # by address, until a finalizer has compared data
        self._changed: list[str] = []  # collectives with changed data in freed memory

    def empty(self, numel: int, like: Tensor) -> Tensor:
        size = numel * like.itemsize
        if not size or like.device.type != "cpu":
            return like.new_empty(numel)
        memory = _Memory(size)
        array = (ctypes.c_char * size).from_buffer(memory.bytes)  # freed with the tensor's storage
        x = torch.frombuffer(array, dtype=torch.uint8)  # (bytes,)
        self._memories[x.data_ptr()] = memory
        weakref.finalize(array, self._freed, x.data_ptr()).atexit = False
        return from_bytes(x, like.dtype)

    def sent(self, work: Late) -> None:
        for x in {id(x): x for x in work.sends}.values():
            for address, memory in [*self._memories.items()]:  # a copy: memory may be freed meanwhile
                begin = x.data_ptr() - address
                if 0 <= begin < len(memory.bytes):
                    memory.sent.append((str(work), begin, bytes(memory.bytes[begin : begin + x.nbytes])))

    def _freed(self, address: int) -> None:
        self._changed += self._memories.pop(address).changed()

    def check(self) -> None:
        alive = [name for memory in [*self._memories.values()] for name in memory.changed()]
        if changed := [*self._changed, *alive]:
            raise InFlightError(
                f"{'; '.join(changed)}: memory that is sent without a copy was written to after the wait, when a peer "
                "may still read it: write to a clone"
            )


class UnderWay:
    """One rank's unfinished collectives."""

    def __init__(self) -> None:
        self._works: dict[Late, None] = {}
        self.lent = Lent()

    def start(self, work: Late) -> Late:
        """Fill `writes` with poison. InFlightError if another unfinished collective uses the memory."""
        if any(_overlap(x, work.writes) for x in work.reads):
            raise InFlightError(f"{work.call} at {work.where} would send from memory that it receives into")
        for other in self._works:
            if any(_overlap(x, other.writes) for x in work.reads):
                raise InFlightError(f"{work.call} at {work.where} would send what is still to arrive by {other}")
            if any(_overlap(x, [*other.reads, *other.writes]) for x in work.writes):
                raise InFlightError(f"{work.call} at {work.where} would write to memory of {other}, which is under way")
        with torch.no_grad():
            for place in work.writes:
                poison(place)
        work.before = [as_bytes(x).clone() for x in (*work.reads, *work.writes)]
        self._works[work] = None
        return work

    def end(self, work: Late) -> bool:
        return work in self._works and self._works.pop(work) is None

    def check_none(self) -> None:
        if self._works:
            named = "; ".join(str(work) for work in self._works)
            raise InFlightError(f"nobody has waited for {len(self._works)} collective(s): {named}")
        self.lent.check()


def _overlap(x: Tensor, others: Iterable[Tensor]) -> bool:
    begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
    return any(y.data_ptr() < end and begin < y.data_ptr() + y.nbytes for y in others if x.numel() and y.numel())
