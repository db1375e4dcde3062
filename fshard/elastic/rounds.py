"""A process of a long run: it holds parts of two states, and goes on with the processes that are left.

Note [What a process lets go]
    The first state of a round is made from what all members held. A process holds both until all ranks have kept the
    new one (the last collective of `start`), because a rank may be lost before. Afterwards it holds the last two states
    of the round: a rank that keeps step s has made the collectives of this step, so all ranks have kept the state
    before. Parts of other rounds are given up: the same steps are made again by other ranks, with other bits.

Note [Lost or not yet here]
    Where elements are gone with their ranks, a process outside of the round may hold them: it still waits for a rank
    that is gone, and enters the next round. So `run` raises LostError only if all that live are in the round.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.restoring import latest, restore
from ..comm import consensus
from ..comm.mesh import AnyMesh, rank_in
from ..core.arguments import check_positive, check_whole
from ..core.tree import Tree
from ..layout.pieces import mesh_of
from .keeping import Kept, keep
from .meeting import Meeting, Round
from .moving import LostError, move

T = TypeVar("T")
Use = Callable[[int], int | Mapping[str, int]]


class _Rejoin(Exception):
    """Raised on all ranks if other processes have entered the next round."""


@dataclass
class Member:
    """A process of a run: what it holds, and its meshes in this round."""

    meeting: Meeting
    distance: int = 1
    held: list[Kept] = field(default_factory=list)
    round: Round = Round(0, ())
    everyone: AnyMesh = None  # spares, too
    mesh: AnyMesh = None  # the ranks that train; None on a spare
    kept: Kept | None = None  # the last state kept in this round

    def start(self, like: Tree, dir: str | os.PathLike[str] | None = None) -> tuple[Tree, int]:
        """Return the state from which the ranks go on, in the form of `like`, and the number of its steps.

        The state is the last one of which the members hold every element. A run that begins starts from the last
        checkpoint in `dir`, or from `like` with 0 steps. If copies are gone, a warning says so, and the ranks go on
        from the last checkpoint in `dir`; without one, LostError. Every rank that trains must call this, once in each
        round.
        """
        try:
            moved = move(self.held, like, mesh=self.everyone)
            lost = "all ranks that held a state are gone" if moved is None and self._had_state() else ""
        except LostError as error:
            moved, lost = None, str(error)
        state, step = (moved.state, moved.step) if moved else self._begun(like, dir, lost)
        self.held[:] = [kept for kept in self.held if moved and kept.key == moved.key]
        self.kept = None
        self._hold(state, step)
        consensus.any_rank(torch.zeros((), dtype=torch.uint8), self.mesh)  # all ranks hold it, or a rank is lost
        self.meeting.note_state()
        return state, step

    def keep(self, state: Tree, step: int) -> None:
        """Hold a state, `step` steps after the beginning, beside the one before; let waiting processes in.

        Every rank must call this. If processes wait, `run` ends this call of `train`, and calls it with the new ranks.
        """
        self._hold(state, step)
        waiting = rank_in(self.mesh) == 0 and bool(self.meeting.entered(self.round.number + 1))
        if consensus.any_rank(torch.tensor(waiting, dtype=torch.uint8), self.mesh):
            raise _Rejoin

    def _hold(self, state: Tree, step: int) -> None:
        kept = keep(state, step, before=self.kept, distance=self.distance, round=self.round.number)
        self.held[:] = [*(self.held if self.kept is None else [self.kept]), kept]
        self.kept = kept

    def _had_state(self) -> bool:
        had = torch.tensor(self.meeting.had_state(), dtype=torch.uint8)
        return bool(consensus.any_rank(had, self.mesh))

    def _begun(self, like: Tree, dir: str | os.PathLike[str] | None, lost: str) -> tuple[Tree, int]:
        step = None if dir is None else latest(dir, self.mesh)
        if step is not None:
            if lost and rank_in(self.mesh) == 0:
                warnings.warn(f"{lost}: the ranks go on from the checkpoint of step {step} in {dir}", stacklevel=3)
            return restore(str(dir), like, step, mesh=self.mesh), step
        if lost:
            raise LostError(f"{lost}. Give member.start(like, dir) the directory of a checkpoint")
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
            reached = (round.members, [kept.key for kept in member.held][-1:])
            if failed == reached:
                raise
            failed = reached
    return None


def _play(train: Callable[[AnyMesh, Member], T], member: Member) -> T | None:
    meeting = member.meeting
    if member.mesh is None:
        move(member.held, None, mesh=member.everyone)
        while not meeting.entered(member.round.number + 1) and not meeting.is_over():
            time.sleep(0.05)
        if meeting.is_over():
            return None
        raise _Rejoin
    result = train(member.mesh, member)
    with suppress(RuntimeError):  # a rank that leaves first would seem to be lost
        consensus.any_rank(torch.zeros((), dtype=torch.uint8), member.mesh)
    meeting.end()
    return result


@contextmanager
def _ranks(
    member: Member, round: Round, use: Use, device: str, backend: str, timeout: float
) -> Iterator[None]:
    """Give the member its meshes in the block."""
    size, rank = len(round.members), round.members.index(member.meeting.me)
    store = dist.PrefixStore(f"round/{round.number}", member.meeting.store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        used = use(size)
        axes = {"shard": used} if isinstance(used, int) else dict(used)
        member.round = round
        member.everyone = _mesh(device, {"all": size})
        active = _mesh(device, axes)
        member.mesh = active if active.get_coordinate() is not None else None
        yield
    finally:
        for mesh in (member.mesh, member.everyone):
            close(mesh)
        member.mesh = member.everyone = member.kept = None


def _mesh(device: str, axes: Mapping[str, int]) -> DeviceMesh:
    ranks = torch.arange(torch.Size(axes.values()).numel()).view(*axes.values())
    return DeviceMesh(device, ranks, mesh_dim_names=tuple(axes))
