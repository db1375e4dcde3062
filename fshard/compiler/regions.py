"""Equal regions of a graph, compiled once, and a driver that calls them between collectives.

Note [Regions]
    1. Compile time grows with the number of nodes, and a network's layers are equal. A region is the computation
       between two collectives; if gathers are merged, it ends before the first reader of the next unit's part. Equal
       layers have equal regions: the same operators, numbers, shapes, wiring and order. Each distinct region is
       compiled once.
    2. The driver is a graph of collectives and calls of regions. Python runs its code (`Compiled.as_text`).
    3. A region gets whole buffers and makes views of them. The driver makes the views of the graph's inputs, because
       their offsets differ between layers; a region that writes to an input gets the whole input.
    4. A region takes its arguments as a list and empties the list, so a value is freed after its last reader.
    5. A graph stays whole if no two regions are equal; if it draws from torch's generator, because regions would draw
       other numbers; or if it has lazily conjugated or negated values, because regions do not see these bits. If it
       writes to parts of inputs, it is then one region.
"""

from __future__ import annotations

import inspect
import operator as python
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor, fx

from ..core.random import draws
from ..core.storage import address, ranges_meet
from ..core.tracing import memo
from ..graph.dataflow import is_call, is_write, written
from ..graph.inspect import operator, values
from ..graph.memory import storages_of
from .trace import alone

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]  # a function that empties its list of arguments
Compile = Callable[[fx.GraphModule], Callable[..., Sequence[Tensor]]]

# operators of fshard without communication
_COMPUTES = ("fshard.materialize", "fshard.draw", "fshard.forked", "fshard.seeded", "fshard.bitcast")


@dataclass(frozen=True)
class Region:
    """Nodes between two collectives as a graph. `inputs` and `outputs` are nodes of the whole graph."""

    graph: fx.Graph
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    @memo
    def key(self) -> tuple[object, ...]:
        numbers = {node: number for number, node in enumerate(self.graph.nodes)}
        memory: dict[int, int] = {}
        key: list[object] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                x = node.meta["val"]
                form = x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.dtype, x.device
                key.append((*form, memory.setdefault(address(x), len(memory))))
            else:
                wiring = fx.map_arg((node.args, node.kwargs), lambda x: f"%{numbers[x]}")
                key.append((node.target, repr(wiring)))
        return tuple(key)


def regions(module: fx.GraphModule) -> list[fx.Node | Region]:
    """Return regions and other nodes in order; [] if the graph must stay whole."""
    if any(_keeps_whole(module, node) for node in module.graph.nodes):
        return []
    runs = _node_runs(module.graph)
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    read = [_nodes_read(run) for run in runs]
    needed = {x for number, nodes in enumerate(read) for x in nodes if run_of.get(x) != number}
    return [_region(run, x, needed) if _is_computed(run[0]) else run[0] for run, x in zip(runs, read, strict=True)]


def one_region(module: fx.GraphModule) -> list[fx.Node | Region]:
    """Return all nodes in one region: in a whole graph, compilers copy an input to write to its parts."""
    output = module.graph.output_node()
    run = [node for node in module.graph.nodes if node.op not in ("placeholder", "output") and not _is_view(node)]
    region = _region(run, _nodes_read(run), {*_nodes_read([output])})
    return [*module.graph.find_nodes(op="placeholder"), region, output]


def are_alike(parts: Sequence[fx.Node | Region]) -> bool:
    keys = [part.key for part in parts if isinstance(part, Region)]
    return len({*keys}) < len(keys)


def driver(module: fx.GraphModule, parts: Sequence[fx.Node | Region], compiled: Compile) -> fx.GraphModule:
    copies, functions = _Copies(), dict[tuple[object, ...], Boxed]()
    for part in parts:
        if isinstance(part, fx.Node):
            copies.add(part)
            continue
        if part.key not in functions:
            fn = compiled(fx.GraphModule(module, part.graph))
            functions[part.key] = _named_region(_boxed(fn), f"region_{len(functions)}")
        given = copies.graph.create_node("call_function", boxed, tuple(map(copies.get, part.inputs)), name="values")
        out = copies.graph.create_node("call_function", functions[part.key], (given,), name="out")
        for number, node in enumerate(part.outputs):
            copies.of[node] = copies.graph.call_function(python.getitem, (out, number))
    return fx.GraphModule(module, copies.graph)


def as_text(module: fx.GraphModule) -> str:
    return module.code.replace(f"{__name__.replace('.', '_')}_", "")


def _keeps_whole(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return not isinstance(getattr(module, str(node.target), None), Tensor)
    is_random = node.op == "call_function" and draws(node.target, node.args, node.kwargs)
    return is_random or any(x.is_conj() or x.is_neg() for x in values(node))


def _is_computed(node: fx.Node) -> bool:
    if node.op != "call_function" or _is_memory(node):
        return False
    if is_call(node, "getitem"):
        return _is_computed(node.args[0])  # type: ignore[arg-type]
    return not operator(node).startswith("fshard.") or operator(node) in _COMPUTES


def _is_memory(node: fx.Node) -> bool:
    return is_call(node, "empty", "empty_strided", "new_empty")


def _is_view(node: fx.Node) -> bool:
    if not _is_computed(node) or is_write(node) or not values(node):
        return False
    if is_call(node, "getitem"):
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return {*storages_of(node)} <= {storage for x in node.all_input_nodes for storage in storages_of(x)}


def _node_runs(graph: fx.Graph) -> list[list[fx.Node]]:
    runs: list[list[fx.Node]] = []
    run_of: dict[fx.Node, list[fx.Node]] = {}
    run: list[fx.Node] = []
    unread = {storage: x.meta["unit"] for x in graph.nodes if "unit" in x.meta for storage in storages_of(x)}
    reader, last = graph.output_node(), set[str]()  # last first reader of a part, and its units
    for node in graph.nodes:
        if _is_view(node) or _is_memory(node):
            continue
        if is_call(node, "getitem") and _is_computed(node):
            run_of[node] = run_of[node.args[0]]
            run_of[node].append(node)
        elif _is_computed(node):
            read = {storage for x in node.all_input_nodes for storage in storages_of(x)}
            if units := {unread.pop(storage) for storage in read if storage in unread}:
                if run_of.get(reader) is run and units != last:
                    runs.append(run)
                    run = []
                reader, last = node, units
            run.append(node)
            run_of[node] = run
        else:
            if run and (node.op == "output" or operator(node).startswith("fshard.")):
                runs.append(run)
                run = []
            runs.append([node])
    return runs


def _nodes_read(run: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that `run` reads. For a view return its base, unless it is a part of an input.

    A run gets an input whole if it writes to overlapping parts.
    """
    memory, whole = written(run), set[int]()  # `whole`: storages of inputs whose parts overlap, and one is written

    def read(node: fx.Node, parts: bool) -> Iterator[fx.Node]:
        parts = parts and "as_strided" not in operator(node)  # `as_strided` counts from the buffer's start
        for x in node.all_input_nodes:
            nodes = [*read(x, parts)] if _is_view(x) else [x]
            is_part = parts and all(y.op == "placeholder" for y in nodes) and whole.isdisjoint(storages_of(x))
            yield from [x] if is_part and isinstance(x.meta.get("val"), Tensor) else nodes

    def read_all() -> list[fx.Node]:
        return list(dict.fromkeys(x for node in run for x in read(node, parts=True)))

    first = read_all()
    inputs = (node for node in first if node.op == "placeholder" or _is_view(node))
    parts = [x for node in inputs for x in values(node) if address(x) in memory]
    whole = {address(x) for x, y in combinations(parts, 2) if ranges_meet(x, y)}
    return read_all() if whole else first


def _region(run: Sequence[fx.Node], read: Sequence[fx.Node], needed: set[fx.Node]) -> Region:
    inside = {*run}
    inputs, outputs = [x for x in read if x not in inside], [node for node in run if node in needed]
    copies = _Copies()
    for number, node in enumerate(inputs):
        copies.of[node] = copies.graph.placeholder(f"x{number}")
        x = node.meta["val"]
        copies.of[node].meta["val"] = alone(x) if _is_view(node) else x
    for node in run:
        copies.add(node)
    copies.graph.output([copies.of[node] for node in outputs])
    return Region(copies.graph, inputs, outputs)


def boxed(*values: Tensor) -> list[Tensor]:
    return [*values]


def _boxed(fn: Callable[..., Sequence[Tensor]]) -> Boxed:
    """Return a function of one list, if possible the one inside `fn`, because `fn` holds arguments to its end."""
    inner = inspect.unwrap(fn, stop=_takes_one)
    return inner if _takes_one(inner) else lambda args: fn(*args)


def _takes_one(fn: Callable[..., object]) -> bool:
    code = getattr(fn, "__code__", None)
    return code is not None and code.co_argcount == 1 and not code.co_flags & inspect.CO_VARARGS


def _named_region(fn: Boxed, name: str) -> Boxed:
    def region(values: list[Tensor]) -> Sequence[Tensor]:
        return fn(values)

    region.__name__ = name
    return region


class _Copies:
    """Copies of nodes in a new graph. A view or an allocation is copied before its first reader."""

    def __init__(self) -> None:
        self.graph, self.of = fx.Graph(), dict[fx.Node, fx.Node]()

    def get(self, node: fx.Node) -> fx.Node:
        return self.of[node] if node in self.of else self.add(node)

    def add(self, node: fx.Node) -> fx.Node:
        self.of[node] = self.graph.node_copy(node, self.get)
        return self.of[node]
