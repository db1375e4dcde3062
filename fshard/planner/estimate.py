"""Estimate a step before it runs: peak of memory and its tensors, traffic of a rank, and room needed on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ..compiler.jit import Jitted, jit
from ..compiler.lowered import Lowered, Options, lower
from ..compiler.signature import flat_call
from ..compiler.trace import TraceError, eval_shape
from ..core import tree
from ..core.arguments import call_site, check_whole
from ..core.tree import Tree
from ..graph.inspect import Flight, Traffic, collectives, flights, form_of, operator, values
from ..graph.memory import MemorySpan, rows, spans
from ..plan.owners import shortened, size, tabulate
from ..plan.plan import Plan
from ..sharding.sharded import Sharded
from ..train.step import Step
from .depth import Key, Results, Stack, calls, depths_of, expanded, images, noted, runs, stack_of, with_few, with_plan

MOST_SHOWN = 10  # listed tensors at the peak


class Interval(NamedTuple):
    """Bytes between two bounds, and the source of the bounds."""

    low: int
    high: int
    source: str


class Memory(NamedTuple):
    """The bytes of one purpose: before the step, at the peak, and at this purpose's own peak."""

    purpose: str
    resident: int
    at_peak: int
    own_peak: int


class Tensors(NamedTuple):
    """Equal tensors in memory at the peak: `count` of them, with `bytes` in all.

    - `form`: dtype and shape, such as "bf16[8, 128]"; for flat tensors the dtype only.
    - `unit`, `line`: the unit, and the line of the user's code, where they were allocated; "" if unknown.
    """

    purpose: str
    operator: str
    form: str
    unit: str
    line: str
    count: int  # type: ignore[assignment]  # hides tuple.count
    bytes: int


@dataclass(frozen=True)
class Peak:
    """The most bytes in memory; operator, unit, phase and line of this peak's node; the largest tensors at the peak."""

    bytes: int
    operator: str
    unit: str
    phase: str
    line: str
    largest: tuple[Tensors, ...]


@dataclass(frozen=True)
class Device:
    """The memory that a process takes on a GPU: allocated and reserved by torch, and taken by libraries."""

    allocated: Interval
    workspaces: Interval
    reserved: Interval
    communicators: Interval
    total: Interval
    unknown: tuple[str, ...]

    def fits(self, capacity: int) -> str:
        """Return "yes" if a device of `capacity` bytes has room, "no" if not, "likely" between the bounds.

        The bounds leave out the items in `unknown`: leave room for these.
        """
        check_whole("fits: capacity", capacity, what="a number of bytes")
        return "yes" if self.total.high <= capacity else "no" if self.total.low > capacity else "likely"


@dataclass(frozen=True)
class Estimate:
    """The result of `fshard.estimate`: `print` shows tables, `to_dict` is for programs.

    - `memory`: a row for each purpose.
    - `traffic`: a row for each kind, unit and axis, with the bytes that a rank sends in a step.
    - `graph`: the graph that the figures describe.
    - `notes`: what the figures leave out.
    """

    peak: Peak
    memory: tuple[Memory, ...]
    traffic: tuple[Traffic, ...]
    device: Device
    graph: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return dicts, lists, numbers and strings only."""
        tables = {name: [row._asdict() for row in getattr(self, name)] for name in ("memory", "traffic")}
        peak = asdict(self.peak) | {"largest": [row._asdict() for row in self.peak.largest]}
        device = {k: x._asdict() if isinstance(x, Interval) else x for k, x in vars(self.device).items()}
        return {"peak": peak, **tables, "device": device, "graph": self.graph, "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def estimate(step: Callable[..., Tree], state: Tree, batch: Tree, *args: Tree, **kwargs: Tree) -> Estimate:
    """Estimate memory, traffic and GPU room of `step(state, batch, *args, **kwargs)` on one rank, without running it.

    - `step`: the result of `train_step`, `jit` of it, or any pure function. A step that is not jitted counts as
      `jit(step)`.
    - `state`, `batch`, `args`, `kwargs`: real, on meta, or from `eval_shape`; an `AbstractMesh` gives any number of
      ranks.

    The figures are of the step's graph, after `jit`'s passes with its options. If the state has a list of equal units,
    such as the layers of a network, and all figures follow from a few units, only a few units are lowered (Note
    [Depth] in `planner/depth.py`); `graph` says so. TraceError if `jit` cannot trace the step.

    >>> plan = make_plan({"w": torch.empty(512, 512, device="meta")}, AbstractMesh(shard=4))
    >>> tx = optim.adamw(1e-3)
    >>> state = eval_shape(lambda p: init_state(shard_params(p, plan), tx), {"w": torch.empty(512, 512)})
    >>> step = jit(train_step(lambda p, x: (x @ p["w"]).square().mean(), tx), donate=True)
    >>> needed = estimate(step, state, torch.empty(8, 512))
    >>> {row.purpose: row.resident for row in needed.memory}["parameters"], needed.device.fits(16 << 30)
    (262144, 'yes')
    >>> [(row.kind, row.bytes, row.count) for row in needed.traffic][:2]
    [('all_gather', 786432, 1), ('all_reduce', 120, 1)]
    """
    jitted = step if isinstance(step, Jitted) else jit(step, donate=getattr(step, "donate", False))
    fn, options = jitted.__wrapped__, jitted.options
    given: tuple[Tree, ...] = eval_shape(lambda x: x, (state, batch, *args, kwargs))  # the keywords last
    sharded = [x.plan for x in tree.nodes(given[:1], Sharded)] or [x.plan for x in tree.nodes(given, Sharded)]
    stack = stack_of(sharded[0]) if sharded else None
    figures, said = _of_few(fn, options, given, sharded[0], stack) if stack else (None, "no list of equal units")
    if figures is None:
        whole = _read_step(fn, options, given, stack)
        sites = [[i] for i in range(len(whole.sites))]
        figures, said = _figures([whole], sites, _Growth((0,), 0), stack), f"the whole graph: {said}"
    notes = [f"the graph of jit(step, donate={options.donate}, bucket={options.bucket}, in_flight={options.in_flight})"]
    notes += [EAGER] * (jitted is not step) + [ON_HOST] * _has_state_on_host(given)
    order = {unit.name: number for number, unit in enumerate(sharded[0].units)} if sharded else {}
    kinds = dict.fromkeys(kind for kind, _, _ in figures.sent)
    keys = sorted(figures.sent, key=lambda key: ([*kinds].index(key[0]), order.get(key[1], -1)))
    traffic = tuple(Traffic(*key, *figures.sent[key]) for key in keys)
    device = _device(figures.peak.bytes, len({axis for _, _, axis in keys}))
    return Estimate(figures.peak, tuple(figures.memory), traffic, device, said, tuple(notes))


EAGER = "a step that is not jitted keeps more: up to 1.22 times this peak was measured (docs/compile.md)"
ON_HOST = (
    "the optimizer's state is in host memory and not counted; an update has that of one unit on the device, or, in a "
    "graph and for an optimizer that looks at leaves or norms, all of it"
)
_SOURCE = "counted on the graph; the allocator of CPU ranks agreed to 3% in most steps (docs/compile.md)"
_RESERVED = "1 to 1.6 times what is allocated: DeepSpeed ZeRO-2 and FSDP1 in OpenTau PR#273"
_WORKSPACES = "cuBLAS: 8,519,680 bytes, on Hopper 32 MiB a stream (pytorch PR#120925), of two streams at most"
_COMMUNICATORS = "NCCL: 544 MB (nccl#964) to 2 GB (nccl#864) for each axis along which ranks send"
_UNKNOWN = ("the CUDA context", "workspaces of attention kernels", "what other programs take of the device")


_Sent = dict[tuple[str, str, str], tuple[int, int]]  # by kind, unit and axis: bytes, number


class _Figures(NamedTuple):
    peak: Peak
    memory: list[Memory]
    sent: _Sent


def _read_step(fn: Callable[..., Tree], options: Options, given: Sequence[Tree], stack: Stack | None) -> _Reading:
    lowered = lower(partial(noted, fn, call_site()), *flat_call(given[:-1], given[-1]), options)
    return _Reading(lowered, stack, "optimizer" if _has_state_on_host(given) else "")


def _has_state_on_host(given: Sequence[Tree]) -> bool:
    return any(x.plan.state_on_host for x in tree.nodes(given, Sharded))


def _of_few(
    fn: Callable[..., Tree], options: Options, given: Sequence[Tree], plan: Plan, stack: Stack
) -> tuple[_Figures | None, str]:
    """Return (figures by few units, description), or (None, the reason for the whole graph)."""
    name, depths = f"{stack.depth} equal units {stack.path}.*", depths_of(plan, stack)
    if stack.depth <= depths[-1] + 1:
        return None, f"few units, {name}"
    if not isinstance(fn, Step):
        return None, f"{name}, but the step is not what train_step returns"
    if any(isinstance(x, Tensor) and x.dim() for x in tree.tops(getattr(given[0], "opt_state", None), Sharded)):
        return None, f"{name}, but the optimizer has state of its own shapes, which is not that of fewer"
    try:
        plans = [with_few(plan, stack, depth) for depth in depths]
        states = [with_plan(given, plan, new) for new in plans]
        results: Results = {}
        pairs = ((plans[0], states[0]), (plans[1], states[1]), (plan, given))
        few, more, whole = (calls(fn, p, each, results) for p, each in pairs)
        places = runs(few, more)
        if places is None or expanded(few, places, stack.depth - depths[0]) != whole:
            return None, f"{name}, but the loss does not compute the same with each"
        readings = [_read_step(fn, options, each, stack) for each in states]
    except (TraceError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as failure:
        return None, f"{name}, but with fewer the loss fails: {type(failure).__name__}: {failure}".splitlines()[0]
    sizes = set.intersection(*(reading.sizes for reading in readings))
    short, middle, long = ([site.key(sizes) for site in reading.sites] for reading in readings)
    places, times = runs(short, middle), [depth - depths[0] for depth in depths]
    if places is None or expanded(short, places, times[2]) != long:
        return None, f"{name}, but their graphs differ"
    image = images([reading.bytes for reading in readings], short, places, times)
    if image is None:
        return None, f"{name}, but memory does not grow evenly from one to the next"
    try:
        figures = _figures(readings, image, _Growth(depths, stack.depth), stack)
    except _Uneven as failure:
        return None, f"{name}, but {failure} does not grow evenly with them"
    return figures, f"the graphs of {', '.join(map(str, depths))} of {name}, from which those of all follow"


class _Uneven(Exception): ...


class _Growth(NamedTuple):
    """The numbers of units in the graphs, and the number of all units. A single graph is the whole graph."""

    depths: tuple[int, ...]
    depth: int

    def bounded(self, numbers: Sequence[int]) -> tuple[int, bool]:
        """Return (value for all units, True) if numbers grow linearly; else (a bound, False), as for a norm's sums."""
        if len(numbers) == 1:
            return numbers[0], True
        near, far, further = (depth - self.depths[0] for depth in (*self.depths[1:], self.depth))
        slope, rest = divmod(numbers[1] - numbers[0], near)
        if rest or numbers[2] - numbers[0] != slope * far:
            return max(numbers) + 2 * self.depth * max(numbers[1] - numbers[0], numbers[2] - numbers[1], 0), False
        return numbers[0] + slope * further, True

    def exact(self, numbers: Sequence[int], what: str) -> int:
        number, is_exact = self.bounded(numbers)
        if not is_exact:
            raise _Uneven(what)
        return number

    def pair(self, pairs: Sequence[tuple[int, int]], what: str) -> tuple[int, int]:
        return self.exact([n for n, _ in pairs], what), self.exact([nbytes for _, nbytes in pairs], what)


class _Site(NamedTuple):
    """A node that allocates: its number, and properties shared by equal nodes of other units."""

    number: int
    operator: str
    unit: str
    phase: str
    line: str
    forms: tuple[tuple[torch.dtype, int], ...]
    starts: str | None

    def key(self, sizes: Collection[int]) -> Key:
        """Return a key, equal for this node in other units and larger graphs. Bytes count only if in `sizes`."""
        known = sizes if self.phase != "update" else ()  # an update's tensors grow with the number of units
        return *self[1:5], self.starts, *((dtype, n if n in known else None) for dtype, n in self.forms)


class _Reading:
    def __init__(self, lowered: Lowered, stack: Stack | None, on_host: str):
        # `on_host`: a purpose in host memory, not counted
        self.spans: list[MemorySpan] = [x for x in spans(lowered.graph, lowered.holds()) if x.what != on_host]
        nodes, firsts = list(lowered.graph.nodes), {span.first for span in self.spans}
        self._stack = stack
        self.sites: list[_Site] = [site for site in self._sites(nodes, flights(lowered.graph)) if site.number in firsts]
        self._units: dict[int, _Site] = {site.number: site for site in self.sites}
        counted = rows(self.spans, len(nodes))
        self.bytes: list[dict[str, int]] = [counted[site.number] for site in self.sites]
        self.num_inputs: int = sum(nodes[site.number].op == "placeholder" for site in self.sites)
        self.sent: _Sent = {(x.kind, x.unit, x.axis): (x.bytes, x.count) for x in collectives(lowered.graph)}
        self.sizes: set[int] = {nbytes for site in self.sites for _, nbytes in site.forms}

    def _sites(self, nodes: Sequence[fx.Node], sent: Sequence[Flight]) -> Iterator[_Site]:
        # compiler passes move collectives between phases
        origins = [None if operator(node).startswith("fshard.") else node.meta.get("origin") for node in nodes]
        last = max((i for i, origin in enumerate(origins) if origin and origin.is_backward), default=len(nodes))
        started = {flight.start: self.general(flight.unit) for flight in sent}
        gathered = {flight.wait: self.general(flight.unit) for flight in sent if flight.kind == "all_gather"}
        phase, unit = "forward", ""
        for i, (node, origin) in enumerate(zip(nodes, origins, strict=True)):
            phase = "update" if i > last else phase if origin is None else ("forward", "backward")[origin.is_backward]
            unit = "" if phase == "update" else gathered.get(i, unit)
            line, forms = origin.line if origin else "", tuple((x.dtype, x.nbytes) for x in values(node))
            name = "input" if node.op == "placeholder" else operator(node)
            yield _Site(i, name, unit, phase, line, forms, started.get(i))

    def general(self, units: str) -> str:
        return "+".join(self._stack.general(name) if self._stack else name for name in units.split("+"))

    def there(self, site: _Site) -> dict[tuple[str, ...], tuple[int, int]]:
        """Return (number, bytes) of equal tensors in memory at a node, by the first fields of `Tensors`."""
        groups = dict[tuple[str, ...], tuple[int, int]]()
        for span in self.spans:
            if span.first <= site.number <= span.last and span.nbytes:
                at, text = self._units[span.first], form_of(span.value)
                # the length of a flat tensor depends on the number of units
                text = text.partition("[")[0] if span.value.dim() == 1 else text
                unit = at.starts if span.what == "gathered" else at.unit
                key = (span.what, at.operator, text, unit or "", at.line)
                count, nbytes = groups.get(key, (0, 0))
                groups[key] = count + 1, nbytes + span.nbytes
        return groups


def _figures(
    readings: Sequence[_Reading], images: Sequence[Sequence[int]], all_of: _Growth, stack: Stack | None
) -> _Figures:
    purposes = dict.fromkeys(name for row in readings[-1].bytes for name in row)
    each = ([reading.bytes[i] for reading, i in zip(readings, image, strict=True)] for image in images)
    table = [{name: all_of.bounded([row.get(name, 0) for row in at]) for name in purposes} for at in each]
    totals = [sum(n for n, _ in row.values()) for row in table]
    top = max(range(len(table)), key=totals.__getitem__)
    most = {name: max(row[name] for row in table) for name in purposes}
    if not all(is_exact for _, is_exact in (*table[top].values(), *most.values())):
        raise _Uneven("the memory of some node")
    before = [reading.bytes[reading.num_inputs - 1] for reading in readings]
    resident = {name: all_of.exact([row.get(name, 0) for row in before], "the state") for name in purposes}
    memory = [Memory(name, resident[name], table[top][name][0], most[name][0]) for name in purposes]
    sites = [reading.sites[i] for reading, i in zip(readings, images[top], strict=True)]
    there = [reading.there(site) for reading, site in zip(readings, sites, strict=True)]
    pairs = {key: [groups.get(key, (0, 0)) for groups in there] for key in dict.fromkeys(chain(*there))}
    tensors = [Tensors(*key, *all_of.pair(pair, "a tensor")) for key, pair in pairs.items()]  # type: ignore[call-arg, arg-type]
    largest = sorted(tensors, key=lambda row: -row.bytes)[:MOST_SHOWN]
    peak = Peak(totals[top], *sites[0][1:5], tuple(largest))
    return _Figures(peak, sorted(memory, key=lambda row: -row.at_peak), _sent_by_all(readings, all_of, stack))


def _sent_by_all(readings: Sequence[_Reading], all_of: _Growth, stack: Stack | None) -> _Sent:
    """Return (bytes, number) by collective. All units of a stack but the first and last must send alike."""
    if len(readings) == 1 or stack is None:
        return readings[0].sent
    outside = [{key: x for key, x in r.sent.items() if not stack.place(key[1])} for r in readings]
    names = dict.fromkeys(chain(*outside))
    sent = {key: all_of.pair([each.get(key, (0, 0)) for each in outside], "what ranks send") for key in names}
    inside = {(kind, place[1], axis) for r in readings for kind, unit, axis in r.sent if (place := stack.place(unit))}
    of_few = [*zip(readings, all_of.depths, strict=True)]
    for kind, number, axis in inside:
        rows = [[r.sent.get((kind, names[number], axis), (0, 0)) for names in stack.units[:n]] for r, n in of_few]
        # another tree may have units with names of the stack, even of units that this graph lacks
        others = {r.sent.get((kind, names[number], axis)) for r, n in of_few for names in stack.units[n:]}
        if len({(row[0], *{*row[1:-1]}, row[-1]) for row in rows}) > 1 or len({*rows[-1][1:-1]}) > 1 or len(others) > 1:
            raise _Uneven("what ranks send")
        first, middle, *_, last = rows[-1]
        each = [first, *[middle] * (all_of.depth - 2), last]
        sent |= {(kind, names[number], axis): x for names, x in zip(stack.units, each, strict=True)}
    return {key: x for key, x in sent.items() if x[1]}


def _device(peak: int, num_axes: int) -> Device:
    allocated = Interval(int(0.97 * peak), int(1.03 * peak), _SOURCE)
    workspaces = Interval(8_519_680, 2 * (32 << 20), _WORKSPACES)
    most = int(1.6 * (allocated.high + workspaces.high))
    reserved = Interval(allocated.low + workspaces.low, most, _RESERVED)
    communicators = Interval(num_axes * 544_000_000, num_axes * 2_000_000_000, _COMMUNICATORS)
    total = Interval(reserved.low + communicators.low, reserved.high + communicators.high, "the two before")
    return Device(allocated, workspaces, reserved, communicators, total, _UNKNOWN)


def _lines(x: Estimate) -> list[str]:
    peak, device = x.peak, x.device
    at = " of ".join(filter(None, [peak.operator, peak.unit]))
    head = f"peak {size(peak.bytes)} at {at}, in the {peak.phase}{f', {PurePath(peak.line).name}' if peak.line else ''}"
    memory = [["memory", "before", "at the peak", "own peak"]]
    memory += [[row.purpose, *map(size, row[1:])] for row in x.memory]
    largest = [["largest at the peak", "", "unit", "line", "number", "bytes"]]
    for t in peak.largest:
        unit, line = shortened(t.unit, 24), PurePath(t.line).name
        largest.append([f"{t.operator} {t.form}", t.purpose, unit, line, str(t.count), size(t.bytes)])
    kinds = dict[tuple[str, str], list[Traffic]]()
    for row in x.traffic:
        kinds.setdefault((row.kind, row.axis), []).append(row)
    sent = [["traffic", "axis", "number", "sent"]]
    sent += [[*k, str(sum(r.count for r in v)), size(sum(r.bytes for r in v))] for k, v in kinds.items()]
    names = ("allocated", "workspaces", "reserved", "communicators", "total")
    room = [["on a GPU", "from", "to", "source"]]
    room += [[n, size(i.low), size(i.high), i.source] for n in names for i in [getattr(device, n)]]
    tables = [tabulate(memory, {1, 2, 3}), tabulate(largest, {4, 5}), tabulate(sent, {2, 3}), tabulate(room, {1, 2})]
    notes = [f"not counted: {', '.join(device.unknown)}", f"of {x.graph}", *x.notes]
    return [head, *(line for table in tables for line in ["", *table]), "", *notes]
