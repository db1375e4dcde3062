"""A deterministic scheduler for simulated ranks, and fault injection.

Note [The baton]
    Every rank is a thread, and only the thread with the baton (a lock) runs. A rank passes the baton on when it waits
    in a collective; the last rank to arrive copies the data for all ranks. So the order of threads is deterministic.
    Threads share the process's random states, so a rank that passes the baton saves its states, and the next rank
    restores its own. After a failure every other rank gets the baton once more, and stops.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor

from ..comm.ranks import SAME_ORDER, Call, MismatchError
from ..core.arguments import call_site
from ..core.storage import as_bytes, from_bytes
from .rng import generators_of


@dataclass(frozen=True)
class Collective:
    """A collective of a simulated world: kind, unit, mesh axis and participating ranks.

    `nbytes`: bytes sent by the rank that sends most.
    """

    kind: str
    unit: str
    axis: str
    nbytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Dies:
    """A fault: the rank raises RankDied at its collective number `at`, from 0. No fault if the rank calls fewer.

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
    """A fault: the rank's collective number `at`, from 0, sends wrong bytes, the same in every run.

    Only other ranks get the wrong bytes.

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
    """A fault: the rank runs only when no other rank can run. Results must not depend on this.

    >>> from fshard.testing import World
    >>> turns = []
    >>> _ = World(3, faults=[Slow(0)]).run(lambda mesh: turns.append(mesh.get_rank()))
    >>> turns
    [1, 2, 0]
    """

    rank: int


Fault = Dies | Garbage | Slow


class RankDied(RuntimeError):
    """Raised on a simulated rank by the fault `Dies`."""


class Stopped(BaseException):
    """Raised in a rank to end its thread, because another rank failed."""


@dataclass
class Post:
    """One rank's tensors in a collective; the last rank to arrive calls `act`, which moves all data."""

    rank: int
    call: Call
    own: Sequence[Tensor]
    places: Sequence[Tensor]  # for results
    act: Callable[[list[Post]], None]
    sent: Sequence[Tensor] = ()  # `own`, or copies with wrong bytes (`Garbage`)


def _garbage(x: Tensor, seed: int) -> Tensor:
    data = as_bytes(x)
    generator = torch.Generator("cpu").manual_seed(seed)
    flips = torch.randint(1, 256, data.shape, dtype=torch.uint8, generator=generator, device="cpu")
    return from_bytes(data ^ flips.to(x.device), x.dtype).view(x.shape)


class WorldRun:
    """The state of one run of a world."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, faults: Sequence[Fault]):
        self.sizes, self.device = dict(sizes), device
        self.num_ranks = math.prod(sizes.values())
        self.log: list[Collective] = []
        self.failure: BaseException | None = None
        self.threads: list[threading.Thread] = []
        self._process = os.getpid()
        self.over = threading.Event()
        self._batons = [threading.Lock() for _ in range(self.num_ranks)]
        for baton in self._batons:
            baton.acquire()
        self.generators = generators_of(self.num_ranks, device)
        self._slow = {fault.rank for fault in faults if isinstance(fault, Slow)}
        self._faults = {(fault.rank, fault.at): fault for fault in faults if not isinstance(fault, Slow)}
        self._counts = [0] * self.num_ranks
        self._posts: dict[int, Post] = {}  # of waiting ranks
        self._meetings: dict[tuple[int, ...], list[Post]] = {}  # of arrived ranks, by group
        self._ended: set[int] = set()
        self.closed: dict[int, str] = {}  # by rank that has closed its mesh: why

    def reopen(self) -> None:
        """Make the meshes of this ended run usable in another run, without faults."""
        WorldRun.__init__(self, self.sizes, self.device, ())

    def begin(self, rank: int) -> None:
        self._batons[rank].acquire()
        if self.failure is not None:
            raise Stopped
        for generator in self.generators:
            generator.bring(rank)

    def start(self) -> None:
        self._batons[self._after(self.num_ranks - 1)].release()

    def _after(self, rank: int) -> int:
        """Return the next rank after `rank` that can run, slow ranks last; -1 if there is none."""
        order = chain(range(rank + 1, self.num_ranks), range(rank + 1))
        ready = (r for r in order if r not in self._ended and (self.failure is not None or r not in self._posts))
        if not self._slow:
            return next(ready, -1)
        return min(ready, key=lambda r: r in self._slow, default=-1)

    def hand_over(self, rank: int) -> None:
        """Pass the baton on. If no rank can run, end the run, with MismatchError if some rank still waits."""
        if self.failure is None:
            for generator in self.generators:
                generator.put_away(rank)
        after = self._after(rank)
        if after < 0 and self._posts:
            self.failure = MismatchError(f"no rank can go on: {self._standing()}")
            after = self._after(rank)
        if after < 0:
            self.over.set()
        else:
            self._batons[after].release()

    def _told(self, post: Post) -> str:
        return f"{post.call} at {call_site(sys._current_frames()[self.threads[post.rank].ident or 0])}"

    def _standing(self) -> str:
        posts = (self._posts.get(rank) for rank in range(self.num_ranks))
        told = [self._end_of(r) if p is None else f"waits in {self._told(p)}" for r, p in enumerate(posts)]
        return f"{'; '.join(f'rank {rank} {text}' for rank, text in enumerate(told))}. {SAME_ORDER}"

    def _end_of(self, rank: int) -> str:
        return self.closed.get(rank, "has returned")

    def meet(self, group: tuple[int, ...], post: Post) -> Sequence[Tensor]:
        self._check_caller(post)
        if self.failure is not None:  # user code calls a collective in a `finally` block
            raise Stopped
        rank = post.rank
        if rank in self.closed:  # in the step that closes the mesh
            raise MismatchError(f"{post.call}: this rank {self.closed[rank]}")
        self._fault(post)
        self._posts[rank] = post
        ended = [r for r in group if r in self._ended] if self._ended else []
        if ended:
            words = f"rank {rank} is in {self._told(post)}, but rank {ended[0]} {self._end_of(ended[0])}"
            self._fail(f"{words}: {self._standing()}")
        arrived = self._meetings.setdefault(group, [])
        arrived.append(post)
        if len(arrived) == len(group):
            self._complete(group, sorted(self._meetings.pop(group), key=lambda p: p.rank))
            arrived.clear()  # waiting ranks hold this list, and with it all ranks' results
        else:
            self.hand_over(rank)
            self.begin(rank)  # returns when the outputs are filled
        return post.places

    def _check_caller(self, post: Post) -> None:
        if self.over.is_set():
            raise RuntimeError(
                f"{post.call}: the simulated world has ended, and its ranks with it. Communicate inside the function "
                "that it runs. `World.gather(results)` joins what the ranks have returned."
            )
        thread = threading.current_thread()
        if thread is self.threads[post.rank] and os.getpid() == self._process:
            return
        is_rank = thread in self.threads
        where = f"simulated rank {self.threads.index(thread)}" if is_rank else f"thread {thread.name!r}"
        where = where if os.getpid() == self._process else "a forked process"
        raise RuntimeError(
            f"{post.call}: {where} communicates over the mesh of simulated rank {post.rank}: a rank's own thread alone "
            "may do so. Ranks share this process: do they share a cache, or a module that keeps tensors?"
        )

    def _fail(self, words: str) -> NoReturn:
        # set before raising: a collective in the user's exception handler must raise Stopped, and not wait
        self.failure = MismatchError(words)
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
                    f"{self._told(post)}. {SAME_ORDER}"
                )
        with torch.no_grad():
            first.act(posts)
        nbytes = max(post.call.nbytes for post in posts)
        self.log.append(Collective(first.call.kind, first.call.label, first.call.axis, nbytes, group))
        for rank in group:
            del self._posts[rank]

    def end(self, rank: int, failure: BaseException | None = None) -> None:
        self._ended.add(rank)
        self._posts.pop(rank, None)
        self.failure = failure if self.failure is None else self.failure
        waiting = [r for group, posts in self._meetings.items() if rank in group for r in (p.rank for p in posts)]
        if waiting and self.failure is None:
            self.failure = MismatchError(
                f"rank {rank} returned while rank {waiting[0]} waits for it: {self._standing()}"
            )
        self.hand_over(rank)


def on_threads(run: WorldRun, rank_main: Callable[[int], None]) -> None:
    for rank in range(run.num_ranks):
        main = contextvars.copy_context().run
        run.threads.append(threading.Thread(target=main, args=(rank_main, rank), daemon=True))
    for thread in run.threads:
        thread.start()
    try:
        run.start()
        while not run.over.wait(0.2):  # with a timeout: a signal just before a wait is handled after the wait
            pass
    except BaseException as failure:  # as KeyboardInterrupt: ranks then stop at their next collective
        run.failure = failure
        run.over.wait()
        raise
    finally:
        for thread in run.threads:
            thread.join()
