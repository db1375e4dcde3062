"""A pass over a traced function: results are written to the tensors of the first argument, which is given away."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..core import tree
from .trace import Output, Trace

_clone, _copy_ = torch.ops.aten.clone.default, torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Input:
    """A result that is an input of the graph, by its number: the graph wrote the result there."""

    number: int


class _Move(NamedTuple):
    """A result that is written to an input: the number of the leaf, of the graph's input, and of its output."""

    leaf: int
    input: int
    output: int


def donated(traced: Trace, leaves: Sequence[Any]) -> Trace:
    """The function with each tensor of its first result copied, at the end, to the same leaf of its first argument.

    What comes out, or the first element of it, must have the structure of the first argument (ValueError), and the
    same shapes, dtypes and devices. The inputs that were written to are results in place of the outputs.
    """
    first = _first_argument(traced)
    graph, results = copy.deepcopy(traced.module.graph), list(traced.results)
    inputs, output = [node for node in graph.nodes if node.op == "placeholder"], graph.output_node()
    outputs: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    moves = [
        move for move in _moves(leaves[: first.num_leaves], results) if outputs[move.output] is not inputs[move.input]
    ]
    _check_fit(moves, inputs, outputs, tree.paths(first))
    with graph.inserting_before(output):
        # all of these are read before any is written: one input may be moved to the place of another
        written = {_storage(inputs[move.input]) for move in moves}
        outputs = [_cloned(graph, node) if _storage(node) in written else node for node in outputs]
        for move in moves:
            graph.call_function(_copy_, (inputs[move.input], outputs[move.output]))
            results[move.leaf] = Input(move.input)
    kept = [result.number for result in results if isinstance(result, Output)]
    output.args = ([outputs[number] for number in kept],)
    results = [Output(kept.index(result.number)) if isinstance(result, Output) else result for result in results]
    return Trace(fx.GraphModule(traced.module, graph), traced.spec, traced.out_spec, tuple(results))


def _first_argument(traced: Trace) -> tree.Spec:
    """The structure of the first argument. ValueError unless a tree of that structure comes out first."""
    arguments = traced.spec.child(0)
    first = arguments.child(0) if arguments.num_children else None
    if first is None or first not in [traced.out_spec, *traced.out_spec.children()[:1]]:
        raise ValueError(
            "jit(donate=True): the function must give back, first of all, a tree of the structure of its first "
            f"argument, {first}: it gives {traced.out_spec}. Use donate=False."
        )
    return first


def _moves(leaves: Sequence[Any], results: Sequence[Any]) -> Iterator[_Move]:
    """The tensors among the leaves of the first argument whose results are outputs of the graph."""
    number = 0  # of the input: the graph's inputs are the leaves that are tensors
    for leaf, (given, result) in enumerate(zip(leaves, results, strict=False)):
        if isinstance(given, Tensor):
            if isinstance(result, Output):
                yield _Move(leaf, number, result.number)
            number += 1


def _check_fit(moves: Sequence[_Move], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], paths: list[str]) -> None:
    """Raise ValueError for a result whose shape, dtype or device is not that of the tensor it is written to."""
    for move in moves:
        place, value = inputs[move.input].meta["val"], outputs[move.output].meta["val"]
        if (place.shape, place.dtype, place.device) != (value.shape, value.dtype, value.device):
            raise ValueError(
                f"jit(donate=True): leaf {paths[move.leaf]!r} of what comes out first must take the place of "
                f"{place.dtype}{list(place.shape)}, and is {value.dtype}{list(value.shape)}. Use donate=False."
            )


def _storage(node: fx.Node) -> int:
    # `_cdata` is private: the identity of a storage, of fake tensors too (test_donate.py notices when it goes)
    return node.meta["val"].untyped_storage()._cdata


def _cloned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    clone = graph.call_function(_clone, (node,))
    clone.meta = dict(node.meta)
    return clone
