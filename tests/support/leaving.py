"""A rank that leaves: by an error, a signal or `close`; all ranks keep their errors, and with them plans and groups."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard.comm import mesh as mesh_module
from fshard.comm import primitives
from fshard.comm.mesh import Mesh
from fshard.comm.primitives import along
from fshard.comm.process_groups import GroupRanks
from fshard.hosts import rendezvous
from fshard.hosts.links import Link

from . import faults
from .hostile import again, num_open


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


@contextmanager
def _copies(over: str) -> Iterator[None]:
    """With "elsewhere", the ranks seem to be on one host, but reach no address on it, as copies of one machine."""
    listening = rendezvous._listening

    def other(stack: Any, family: int, address: Any) -> Any:
        return listening(stack, family, address + "-here" if isinstance(address, str) else address)

    with mock.patch.object(rendezvous, "_listening", other) if over == "elsewhere" else nullcontext():
        yield


def leaves(mesh: Any, path: str, over: str, way: str, bad: int, checked: bool) -> str:
    """One rank leaves in a step; what another hears of it, while all keep what they have and only the one closes."""
    rank, size, inner = mesh.get_rank(), mesh.size(), fshard.optim.adamw(0.1)
    heard, kept = dist.FileStore(path, size), list[object]()
    with _copies(over):
        state = faults.start(mesh, "host" if over == "elsewhere" else over, inner)
        fshard.check(faults.one_step)(mesh, None, state, inner)
    kinds = {type(along(state.params.plan.mesh, axis)).__name__ for axis in mesh.mesh_dim_names}
    assert kinds == {"_HostRanks" if over == "host" else "GroupRanks"}

    def job(state: Any) -> None:
        step = faults.step_of(inner, lambda place: WAYS[way](mesh) if (place, rank) == ("forward", bad) else None)
        step(state, faults.batch(rank))

    try:
        with fshard.closing(mesh) if rank == bad else nullcontext():
            (fshard.check(job) if checked else job)(state)
    except (RuntimeError, BoomError) as failure:
        kept.append(failure)
    heard.set(str(rank), "")
    heard.wait([str(other) for other in range(size) if other != bad])
    return "; ".join(f"{type(failure).__name__}: {failure}" for failure in kept)


def _memory() -> int:
    """The pieces of shared memory in this process."""
    return sum("memfd:fshard" in line for line in Path("/proc/self/maps").read_text().splitlines())


class BuiltIn(GroupRanks):
    """Ranks that call gloo's own collectives, as more than eight processes do."""

    may_be_replaced = False

    def __init__(self, axis: str, group: Any, device: torch.device, **kwargs: Any):
        super().__init__(axis, group, device, few=1, **kwargs)


def _trained(mesh: Any) -> list[Tensor]:
    """Parameters of 5 MB after two checked steps, and a gather that lies in shared memory."""
    whole, tx = {"w": torch.linspace(-1, 1, 600_000).view(3, -1), "b": torch.ones(5)}, fshard.optim.adamw(0.1)
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), tx)
    step = fshard.check(fshard.train_step(lambda p, x: (p["w"] * x).square().mean() + p["b"].sum(), tx))
    for number in range(2):
        state, _ = step(state, torch.tensor([float(mesh.get_rank() + number)]))
    found = fshard.gather_params(state.params)
    return [x.clone() for x in found.values()]


def closed_again_and_again(mesh: Any) -> tuple[list[tuple[int, int]], bool]:
    """Descriptors and memory after each of some meshes was closed, while its plans are kept; whether results agree."""
    import torch._dynamo  # a checked step imports it

    counts, kept, results = list[tuple[int, int]](), list[Any](), list[list[Tensor]]()
    gc.disable()
    for number in range(4):
        group = dist.new_group()
        part = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        built_in = mock.patch.object(mesh_module, "GroupRanks", BuiltIn)
        with fshard.closing(part), built_in if number == 2 else nullcontext():
            kept.append(fshard.make_plan({"w": torch.ones(3)}, part))
            results.append(_trained(part))
        dist.destroy_process_group(group)
        del group, part
        counts.append((num_open(), _memory()))
    gc.enable()
    return counts, all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


def a_new_mesh(mesh: Any, path: str) -> list[bool]:
    """Whether a mesh of new process groups trains as the closed one did: of one group, then of all of them."""
    rank, size = mesh.get_rank(), mesh.size()
    first = _trained(mesh)
    fshard.close(mesh)
    refused = False
    try:
        fshard.make_plan({"w": torch.ones(3)}, mesh)
    except RuntimeError as failure:
        refused = f"axis 'shard' of a mesh: this rank has closed the mesh at {__file__}" in str(failure)
    part = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("shard",))
    second = _trained(part)
    fshard.close(part)
    again(rank, size, path)
    fshard.close(mesh)  # its groups are new: nothing was ever sent over them
    again(rank, size, path + "2")
    last = _trained(init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)))
    return [refused, *(torch.equal(x, y) for xs in (second, last) for x, y in zip(first, xs, strict=True))]


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def _reduce(mesh: Any) -> Tensor:
    return fshard.all_reduce(torch.ones(1), mesh, "shard")


def what_is_closed(mesh: Any) -> dict[str, str]:
    """What a rank hears of calls on meshes, before and after they were closed."""
    found, group = dict[str, str](), dist.new_group()
    part = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    twin = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    plan, old = fshard.make_plan({"w": torch.ones(3)}, part), fshard.make_plan({"w": torch.ones(3)}, twin)
    checked = fshard.check(lambda: _reduce(part), part)
    checked()
    threads = [threading.Thread(target=lambda: found.update(thread=_error(lambda: fshard.close(part))))]
    for thread in threads:
        thread.start()
        thread.join()
    pairs = [(over, n) for over in (part, mesh) for n in (1, 1 << 19)]
    under_way = [primitives.all_gather(torch.ones(n), along(over, "shard")) for over, n in pairs]
    ranks = along(plan.mesh, "shard")
    fshard.close(plan.mesh)
    for _ in range(2):
        fshard.close(part)
    found["reduce"], found["plan"] = _error(lambda: _reduce(part)), _error(lambda: fshard.make_plan({}, part))
    found["shared group"], found["its plan"] = _error(lambda: _reduce(twin)), _error(lambda: _reduce(old.mesh))
    found["checked"] = _error(checked)
    found["kept ranks"] = _error(lambda: primitives.all_gather(torch.ones(1), ranks).wait())
    found["under way"] = "; ".join(_error(pending.wait) for pending in under_way[:2])
    found["another mesh"] = "; ".join(_error(pending.wait) for pending in under_way[2:])
    # the peer's has another size, and never arrives
    never = primitives.all_gather(torch.ones(1 + mesh.get_rank()), along(mesh, "shard"))
    fshard.close(mesh)
    found["never"] = _error(never.wait)
    found["over gloo"] = _error(lambda: _reduce(mesh))
    return found


def of_two_axes(mesh: Any, path: str) -> str:
    """Of 2 x 2 ranks the last closes its part of the mesh, along "shard"; what the others hear, on the whole mesh."""
    rank, heard, whole = mesh.get_rank(), dist.FileStore(path, 4), {"w": torch.ones(3)}
    plan, part = fshard.make_plan(whole, mesh), fshard.make_plan(whole, mesh["shard"])
    if rank == 3:
        fshard.close(part.mesh)
        heard.wait(["1", "2"])
        return "; ".join(_error(partial(fshard.all_reduce, torch.ones(1), mesh, axis)) for axis in mesh.mesh_dim_names)
    axis = "replicate" if rank == 1 else "shard"
    text = "no error" if rank == 0 else _error(lambda: fshard.all_reduce(torch.ones(1), plan.mesh, axis))
    heard.set(str(rank), "")
    return text


def of_two_hosts(mesh: Any, path: str) -> str:
    """On 2 hosts with 2 ranks each the last is killed; what the others hear along an axis between hosts or inside."""
    rank, heard = mesh.get_rank(), dist.FileStore(path, 4)
    with mock.patch.object(rendezvous, "_host", return_value=f"host {mesh.get_local_rank('replicate')}"):
        connected: Any = fshard.make_plan({"w": torch.ones(3)}, mesh).mesh
    kinds = [type(along(connected, axis)).__name__ for axis in ("replicate", "shard")]
    assert kinds == ["GroupRanks", "_HostRanks"]
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fshard.MismatchError) as caught:
        fshard.all_reduce(torch.ones(1), connected, "shard" if rank == 2 else "replicate")
    heard.set(str(rank), "")
    heard.wait(["0", "1", "2"])
    return str(caught.value)


def destroyed_before(mesh: Any) -> str:
    """A mesh whose groups torch has destroyed is closed, as one that was never used."""
    params = fshard.shard_params({"w": torch.ones(3)}, fshard.make_plan({"w": torch.ones(3)}, mesh))
    unused = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("other",))
    dist.destroy_process_group()
    for each in (mesh, unused, mesh):
        fshard.close(each)
    return _error(lambda: fshard.gather_params(params))


def ends_while_others_read(mesh: Any, path: str, over: str) -> bool:
    """Rank 0 closes as soon as it has its result; rank 1 reads that of rank 0 later, and rank 2 sends later still."""
    rank, told = mesh.get_rank(), dist.FileStore(path, mesh.size())
    ranks = along(faults.plan_of(mesh, over).mesh, "shard")
    send, acknowledge, large = Link.send, Link.acknowledge, torch.arange(1 << 19) + rank

    def late(link: Link, *args: Any) -> None:
        if rank == 2 and link.peer.startswith("rank 1"):
            told.wait(["read"])
        send(link, *args)

    def tells(link: Link, segment: int) -> None:
        acknowledge(link, segment)
        if rank == 1:
            told.set("read", "")

    with mock.patch.multiple(Link, send=late, acknowledge=tells):
        pending = primitives.all_gather(large, ranks)
        if rank == 1:
            told.wait(["left"])
        received = pending.wait()
    if rank == 0:
        fshard.close(mesh)
        told.set("left", "")
    return torch.equal(received, torch.cat([large - rank + r for r in range(mesh.size())]))


def closed_twice(mesh: Any) -> str:
    """What a simulated rank hears that has closed its mesh."""
    fshard.close(mesh)
    fshard.close(mesh)
    return _error(lambda: _reduce(mesh))


def closed_in_a_loss(mesh: Any) -> str:
    """What a rank hears whose loss closes the mesh, and reads on."""
    whole = {name: torch.ones(5) for name in "abc"}
    shards = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=[*whole]))

    def loss(params: Any) -> Tensor:
        total = params["a"].sum()
        fshard.close(mesh)
        return total + params["b"].sum() + params["c"].sum()

    return _error(lambda: fshard.value_and_grad(loss)(shards))


def closes_in_between(mesh: Any, fails: bool) -> str:
    """Rank 1 leaves while rank 0 sums; it returns an error of its own."""
    with suppress(LookupError), fshard.closing(mesh):
        _reduce(mesh)
        if mesh.get_rank() == 0:
            _reduce(mesh)
        elif fails:
            raise BoomError("boom")
    return _error(lambda: _reduce(mesh))
