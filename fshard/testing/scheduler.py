"""A deterministic scheduler for simulated ranks, and fault injection.

Note [The baton]
    Every rank is a thread, and only the thread that holds the baton runs. A rank hands the baton over where it has to
    wait in a collective; the last rank to arrive moves the data for all. So the order is fixed. A hang is a state of
    the scheduler in which no rank can run, and becomes an error that says what each rank waits for. Random states,
    which threads share, are saved and restored at each handover. After a failure every other rank gets the baton once
    more, and stops.
"""

from __future__ import annotations

import contextvars
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor

from ..comm.log import Call
from ..comm.ranks import MismatchError
from ..core.bits import as_bytes, from_bytes
from ..core.callsite import call_site
from .rng import Generators


@dataclass(frozen=True)
class Collective:
    """A collective of a simulated world: its kind, for which unit, along which axis, between which ranks.

    `nbytes` is what one rank sends (where they send unequally much, the one that sends most).
    """

    kind: str
    unit: str
    axis: str
    nbytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Dies:
    """A fault: the rank raises RankDied at its collective number `at`, counted from 0; none if it makes fewer.

    >>> from fshard.testing import World
    >>> try:
    ...     World(2, faults=[Dies(1)]).run(lambda mesh: all_reduce(torch.ones(1), mesh, "shard"))
    ... except RankDied as error:
    ...     str(error).partition(",")[0]
    'rank 1 died at its collective 0'
    """

    rank: int
    at: int = 0


@dataclass(frozen=True)
class Garbage:
    """A fault: every byte that the rank sends in its collective number `at`, counted from 0, is changed.

    The bytes are the same in every run, and the rank's own tensors stay as they are.

    >>> from fshard.testing import World
    >>> def job(mesh):
    ...     return all_gather(torch.arange(1, 3), mesh, "shard").sum() == 6
    >>> [good.item() for good in World(2, faults=[Garbage(1)]).run(job)]
    [False, True]
    """

    rank: int
    at: int = 0


@dataclass(frozen=True)
class Slow:
    """A fault: the rank runs only when no other can go on, which must change no result.

    >>> from fshard.testing import World
    >>> turns = []
    >>> _ = World(3, faults=[Slow(0)]).run(lambda mesh: turns.append(mesh.get_rank()))
    >>> turns
    [1, 2, 0]
    """

    rank: int


Fault = Dies | Garbage | Slow


class RankDied(RuntimeError):
    """A simulated rank died, as `Dies` asked it to."""


class Stopped(BaseException):
    """Ends a rank's thread because another rank failed."""


@dataclass
class Post:
    """What a rank hands over at a collective."""

    rank: int
    call: Call
    own: Sequence[Tensor]
    places: Sequence[Tensor]  # where results go
    act: Callable[[list[Post]], None]
    sent: Sequence[Tensor] = ()  # own, or garbage


def _garbage(x: Tensor, seed: int) -> Tensor:
    """A copy of a tensor in which every byte differs."""
    data = as_bytes(x)
    generator = torch.Generator("cpu").manual_seed(seed)
    flips = torch.randint(1, 256, data.shape, dtype=torch.uint8, generator=generator, device="cpu")
    return from_bytes(data ^ flips.to(x.device), x.dtype).view(x.shape)


class Run:
    """The ranks of one run, the baton, and what has happened."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, faults: Sequence[Fault]):
        self.sizes, self.device = dict(sizes), device
        self.num_ranks = math.prod(sizes.values())
        self.log: list[Collective] = []
        self.failure: BaseException | None = None
        self.threads: list[threading.Thread] = []
        self.over = threading.Event()
        self._batons = [threading.Lock() for _ in range(self.num_ranks)]
        for baton in self._batons:
            baton.acquire()
        self.generators = Generators(self.num_ranks, device)
        self._slow = {fault.rank for fault in faults if isinstance(fault, Slow)}
        self._faults = {(fault.rank, fault.at): fault for fault in faults if not isinstance(fault, Slow)}
        self._counts = [0] * self.num_ranks
        self._posts: dict[int, Post] = {}  # of ranks that wait
        self._meetings: dict[tuple[int, ...], list[Post]] = {}  # ranks that are to meet, and what has come
        self._ended: set[int] = set()

    def begin(self, rank: int) -> None:
        """Wait for the baton."""
        self._batons[rank].acquire()
        if self.failure is not None:
            raise Stopped
        self.generators.bring(rank)

    def start(self) -> None:
        """Give the baton to the first rank."""
        self._batons[self._after(self.num_ranks - 1)].release()

    def _after(self, rank: int) -> int:
        """The next rank that can run, round the circle, slow ones last; -1 if there is none."""
        order = chain(range(rank + 1, self.num_ranks), range(rank + 1))
        ready = (r for r in order if r not in self._ended and (self.failure is not None or r not in self._posts))
        if not self._slow:
            return next(ready, -1)
        return min(ready, key=lambda r: r in self._slow, default=-1)

    def hand_over(self, rank: int) -> None:
        """Give the baton to the next rank that can run; if none can, the run has failed."""
        if self.failure is None:
            self.generators.put_away(rank)
        after = self._after(rank)
        if after < 0 and self._posts:
            self.failure = MismatchError(f"no rank can go on: {self._standing()}")
            after = self._after(rank)
        if after < 0:
            self.over.set()
        else:
            self._batons[after].release()

    def _told(self, post: Post) -> str:
        return f"{post.call} at {_call_site(self.threads[post.rank])}"

    def _standing(self) -> str:
        lines = []
        for rank in range(self.num_ranks):
            if rank in self._posts:
                lines.append(f"rank {rank} waits in {self._told(self._posts[rank])}")
            else:
                lines.append(f"rank {rank} has returned")
        return "; ".join(lines) + ". All ranks must call the same collectives in the same order."

    def meet(self, group: tuple[int, ...], post: Post) -> Sequence[Tensor]:
        """Take part in a collective; its results, when it is done."""
        if self.failure is not None:  # in a finally of the user's
            raise Stopped
        rank = post.rank
        self._fault(post)
        self._posts[rank] = post
        gone = [r for r in group if r in self._ended] if self._ended else []
        if gone:
            self._fail(f"rank {rank} is in {self._told(post)}, but rank {gone[0]} has returned: {self._standing()}")
        here = self._meetings.setdefault(group, [])
        here.append(post)
        if len(here) == len(group):
            self._complete(group, sorted(self._meetings.pop(group), key=lambda p: p.rank))
            here.clear()  # ranks that wait hold it, and would hold each other's results
        else:
            self.hand_over(rank)
            self.begin(rank)
        return post.places

    def _fail(self, words: str) -> NoReturn:
        self.failure = MismatchError(words)  # at once: what the user does about it must not wait for others
        raise self.failure

    def _fault(self, post: Post) -> None:
        count = self._counts[post.rank]
        self._counts[post.rank] += 1
        fault = self._faults.get((post.rank, count))
        if isinstance(fault, Dies):
            raise RankDied(f"rank {post.rank} died at its collective {count}, {self._told(post)}")
        post.sent = [_garbage(x, count) for x in post.own] if isinstance(fault, Garbage) else post.own

    def _complete(self, group: tuple[int, ...], posts: list[Post]) -> None:
        first = posts[0]
        for post in posts:
            if not post.call.agrees(first.call):
                self._fail(
                    f"ranks called different collectives: rank {first.rank} {self._told(first)}; rank {post.rank} "
                    f"{self._told(post)}. All ranks must call the same ones in the same order."
                )
        with torch.no_grad():
            first.act(posts)
        nbytes = max(post.call.nbytes for post in posts)
        self.log.append(Collective(first.call.kind, first.call.label, first.call.axis, nbytes, group))
        for rank in group:
            del self._posts[rank]

    def end(self, rank: int, failure: BaseException | None = None) -> None:
        """A rank has returned, or failed."""
        self._ended.add(rank)
        self._posts.pop(rank, None)
        self.failure = failure if self.failure is None else self.failure
        waiting = [r for group, posts in self._meetings.items() if rank in group for r in (p.rank for p in posts)]
        if waiting and self.failure is None:
            self.failure = MismatchError(
                f"rank {rank} returned while rank {waiting[0]} waits for it: {self._standing()}"
            )
        self.hand_over(rank)


def _call_site(thread: threading.Thread) -> str:
    """Where in the user's code a thread is: one that waits stands still."""
    return call_site(sys._current_frames()[thread.ident or 0])


def on_threads(run: Run, rank_main: Callable[[int], None]) -> None:
    """Every rank on a thread of its own, until the last has ended."""
    run.threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(rank_main, rank), daemon=True)
        for rank in range(run.num_ranks)
    ]
    for thread in run.threads:
        thread.start()
    try:
        run.start()
        while not run.over.wait(0.2):  # a signal that comes just before a wait is seen only after it
            pass
    except BaseException as failure:  # an interrupt: ranks stop at their next collective
        run.failure = failure
        run.over.wait()
        raise
    finally:
        for thread in run.threads:
            thread.join()
