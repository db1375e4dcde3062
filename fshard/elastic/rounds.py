"""A process of a long run: it holds parts of two states, and goes on with the processes that are left.

Note [What a process lets go]
    A process holds two states (Note [Two kept states] in `keeping.py`). The first state of a round is made from what
    all members held, and held beside it until all ranks have kept the new one, at the end of `start`: a rank may be
    lost before. All other states of earlier rounds are given up: the same steps are made again by other ranks, with
    other bits.

Note [Lost or not yet here]
    Where elements are gone with their ranks, a process outside of the round may hold them: it still waits for a rank
    that is gone, and enters the next round. So `run` raises LostError only if all that live are in the round.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.restoring import latest, restore
from ..comm import consensus
from ..comm.consensus import close
from ..comm.mesh import AnyMesh, axis_sizes, rank_in
from ..core.arguments import check_positive, check_whole
from ..core.tree import Tree
from .keeping import Kept, StateKey, keep
from .meeting import NO_ROUND, Meeting, Round
from .moving import LostError, last_whole, move

T = TypeVar("T")
Use = Callable[[int], int | Mapping[str, int]]


class _Rejoin(Exception):
    """Raised on all ranks if other processes have entered the next round."""


@dataclass
class Member:
    """A process of a run: what it holds, and its meshes in this round."""

    meeting: Meeting
    distance: int = 1
    held: list[Kept] = field(default_factory=list)  # the last two states
    round: Round = NO_ROUND
    trains: Sequence[int] = ()  # members of the round that train
    everyone: AnyMesh = None  # spares, too
    mesh: AnyMesh = None  # the ranks that train; None on a spare

    def start(self, like: Tree, dir: str | os.PathLike[str] | None = None) -> tuple[Tree, int]:
        """Return the state from which the ranks go on, in the form of `like`, and the number of its steps.

        The state is the last one of which the members hold every element. A run that begins starts from the last
        checkpoint in `dir`, or from `like` with 0 steps. If copies are gone with their ranks, the ranks go on from the
        last checkpoint in `dir`, and a warning says so; without one, LostError. All ranks must call this, once in each
        round.
        """
        try:
            key = self._last_whole()
        except LostError as error:
            state, step = self._restored(like, dir, str(error))
            self.held.clear()
        else:
            state, step = self._restored(like, dir) if key is None else (self._moved(like), key[1])
            self.held[:] = [kept for kept in self.held if kept.key == key]
        self._hold(state, step)
        consensus.any_rank(torch.zeros((), dtype=torch.uint8), self.mesh)  # all ranks hold it, or a rank is lost
        self.meeting.note_state()
        return state, step

    def keep(self, state: Tree, step: int) -> None:
        """Hold a state, `step` steps after the beginning, and the one before; all ranks must call this.

        If processes wait, `run` ends this call of `train`, and calls it again with the new ranks.
        """
        self._hold(state, step)
        waiting = rank_in(self.mesh) == 0 and bool(self.meeting.entered(self.round.number + 1))
        if consensus.any_rank(torch.tensor(waiting, dtype=torch.uint8), self.mesh):
            raise _Rejoin

    def give(self) -> None:
        """Take part in the `start` of the other members, as a spare."""
        with suppress(LostError):
            if self._last_whole() is not None:
                self._moved(None)

    def _last_whole(self) -> StateKey | None:
        key = last_whole(self.held, self.everyone)
        had = torch.tensor(key is None and self.meeting.had_state(), dtype=torch.uint8)
        if consensus.any_rank(had, self.everyone):
            raise LostError("elastic: all processes that held a state are gone")
        return key

    def _moved(self, like: Tree) -> Tree:
        return move(self.held, like, mesh=self.everyone)

    def _hold(self, state: Tree, step: int) -> None:
        oldest = self.held.pop(0) if len(self.held) == 2 else None
        ranks = next((size for size in axis_sizes(self.mesh).values() if size > 1), 1)
        distance = self.distance if self.distance % ranks else 1
        self.held.append(keep(state, step, round=self.round.number, reuse=oldest, distance=distance, mesh=self.mesh))

    def _restored(self, like: Tree, dir: str | os.PathLike[str] | None, lost: str = "") -> tuple[Tree, int]:
        step = None if dir is None else latest(dir, self.mesh)
        if dir is not None and step is not None:
            if lost and rank_in(self.mesh) == 0:
                warnings.warn(f"{lost}. The ranks go on from step {step} in {dir}", stacklevel=3)
            return restore(dir, like, step, mesh=self.mesh), step
        if lost:
            raise LostError(f"{lost}. Give member.start(like, dir) a directory of checkpoints to go on from them")
        return like, 0


def run(
    train: Callable[[AnyMesh, Member], T],
    meeting: Meeting,
    first: int,
    use: Use = lambda ranks: ranks,
    device: str = "cpu",
    backend: str = "gloo",
    timeout: float = 60.0,
    distance: int = 1,
) -> T | None:
    """Call `train(mesh, member)` for each set of ranks in turn, until it returns; every process of the run calls this.

    If a rank is lost, or processes come, the processes that are left call `train` again with a new mesh; its
    `member.start` returns the state to go on from, and `member.keep` holds a state after each step.

    - `first`: the number of processes in the first round.
    - `use`: a function of the number of processes that returns how many train, or the axes of the mesh by name. The
      others are spares: they hold nothing new, and `run` returns None on them in the end.
    - `timeout`: seconds that a rank waits for a message.
    - `distance`: the copy of a rank's part is at the rank so much further along the axis.

    An error that comes twice with the same ranks and the same state is raised. LostError if parts of a state are gone
    with all their holders, and there is no checkpoint.
    """
    check_whole("elastic.run: first", first, 1, what="a number of processes")
    check_positive("elastic.run: timeout", timeout)
    member, failed, lost_at = Member(meeting, distance), None, None
    while (round := meeting.enter(first if meeting.last_round().number == 0 else 1)) is not None:
        try:
            with _ranks(member, round, use, device, backend, timeout):
                return _play(train, member)
        except _Rejoin:
            continue
        except LostError:
            lost_at = lost_at or time.monotonic()
            outside = set(meeting.alive()) - set(round.members)
            if not outside or time.monotonic() > lost_at + timeout + meeting.patience:
                raise
        except (RuntimeError, ConnectionError):
            reached = (round.members, [kept.key[1] for kept in member.held][-1:])
            if failed == reached:
                raise
            failed = reached
    return None


def _play(train: Callable[[AnyMesh, Member], T], member: Member) -> T | None:
    meeting = member.meeting
    if member.mesh is None:
        member.give()
        if not meeting.wait(member.round, member.trains):
            raise _Rejoin
        return None
    result = train(member.mesh, member)
    with suppress(RuntimeError):  # a rank that leaves first would seem to be lost
        consensus.any_rank(torch.zeros((), dtype=torch.uint8), member.mesh)
    meeting.end()
    return result


@contextmanager
def _ranks(member: Member, round: Round, use: Use, device: str, backend: str, timeout: float) -> Iterator[None]:
    """Give the member its meshes in the block."""
    size, rank = len(round.members), round.members.index(member.meeting.me)
    store = dist.PrefixStore(f"ranks/{round.number}", member.meeting.store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        used = use(size)
        axes = {"shard": used} if isinstance(used, int) else used
        member.round, member.trains = round, round.members[: math.prod(axes.values())]
        member.everyone, active = _mesh(device, {"all": size}), _mesh(device, axes)
        member.mesh = None if active.get_coordinate() is None else active
        yield
    finally:
        for mesh in (member.mesh, member.everyone):
            close(mesh)
        member.mesh = member.everyone = None
        dist.destroy_process_group()


def _mesh(device: str, axes: Mapping[str, int]) -> DeviceMesh:
    sizes = [*axes.values()]
    return DeviceMesh(device, torch.arange(math.prod(sizes)).view(sizes), mesh_dim_names=(*axes,))
