"""A rank that leaves: by an error, a signal or `close`; all ranks keep their errors, and with them plans and groups."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fshard
from fshard.comm.mesh import Mesh
from fshard.comm.primitives import along
from fshard.hosts import rendezvous

from . import faults


class BoomError(Exception):
    """What a rank raises."""


def _raise(mesh: Mesh) -> None:
    raise BoomError("boom")


def _signal(number: int) -> Callable[[Mesh], None]:
    return lambda mesh: os.kill(os.getpid(), number)


WAYS: dict[str, Callable[[Mesh], None]] = {
    "error": _raise,
    "close": fshard.close,
    "kill": _signal(signal.SIGKILL),
    "term": _signal(signal.SIGTERM),
}
OVER = ["host", "gloo", "elsewhere"]


def _connected(mesh: Mesh, over: str) -> Any:
    """A state and a step, connected by shared memory, by gloo alone, or as on copies of one machine."""
    listening = rendezvous._listening

    def other(stack: Any, family: int, address: Any) -> Any:
        return listening(stack, family, address + "-here" if isinstance(address, str) else address)

    with mock.patch.object(rendezvous, "_listening", other if over == "elsewhere" else listening):
        inner = fshard.optim.adamw(0.1)
        state = faults.start(mesh, "host" if over == "elsewhere" else over, inner)
        return state, inner, fshard.check(faults.one_step)(mesh, None, state, inner)


def leaves(mesh: Any, path: str, over: str, way: str, bad: int, checked: bool) -> str:
    """One rank leaves in a step; what another hears of it, while all keep what they have."""
    rank, size = mesh.get_rank(), mesh.size()
    heard, kept = dist.FileStore(path, size), list[object]()
    state, inner, _ = _connected(mesh, over)
    kinds = {type(along(state.params.plan.mesh, axis)).__name__ for axis in mesh.mesh_dim_names}
    assert kinds == {"_HostRanks" if over == "host" else "GroupRanks"}

    def job(state: Any) -> None:
        step = faults.step_of(inner, lambda place: WAYS[way](mesh) if (place, rank) == ("forward", bad) else None)
        step(state, faults.batch(rank))

    text = "no error"
    try:
        with fshard.closing(mesh):
            (fshard.check(job) if checked else job)(state)
    except (RuntimeError, BoomError) as failure:
        kept.append(failure)
        text = f"{type(failure).__name__}: {failure}"
    heard.set(str(rank), "")
    with suppress(dist.DistStoreError):
        heard.wait([str(other) for other in range(size) if other != bad])
    assert kept
    return text
