"""Equal regions of a graph are compiled once, and a driver calls them between the collectives.

Note [Regions]
    To compile a graph takes time in proportion to its nodes, and the layers of a network are equal. A region is what a
    graph computes between two collectives. Equal layers have equal regions: the same operators, numbers, shapes and
    wiring, in the same order. Each distinct region is compiled by itself. The driver is a graph, too: it starts and
    awaits the collectives, and calls the regions. Its code is text that Python runs (`Compiled.as_text`).

    What a region is given are whole buffers, of which it makes its views, and views of the graph's inputs: these lie
    elsewhere in each layer, and the driver makes them. A region that writes to an input is given the whole. It is
    called with a list, which it empties: a value is freed in the region that reads it last, as in one graph.

    A graph stays whole if all of its regions differ, if it draws from torch's generator (its regions would draw other
    numbers than the graph), or if it has values that are conjugated or negated lazily (a compiled region reads the
    memory of its inputs, in which neither is applied).
"""

from __future__ import annotations

import inspect
import operator as python
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from ..core.random import draws
from ..core.storage import address
from ..core.tracing import memo
from ..graph.dataflow import is_call, writes, written
from ..graph.inspect import operator, values
from ..graph.memory import storages_of
from .trace import alone

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]  # a function that empties its list of arguments
Compile = Callable[[fx.GraphModule], Callable[..., Sequence[Tensor]]]

# operators of fshard that compute, and move no data between ranks
_COMPUTES = ("fshard.materialize", "fshard.draw", "fshard.forked", "fshard.seeded", "fshard.bitcast")


@dataclass(frozen=True)
class Region:
    """Nodes between two collectives as a graph, from `inputs` to `outputs`, which are nodes of the whole graph."""

    graph: fx.Graph
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    @memo
    def key(self) -> tuple[object, ...]:
        """A key that is equal for equal regions: operators, numbers, wiring, and the memory of the inputs."""
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
    """The regions of a graph, and the nodes of the driver, in order; empty for a graph that has to stay whole."""
    if any(_keeps_whole(module, node) for node in module.graph.nodes):
        return []
    runs = _runs(module.graph)
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    read = [_read(run) for run in runs]
    needed = {x for number, nodes in enumerate(read) for x in nodes if run_of.get(x) != number}
    return [_region(run, x, needed) if _is_computed(run[0]) else run[0] for run, x in zip(runs, read, strict=True)]


def are_alike(parts: Sequence[fx.Node | Region]) -> bool:
    """Whether two regions are equal."""
    keys = [part.key for part in parts if isinstance(part, Region)]
    return len({*keys}) < len(keys)


def driver(module: fx.GraphModule, parts: Sequence[fx.Node | Region], compiled: Compile) -> fx.GraphModule:
    """The driver of a graph with these parts, whose distinct regions are `compiled`."""
    copies, functions = _Copies(), dict[tuple[object, ...], Boxed]()
    for part in parts:
        if isinstance(part, fx.Node):
            copies.add(part)
            continue
        if part.key not in functions:
            fn = compiled(fx.GraphModule(module, part.graph))
            functions[part.key] = _named(_boxed(fn), f"region_{len(functions)}")
        given = copies.graph.create_node("call_function", boxed, tuple(map(copies.get, part.inputs)), name="values")
        out = copies.graph.create_node("call_function", functions[part.key], (given,), name="out")
        for number, node in enumerate(part.outputs):
            copies.of[node] = copies.graph.call_function(python.getitem, (out, number))
    return fx.GraphModule(module, copies.graph)


def as_text(module: fx.GraphModule) -> str:
    """The code of a driver, with the names of regions alone."""
    return module.code.replace(f"{__name__.replace('.', '_')}_", "")


def _keeps_whole(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node draws from torch's generator, has a value that is laid out lazily, or reads a graph inside."""
    if node.op == "get_attr":
        return not isinstance(getattr(module, str(node.target), None), Tensor)
    is_random = node.op == "call_function" and draws(node.target, node.args, node.kwargs)
    return is_random or any(x.is_conj() or x.is_neg() for x in values(node))


def _is_computed(node: fx.Node) -> bool:
    """Whether a node belongs to a region; starts, waits and places of collectives, and new memory, are the driver's."""
    if node.op != "call_function" or _is_memory(node):
        return False
    if is_call(node, "getitem"):
        return _is_computed(node.args[0])  # type: ignore[arg-type]
    return not operator(node).startswith("fshard.") or operator(node) in _COMPUTES


def _is_memory(node: fx.Node) -> bool:
    """Whether a node allocates memory without a value."""
    return is_call(node, "empty", "empty_strided")


def _is_view(node: fx.Node) -> bool:
    """Whether a node only names memory that its inputs have."""
    if not _is_computed(node) or writes(node) or not values(node):
        return False
    if is_call(node, "getitem"):  # of several results, or of several views
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return {*storages_of(node)} <= {storage for x in node.all_input_nodes for storage in storages_of(x)}


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each region, and those of the driver one by one, in order. Views and new memory are in neither."""
    runs: list[list[fx.Node]] = []
    run_of: dict[fx.Node, list[fx.Node]] = {}
    run: list[fx.Node] = []
    for node in graph.nodes:
        if _is_view(node) or _is_memory(node):
            continue
        if is_call(node, "getitem") and _is_computed(node):
            run_of[node] = run_of[node.args[0]]
            run_of[node].append(node)
        elif _is_computed(node):
            run.append(node)
            run_of[node] = run
        else:
            if run and (node.op == "output" or operator(node).startswith("fshard.")):
                runs.append(run)
                run = []
            runs.append([node])
    return runs


def _read(run: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that a run reads: for a view its base, or the view itself if it is of an input not written here."""
    memory = written(run)

    def read(node: fx.Node, parts: bool) -> Iterator[fx.Node]:
        parts = parts and "as_strided" not in operator(node)  # which counts from the begin of the whole
        for x in node.all_input_nodes:
            nodes = [*read(x, parts)] if _is_view(x) else [x]
            is_part = parts and all(y.op == "placeholder" for y in nodes) and memory.isdisjoint(storages_of(x))
            yield from [x] if is_part and isinstance(x.meta.get("val"), Tensor) else nodes

    return list(dict.fromkeys(x for node in run for x in read(node, parts=True)))


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
    """The values as a list, so that nothing else holds those that are not read later."""
    return [*values]


def _boxed(fn: Callable[..., Sequence[Tensor]]) -> Boxed:
    """The function that takes one list: inside of `fn`, which would hold its arguments until its end, or around it."""
    inner = inspect.unwrap(fn, stop=_takes_one)
    return inner if _takes_one(inner) else lambda args: fn(*args)


def _takes_one(fn: Callable[..., object]) -> bool:
    code = getattr(fn, "__code__", None)
    return code is not None and code.co_argcount == 1 and not code.co_flags & inspect.CO_VARARGS


def _named(fn: Boxed, name: str) -> Boxed:
    def region(values: list[Tensor]) -> Sequence[Tensor]:
        return fn(values)

    region.__name__ = name
    return region


class _Copies:
    """Copies of nodes in a new graph; those of views and of new memory are made where they are read first."""

    def __init__(self) -> None:
        self.graph, self.of = fx.Graph(), dict[fx.Node, fx.Node]()

    def get(self, node: fx.Node) -> fx.Node:
        """The copy of a node."""
        return self.of[node] if node in self.of else self.add(node)

    def add(self, node: fx.Node) -> fx.Node:
        """Copy a node to the end of the new graph."""
        self.of[node] = self.graph.node_copy(node, self.get)
        return self.of[node]
