"""Ranks without processes: the same step on several ranks in one process, in a fixed order, under a debugger.

Note [The baton]
    Every rank is a thread, and only the one that holds the baton runs. It hands the baton over where it has to wait in
    a collective; the last rank to arrive moves the data for all. So the order is fixed, a hang is a state of the
    scheduler (nobody can go on) and becomes an error that names what each rank waits for, and torch's random state,
    which threads share, is put away and brought back at each handover.
"""

from __future__ import annotations

import contextvars
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .comm import MismatchError, Works, mesh_device, places
from .record import call_site


class _Stopped(BaseException):
    """Ends a rank's thread because another rank failed."""


@dataclass
class _Post:
    """A collective a rank has arrived at."""

    group: tuple[int, ...]
    sends: Sequence[Tensor]
    recvs: Sequence[Tensor]
    call: str
    site: str

    def __str__(self) -> str:
        return f"{self.call} at {self.site}"


@dataclass
class _World:
    sizes: dict[str, int]
    device: str
    posts: dict[int, _Post] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failure: BaseException | None = None
    random: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_ranks = math.prod(self.sizes.values())
        self.batons = [threading.Semaphore(0) for _ in range(self.num_ranks)]
        seeds = torch.Generator().manual_seed(torch.initial_seed())
        for rank in range(self.num_ranks):
            seed = int(torch.randint(2**63 - 1, (), generator=seeds))
            self.random[rank] = torch.Generator().manual_seed(seed).get_state()

    def begin(self, rank: int) -> None:
        """Wait for the baton."""
        self.batons[rank].acquire()
        if self.failure is not None:
            raise _Stopped
        torch.set_rng_state(self.random[rank])

    def hand_over(self, rank: int) -> None:
        """Give the baton to the next rank that can run; if none can, end the run."""
        self.random[rank] = torch.get_rng_state()
        order = [(rank + i) % self.num_ranks for i in range(1, self.num_ranks + 1)]
        ready = [r for r in order if r not in self.posts and r not in self.ended]
        if ready:
            self.batons[ready[0]].release()
        elif self.posts:
            self.fail(MismatchError(f"no rank can go on: {self._standing()}"))

    def _standing(self) -> str:
        lines = []
        for rank in range(self.num_ranks):
            lines.append(f"rank {rank} " + (f"waits in {self.posts[rank]}" if rank in self.posts else "has returned"))
        return "; ".join(lines) + ". All ranks must call the same collectives in the same order."

    def fail(self, failure: BaseException) -> None:
        """Stop every rank."""
        if self.failure is None:
            self.failure = failure
        for baton in self.batons:
            baton.release()

    def arrive(self, rank: int, post: _Post) -> None:
        """Take part in a collective; returns when it is done."""
        self.posts[rank] = post
        gone = [r for r in post.group if r in self.ended]
        if gone:
            raise MismatchError(f"rank {rank} is in {post}, but rank {gone[0]} has returned: {self._standing()}")
        here = [r for r in post.group if r in self.posts and self.posts[r].group == post.group]
        if len(here) == len(post.group):
            self._exchange(post.group)
        else:
            self.hand_over(rank)
            self.begin(rank)

    def _exchange(self, group: tuple[int, ...]) -> None:
        posts = [self.posts[r] for r in group]
        for rank, post in zip(group, posts, strict=True):
            if post.call != posts[0].call:
                raise MismatchError(
                    f"ranks called different collectives: rank {group[0]} {posts[0]}; rank {rank} {post}. "
                    "All ranks must call the same ones in the same order."
                )
        with torch.no_grad():
            for i, post in enumerate(posts):
                for j, source in enumerate(posts):
                    if i != j:
                        post.recvs[j].copy_(source.sends[i]) if post.recvs[j].numel() else None
        for r in group:
            del self.posts[r]

    def end(self, rank: int) -> None:
        """A rank has returned."""
        self.ended.add(rank)
        waiting = [r for r, post in self.posts.items() if rank in post.group]
        if waiting:
            self.fail(MismatchError(f"rank {rank} returned while rank {waiting[0]} waits for it: {self._standing()}"))
        self.hand_over(rank)


class SimulatedMesh:
    """The mesh one simulated rank sees: it reads like a DeviceMesh with the axes `replicate` and `shard`."""

    def __init__(self, world: _World, rank: int):
        self._world, self._rank = world, rank
        self.mesh_dim_names = tuple(world.sizes)
        self.shape = tuple(world.sizes.values())
        self.ndim = len(self.shape)
        self.device_type = world.device

    def size(self, axis: str | int | None = None) -> int:
        """The number of ranks along an axis (None: in all)."""
        return math.prod(self.shape) if axis is None else self.shape[self._number(axis)]

    def get_rank(self) -> int:
        """This rank's number among all."""
        return self._rank

    def get_coordinate(self) -> list[int]:
        """This rank's number along each axis."""
        rest, coordinate = self._rank, list[int]()
        for size in reversed(self.shape):
            rest, at = divmod(rest, size)
            coordinate.insert(0, at)
        return coordinate

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """This rank's number along an axis (None: the only one)."""
        if axis is None and self.ndim > 1:
            raise ValueError(f"get_local_rank: name one of the axes {self.mesh_dim_names}")
        return self.get_coordinate()[self._number(axis or 0)]

    def _number(self, axis: str | int) -> int:
        if isinstance(axis, str) and axis not in self.mesh_dim_names:
            raise ValueError(f"the mesh has no axis {axis!r}: it has {', '.join(map(repr, self.mesh_dim_names))}")
        return self.mesh_dim_names.index(axis) if isinstance(axis, str) else axis

    def ranks(self, axis: str) -> _SimulatedRanks:
        """The ranks along one axis (what `fshard.comm` asks of a mesh)."""
        return _SimulatedRanks(self, self._world, axis)


class _SimulatedRanks:
    built_in = None

    def __init__(self, mesh: SimulatedMesh, world: _World, axis: str):
        self.axis, self._world, self._me = axis, world, mesh.get_rank()
        self.device = mesh_device(mesh)
        number = mesh.mesh_dim_names.index(axis)
        self.rank, self.size = mesh.get_coordinate()[number], mesh.shape[number]
        stride = math.prod(mesh.shape[number + 1 :])
        first = self._me - self.rank * stride
        self._group = tuple(first + i * stride for i in range(self.size))

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        return like.new_empty(numel)

    def idle(self, x: Tensor) -> bool:
        return True

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: str) -> Works:
        parts = places(sends, recvs, self.rank)
        if self.size > 1:
            # ranks may have streams of their own, and the last to arrive moves the data of all on its own
            module = torch.get_device_module(self.device)
            module.synchronize()
            self._world.arrive(self._me, _Post(self._group, sends, parts, call, call_site()))
            module.synchronize()
        return Works([], parts)


def _load_forward_mode() -> None:
    with warnings.catch_warnings():  # torch 2.13 scripts a few formulas when it is first used, and warns of that itself
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        torch.func.jvp(torch.neg, (torch.zeros(()),), (torch.zeros(()),))


def simulate(fn: Callable[[SimulatedMesh], Any], shard: int = 4, replicate: int = 1, device: str = "cpu") -> list[Any]:
    """Run `fn(mesh)` once per rank of a `replicate` x `shard` mesh, in this process; the results in rank order.

    Ranks advance in a fixed order and reductions add in rank order. Each has torch random state of its own. The first
    exception of any rank stops all and is raised here, with a note of the rank; ranks that call different collectives,
    or of which one ends early, raise MismatchError naming both sides. Inside, use torch.func.jvp, not dual levels of
    your own (torch has one for all threads).

    >>> simulate(lambda mesh: mesh.get_local_rank("shard"), shard=3)
    [0, 1, 2]
    """
    if min(shard, replicate) < 1:
        raise ValueError(f"simulate: expected at least 1 rank along each axis, got {replicate=} and {shard=}")
    world = _World({"replicate": replicate, "shard": shard}, device)
    results: list[Any] = [None] * world.num_ranks
    num_threads = torch.get_num_threads()

    def rank_main(rank: int) -> None:
        try:
            world.begin(rank)
            torch.set_num_threads(num_threads)
            # else ranks would wait for each other inside CUDA's one backward thread
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(SimulatedMesh(world, rank))
            world.end(rank)
        except _Stopped:
            pass
        except BaseException as failure:
            if not isinstance(failure, MismatchError):
                failure.add_note(f"(raised in simulated rank {rank} of {world.num_ranks})")
            world.fail(failure)

    def run_all(x: Tensor) -> Tensor:
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(rank_main, rank), daemon=True)
            for rank in range(world.num_ranks)
        ]
        for thread in threads:
            thread.start()
        world.batons[0].release()
        for thread in threads:
            thread.join()
        return x

    before = torch.get_rng_state()
    try:
        # Forward-mode levels belong to the process: a rank whose jvp ends would end the others'. Inside this one,
        # which no rank ever sees, theirs open none.
        _load_forward_mode()
        torch.func.jvp(run_all, (torch.zeros(()),), (torch.zeros(()),))
    finally:
        torch.set_rng_state(before)
    if world.failure is not None:
        raise world.failure
    return results
