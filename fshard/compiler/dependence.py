"""Arguments that depend on other arguments by autograd: a graph has no gradient from one to the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

Depends = Mapping[int, tuple[int, ...]]  # numbers of tensors, and of those that they depend on


def depends(tensors: Sequence[Tensor]) -> Depends:
    """Return which tensors were computed from which others, as autograd recorded it.

    A view of another tensor is left out if that one was computed from none: fake tensors have the same view.
    """
    edges = {i: tuple(get_gradient_edge(x))[:2] for i, x in enumerate(tensors) if x.requires_grad}
    if len(edges) < 2 or all(tensors[i].is_leaf for i in edges):
        return {}
    reached = {i: _before(tensors[i]) for i in edges}
    others = {i: [j for j in edges if edges[j] in reached[i]] for i in edges}
    # private: torch shows the tensor that a view is of by no other name
    apart = {i: tuple(j for j in others[i] if others[j] or tensors[i]._base is not tensors[j]) for i in edges}
    return {i: numbers for i, numbers in apart.items() if numbers}


def _before(x: Tensor) -> set[tuple[Node | None, int]]:
    """Return what a tensor was computed from: nodes of autograd, each with the number of its output."""
    reached = set[tuple[Node | None, int]]()
    waiting = [x.grad_fn]
    while waiting:
        new = {edge for edge in getattr(waiting.pop(), "next_functions", ()) if edge not in reached}
        reached |= new
        waiting += [node for node, _ in new]
    return reached


class _Linked(torch.autograd.Function):
    """The first tensor; a gradient that goes on from it to the others is an error."""

    @staticmethod
    def forward(ctx: Any, error: Exception, x: Tensor, *others: Tensor) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.error


def linked(inputs: Sequence[Tensor], depend: Depends, errors: Sequence[Exception]) -> list[Tensor]:
    """Return the inputs, each linked with those that it depends on: a gradient on that way raises its error."""
    made: dict[int, Tensor] = {}  # by id: an input may be in several places
    pairs = zip(depend, errors, strict=True)
    for number, error in sorted(pairs, key=lambda pair: len(depend[pair[0]])):  # each after those it depends on
        x, others = inputs[number], [made.get(id(inputs[i]), inputs[i]) for i in depend[number]]
        if id(x) not in made:
            with torch.enable_grad():
                made[id(x)] = _Linked.apply(error, x, *others)
    return [made.get(id(x), x) for x in inputs]
