"""Processes of one run, some of which are killed or come later, at places that are said."""

import os
import pickle
import signal
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore

import fshard
from fshard import elastic

from .survivors import NOTE, batch_of, new_state, new_step, whole

STEPS = 5
PLACES = ("at the start", "before the step", "after the step", "after keep", "at the end")


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
    wakes: bool = False  # a stopped process goes on when the others are done


def store_of(port: int) -> Any:
    """The store of a run, which is in the process of the test."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def process(mesh: Any, port: int, run: Run) -> bytes | None:
    """One process of a run: pickled the whole state in the end, ranks and first step of its rounds, warnings."""
    comes = run.comes_at is not None and mesh.get_rank() == mesh.size() - 1
    dist.destroy_process_group()
    store, rounds = store_of(port), list[tuple[int, int]]()
    if comes:
        store.wait(["come"])
    meeting = elastic.Meeting(store, patience=1.0 if run.wakes else 10.0)

    def die(member: elastic.RunMember, rank: int, step: int, place: str) -> None:
        for death in run.deaths:
            if death[:4] != (member.round.number, rank, step, place):
                continue
            if not death.signal:
                raise RuntimeError("an error of the user's")
            store.set("stopped", str(os.getpid()))
            os.kill(os.getpid(), death.signal)

    def train(mesh: Any, member: elastic.RunMember) -> Any:
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
                meeting.store.wait(["entered/2/1"])
            member.keep({"train": state, **NOTE}, k + 1)
            die(member, rank, k, PLACES[3])
        result = whole(state)
        die(member, rank, STEPS, PLACES[4])
        return result

    def use(processes: int) -> int | Mapping[str, int]:
        return max(1, processes - run.spares)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = elastic.run(train, meeting, run.first, use=use, timeout=1.0 if run.wakes else 20.0)
    told = [str(warning.message) for warning in found]
    if run.wakes and result is not None and store.add("ended", 1) == 2:
        os.kill(int(store.get("stopped")), signal.SIGCONT)
    return (
        None if result is None else pickle.dumps((result, rounds, told))
    )  # a pipe would send files of a process that ends


def save_step_two(mesh: Any, run: Run) -> None:
    """A checkpoint of two steps on these ranks."""
    state, step = new_state(mesh, run.kind), new_step(mesh, run.kind)
    for k in range(2):
        state, _ = step(state, batch_of(k, *fshard.rank_and_size(mesh)))
    assert run.folder is not None
    fshard.checkpoint.save(run.folder, {"train": state, **NOTE}, 2)
