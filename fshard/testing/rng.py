"""Process-wide state of a simulated run: random generators (python, numpy, torch), one per rank; torch's threads."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_MT19937 = 2500  # bytes of a generator's state: 624 words and a position


@contextmanager
def with_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads in a block: the bits of sums depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Python:
    """The generator of the `random` module.

    Reading the generator's state takes long. So `put_away` draws one number: if this is the rank's next number, the
    rank has drawn nothing; else `put_away` reads the state, and moves its position back by one.
    """

    def __init__(self, num_ranks: int):
        self._before = random.getstate()
        seeds = random.Random()
        seeds.setstate(self._before)
        ranks = [random.Random(seeds.getrandbits(64)) for _ in range(num_ranks)]
        self._states = [rank.getstate() for rank in ranks]
        self._next: list[int | None] = [rank.getrandbits(32) for rank in ranks]

    def bring(self, rank: int) -> None:
        random.setstate(self._states[rank])

    def put_away(self, rank: int) -> None:
        if self._next[rank] is None:
            self._states[rank] = random.getstate()
        elif random.getrandbits(32) != self._next[rank]:
            version, (*words, place), gauss = random.getstate()
            self._states[rank] = version, (*words, place - 1), gauss
            self._next[rank] = None

    def restore(self) -> None:
        random.setstate(self._before)


class _Numpy:
    """The global generator of numpy, if numpy was imported before the run.

    Saving numpy's full state (with a cached normal number) takes long, so `put_away` saves it only for ranks that have
    drawn.
    """

    def __init__(self, num_ranks: int, np: ModuleType):
        self._random = np.random
        self._bits, self._before = np.random.get_bit_generator(), np.random.get_state(legacy=False)
        seeds = np.random.RandomState()
        seeds.set_state(self._before)
        self._by_rank = [np.random.MT19937(seeds.randint(2**32, size=4, dtype=np.uint32)) for _ in range(num_ranks)]
        self._seeded = [self._words(bits) for bits in self._by_rank]
        self._states = dict[int, object]()  # of ranks that have drawn

    @staticmethod
    def _words(bits: Any) -> bytes:  # `bits`: a generator of numpy, unknown to mypy
        # faster than `bits.state`
        return ctypes.string_at(bits.ctypes.state_address, _MT19937)

    def bring(self, rank: int) -> None:
        self._random.set_bit_generator(self._by_rank[rank])
        if rank in self._states:
            self._random.set_state(self._states[rank])

    def put_away(self, rank: int) -> None:
        bits = self._random.get_bit_generator()
        if rank in self._states or bits is not self._by_rank[rank] or self._words(bits) != self._seeded[rank]:
            self._by_rank[rank], self._states[rank] = bits, self._random.get_state(legacy=False)

    def restore(self) -> None:
        self._random.set_bit_generator(self._bits)
        self._random.set_state(self._before)


class _Torch:
    def __init__(self, num_ranks: int, device: torch.device, get: Callable[[], Tensor], set_: Callable[..., object]):
        self._get, self._set, self._before = get, set_, get()
        seeds = torch.Generator(device)
        seeds.set_state(self._before)
        self._states = []
        for _ in range(num_ranks):
            seed = int(torch.randint(2**63 - 1, (), generator=seeds, device=device))
            self._states.append(torch.Generator(device).manual_seed(seed).get_state())

    def bring(self, rank: int) -> None:
        self._set(self._states[rank])

    def put_away(self, rank: int) -> None:
        self._states[rank] = self._get()

    def restore(self) -> None:
        self._set(self._before)


def generators_of(num_ranks: int, device: torch.device) -> list[_Torch | _Python | _Numpy]:
    """Return the random states of simulated ranks, seeded from the process's states."""
    host = torch.default_generator
    kinds: list[_Torch | _Python | _Numpy] = [
        _Torch(num_ranks, torch.device("cpu"), host.get_state, host.set_state),
        _Python(num_ranks),
    ]
    np = sys.modules.get("numpy")
    if np is not None and hasattr(np.random, "set_bit_generator"):
        kinds.append(_Numpy(num_ranks, np))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        get, set_ = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
        kinds.append(_Torch(num_ranks, device, get, set_))
    return kinds
