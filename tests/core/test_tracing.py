"""Marks of traced tensors: a class that says how a tensor was made, carried by the nodes of a graph."""

from threading import Thread
from typing import Any

import pytest
import torch
from support.graphs import graph_of
from torch import Tensor

from fshard.core.tracing import Marked, kind_of, mark, memo
from fshard.train.loss_scale import Unscaled


class Divided(Marked):
    """A mark."""


def views() -> list[Any]:
    """The operators of torch that take one tensor and return it, or a view of it: what make_fx could record `detach` as
    is one of them. Not those that graphs have as others: `x.T` as a permutation, `lift_fresh` as a copy."""
    found = []
    # `dir(torch.ops.aten)` would be those that were called: other ones after other tests
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        aliases = [x.alias_info for x in (*schema.arguments, *schema.returns)]
        if space in ("aten", "prims") and name != "lift_fresh" and len(aliases) == 2 and all(aliases):
            op = getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default")
            is_here = torch._C._dispatch_has_kernel(op.name()) and not schema.is_mutable
            if is_here and not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
                found.append(op)
    return found


TENSORS = {
    "vector": torch.arange(3.0),
    "matrix": torch.arange(6.0).view(2, 3),
    "row": torch.arange(3.0).view(1, 3),
    "complex": torch.complex(torch.arange(3.0), torch.ones(3)),
    "pairs": torch.ones(3, 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_mark_goes_through_what_returns_its_argument(name):
    """Gradients would be divided by the loss scale twice if torch recorded `detach` as an operator that fshard does not
    know, and what torch computes from them could not be scaled if an operator that computes kept the mark."""
    x, seen = TENSORS[name], 0
    for op in views():
        try:
            same = op(x)
        except (RuntimeError, TypeError):
            continue  # not of such a tensor
        is_same = same.is_set_to(x) if same.dtype == x.dtype and same.is_conj() == x.is_conj() else False
        kinds = []

        def fn(y: Tensor, op: Any = op, kinds: list[Any] = kinds) -> Tensor:
            z = op(mark(y.clone(), Divided))
            kinds.append(kind_of(z))
            return z

        graph_of(fn, x)
        assert kinds == [Divided if is_same else Tensor], op
        seen += is_same
    assert seen >= 3


FUNCTIONS = {
    "detach": lambda x: x.detach(),
    "detach twice": lambda x: x.detach().detach(),
    "in place": lambda x: x.relu_(),
    "sum": lambda x: x + 0,
    "clone": lambda x: x.clone(),
    "sum of detached": lambda x: x.detach() + 0,
    "part": lambda x: x[:2],
    "view": lambda x: x.view(3, 1),
    "view of its own shape": lambda x: x.view(3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_mark_what_is_marked_eagerly(name):
    """A step could unscale its gradients twice as a graph and not eagerly, or scale them again eagerly alone."""
    function, kinds = FUNCTIONS[name], []
    graph_of(lambda x: kinds.append(kind_of(function(mark(x.clone(), Unscaled)))) or x + 1, torch.ones(3))
    assert kinds == [type(function(mark(torch.ones(3), Unscaled)))]


class Slow:
    """An object with a value that waits for another thread, which may be None."""

    def __init__(self, other: Thread | None):
        self._other = other

    @memo
    def value(self) -> bool:
        """Whether the other thread has ended."""
        if self._other is not None:
            self._other.start()
            self._other.join(5)
        return self._other is None or not self._other.is_alive()


def test_a_memo_takes_no_lock() -> None:
    """A simulated rank that waits for others in a memo would wait for ever: they want the lock."""
    ended = Slow(None)
    slow = Slow(Thread(target=lambda: ended.value, daemon=True))
    assert slow.value
    assert vars(slow)["value"] is True
    assert isinstance(Slow.value, memo)
