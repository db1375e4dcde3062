"""Inspect a graph: its text, its collectives, its floating-point operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from ..core import tree

_COLLECTIVE_KINDS = ("all_gather", "all_gather_into", "reduce_scatter", "all_reduce", "exchange")
_COLLECTIVES = tuple(f"fshard.{kind}" for kind in _COLLECTIVE_KINDS)


class Traffic(NamedTuple):
    """All collectives of one kind, unit and axis: their number, and the bytes sent by a rank."""

    kind: str
    unit: str
    axis: str
    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count


def operator(node: fx.Node) -> str:
    """Return the name of a node's operator without overload: `mm` for aten's, `LIBRARY.NAME` for others."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", str(target))
    return _operator_name(target)


@cache
def _operator_name(target: torch._ops.OpOverload) -> str:
    return target.name().partition(".")[0].removeprefix("aten::").replace("::", ".")


def arguments(node: fx.Node) -> dict[str, Any]:  # Any: depends on the operator's schema
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def starts(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and operator(node) in _COLLECTIVES]


class Flight(NamedTuple):
    """One collective: the bytes sent by a rank, and the numbers of its start and wait nodes."""

    kind: str
    unit: str
    axis: str
    bytes: int
    start: int
    wait: int


def flights(graph: fx.Graph) -> list[Flight]:
    order = {node: number for number, node in enumerate(graph.nodes)}
    tickets = {arguments(node)["ticket"]: number for node, number in order.items() if operator(node) == "fshard.wait"}
    # the ticket is an element of the start's result, or the whole result
    waits = {ticket.args[0] if operator(ticket) == "getitem" else ticket: n for ticket, n in tickets.items()}
    result = []
    for node in starts(graph):
        by_name = arguments(node)
        # only an exchange has an argument `kind`, the collective made of it
        kind = by_name.get("kind", operator(node).removeprefix("fshard.").removesuffix("_into"))
        at = by_name["label"], by_name["axis"], by_name["nbytes"]
        result.append(Flight(kind, *at, order[node], waits[node]))
    return result


def collectives(graph: fx.Graph) -> list[Traffic]:
    counts: Counter[tuple[str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str]] = Counter()
    for flight in flights(graph):
        counts[flight[:3]] += 1
        sent[flight[:3]] += flight.bytes
    return [Traffic(*key, sent[key], count) for key, count in counts.items()]


def flops(module: fx.GraphModule) -> int:
    """Count floating-point operations of matrix products, convolutions and attention: two for a multiply-add."""
    fakes = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with fakes[0].fake_mode, FlopCounterMode(display=False) as counter:
        fx.Interpreter(module).run(*fakes)
    return counter.get_total_flops()


def lines(graph: fx.Graph, names: Sequence[str]) -> Iterator[str]:
    inputs = iter(names)
    for node in graph.nodes:
        if node.op == "placeholder":
            yield f"in {node.name}: {_type(node)}  # {next(inputs)}"
        elif node.op == "output":
            yield f"out {_shown(node.args[0])}"
        elif operator(node) != "getitem":
            shown = ", ".join([_shown(a) for a in node.args] + [f"{k}={_shown(v)}" for k, v in node.kwargs.items()])
            yield f"{node.name}: {_type(node)} = {operator(node)}({shown})"


def _shown(x: object) -> str:
    if isinstance(x, fx.Node):
        return f"{_shown(x.args[0])}[{x.args[1]}]" if operator(x) == "getitem" and x.op == "call_function" else x.name
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_shown, x))}]"
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else repr(x)


_DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.uint8: "u8",
}


def _type(node: fx.Node) -> str:
    return " ".join(map(form_of, values(node))) or "()"


def form_of(x: Tensor) -> str:
    """Return dtype and shape, as in "bf16[8, 128]"."""
    return f"{_DTYPE_NAMES.get(x.dtype, str(x.dtype)[6:])}{list(x.shape)}"


def values(node: fx.Node) -> list[Tensor]:
    made = node.meta.get("val")
    if isinstance(made, Tensor | None):
        return [] if made is None else [made]
    return [v for v in tree.leaves(made) if isinstance(v, Tensor)]
