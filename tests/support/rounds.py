"""Processes of one run, some of which are killed or come later, at places that are said."""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore

import fshard
from fshard import elastic

from .survivors import NOTE, batch_of, new_state, new_step, whole

STEPS = 5
PLACES = ("at the start", "before the step", "after the step", "after keep")


class Death(NamedTuple):
    """The rank of a round that is killed, at a place of a step."""

    round: int
    rank: int
    step: int
    place: str
    signal: int = signal.SIGKILL


class Run(NamedTuple):
    """What all processes of a run know."""

    kind: str
    first: int
    deaths: Sequence[Death] = ()
    spares: int = 0
    comes_at: int | None = None  # the last process comes at this step of round 1
    folder: str | None = None  # of a checkpoint of step 2


def store_of(port: int) -> Any:
    """The store of a run, which is in the process of the test."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def process(mesh: Any, port: int, run: Run) -> tuple[Any, list[tuple[int, int]]] | None:
    """One process of a run: the whole state in the end, and the ranks and first step of each of its rounds."""
    comes = run.comes_at is not None and mesh.get_rank() == mesh.size() - 1
    dist.destroy_process_group()
    store, rounds = store_of(port), list[tuple[int, int]]()
    if comes:
        store.wait(["come"])
    meeting = elastic.Meeting(store)

    def die(member: elastic.Member, rank: int, step: int, place: str) -> None:
        for death in run.deaths:
            if death[:4] == (member.round.number, rank, step, place):
                os.kill(os.getpid(), death.signal)

    def train(mesh: Any, member: elastic.Member) -> Any:
        rank, ranks = fshard.rank_and_size(mesh)
        begun = {"train": new_state(mesh, run.kind), **NOTE}
        die(member, rank, 0, PLACES[0])
        like, first = member.start(begun, run.folder)
        rounds.append((ranks, first))
        state, step = like["train"], new_step(mesh, run.kind)
        for k in range(first, STEPS):
            die(member, rank, k, PLACES[1])
            state, _ = step(state, batch_of(k, rank, ranks))
            die(member, rank, k, PLACES[2])
            if run.comes_at == k and member.round.number == 1:
                store.set("come", "")
                meeting.store.wait(["entered/2"])
            member.keep({"train": state, **NOTE}, k + 1)
            die(member, rank, k, PLACES[3])
        return whole(state)

    def use(processes: int) -> int | Mapping[str, int]:
        return max(1, processes - run.spares)

    result = elastic.run(train, meeting, run.first, use=use, timeout=20.0)
    return None if result is None else (result, rounds)
