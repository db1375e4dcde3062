"""Copies beside the computation, on streams that record their order: what is read or let go too early is found."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerator import DEVICE, Ranks, on_accelerator
from test_offload import loss, state_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import DynamicLossScale, offload, optim

pytestmark = pytest.mark.usefixtures("one_thread")
Clock = dict[Any, int]


class Stream:
    """A queue of a device: what it has done, and what it knows to be done elsewhere."""

    def __init__(self) -> None:
        self.clock: Clock = defaultdict(int)

    def wait_stream(self, other: "Stream") -> None:
        """Know what the other has been given so far."""
        self.see(other.clock)

    def see(self, clock: Clock) -> None:
        """Know as much."""
        for who, time in clock.items():
            self.clock[who] = max(self.clock[who], time)


class Memory:
    """Who has written to a storage last, and who has read it since; the stream that it was made on."""

    def __init__(self, x: Tensor, maker: Stream, name: str):
        self.alive, self.maker, self.name = StorageWeakRef(x.untyped_storage()), maker, name
        self.write: tuple[Stream, int, str] | None = None
        self.reads: list[tuple[Stream, int, str]] = []


class Ordered(TorchDispatchMode):
    """A device module with streams (in the place of torch.cuda), and the hazards among what runs on them."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.main, self.net = Stream(), Stream(), Stream()
        self._current, self._streams = self.main, [self.main, self.net]
        self._memory: dict[int, Memory] = {}
        self._pools: dict[Stream, list[Memory]] = defaultdict(list)  # what is freed, by the stream it was made on
        self.hazards: set[str] = set()

    def Stream(self) -> Stream:
        """Another stream."""
        self._streams.append(Stream())
        return self._streams[-1]

    def current_stream(self) -> Stream:
        """The one that operators are given to."""
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Inside the block operators are given to this one."""
        before, self._current = self._current, stream
        yield
        self._current = before

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in self._streams:
            self.host.see(stream.clock)

    def _of(self, x: Tensor, who: Stream, name: str) -> Memory:
        return self._memory.setdefault(x.untyped_storage()._cdata, Memory(x, who, name))

    def _sweep(self) -> None:
        for key, memory in [*self._memory.items()]:
            if memory.alive.expired():
                self._pools[memory.maker].append(self._memory.pop(key))

    def _take(self, who: Stream) -> None:
        """New memory of a stream may be any that was made there and let go: all work on it must be known."""
        for memory in self._pools.pop(who, []) if who is not self.host else []:
            for other, time, name in [*memory.reads, *([memory.write] if memory.write else [])]:
                if who.clock[other] < time:
                    self.hazards.add(f"memory is used again while {name} runs")

    def access(self, who: Stream, reads: list[Tensor], writes: list[Tensor], made: list[Tensor], name: str) -> None:
        """Check one operator's reads and writes against what its stream knows, and note them."""
        who.see(self.host.clock)  # it was launched after what the host has done
        who.clock[who] += 1
        self._sweep()
        if made:
            self._take(who)
        for x in reads:
            memory = self._of(x, who, name)
            if memory.write and who.clock[memory.write[0]] < memory.write[1]:
                self.hazards.add(f"{name} reads before {memory.write[2]} is done")
            memory.reads.append((who, who.clock[who], name))
        for x in [*writes, *made]:
            memory = self._of(x, who, name)
            for other, time, before in [*memory.reads, *([memory.write] if memory.write else [])]:
                if who.clock[other] < time:
                    self.hazards.add(f"{name} writes before {before} is done")
            memory.write, memory.reads = (who, who.clock[who], name), []

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
        # a number of the host's is an argument of a kernel
        self.access(who, [x for x in reads if near or crosses or x.device == DEVICE], into, made, op.__name__)
        waits = crosses and not named.get("non_blocking", False)
        if waits or op is torch.ops.aten._local_scalar_dense:
            self.host.see(self._current.clock)
        return out


class Sent:
    """An exchange as NCCL has it: on a stream that waits for whoever starts it, and is waited for."""

    def __init__(self, ordered: Ordered, works: Any, sends: list[Tensor], rank: int):
        self._ordered, self._parts = ordered, works.parts
        ordered.net.wait_stream(ordered.current_stream())
        to = [x for number, x in enumerate(works.parts) if number != rank]
        ordered.access(ordered.net, sends, to, [], "a collective")

    def wait(self) -> Any:
        """The stream that asks waits."""
        self._ordered.current_stream().wait_stream(self._ordered.net)
        return self._parts

    def done(self) -> None:
        """Nothing is shared."""


def hazards(how: dict[str, Any], step: dict[str, Any], scaler: Any = None) -> set[str]:
    """Of three steps with leaves in host memory."""
    with on_accelerator(), pytest.MonkeyPatch.context() as patch:
        ordered, find, exchange = Ordered(), torch.get_device_module, Ranks.exchange

        def sent(self: Ranks, sends: Any, recvs: Any, call: str) -> Any:
            return Sent(ordered, exchange(self, sends, recvs, call), list(sends), self.rank)

        patch.setattr(Ranks, "exchange", sent)
        patch.setattr(torch, "get_device_module", lambda x: ordered if torch.device(x) == DEVICE else find(x))
        with ordered:
            tx = optim.adamw(0.1)
            state, run = state_of(tx, scaler, **how), fshard.train_step(loss, tx, **step)
            for _ in range(3):
                state, _ = run(state, torch.ones(4, 8, device=DEVICE))
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", HOW)
def test_nothing_is_overtaken(name):
    """With a loss scale, which the host reads, and without one."""
    assert hazards(*HOW[name]) == set()
    assert hazards(*HOW[name], DynamicLossScale(8.0)) == set()


def test_the_computation_waits_for_what_arrives(monkeypatch):
    """Without it, it reads too early what no collective brings."""
    monkeypatch.setattr(offload.Crossing, "join", lambda self: None)
    whole = dict.fromkeys(("params_over", "grads_over", "state_over"), ())
    assert "mm reads before _to_copy is done" in hazards(whole, {})


def test_the_host_waits_before_it_reads(monkeypatch):
    """Gradients that have come to its memory."""
    monkeypatch.setattr(offload.Crossing, "settle", lambda self: None)
    assert any(words.endswith("reads before copy_ is done") for words in hazards({}, {}))


def test_copies_wait_for_what_they_copy(monkeypatch):
    """And for what was in their memory before."""

    @contextmanager
    def ahead(self: offload.Crossing) -> Iterator[None]:
        with self._module.stream(self._stream):
            yield

    monkeypatch.setattr(offload.Crossing, "ahead", ahead)
    found = hazards({}, {})
    assert any(words.startswith("copy_ reads before") for words in found)
    assert any(words.startswith("memory is used again while") for words in found)


def test_what_is_copied_lives_until_it_is_waited_for(monkeypatch):
    """Else its memory is the computation's again."""
    monkeypatch.setattr(
        offload._Arrival, "__init__", lambda self, crossing, held: vars(self).update(crossing=crossing, held=[])
    )
    assert "memory is used again while copy_ runs" in hazards({}, {})


def test_the_computation_waits_for_collectives(monkeypatch):
    """Without it, it reads what is still to arrive."""
    monkeypatch.setattr(Sent, "wait", lambda self: self._parts)
    assert any(words.endswith("reads before a collective is done") for words in hazards({}, {}))
