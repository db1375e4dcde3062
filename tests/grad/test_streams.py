"""Copies and sums beside the computation, on simulated streams that record their order and report hazards.

On a GPU each hazard would be a wrong value now and then, without an error: an update that reads gradients before they
are summed; a sum that reads a buffer before the backward has filled it, or after that memory was used again; a message
that is overwritten while it is sent. Two things that would be right but slow are errors here too: a sum on the
computation's stream, and buffers that are kept for longer than a unit.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from support.accelerator import DEVICE, Mesh, Ranks, on_accelerator
from support.models import STRATEGIES
from support.offloaded import Doubling, loss, state_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import DynamicLossScale, optim, tree
from fshard.comm import primitives
from fshard.comm.ranks import Call, Pending
from fshard.comm.reduction import Sums
from fshard.grad import travel, under_way
from fshard.plan import ahead
from fshard.plan.ahead import crossings
from fshard.wire import Int8

Clock = dict[Any, int]


class Stream:
    """A queue of a device: a clock of what it has run, and of what it knows to be done on other streams."""

    def __init__(self, priority: int = 0) -> None:
        self.clock: Clock = defaultdict(int)
        self.priority = priority

    def wait_stream(self, other: "Stream") -> None:
        """Learn all that the other stream has been given so far."""
        self.see(other.clock)

    def see(self, clock: Clock) -> None:
        """Learn all that a clock has."""
        for who, time in clock.items():
            self.clock[who] = max(self.clock[who], time)


class Access(NamedTuple):
    """A read or write by a stream of some bytes of a storage, with its time."""

    who: Stream
    time: int
    name: str
    begin: int
    end: int
    writes: bool

    def before(self, other: "Access") -> bool:
        """Whether the other access's stream knows this one to be done."""
        return other.who.clock[self.who] >= self.time

    def meets(self, other: "Access") -> bool:
        """Whether both have bytes in common, and one of them writes."""
        return (self.writes or other.writes) and self.begin < other.end and other.begin < self.end

    def within(self, other: "Access") -> bool:
        """Whether all bytes of this access are in the other."""
        return other.begin <= self.begin and self.end <= other.end


def span(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte after its last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    begin = int(x.storage_offset()) * x.itemsize
    return begin, begin + (last + 1) * x.itemsize * bool(x.numel())


class Memory:
    """The accesses to a storage that still matter, and the stream that allocated it."""

    def __init__(self, x: Tensor, maker: Stream):
        self.alive, self.maker = StorageWeakRef(x.untyped_storage()), maker
        self.done: list[Access] = []


class Ordered(TorchDispatchMode):
    """A device module with streams (in place of torch.cuda), which records the hazards between operators."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.main = Stream(), Stream()
        self._current, self._streams = self.main, [self.main]
        self.nets: dict[str, Stream] = defaultdict(self.Stream)
        self.waited: list[tuple[Stream, str]] = []  # who has waited for which collective
        self._memory: dict[int, Memory] = {}
        self._pools: dict[Stream, list[Memory]] = defaultdict(list)  # what is freed, by the stream it was made on
        self.hazards: set[str] = set()
        self.ran: dict[Stream, list[str]] = defaultdict(list)

    def Stream(self, priority: int = 0) -> Stream:
        """A new stream."""
        self._streams.append(Stream(priority))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        """The stream that operators are given to."""
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Inside the block operators are given to this stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self._streams:
            self.host.see(stream.clock)

    def _sweep(self) -> None:
        for key, memory in [*self._memory.items()]:
            if memory.alive.expired():
                self._pools[memory.maker].append(self._memory.pop(key))

    def _take(self, now: Access) -> None:
        """New memory may be any that this stream allocated and freed: all accesses to that must be known to be done."""
        for memory in self._pools.pop(now.who, []) if now.who is not self.host else []:
            for last in memory.done:
                if not last.before(now):
                    self.hazards.add(f"memory is used again while {last.name} runs")

    def access(self, who: Stream, reads: list[Tensor], writes: list[Tensor], made: list[Tensor], name: str) -> None:
        """Check one operator's reads and writes against what its stream knows, and record them."""
        who.see(self.host.clock)  # it was launched after what the host has done
        who.clock[who] += 1
        self.ran[who].append(name)
        self._sweep()
        if made:
            self._take(Access(who, who.clock[who], name, 0, 0, True))
        for x, writing in [*((x, False) for x in reads), *((x, True) for x in [*writes, *made])]:
            memory = self._memory.setdefault(x.untyped_storage()._cdata, Memory(x, who))
            now = Access(who, who.clock[who], name, *span(x), writing)
            for last in memory.done:
                if last.meets(now) and not last.before(now):
                    verb = "writes" if writing else "reads"
                    self.hazards.add(f"{name} {verb} before {last.name} is done")
            memory.done = [last for last in memory.done if not (writing and last.within(now))] + [now]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema, given = func._schema, pytree.tree_leaves((args, kwargs))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if views or func.overloadpacket is torch.ops.aten.new_empty:  # which look at no element
            given = []
        if views:
            return out
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        marked = [named.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        into = [x for x in pytree.tree_leaves(marked) if isinstance(x, Tensor)]
        reads = [x for x in given if isinstance(x, Tensor) and not any(x is y for y in into)]
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and not any(x is y for y in given)]
        tensors, op = [*reads, *into, *made], func.overloadpacket
        crosses = op in (torch.ops.aten.copy_, torch.ops.aten._to_copy) and len({x.device for x in tensors}) > 1
        near = all(x.device != DEVICE for x in tensors)
        who = self.host if near else self._current
        # a 0-d tensor on the host is passed to a kernel as a number
        self.access(who, [x for x in reads if near or crosses or x.device == DEVICE], into, made, op.__name__)
        waits = crosses and not named.get("non_blocking", False)
        if waits or op is torch.ops.aten._local_scalar_dense:
            self.host.see(self._current.clock)
        return out


class Sent:
    """A collective like NCCL's: on a stream of its own that waits for the stream which starts it."""

    def __init__(self, ordered: Ordered, sends: list[Tensor], to: list[Tensor], parts: Any, axis: str, call: str):
        self._ordered, self._parts, self._call = ordered, parts, call
        net = ordered.nets[axis]
        net.wait_stream(ordered.current_stream())
        ordered.access(net, sends, to, [], "a collective")
        self._end = dict(net.clock)
        self._stashed: Any = [sends, to]  # torch keeps these until the first wait

    def wait(self) -> Any:
        """The current stream waits for the collective."""
        self._ordered.waited.append((self._ordered.current_stream(), self._call))
        self._ordered.current_stream().see(self._end)
        self._stashed = None
        return self._parts

    def done(self) -> None:
        """Nothing to release: no memory is shared."""


@contextmanager
def streams() -> Iterator[Ordered]:
    """The simulated accelerator with streams, and with collectives on one stream for each axis."""
    with on_accelerator(), pytest.MonkeyPatch.context() as patch:
        ordered, find, exchange = Ordered(), torch.get_device_module, Ranks.exchange

        def sent(self: Ranks, sends: Any, recvs: Any, call: Any) -> Any:
            works = exchange(self, sends, recvs, call)
            to = [x for number, x in enumerate(works.parts) if number != self.rank]
            return works if self.size == 1 else Sent(ordered, list(sends), to, works.parts, self.axis, str(call))

        def built_in(collective: Any, ranks: Ranks, call: Any, *args: Tensor) -> Sent:
            return Sent(ordered, [*args[1:]], [args[0]], [], ranks.axis, f"{call.kind} {ranks.axis}")

        patch.setattr(Ranks, "exchange", sent)
        patch.setattr(Ranks, "built_in", property(lambda self: "NCCL" if self.size > 1 else None))
        patch.setattr(primitives, "_built_in", built_in)
        patch.setattr(torch, "get_device_module", lambda x: ordered if torch.device(x) == DEVICE else find(x))
        with ordered:
            yield ordered


def train(state: Any, tx: Any, step: dict[str, Any]) -> Any:
    """The state after three steps; sums are exact if nothing else is said, so that the device adds them."""
    run = fshard.train_step(loss, tx, **{"reduction": "exact"} | step)
    for _ in range(3):
        state, _ = run(state, torch.ones(4, 8, device=DEVICE))
    return state


def hazards(how: dict[str, Any], step: dict[str, Any], scaler: Any = None) -> set[str]:
    """The hazards of three steps with leaves in host memory."""
    with streams() as ordered:
        tx = optim.adamw(0.1)
        train(state_of(tx, scaler, **how), tx, step)
    return ordered.hazards


HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "donate": ({}, {"donate": True}),
    "micro": ({}, {"accumulate": 2, "clip_norm": 1.0}),
    "once": ({}, {"accumulate": 2, "reduce_once": True}),
    "zero1": ({"params_over": (), "grads_over": ()}, {"donate": True}),
    "together": ({"together": True}, {}),
    "bf16": ({"policy": "compute=bf16"}, {}),
    "keep": ({"regather": False}, {}),
}


@pytest.mark.parametrize("name", HOW)
def test_nothing_is_overtaken(name):
    """Steps with leaves in host memory have no hazard between streams: otherwise a GPU would read wrong values now
    and then."""
    assert hazards(*HOW[name]) == set()
    assert hazards(*HOW[name], DynamicLossScale(8.0)) == set()


def test_the_computation_waits_for_what_arrives(monkeypatch):
    """If the computation did not wait for copies from the host, the test above would report it: otherwise it could
    not fail."""
    monkeypatch.setattr(ahead.Crossing, "join", lambda self: None)
    whole = dict.fromkeys(("params_over", "grads_over", "state_over"), ())
    assert "mm reads before _to_copy is done" in hazards(whole, {})


def test_the_host_waits_before_it_reads(monkeypatch):
    """If the host did not wait for gradients copied to it, a hazard is reported: otherwise the check would miss it."""
    monkeypatch.setattr(ahead.Crossing, "settle", lambda self: None)
    assert any(words.endswith("reads before copy_ is done") for words in hazards({}, {}))


def test_copies_wait_for_what_they_copy(monkeypatch):
    """If copies did not wait for the computation, hazards are reported: otherwise the check would miss them."""

    @contextmanager
    def beside(self: ahead.Crossing) -> Iterator[None]:
        with self._module.stream(self._stream):
            yield

    monkeypatch.setattr(ahead.Crossing, "ahead", beside)
    found = hazards({}, {})
    assert any(words.startswith("copy_ reads before") for words in found)
    assert any(words.startswith("memory is used again while") for words in found)


def test_what_is_copied_lives_until_it_is_waited_for(monkeypatch):
    """If a copy's source were freed early, a hazard is reported: otherwise the check would miss reused memory."""
    monkeypatch.setattr(
        ahead._Arrival, "__init__", lambda self, crossing, held: vars(self).update(crossing=crossing, held=[])
    )
    assert "memory is used again while copy_ runs" in hazards({}, {})


def test_the_computation_waits_for_collectives(monkeypatch):
    """If the computation did not wait for collectives, a hazard is reported: otherwise the check would miss it."""
    monkeypatch.setattr(Sent, "wait", lambda self: vars(self).update(_stashed=None) or self._parts)
    assert any(words.endswith("reads before a collective is done") for words in hazards({}, {}))


# Sums of gradients, with all leaves on the device.

ONE, TWO, THREE = ({"shard": n} for n in (1, 2, 3))
HYBRID = {"replicate": 2, "shard": 2}
FEW = {"replicate": 3, "shard": 3}  # sums that nothing divides, and all-reduces in two stages
MICRO = {"accumulate": 2, "clip_norm": 1.0}


class Reading(Sums):
    """A reduction whose hook reads a tensor that the computation makes during the reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["seen"] = []

    def reduce_scatter(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Any:
        """Make a tensor for the hook, then reduce."""
        self.__dict__["seen"].append(torch.ones_like(x[:1]) * 2)
        return super().reduce_scatter(x, ranks, label, out)

    def after(self, grads: Tensor, unit: str) -> Tensor:
        """Multiply by the tensor that `reduce_scatter` made."""
        return grads * self.__dict__["seen"][-1]


class Careless(Sums):
    """A reduction that keeps no reference to what it sends."""

    def reduce_scatter(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Any:
        """The backend's own reduce-scatter, without keeping `x`."""
        assert out is not None
        return Pending(
            primitives._built_in(abs, ranks, Call("reduce_scatter", ranks.axis, label, 0), out, x), lambda _: out
        )


@dataclass(frozen=True)
class Adding:
    """A gather that makes a tensor while its collective is under way, and adds it."""

    def all_gather(self, x: Tensor, ranks: Any, label: str) -> Pending:
        """Gather, make zeros of what was sent, and add them."""
        pending = primitives.all_gather(x, ranks, label)
        zeros = (x * 0).repeat(ranks.size)
        return pending.then(lambda full: full + zeros)


WIDE = dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard"))
GATHERS: dict[str, dict[str, Any]] = {  # in two stages
    "plain": {},
    "bf16": {"policy": "compute=bf16", "whole": "**.b"},
    "int8": {"param_wire": Int8(16)},
    "together": {"together": True, "policy": "compute=bf16; **.b: compute=f32"},
    "kept": {"regather": {"blocks.1": "shard", "blocks.2": False}},
    "host": {"offload": "blocks.*"},
    "three": {"prefetch": 3},
    "adding": {"gather": Adding()},
}
SUMS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    **{name: (HYBRID, how, {}) for name, how in STRATEGIES.items()},
    **{f"{name}-few": (FEW, how, MICRO) for name, how in STRATEGIES.items()},
    **{f"{name}-once": (HYBRID, how, {"accumulate": 2, "reduce_once": True}) for name, how in STRATEGIES.items()},
    # one rank has nothing to add, but casts
    "alone": (ONE, {"policy": "compute=bf16, reduce=bf16"}, {"donate": True}),
    "two": (TWO, {}, {"donate": True}),
    "later": (HYBRID, {}, {"accumulate": 2, "reduce_once": "replicate"}),
    "fast": (HYBRID, {}, {"reduction": "fast"}),
    "fast-half": (HYBRID, {"policy": "compute=bf16, reduce=bf16"}, {"reduction": "fast"}),
    "tree": (HYBRID, {}, {"reduction": fshard.reduction.TreeSums(slices=4)}),
    # with one slice a rank, sums are taken beside the backward
    "tree-ddp": (TWO, STRATEGIES["ddp"], {"reduction": fshard.reduction.TreeSums(slices=2)}),
    "tree-zero1": (TWO, STRATEGIES["zero1"], {"reduction": fshard.reduction.TreeSums(slices=2)}),
    "tree-whole": (TWO, {"whole": "**.b"}, {"reduction": fshard.reduction.TreeSums(slices=2)}),
    "bf16": (HYBRID, {"policy": "compute=bf16, reduce=bf16"}, MICRO),
    "half": (HYBRID, {"policy": "compute=f32, reduce=f16"}, MICRO),
    "int8": (HYBRID, {"param_wire": Int8(16), "grad_wire": Int8(16)}, MICRO),
    "int8-ddp": (THREE, {"grad_wire": Int8(16)} | STRATEGIES["ddp"], {}),
    "together": (THREE, {"together": True}, MICRO),
    "hook": (THREE, {}, {"reduction": Doubling()}),
    "reading": (THREE, {}, {"reduction": Reading()}),
    "careless": (THREE, {}, {"reduction": Careless()}),
    "host": (HYBRID, {"offload": "blocks.1"}, MICRO),
    **{f"wide-{name}": (HYBRID, WIDE | how, {}) for name, how in GATHERS.items()},
}


def made(sizes: dict[str, int], how: dict[str, Any], tx: Any, scaler: Any = None) -> fshard.TrainState:
    """The state of training four blocks."""
    block = {"w": torch.ones(8, 8), "b": torch.ones(8)}
    blocks = [tree.map(torch.clone, block) for _ in range(4)]
    params = {"blocks": blocks, "norm": torch.ones(8), "head": torch.ones(8, 4)}
    plan = fshard.make_plan(params, Mesh(**sizes), **{"units": ["blocks.*"], "block": 4} | how)
    return fshard.init_state(fshard.shard_params(tree.map(lambda x: x.to(DEVICE), params), plan), tx, scaler)


def found(name: str, scaler: Any = None) -> set[str]:
    """The hazards of three steps of a case of SUMS."""
    sizes, how, step = SUMS[name]
    with streams() as ordered:
        tx = optim.adamw(0.1)
        train(made(sizes, how, tx, scaler), tx, step)
    return ordered.hazards


@pytest.mark.parametrize("name", SUMS)
def test_no_sum_overtakes_or_is_overtaken(name):
    """Sums of gradients have no hazard in any strategy, wire or dtype: otherwise a GPU would add wrong gradients now
    and then."""
    assert found(name) == set()
    assert found(name, DynamicLossScale(8.0)) == set()


PLANS = {**STRATEGIES, "cast": {"policy": "compute=bf16", "whole": "**.b"}, "whole": {"whole": "**.b"}}


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("plan", PLANS)
def test_an_update_in_the_backward_overtakes_nothing(plan, clip_norm):
    """The norm of the gradients would be read while it is overwritten, also that by which they are clipped."""
    with streams() as ordered:
        tx = optim.adamw(0.1)
        train(made(HYBRID, PLANS[plan], tx), tx, {"donate": True, "in_backward": True, "clip_norm": clip_norm})
    assert ordered.hazards == set()


@pytest.mark.parametrize("name", ["two", "full", "int8", "fast"])
def test_the_computation_waits_for_no_reduction(name):
    """A side stream waits for reductions and adds, the computation does not: otherwise the backward would wait for
    the network."""
    sizes, how, step = SUMS[name]
    with streams() as ordered:
        tx = optim.adamw(0.1)
        state = train(made(sizes, how, tx), tx, {k: v for k, v in step.items() if k == "reduction"})
    side = state.params.plan.crossings.sums._stream
    who = [stream for stream, call in ordered.waited if call.startswith("reduce_scatter")]
    assert who
    assert set(who) == {side}
    assert name == "fast" or "add" in ordered.ran[side]
    assert "sqrt" in ordered.ran[ordered.main]
    assert "sqrt" not in ordered.ran[side]


def test_what_the_computation_waits_for_comes_first():
    """Streams beside the computation have a high priority: otherwise their short kernels would wait for room on the
    GPU, and the computation for them."""
    with streams() as ordered:
        sums, stages = made(TWO, {}, optim.sgd(0.1)).params.plan.crossings[2:]
    assert ordered.main.priority > sums._stream.priority == stages._stream.priority


def test_the_update_waits_for_sums(monkeypatch):
    """If the update did not wait for sums, hazards are reported: otherwise the check would miss an update that comes
    too early."""
    monkeypatch.setattr(under_way.Reductions, "drop", lambda self: None)  # which would wait later
    assert found("two") == set()
    monkeypatch.setattr(under_way.Reductions, "join", lambda self: self._stepped.clear())
    words = found("two")
    assert any(word.endswith("reads before add is done") for word in words)
    assert "memory is used again while add runs" in words


@pytest.mark.parametrize("name", ["alone", "reading"])
def test_sums_wait_for_the_computation(name, monkeypatch):
    """If sums did not wait for the computation, a hazard is reported: otherwise the check would miss a sum of
    unwritten buffers."""

    def beside(self: Any, older: Any) -> Any:
        self._stepped += older
        return self._side._module.stream(self._side._stream)

    monkeypatch.setattr(under_way.Reductions, "_beside", beside)
    assert any("reads before" in word for word in found(name))


@pytest.mark.parametrize("name", ["two", "half", "int8-ddp", "fast"])
def test_what_is_summed_lives_until_the_computation_has_waited(name, monkeypatch):
    """If buffers of sums were freed early, a hazard is reported: otherwise the check would miss memory reused too
    early."""
    move_on = under_way.Reductions.move_on

    def forgetful(self: Any, ahead: int) -> None:
        move_on(self, ahead)
        self._stepped[:] = [Pending(None, lambda _: None)] * bool(self._stepped)

    monkeypatch.setattr(under_way.Reductions, "move_on", forgetful)
    assert any(word.startswith("memory is used again while") for word in found(name))


@pytest.mark.parametrize("name", ["int8-ddp", "fast", "fast-half", "careless", "tree-ddp"])
def test_what_is_sent_lives_until_the_computation_has_waited(name, monkeypatch):
    """If sent tensors were freed early, as NCCL allows, a hazard is reported: otherwise the check would miss
    overwritten messages."""
    assert found(name) == set()
    monkeypatch.setattr(Pending, "keeping", lambda self, *sent: self)
    assert "memory is used again while a collective runs" in found(name)


def test_the_computation_waits_for_no_stage_of_a_gather():
    """A side stream waits for the first stage of a gather and starts the second, also where two units travel ahead: a
    link between hosts that is slower than a unit would be waited for earlier than needed."""
    with streams() as ordered:
        state = made(HYBRID, WIDE, optim.sgd(0.1))
        fshard.value_and_grad(loss)(state.params, torch.ones(4, 8, device=DEVICE))
    side = state.params.plan.crossings.stages._stream
    first = [stream for stream, call in ordered.waited if call == "all_gather shard"]
    assert {stream for stream, call in ordered.waited if call == "all_gather replicate"} == {ordered.main}
    assert first[:2] == [ordered.main] * 2  # there is nothing to compute with beside
    assert set(first[2:]) == {side}


@pytest.mark.parametrize(("name", "words"), [("plain", "is done"), ("bf16", "memory is used again while")])
def test_stages_are_waited_for(name, words, monkeypatch):
    """If the next stage did not wait, or what was sent were freed early, a hazard is reported: otherwise the check
    would miss both."""
    assert found(f"wide-{name}") == set()
    if name == "plain":
        monkeypatch.setattr(Pending, "advance", lambda self: vars(self._exchange).update(wait=list) or self.step())
    else:
        monkeypatch.setattr(Pending, "keeping", lambda self, *sent: self)
    assert any(words in word for word in found(f"wide-{name}"))


class Broken(torch.autograd.Function):
    """The identity, whose backward raises ZeroDivisionError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A copy of the input."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise ZeroDivisionError."""
        raise ZeroDivisionError


def broken(params: Any, batch: Tensor) -> Any:
    """A loss that reduces three blocks before its backward fails."""
    x = Broken.apply(torch.tanh(batch @ params["blocks"][0]["w"]))
    for at in range(1, 4):
        x = torch.tanh(x @ params["blocks"][at]["w"])
    return x.sum()


def after_an_error(sizes: dict[str, int]) -> set[str]:
    """The hazards of a backward that fails, and of a computation after it."""
    with streams() as ordered:
        params = made(sizes, {}, optim.sgd(0.1)).params
        with pytest.raises(ZeroDivisionError):
            fshard.value_and_grad(broken)(params, torch.ones(4, 8, device=DEVICE))
        assert ordered.current_stream() is ordered.main
        torch.ones(4, 8, device=DEVICE).mul_(2)
    return ordered.hazards


def test_nothing_is_left_behind_after_an_error(monkeypatch):
    """After a failed backward, sums under way end before memory is reused: otherwise the next computation would be
    overwritten."""
    assert after_an_error(TWO) == set()
    assert after_an_error(HYBRID) == set()
    monkeypatch.setattr(under_way.Reductions, "join", lambda self: None)
    monkeypatch.setattr(under_way.Reductions, "drop", lambda self: vars(self).update(_under_way=[], _stepped=[]))
    assert any(word.startswith("memory is used again while") for word in after_an_error(TWO))


@pytest.mark.parametrize(("sizes", "reduction", "most"), [(TWO, "fast", 1), (TWO, "exact", 2), (HYBRID, "fast", 2)])
@pytest.mark.parametrize("units", [["blocks.*"], ["blocks.*", "head"]])  # equal ones, and two small ones besides
def test_buffers_are_kept_for_a_unit_at_most(units, sizes, reduction, most, monkeypatch):
    """When a gradient buffer is made, at most one other is alive, and none where the backend adds, but small ones that
    fit in its place: otherwise memory would grow with the number of units, or be more than FSDP2 needs."""
    alive, found, make = list[tuple[StorageWeakRef, int]](), list[int](), travel.Gradients.buffer

    def buffer(*args: Any) -> Tensor:
        before = sum(nbytes for ref, nbytes in alive if not ref.expired())
        flat = make(*args)
        alive.append((StorageWeakRef(flat.untyped_storage()), flat.nbytes))
        found.append(before + flat.nbytes)
        return flat

    monkeypatch.setattr(travel.Gradients, "buffer", buffer)
    with streams():
        params = made(sizes, {"units": units}, optim.sgd(0.1)).params
        fshard.value_and_grad(loss, reduction=reduction)(params, torch.ones(4, 8, device=DEVICE))
    assert len(found) == 4 + len(units)
    assert max(found) == most * max(params.plan.ahead.sizes)


def test_where_there_are_no_streams_none_are_made():
    """No streams are made on CPUs or while a graph is traced: otherwise a step would fail there, or a graph hold a
    stream."""
    params = {"w": torch.ones(8, 4)}

    def law(mesh: Any) -> None:
        plan = fshard.make_plan(params, mesh)
        fshard.value_and_grad(lambda p: p["w"].sum())(fshard.shard_params(params, plan))
        assert crossings not in plan.mesh._kept

    fshard.testing.simulate(law, shard=2)
    with on_accelerator():
        plan = fshard.make_plan(params, Mesh())
        with FakeTensorMode():
            under_way.Reductions(plan)
            assert crossings not in plan.mesh._kept
        under_way.Reductions(plan)
        assert crossings in plan.mesh._kept
