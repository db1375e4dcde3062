"""What a step needs before it runs: the peak of memory, what is there then, what a rank sends, and room on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from torch import fx

from ..compiler.jit import Jitted, jit
from ..compiler.lowered import Lowered, Options, lower
from ..compiler.signature import flatten
from ..compiler.trace import Origin, TraceError, eval_shape
from ..core import tree
from ..core.arguments import check_whole
from ..core.tree import Tree
from ..graph.inspect import Flight, Traffic, collectives, flights, form, operator, values
from ..graph.memory import Span, rows, spans
from ..plan.plan import Plan
from ..plan.tables import aligned, size
from ..sharding.sharded import Sharded
from ..train.step import Step
from .depth import DEPTHS, Key, Results, Stack, calls, expanded, images, runs, shortened, stack_of, with_plan

MOST = 10  # tensors of the peak that are listed


class Interval(NamedTuple):
    """Bytes between two bounds, and where the bounds are from."""

    low: int
    high: int
    source: str


class Memory(NamedTuple):
    """The bytes of one purpose: there before the step, at the peak, and at this purpose's own peak."""

    purpose: str
    resident: int
    at_peak: int
    own_peak: int


class Tensors(NamedTuple):
    """Equal tensors that are in memory at the peak: how many, and their bytes together.

    They are of an operator, of a form such as "bf16[8, 128]" (of flat ones the dtype alone), allocated in a unit at a
    line of the user's code; "" where that is not known.
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
    """The most bytes in memory at one node of the graph: its operator, unit, phase and line, and what is there then."""

    bytes: int
    operator: str
    unit: str
    phase: str
    line: str
    largest: tuple[Tensors, ...]


@dataclass(frozen=True)
class Device:
    """The memory of a GPU that a process takes: what torch allocates and reserves, and what libraries take."""

    allocated: Interval
    workspaces: Interval
    reserved: Interval
    communicators: Interval
    total: Interval
    unknown: tuple[str, ...]

    def fits(self, capacity: int) -> str:
        """Whether a device of so many bytes has room: "yes", "likely" (the bounds say both) or "no".

        What is `unknown` is in no bound: leave room for it.
        """
        check_whole("fits: capacity", capacity, what="a number of bytes")
        return "yes" if self.total.high <= capacity else "no" if self.total.low > capacity else "likely"


@dataclass(frozen=True)
class Estimate:
    """What `fshard.estimate` returns: `print` shows it as tables, `to_dict` gives it to programs.

    `memory` has a row for each purpose, `traffic` one for each kind, unit and axis: bytes that a rank sends in a step.
    `graph` says which graph the figures are of, and `notes` what they leave out.
    """

    peak: Peak
    memory: tuple[Memory, ...]
    traffic: tuple[Traffic, ...]
    device: Device
    graph: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return dicts, lists, numbers and strings alone."""
        tables = {name: [row._asdict() for row in getattr(self, name)] for name in ("memory", "traffic")}
        peak = asdict(self.peak) | {"largest": [row._asdict() for row in self.peak.largest]}
        device = {k: x._asdict() if isinstance(x, Interval) else x for k, x in vars(self.device).items()}
        return {"peak": peak, **tables, "device": device, "graph": self.graph, "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def estimate(step: Callable[..., Tree], state: Tree, batch: Tree, *args: Tree) -> Estimate:
    """Return what `step(state, batch, *args)` needs on one rank, without running it: memory, traffic, room on a GPU.

    `step` is what `train_step` returns, or `jit` of it, or any pure function. `state`, `batch` and `args` may be real,
    on meta, or what `eval_shape` returned; on an `AbstractMesh` there may be any number of ranks. The figures are those
    of the step's graph, after `jit`'s passes with its options; a step that is not jitted is taken as `jit(step)`.

    A list of equal units, such as the layers of a network, is lowered with a few of them if the figures of all follow
    from these (Note [Depth]); `graph` says so. TraceError for what `jit` cannot trace.

    >>> plan = make_plan({"w": torch.empty(512, 512, device="meta")}, AbstractMesh(shard=4))
    >>> tx = optim.adamw(1e-3)
    >>> state = eval_shape(lambda p: init_state(shard_params(p, plan), tx), {"w": torch.empty(512, 512)})
    >>> step = jit(train_step(lambda p, x: (x @ p["w"]).square().mean(), tx), donate=True)
    >>> needed = estimate(step, state, torch.empty(8, 512))
    >>> needed.memory[0], needed.device.fits(16 << 30)
    (Memory(purpose='parameters', resident=262144, at_peak=262144, own_peak=262144), 'yes')
    >>> [(row.kind, row.bytes, row.count) for row in needed.traffic][:2]
    [('all_gather', 786432, 1), ('reduce_scatter', 786432, 1)]
    """
    jitted = step if isinstance(step, Jitted) else jit(step, donate=getattr(step, "donate", False))
    fn, options = jitted.__wrapped__, jitted.options
    given = eval_shape(lambda *x: x, state, batch, *args)
    sharded = [x.plan for x in tree.nodes(given[:1], Sharded)] or [x.plan for x in tree.nodes(given, Sharded)]
    stack = stack_of(sharded[0]) if sharded else None
    figures, said = _of_few(fn, options, given, sharded[0], stack) if stack else (None, "no list of equal units")
    if figures is None:
        whole = _Reading(_lowered(fn, options, given), stack)
        figures, said = _figures([whole], [[i] for i in range(len(whole.nodes))], 0, stack), f"the whole graph: {said}"
    notes = [f"the graph of jit(step, donate={options.donate}, bucket={options.bucket}, in_flight={options.in_flight})"]
    notes += [_EAGER] * (jitted is not step)
    order = {unit.name: number for number, unit in enumerate(sharded[0].units)} if sharded else {}
    kinds = dict.fromkeys(kind for kind, _, _ in figures.sent)
    keys = sorted(figures.sent, key=lambda key: ([*kinds].index(key[0]), order.get(key[1], -1)))
    traffic = tuple(Traffic(*key, *figures.sent[key]) for key in keys)
    device = _device(figures.peak.bytes, len({axis for _, _, axis in keys}))
    return Estimate(figures.peak, tuple(figures.memory), traffic, device, said, tuple(notes))


_EAGER = "a step that is not jitted keeps values that a graph fuses: its own peak may be higher"
_SOURCE = "counted on the graph; the allocator of CPU ranks agreed to 3% (docs/estimate.md)"
_RESERVED = "1 to 1.6 times what is allocated: DeepSpeed ZeRO-2 and FSDP1 in OpenTau PR#273"
_WORKSPACES = "cuBLAS: 8,519,680 bytes, on Hopper 32 MiB a stream (pytorch PR#120925), of two streams at most"
_COMMUNICATORS = "NCCL: 544 MB (nccl#964) to 2 GB (nccl#864) for each axis along which ranks send"
_UNKNOWN = ("the CUDA context", "workspaces of attention kernels", "what other programs take of the device")


_Sent = dict[tuple[str, str, str], tuple[int, int]]  # by kind, unit and axis: bytes, and number


class _Figures(NamedTuple):
    """The figures of a graph, read of it, or computed from those of smaller ones."""

    peak: Peak
    memory: list[Memory]
    sent: _Sent


def _lowered(fn: Callable[..., Tree], options: Options, given: Sequence[Tree]) -> Lowered:
    return lower(fn, *flatten(given, {}), options, lines=True)


def _of_few(
    fn: Callable[..., Tree], options: Options, given: Sequence[Tree], plan: Plan, stack: Stack
) -> tuple[_Figures | None, str]:
    """The figures of a step by graphs of a few units of a stack; None, and why the whole graph is needed."""
    name = f"{stack.depth} equal units {stack.path}.*"
    if stack.depth <= DEPTHS[-1] + 1:
        return None, f"few units, {name}"
    if not isinstance(fn, Step):
        return None, f"{name}, but the step is not what train_step returns"
    try:
        plans = [shortened(plan, stack, depth) for depth in DEPTHS]
        states = [with_plan(given, plan, new) for new in plans]
        results: Results = {}
        few, more, whole = (
            calls(fn, p, each, results) for p, each in ((plans[0], states[0]), (plans[1], states[1]), (plan, given))
        )
        places = runs(few, more)
        if places is None or expanded(few, places, stack.depth - DEPTHS[0]) != whole:
            return None, f"{name}, but the loss does not compute the same with each"
        readings = [_Reading(_lowered(fn, options, each), stack) for each in states]
    except (TraceError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as failure:
        return None, f"{name}, but with fewer the loss fails: {type(failure).__name__}: {failure}".splitlines()[0]
    sizes = set.intersection(*(reading.sizes for reading in readings))
    short, middle, long = (reading.keys(sizes) for reading in readings)
    places, times = runs(short, middle), [depth - DEPTHS[0] for depth in DEPTHS]
    if places is None or expanded(short, places, times[2]) != long:
        return None, f"{name}, but their graphs differ"
    image = images([reading.bytes for reading in readings], short, places, times)
    if image is None:
        return None, f"{name}, but memory does not grow evenly from one to the next"
    try:
        figures = _figures(readings, image, stack.depth, stack)
    except _Uneven as failure:
        return None, f"{name}, but {failure} does not grow evenly with them"
    return figures, f"the graphs of {', '.join(map(str, DEPTHS))} of {name}, from which those of all follow"


class _Uneven(Exception):
    """A figure that is not a linear function of the number of units."""


def _at(numbers: Sequence[int], depth: int, what: str) -> int:
    """The number at this depth of a linear function with these values at DEPTHS; a single value stands for itself."""
    if len(numbers) == 1:
        return numbers[0]
    slope, rest = divmod(numbers[1] - numbers[0], DEPTHS[1] - DEPTHS[0])
    if rest or numbers[2] - numbers[0] != slope * (DEPTHS[2] - DEPTHS[0]):
        raise _Uneven(what)
    return numbers[0] + slope * (depth - DEPTHS[0])


def _row_at(each: Sequence[Mapping[str, int]], depth: int) -> dict[str, int]:
    names = dict.fromkeys(name for row in each for name in row)
    return {name: _at([row.get(name, 0) for row in each], depth, name) for name in names}


def _at_most(each: Sequence[Mapping[str, int]], depth: int) -> dict[str, int]:
    """The bytes at this depth; of purposes that do not grow evenly (partial sums of a norm) more than there can be."""

    def most(numbers: list[int], name: str) -> int:
        try:
            return _at(numbers, depth, name)
        except _Uneven:
            return max(numbers) + 2 * depth * max(numbers[1] - numbers[0], numbers[2] - numbers[1], 0)

    return {name: most([row.get(name, 0) for row in each], name) for name in dict.fromkeys(chain(*each))}


class _Reading:
    """What is read of a lowered graph: its nodes by what equal ones have in common, and the memory at each."""

    def __init__(self, lowered: Lowered, stack: Stack | None):
        self.nodes: list[fx.Node] = list(lowered.graph.nodes)
        self._stack = stack
        self.spans: list[Span] = spans(lowered.graph, lowered.holds())
        self.bytes: list[dict[str, int]] = rows(self.spans, len(self.nodes))
        self.num_inputs: int = sum(node.op == "placeholder" for node in self.nodes)
        self.sent: _Sent = {
            (row.kind, row.unit, row.axis): (row.bytes, row.count) for row in collectives(lowered.graph)
        }
        origins = [self._origin(node) for node in self.nodes]
        last = max((i for i, origin in enumerate(origins) if origin and origin.is_backward), default=len(self.nodes))
        self._flights: list[Flight] = flights(lowered.graph)
        gathered = {flight.wait: flight.unit for flight in self._flights if flight.kind == "all_gather"}
        self.phases, self.units, self.lines = list[str](), list[str](), list[str]()
        phase, unit = "forward", ""
        for i, origin in enumerate(origins):
            phase = "update" if i > last else phase if origin is None else _PHASES[origin.is_backward]
            unit = "" if phase == "update" else gathered.get(i, unit)
            self.phases.append(phase)
            self.units.append(unit)
            self.lines.append(origin.line if origin else "")

    def _origin(self, node: fx.Node) -> Origin | None:
        """The origin of a node that computes: collectives are moved between phases."""
        origin: Origin | None = None if operator(node).startswith("fshard.") else node.meta.get("origin")
        return origin

    @cached_property
    def sizes(self) -> set[int]:
        """The bytes of all values."""
        return {x.nbytes for node in self.nodes for x in values(node)}

    def keys(self, sizes: Collection[int]) -> list[Key]:
        """What nodes have in common with those of other units, and in graphs of other numbers of units.

        Of the bytes of values those that are among `sizes`: others are of rows, which are longer for more units.
        """
        started = {flight.start: self.general(flight.unit) for flight in self._flights}
        return [
            (operator(node), *self._forms(i, sizes), started.get(i), self.general(self.units[i]), *self.at(i))
            for i, node in enumerate(self.nodes)
        ]

    def _forms(self, i: int, sizes: Collection[int]) -> list[Key]:
        known = sizes if self.phases[i] != "update" else ()  # which computes with rows alone
        return [(x.dtype, x.nbytes if x.nbytes in known else None) for x in values(self.nodes[i])]

    def at(self, i: int) -> tuple[str, str]:
        """The phase and the line of a node."""
        return self.phases[i], self.lines[i]

    def general(self, unit: str) -> str:
        """The name of a unit, or of several together, that has the same place in the stack as others."""
        return "+".join(self._stack.general(name) if self._stack else name for name in unit.split("+"))

    def there(self, i: int) -> dict[tuple[str, str, str, str, str], tuple[int, int]]:
        """The number and bytes of equal tensors in memory at a node, by what `Tensors` has before them."""
        groups = dict[tuple[str, str, str, str, str], tuple[int, int]]()
        for span in self.spans:
            if span.first <= i <= span.last and span.nbytes:
                is_input = span.node.op == "placeholder"
                text = form(span.value) if span.value.dim() != 1 else form(span.value).partition("[")[0]
                unit = self.units[span.first] if span.what != "gathered" else str(span.node.args[3])
                what = "input" if is_input else operator(span.node)
                key = (span.what, what, text, "" if is_input else self.general(unit), self.lines[span.first])
                count, nbytes = groups.get(key, (0, 0))
                groups[key] = count + 1, nbytes + span.nbytes
        return groups


_PHASES = ("forward", "backward")


def _figures(
    readings: Sequence[_Reading], images: Sequence[Sequence[int]], depth: int, stack: Stack | None
) -> _Figures:
    """The figures of a graph of so many units of the stack, read of one graph, or computed from three."""
    pairs, grown = list[list[tuple[_Reading, int]]](), list[dict[str, int]]()
    uneven = list[dict[str, int]]()
    for image in images:
        each = [reading.bytes[i] for reading, i in zip(readings, image, strict=True)]
        try:
            grown.append(_row_at(each, depth))
            pairs.append([*zip(readings, image, strict=True)])
        except _Uneven:
            uneven.append(_at_most(each, depth))
    top = max(range(len(grown)), key=lambda i: sum(grown[i].values()))
    resident = _row_at([reading.bytes[reading.num_inputs - 1] for reading in readings], depth)
    purposes = dict.fromkeys(name for row in grown for name in row)
    own = {name: max(row.get(name, 0) for row in grown) for name in purposes}
    for row in uneven:
        if sum(row.values()) > sum(grown[top].values()) or any(row[name] > own.get(name, 0) for name in row):
            raise _Uneven("the memory of some node")
    memory = [Memory(name, resident.get(name, 0), grown[top].get(name, 0), own[name]) for name in purposes]
    there = [reading.there(i) for reading, i in pairs[top]]
    tensors = [
        Tensors(*key, *_pair_at([groups.get(key, (0, 0)) for groups in there], depth))
        for key in dict.fromkeys(chain(*there))
    ]
    largest = sorted(tensors, key=lambda row: -row.bytes)[:MOST]
    (first, i), unit = pairs[top][0], _unit_at([reading.units[i] for reading, i in pairs[top]], depth, stack)
    peak = Peak(sum(grown[top].values()), operator(first.nodes[i]), unit, *first.at(i), tuple(largest))
    return _Figures(peak, sorted(memory, key=lambda row: -row.at_peak), _sent_at(readings, depth, stack))


def _unit_at(units: Sequence[str], depth: int, stack: Stack | None) -> str:
    """The unit at this depth of a node that is in these units in the graphs."""
    places = [stack.place(unit) if stack else None for unit in units]
    if len({*units}) == 1 or stack is None or None in places:
        return units[0]
    children = [place[0] for place in places if place]
    return stack.units[_at(children, depth, "the unit of a node")][places[0][1]] if places[0] else units[0]


def _sent_at(readings: Sequence[_Reading], depth: int, stack: Stack | None) -> _Sent:
    """The bytes and number of collectives, by kind, unit and axis: the units between the ends of a stack are equal."""
    if len(readings) == 1 or stack is None:
        return readings[0].sent
    outside = [{key: x for key, x in r.sent.items() if not stack.place(key[1])} for r in readings]
    sent = {key: _pair_at([each.get(key, (0, 0)) for each in outside], depth) for key in dict.fromkeys(chain(*outside))}
    inside = {(kind, place[1], axis) for r in readings for kind, unit, axis in r.sent if (place := stack.place(unit))}
    for kind, number, axis in inside:
        rows = [
            [r.sent.get((kind, names[number], axis), (0, 0)) for names in stack.units[:num]]
            for r, num in zip(readings, DEPTHS, strict=True)
        ]
        if len({(row[0], *{*row[1:-1]}, row[-1]) for row in rows}) > 1 or len({*rows[-1][1:-1]}) > 1:
            raise _Uneven("what ranks send")
        first, middle, *_, last = rows[-1]
        each = [first, *[middle] * (depth - 2), last]
        sent |= {(kind, names[number], axis): x for names, x in zip(stack.units, each, strict=True)}
    return {key: x for key, x in sent.items() if x[1]}


def _pair_at(pairs: Sequence[tuple[int, int]], depth: int) -> tuple[int, int]:
    first, second = (_at([pair[k] for pair in pairs], depth, "what ranks send") for k in (0, 1))
    return first, second


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
    head = f"peak {size(peak.bytes)} at {at}, in the {peak.phase}{f', {peak.line}' if peak.line else ''}"
    memory = [["memory", "before", "at the peak", "own peak"]]
    memory += [[row.purpose, *map(size, row[1:])] for row in x.memory]
    largest = [["largest at the peak", "", "unit", "line", "number", "bytes"]]
    largest += [[f"{t.operator} {t.form}", *t[:1], *t[3:5], str(t.count), size(t.bytes)] for t in peak.largest]
    kinds = dict[tuple[str, str], list[Traffic]]()
    for row in x.traffic:
        kinds.setdefault((row.kind, row.axis), []).append(row)
    sent = [["traffic", "axis", "number", "sent"]]
    sent += [[*k, str(sum(r.count for r in v)), size(sum(r.bytes for r in v))] for k, v in kinds.items()]
    names = ("allocated", "workspaces", "reserved", "communicators", "total")
    room = [["on a GPU", "from", "to", "source"]]
    room += [[n, size(i.low), size(i.high), i.source] for n in names for i in [getattr(device, n)]]
    tables = [aligned(memory, {1, 2, 3}), aligned(largest, {4, 5}), aligned(sent, {2, 3}), aligned(room, {1, 2})]
    notes = [f"not counted: {', '.join(device.unknown)}", f"of {x.graph}", *x.notes]
    return [head, *(line for table in tables for line in ["", *table]), "", *notes]
