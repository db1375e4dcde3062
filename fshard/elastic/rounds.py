"""A process of a long run: it holds parts of two states, and goes on with the other living processes.

Note [What a process lets go]
    A process holds two states (Note [Two kept states] in `keeping.py`). The first state of a round is held beside its
    source, a state of an earlier round, until all ranks have kept the first: a rank may be lost before. Other states
    of earlier rounds are given up, because other ranks make the same steps again, with other bits.

Note [Lost or not yet here]
    If elements are gone with their ranks, a process outside of the round may hold them: it still waits for a lost rank,
    and enters the next round. So ranks raise LostError, or go on from a checkpoint, only if all living processes are in
    the round, or after a time.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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


class RunMember:
    """A process of a run, as `train` gets it from `run`.

    - `meeting`, `distance`, `timeout`: the arguments of `run`.
    - Attributes: `round`, its `number` and `members`; `held`, the last two states.

    >>> import fshard
    >>> def train(mesh, member):
    ...     state, step = member.start({"w": torch.zeros(2)})
    ...     member.keep({"w": state["w"] + 1}, step + 1)
    ...     return member.round.number, len(member.held)
    >>> fshard.elastic.run(train, fshard.elastic.Meeting(dist.HashStore()), first=1)
    (1, 2)
    """

    def __init__(self, meeting: Meeting, distance: int = 1, timeout: float = 60.0):
        self.meeting, self.distance, self.timeout, self.round = meeting, distance, timeout, NO_ROUND
        self.lost_at: float | None = None  # when elements were first missing
        self.awaits = False  # True if a process outside of the round may hold the missing elements
        self.held: list[Kept] = []
        self.trains: Sequence[int] = ()  # training members of the round
        self.everyone: AnyMesh = None  # spares, too
        self.mesh: AnyMesh = None  # of training members; None on a spare

    def start(self, like: Tree, dir: str | os.PathLike[str] | None = None) -> tuple[Tree, int]:
        """Return the state to go on from, in the form of `like`, and its number of steps.

        The state is the last one held whole by the members. A new run starts from the last checkpoint in `dir`, else
        from `like` with 0 steps. If elements are gone with their ranks, the ranks go on from the last checkpoint in
        `dir`, with a warning; LostError without one. All ranks must call this, once in each round.
        """
        try:
            key = self._last_whole()
        except LostError as error:
            self.awaits = self._may_come()
            if self.awaits:
                raise
            state, step = self._restored(like, dir, str(error))
            self.held.clear()
        else:
            state, step = self._restored(like, dir) if key is None else (self._moved(like), key[1])
            self.held[:] = [kept for kept in self.held if kept.key == key]
        self._hold(state, step)
        _any_rank(False, self.mesh)  # all ranks hold it, or a rank is lost
        self.meeting.note_state(self.round.number)
        self.lost_at, self.awaits = None, False
        return state, step

    def keep(self, state: Tree, step: int) -> None:
        """Hold a state, `step` steps after the beginning, and the one before; all ranks must call this.

        If processes wait, `run` ends this call of `train`, and calls it again with the new ranks. ValueError if `step`
        is not larger than the last one, or `start` was not called in this round.
        """
        number, last = self.held[-1].key if self.held else (0, 0)
        if number != self.round.number:
            raise ValueError(f"member.keep: step={step}: call member.start first, in each round")
        if step <= last:  # two states of one step would be mixed, and the larger step taken for the last
            raise ValueError(f"member.keep: step={step}: expected more than {last}, the last step")
        self._hold(state, step)
        waiting = rank_in(self.mesh) == 0 and bool(self.meeting.entered(self.round.number + 1))
        if _any_rank(waiting, self.mesh):
            raise _Rejoin

    def give(self) -> None:
        """Take part in the `start` of the other members, as a spare."""
        with suppress(LostError):
            if self._last_whole() is not None:
                self._moved(None)

    def _last_whole(self) -> StateKey | None:
        key, why = None, "elastic: all holders of the last state are gone"
        try:
            key = last_whole(self.held, self.everyone)
        except LostError as error:
            why = str(error)
        begun = self.meeting.last_with_state(self.round.number)
        if _any_rank((0 if key is None else key[0]) < begun, self.everyone):
            raise LostError(why if key is None else f"{why}; the state of step {key[1]} (round {key[0]}) is older")
        return key

    def _may_come(self) -> bool:
        """Return True on all ranks if a process outside of the round lives, for a time."""
        now = time.monotonic()
        self.lost_at = now if self.lost_at is None else self.lost_at
        may = now <= self.lost_at + self.timeout + self.meeting.patience and rank_in(self.mesh) == 0
        outside = set(self.meeting.alive()) - set(self.round.members) if may else ()
        return _any_rank(bool(outside), self.mesh)

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


def _any_rank(flag: bool, mesh: AnyMesh) -> bool:
    """Return True on all ranks if `flag` is true on one."""
    return bool(consensus.any_rank(torch.tensor(flag, dtype=torch.uint8, device="cpu"), mesh))


def run(
    train: Callable[[AnyMesh, RunMember], T],
    meeting: Meeting,
    first: int,
    use: Use = lambda ranks: ranks,
    device: str = "cpu",
    backend: str = "gloo",
    timeout: float = 60.0,
    distance: int = 1,
) -> T | None:
    """Call `train(mesh, member)` for each set of ranks in turn, a round; every process of the run must call this.

    If a rank is lost or processes come, the processes of the new round call `train` again, on a new mesh:
    `member.start` returns the state to go on from, `member.keep` holds the state after a step. Return the result of
    `train`, or None on a spare.

    - `meeting`: the place where processes meet.
    - `first`: the number of processes in the first round.
    - `use`: a function of the number of processes; it returns how many train, or the axes of the mesh by name. Other
      processes are spares.
    - `device`, `backend`: the device type of meshes, and the backend of process groups.
    - `timeout`: seconds until a rank without an answer is lost.
    - `distance`: as in `keep`; 1 if a multiple of the round's ranks.

    `run` raises an error of `train` the second time, if ranks and step are equal. LostError if a state is gone with all
    its holders, without a checkpoint.

    Source: torchft (2024) for survivors that go on, by replicas; here by parts, on any number of ranks.
    """
    check_whole("elastic.run: first", first, 1, what="a number of processes")
    check_positive("elastic.run: timeout", timeout)
    member, failed = RunMember(meeting, distance, timeout), None
    failure: Exception | None = None
    while (round := meeting.enter(first)) is not None:
        try:
            with _connected_round(member, round, use, device, backend, timeout):
                return _play(train, member)
        except _Rejoin:
            failure = None
            continue
        except LostError:
            if not member.awaits:
                raise
        except (RuntimeError, ConnectionError) as error:
            failure = error
            reached = (round.members, [kept.key[1] for kept in member.held][-1:])
            if failed == reached:
                raise
            failed = reached
    if failure is not None and member.round == meeting.last_round():  # the others have ended without this process
        raise failure
    return None


def _play(train: Callable[[AnyMesh, RunMember], T], member: RunMember) -> T | None:
    meeting = member.meeting
    if member.mesh is None:
        member.give()
        if not meeting.wait(member.round, member.trains):
            raise _Rejoin
        return None
    result = train(member.mesh, member)
    try:
        _any_rank(False, member.mesh)
    except RuntimeError:
        if not meeting.is_over():  # else another rank has ended the run, and left first
            raise
    meeting.end()
    return result


@contextmanager
def _connected_round(
    member: RunMember, round: Round, use: Use, device: str, backend: str, timeout: float
) -> Iterator[None]:
    """Give the member its meshes in the block."""
    size, rank = len(round.members), round.members.index(member.meeting.me)
    store = dist.PrefixStore(f"ranks/{round.number}", member.meeting.store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        used = use(size)
        axes = {"shard": used} if isinstance(used, int) else used
        if not 0 < math.prod(axes.values()) <= size:
            raise ValueError(f"elastic.run: use({size}) returned {used!r}: expected 1 to {size} ranks")
        member.round, member.trains = round, round.members[: math.prod(axes.values())]
        member.everyone, active = _mesh_of_round(device, {"all": size}), _mesh_of_round(device, axes)
        member.mesh = None if active.get_coordinate() is None else active
        yield
    finally:
        for mesh in (member.mesh, member.everyone):
            close(mesh)
        member.mesh = member.everyone = None
        dist.destroy_process_group()


def _mesh_of_round(device: str, axes: Mapping[str, int]) -> DeviceMesh:
    sizes = [*axes.values()]
    return DeviceMesh(device, torch.arange(math.prod(sizes), device="cpu").view(sizes), mesh_dim_names=(*axes,))
