"""Ranks of which one goes wrong: in a collective, in what it returns or raises, or killed."""

import os
import random
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fshard
from fshard import optim
from fshard.comm import process_groups
from fshard.comm.mesh import Mesh, present, unconnected
from fshard.comm.primitives import along
from fshard.core.tree import Tree
from fshard.hosts import compare_calls, one_host, rendezvous
from fshard.hosts.links import Link
from fshard.watch.recording import AnyStep

from .models import same_bits
from .worlds import by_process_groups

Result = tuple[fshard.TrainState, dict[str, Tree]]  # of a step


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong and where in the step; what connects how many ranks."""

    kind: str
    place: str
    rank: int
    over: str = "host"
    size: int = 2
    checked: bool = True


class LeftError(Exception):
    """Leaves a step early."""


def _sum(mesh: Mesh, x: Tensor, **kwargs: Any) -> Tensor:
    return fshard.all_reduce(x, mesh, "shard", **kwargs)


def _gather(mesh: Mesh, x: Tensor, **kwargs: Any) -> Tensor:
    return fshard.all_gather(x, mesh, "shard", **kwargs)


def _order(mesh: Mesh, bad: bool) -> None:
    for label in ("two", "one") if bad else ("one", "two"):
        _gather(mesh, torch.ones(3), label=label)


def _leave(mesh: Mesh, bad: bool) -> None:
    if bad:
        raise LeftError


def _raise(mesh: Mesh, bad: bool) -> None:
    if bad:
        raise ValueError("boom")


def _kill(mesh: Mesh, bad: bool) -> None:
    if bad:
        os.kill(os.getpid(), signal.SIGKILL)


DEEDS: dict[str, Callable[[Mesh, bool], object]] = {
    "collective": lambda mesh, bad: (_sum if bad else _gather)(mesh, torch.ones(4)),
    "operation": lambda mesh, bad: _sum(mesh, torch.ones(3), op="max" if bad else "sum"),
    "shape": lambda mesh, bad: _sum(mesh, torch.ones(4 if bad else 3)),
    "dtype": lambda mesh, bad: _sum(mesh, torch.ones(3, dtype=torch.float64 if bad else torch.float32)),
    "label": lambda mesh, bad: _sum(mesh, torch.ones(3), label="this" if bad else "that"),
    "order": _order,
    "skip": lambda mesh, bad: None if bad else _sum(mesh, torch.ones(3)),
    "more": lambda mesh, bad: _sum(mesh, torch.ones(3)) if bad else None,
    "return": _leave,
    "raise": _raise,
    "kill": _kill,
    "units": lambda mesh, bad: bad,  # whether to use units in another order
}
PLACES = ["forward", "backward", "update"]
KINDS = [(kind, place) for kind in DEEDS if kind != "units" for place in PLACES] + [("units", "units")]
# what comes after the last collective shows in how the call ends
KINDS += [(kind, "after") for kind in ("skip", "raise", "more")]
ALIVE = [Fault(kind, place, i % 2) for i, (kind, place) in enumerate(KINDS) if kind != "kill"]


def drawn(seed: int) -> Fault:
    """A random fault, of those that are found without a check every other one without."""
    r = random.Random(seed)
    size, over = r.choice([2, 3]), r.choice(["host", "gloo"])
    kind, place = r.choice(KINDS + [pair for pair in KINDS if pair[0] == "kill"] * 3)
    return Fault(kind, place, r.randrange(size), over, size, kind != "kill" or r.random() < 0.5)


def params() -> dict[str, Tree]:
    """Three units, of uneven sizes."""
    generator = torch.Generator().manual_seed(1)
    blocks = [torch.randn(5, 5, generator=generator, dtype=torch.float64) / 3 for _ in range(2)]
    return {"blocks": blocks, "head": torch.randn(5, 3, generator=generator, dtype=torch.float64)}


def batch(rank: int) -> Tensor:
    """Another on every rank."""
    return torch.randn(2 + rank, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def plan_of(mesh: Mesh, over: str) -> fshard.Plan:
    """A plan whose ranks are connected by shared memory ("host"), or by gloo's own sockets ("gloo")."""
    plan = fshard.make_plan(params(), mesh, units=["blocks.*"])
    return plan if over == "host" else by_process_groups(plan, mesh)


def at_places(fault: Fault | None, mesh: Mesh) -> Callable[[str], object]:
    """What a step with that fault does at each place."""

    def at(place: str) -> object:
        if fault is not None and place == fault.place:
            return DEEDS[fault.kind](mesh, mesh.get_rank() == fault.rank)
        return None

    return at


def optimizer(inner: optim.Transform, at: Callable[[str], object]) -> optim.Transform:
    """One that comes to a place of faults, then to a collective."""

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        at("update")
        return grads, state

    return optim.chain(optim.Transform(lambda params: (), update), optim.clip_by_global_norm(1.0), inner)


def step_of(inner: optim.Transform, at: Callable[[str], object], **kwargs: Any) -> AnyStep:
    """A step with places of faults in its forward, backward and update."""

    def backward(grad: Tensor) -> None:
        at("backward")

    def loss(p: Tree, x: Tensor) -> fshard.Mean:
        first, second = (1, 0) if at("units") else (0, 1)
        h = torch.tanh(x @ p["blocks"][first])
        at("forward")
        h = torch.tanh(h @ p["blocks"][second])
        if h.requires_grad:
            h.register_hook(backward)
        return fshard.Mean((h @ p["head"]).square().sum(), len(x))

    return fshard.train_step(loss, optimizer(inner, at), **kwargs)


def start(mesh: Mesh, over: str, inner: optim.Transform) -> fshard.TrainState:
    """The state that such a step takes."""
    whole = fshard.shard_params(params(), plan_of(mesh, over))
    return fshard.init_state(whole, optimizer(inner, lambda place: None))


def one_step(mesh: Mesh, fault: Fault | None, state: fshard.TrainState, inner: optim.Transform) -> Result:
    """A step with a fault; a rank may leave it early."""
    at = at_places(fault, mesh)
    try:
        result = step_of(inner, at)(state, batch(mesh.get_rank()))
        at("after")
    except LeftError:
        return state, {}
    return result


def in_a_row(mesh: Mesh, over: str, faults: list[Fault]) -> tuple[list[str], bool]:
    """What this rank hears of each fault, in one world, and whether it computes after them as before."""
    inner = optim.adamw(0.1)
    state, checked, texts = start(mesh, over, inner), fshard.check(one_step), []
    before = one_step(mesh, None, state, inner)
    for fault in faults:
        try:
            checked(mesh, fault, state, inner)
            texts.append("no error")
        except (fshard.MismatchError, ValueError) as failure:
            texts.append(f"{type(failure).__name__}: {failure}")
    return texts, same_bits(checked(mesh, None, state, inner), before)


def fatal(mesh: Mesh, fault: Fault) -> None:
    """A good step, and one with a fault."""
    inner = optim.sgd(0.1, momentum=0.9)
    step = fshard.check(one_step) if fault.checked else one_step
    state, _ = step(mesh, None, start(mesh, fault.over, inner), inner)
    step(mesh, fault, state, inner)


def one_is_slow(mesh: Mesh, path: str) -> str:
    """Of three ranks the last raises, and the one between comes to the collective when the first has its error."""
    heard, rank = dist.FileStore(path, 3), mesh.get_rank()

    def waits(mesh: Mesh) -> None:
        _raise(mesh, rank == 2)
        if rank == 1:
            heard.wait(["heard"])
        _sum(mesh, torch.ones(3))

    try:
        fshard.check(waits, mesh)(mesh)
    except (fshard.MismatchError, ValueError) as failure:
        if rank == 0:
            heard.set("heard", "")
        return str(failure)
    return "no error"


def _healthy(mesh: Mesh) -> float:
    return fshard.all_reduce(torch.ones(()), mesh, "shard").item()


def along_two_axes(mesh: Mesh) -> list[str]:
    """Rank 3 of four raises; in a function that goes on when it hears so; and when all collectives are done."""

    def late(mesh: Mesh) -> None:
        _sum(mesh, torch.ones(3))
        _raise(mesh, mesh.get_rank() == 3)

    def sums(mesh: Mesh) -> None:
        _raise(mesh, mesh.get_rank() == 3)
        _sum(mesh, torch.ones(3))
        fshard.all_reduce(torch.ones(3), mesh, "replicate")

    def goes_on(mesh: Mesh) -> None:
        try:
            sums(mesh)
        except fshard.MismatchError:
            sums(mesh)

    checked, texts = fshard.check(lambda fn, mesh: fn(mesh), mesh), []
    for fn in (sums, goes_on, late):
        with pytest.raises((fshard.MismatchError, ValueError)) as caught:
            checked(fn, mesh)
        texts.append(str(caught.value))
    return [*texts, str(checked(_healthy, mesh))]


def between_hosts(mesh: Mesh, kinds: list[str]) -> list[str]:
    """Faults along a connection that is not of one host."""
    texts = []
    with mock.patch.object(rendezvous, "_host", return_value=f"host {mesh.get_rank()}"):
        assert isinstance(one_host.connect(mesh).ranks("shard"), process_groups.GroupRanks)
        checked = fshard.check(lambda deed, bad: deed(mesh, bad), mesh)
        for kind in kinds:
            try:
                checked(DEEDS[kind], mesh.get_rank() == 1)
            except fshard.MismatchError as failure:
                texts.append(str(failure))
        lines: Any = present(mesh).once(compare_calls.lines_of)
        assert {link.socket.family.name for link in lines._links["shard"].values()} == {"AF_INET"}
    return texts


def jitted(mesh: Mesh, fault: Fault) -> list[str]:
    """A step that is one graph, another on one rank: checked by hand, by the environment; and not."""
    inner, texts = optim.adamw(0.1), []
    state, data = start(mesh, fault.over, inner), batch(mesh.get_rank())
    for wanted in ("", "1"):
        with mock.patch.dict(os.environ, {"FSHARD_CHECK": wanted}):
            step = fshard.jit(step_of(inner, at_places(fault, mesh)), backend="eager")
        with pytest.raises(fshard.MismatchError) as caught:
            (step if wanted else fshard.check(step))(state, data)
        texts.append(str(caught.value))
    good = fshard.jit(step_of(inner, at_places(None, mesh)), backend="eager")
    assert same_bits(fshard.check(good)(state, data), good(state, data))
    return texts


def by_environment(mesh: Mesh, fault: Fault) -> list[str]:
    """What a step's ranks hear with each value of FSHARD_CHECK, read when the step is made."""
    inner, texts = optim.adamw(0.1), []
    by_sockets: Any = unconnected(mesh)  # gloo does not compare calls
    state = start(mesh, fault.over, inner)
    for wanted in ("0", "1"):
        with mock.patch.dict(os.environ, {"FSHARD_CHECK": wanted}):
            step = step_of(inner, at_places(fault, by_sockets))
        try:
            step(state, batch(mesh.get_rank()))
            texts.append("no error")
        except (fshard.MismatchError, ValueError) as failure:
            texts.append(str(failure))
        handle: Any = state.params.plan.mesh
        assert (compare_calls.lines_of in handle._kept) == (wanted == "1")
    return texts


def listens_last(mesh: Mesh) -> str:
    """What rank 1 hears of another collective on rank 0 if it listens when the process of rank 0 has ended."""
    params = {"w": torch.ones(4)}
    connected: Any = fshard.make_plan(params, mesh).mesh
    ranks: Any = along(connected, "shard")
    (data,) = ranks.links.values()
    hear, has_ended = Link.hear, list[bool]()

    def late(link: Link) -> str | None:
        if has_ended or mesh.get_local_rank() == 0:
            return hear(link)
        while data.is_open:
            select.select([data.socket], [], [])
            data.drain()
        data.is_open = True  # as before somebody looked
        has_ended.append(True)
        return None

    with mock.patch.object(Link, "hear", late), pytest.raises(fshard.MismatchError) as caught:
        fshard.check(lambda: DEEDS["collective"](connected, mesh.get_local_rank() == 0), connected)()
    return str(caught.value)


def keeps_its_error(mesh: Mesh, path: str) -> str:
    """Of a 2 x 2 mesh the last two ranks end; rank 0, which waits for one of them, keeps its error and its plan."""
    heard, rank = dist.FileStore(path, 4), mesh.get_rank()
    plan = fshard.make_plan({"w": torch.ones(4)}, mesh)
    if rank >= 2:
        return "has ended"
    with pytest.raises(fshard.MismatchError) as caught:
        fshard.all_reduce(torch.ones(1), plan.mesh, "shard" if rank else "replicate")
    heard.set("heard", "") if rank else heard.wait(["heard"])
    return str(caught.value)
