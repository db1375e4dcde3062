"""A loop over equal units or over rows, whose body a graph traces once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import check_function, expect, wrong
from ..core.tree import Tree
from .replay import Repeated, can_record

Carry = TypeVar("Carry")
_FEW = 3  # with more units, a trace copies the body


def scan(
    body: Callable[..., Tree], carry: Carry, units: Sequence[Tree] | None = None, xs: Tree = None
) -> tuple[Carry, Tree]:
    """Call `body` for each unit with the carry of the last call: a loop that `jit` traces once for equal layers.

    Rule: for each unit, `carry, y = body(unit, carry)`, or `body(unit, carry, x)` with `x` a row of `xs`. Without
    `units` (a loop over time): for each row of `xs`, `carry, y = body(carry, x)`. Returns the last
    carry, and `ys`, all `y` stacked.

    - `body`: returns the new carry, or (carry, y). It must be pure: it returns all values that other code reads, takes
      numbers that differ between units from `xs`, and does not compare tensors by identity.
    - `carry`: a tree; the body keeps its structure.
    - `units`: a list of trees, such as `params["blocks"]` in a loss, where the plan gathers each unit.
    - `xs`: a tree of tensors (len(units), ...), or of equal length. `ys` is such a tree, or None
      without calls or `y`.

    Eagerly, `scan` is the loop. `jit` calls the body for two units, traces it, and copies the trace for all units of
    the same structure, shapes, dtypes and numbers. Values, derivatives and random numbers have the loop's bits.

    Raises TypeError if a new carry has another structure, or a `y` is no tensor; ValueError unless `xs` has a row for
    each call; under `jit`, TraceError for a `torch.autograd.grad(create_graph=True)` around `scan`.

    >>> layers = [{"w": torch.full((1,), 2.0)}, {"w": torch.full((1,), 3.0)}]
    >>> scan(lambda layer, x: (layer["w"] * x, x), torch.ones(1), layers)
    (tensor([6.]), tensor([[1.],
            [2.]]))
    >>> scan(lambda total, x: (total + x, total), torch.tensor(0), xs=torch.tensor([1, 2, 3]))
    (tensor(6), tensor([0, 1, 3]))

    Source: jax.lax.scan.
    """
    expected = "body(carry, x)" if units is None else "body(unit, carry)"
    check_function("scan: body", body, expected, "A module's is module.forward.")
    if not isinstance(units, list | tuple | None):
        raise TypeError(wrong("scan: units", units, "a list of trees", "A stacked leaf is cut by x.unbind()."))
    rows = _rows_of_xs(xs, _num_rows(xs) if units is None else len(units))
    call = Repeated(body) if can_record() and len(rows) > _FEW else body
    ys: list[Tree] = []
    for number, row in enumerate(rows):
        out = call(carry, *row) if units is None else call(units[number], carry, *row)
        carry, y = _carry_and_rows(out, carry)
        ys.append(y)
    return carry, _stacked(ys)


def _num_rows(xs: Tree) -> int:
    sizes = [len(x) for x in tree.leaves(xs) if isinstance(x, Tensor) and x.dim()]
    if not sizes:
        raise TypeError(wrong("scan: xs", xs, "a tree of tensors with rows, as units is None"))
    return sizes[0]


def _rows_of_xs(xs: Tree, count: int) -> Sequence[tuple[Tree, ...]]:
    leaves, spec = tree.flatten(xs)
    for path, x in zip(tree.leaf_paths(spec), leaves, strict=True):
        expect(f"scan: xs{_at(path)}", x, isinstance(x, Tensor), "a tensor with a row for each call")
        if not x.dim() or len(x) != count:
            raise ValueError(f"scan: xs{_at(path)}: shape {list(x.shape)}: expected {count} rows, one for each call")
    columns = [x.unbind() for x in leaves]  # the derivative of `unbind` is one operator, not a sum for each row
    return [() if xs is None else (tree.unflatten(spec, [x[n] for x in columns]),) for n in range(count)]


def _at(path: str) -> str:
    return f" {path!r}" * bool(path)


def _carry_and_rows(out: Tree, carry: Carry) -> tuple[Carry, Tree]:
    form, is_pair = tree.flatten(carry)[1], isinstance(out, tuple) and len(out) == 2
    for got, y in [(out, None), out] if is_pair else [(out, None)]:
        if tree.flatten(got)[1] == form:
            return got, y
        new = tree.in_order_of(form, got)
        if tree.flatten(new)[1] == form:
            return new, y
    what = "scan: body: expected carry or (carry, y), with the structure of the carry that it was given"
    raise TypeError(f"{what}: {tree.difference(carry, got)}")


def _stacked(ys: Sequence[Tree]) -> Tree:
    if not ys:
        return None
    leaves, spec = tree.flatten(ys[0])
    rest = [[leaf for _, leaf in tree.pairs("scan: y of a later unit", ys[0], y)[0]] for y in ys[1:]]
    columns = [*zip(leaves, *rest, strict=True)]
    for path, column in zip(tree.leaf_paths(spec), columns, strict=True):
        expect(f"scan: y{_at(path)}", column[0], all(isinstance(x, Tensor) for x in column), "a tensor for each unit")
        if len(shapes := dict.fromkeys(x.shape for x in column)) > 1:
            raise ValueError(f"scan: y{_at(path)}: shapes {[*map(list, shapes)]}: expected one shape for all units")
    return tree.unflatten(spec, [torch.stack(column) for column in columns])
