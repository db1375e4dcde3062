"""Calls of a module's function: a call has the parameters and buffers that submodules read or write.

Note [The current call]
    A module's code reads `self.weight`, and gets no parameters as arguments. While a call runs, a context variable
    names the call, which has the parameters. After the call, activation checkpointing may run parts of the forward
    again in the backward. There, the number of autograd's running node tells the call: torch numbers a thread's nodes
    in order, and each call keeps the range of its nodes' numbers. The graph of a call's results keeps the call alive.

Note [Hooks of a backward]
    If a part of a forward runs again in the backward, its writes to buffers are dropped: the first run has made them.
    A hook's write has no first run, and would be lost: it is an error. Code that touches a buffer in the backward
    counts as a hook if it touched none in the forward.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..core import tree
from ..core.lazy import Branch
from ..core.storage import writes
from ..core.tracing import assigned
from ..core.tree import Tree
from ..parallel.along import Alongs
from ..sharding.access import placed
from .leaves import Leaves

# the running call of each functionalized module
_RUNNING: ContextVar[dict[Calls, ModuleCall] | None] = ContextVar("fshard.module", default=None)


class ModuleCall:
    """One call of a module's function: parameters by number, buffers, and writes to buffers."""

    def __init__(self, params: Leaves, buffers: Sequence[Tensor]):
        self.params = params
        self.buffers = buffers
        self.along: Alongs = {}
        self.put: dict[tuple[int, str], tuple[Any, Tensor]] = {}  # assigned (member, tensor) by (id of `Slots`, name)
        self._copies: dict[object, Tensor] = {}  # copies of buffers, made when first read
        self._after: dict[object, Tensor] = {}  # buffers assigned in the forward, set when it ends
        self._touching = set[CodeType]()  # code that touched buffers in the forward
        self.returned = False
        self._nodes = (0, 0)  # the call's range of node numbers
        self.thread = get_ident()  # the forward's thread; once a backward begins, the backward's

    def buffer(self, number: int, path: str, where: tuple[int, str] | None = None) -> Tensor:
        """The call's copy of a buffer, for the module to write to."""
        key, old = (where, self._after[where]) if where in self._after else (number, self.buffers[number])
        if self._is_hook():
            return self._read_only(old, path)
        if key not in self._copies:
            self._copies[key] = old.clone()
        return self._copies[key]

    def set_buffer(self, where: tuple[int, str], place: Any, value: Tensor) -> None:
        """Replace a buffer under one name; other names of a tied buffer keep the old tensor."""
        if self._is_hook():
            _refuse(place.path)
        self.put[where] = place, value
        if value is self._copies.get(place.number):  # functional_call puts the old buffer back
            del self.put[where]

    def _is_hook(self) -> bool:
        """See Note [Hooks of a backward]."""
        code = _touching_code()
        if not self.returned:
            self._touching.add(code)
        return code not in self._touching

    def _read_only(self, buffer: Tensor, path: str) -> Tensor:
        """A copy of `buffer` for a hook. ValueError at the end of the backward if the hook wrote to the copy."""
        read = buffer.clone()
        version = writes(read)
        # Private: nothing public runs at the end of a backward (test_module_code.py)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: None if writes(read) == version else _refuse(path))
        return read

    def new_buffers(self, ties: Sequence[int], replaced: Mapping[int, Tensor]) -> list[Tensor]:
        """The buffers after the call; an untouched buffer is the caller's tensor.

        `ties`: for each buffer, the number of the first buffer with the same tensor. `replaced`: by number, tensors
        assigned to buffers. A buffer once read is returned as a copy: torch's version counter misses batch norm's
        writes.
        """
        kept = [self._copies.get(number, old) for number, old in zip(ties, self.buffers, strict=True)]
        self.buffers = [replaced.get(number, x) for number, x in enumerate(kept)]
        self._after = {where: value for where, (place, value) in self.put.items() if place.is_buffer}
        self.put, self._copies, self.returned = {}, {}, True
        return list(self.buffers)

    def replaced(self) -> list[str]:
        put = self.put.values()
        return [place.path for place, x in put if not place.is_buffer or getattr(x, "_place", None) is place]

    @contextmanager
    def running(self) -> Iterator[None]:
        # Private: torch has no public counter of autograd nodes
        first = torch.autograd._get_sequence_nr()
        yield
        self._nodes = first, torch.autograd._get_sequence_nr()

    def made(self, node: int) -> bool:
        return self._nodes[0] <= node < self._nodes[1]

    def stay_alive_with(self, results: Tree) -> None:
        for node in nodes_of(results):
            metadata: dict[object, object] = node.metadata
            metadata[self] = None
            node.register_prehook(self._begin_backward)

    def _begin_backward(self, grads: object) -> None:
        self.thread = get_ident()


# Files of stack frames between a module's code and its buffer: `Slots`, `Stand`, torch's `__getattr__` and tracer.
_FOR_OTHERS = (
    os.path.join(os.path.dirname(__file__), "current.py"),
    os.path.join(os.path.dirname(__file__), "skeleton.py"),
    torch.nn.modules.module.__file__,
    os.path.join(os.path.dirname(torch.__file__), "fx"),
    *tree.MAP_CODE,
)


def _touching_code() -> CodeType:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOR_OTHERS):
        frame = frame.f_back
    return frame.f_code


def _refuse(path: str) -> NoReturn:
    raise ValueError(
        f"a hook of the backward wrote to the buffer {path!r}, whose new value the function has returned before: write "
        "to buffers in the forward, or let the hook collect in a list"
    )


def nodes_of(results: Tree) -> set[Any]:
    """The autograd nodes (`grad_fn`) of the results, without gathering parameters."""
    leaves = tree.tops(placed(results), Branch)
    # also tensors in attributes of objects that are no containers
    leaves += tree.leaves([vars(x) for x in leaves if not isinstance(x, Tensor) and hasattr(x, "__dict__")])
    grad_fn: Any = Tensor.grad_fn  # by torch's own descriptor: `Weight.grad_fn` is None
    nodes = [grad_fn.__get__(x) for x in leaves if isinstance(x, Tensor)]
    return {node for node in nodes if node is not None}


class Calls:
    """The calls of one functionalized module while their graphs are alive. `ties`: as for `new_buffers`."""

    def __init__(self, name: str, ties: Sequence[int]):
        self.name, self.ties = name, ties
        self._alive: weakref.WeakSet[ModuleCall] = weakref.WeakSet()

    @contextmanager
    def during(self, call: ModuleCall) -> Iterator[None]:
        with assigned(_RUNNING, {**(_RUNNING.get() or {}), self: call}), call.running():
            yield
        if torch.is_grad_enabled():
            self._alive.add(call)

    def current(self) -> ModuleCall:
        """The running call; in a backward, the call whose forward runs again in part."""
        call = self.found()
        if call is None:
            raise RuntimeError(
                f"{self.name}: parameters were read outside of a call: those of the module are arguments of the "
                "function that functionalize returned. Call that, and keep no submodule, parameter or generator of it; "
                "with activation checkpointing, return a tensor, or a tree or object that holds one."
            )
        return call

    def found(self) -> ModuleCall | None:
        """`current()`, or None outside of calls."""
        # Private: no public function gives the node whose saved-tensor hook runs, or its number (test_module.py)
        node: Any = torch._C._current_autograd_node()
        running = (_RUNNING.get() or {}).get(self)
        if node is None:
            return running
        # not `running` first: a forward may contain another call's backward
        made = [call for call in list(self._alive) if call.made(node._sequence_nr())]
        # all threads use the same numbers: prefer calls of this thread. A GPU's backward has a thread of autograd,
        # unless multithreading is off, as in `value_and_grad`
        calls = [call for call in made if call.thread == get_ident()] or made
        if len(calls) > 1 and running is None:
            raise RuntimeError(
                f"{self.name}: a part of the forward runs again in a backward of another thread, and {len(calls)} "
                "calls may be meant. Run the backward in the thread of the forward: with "
                "torch.autograd.set_multithreading_enabled(False)"
            )
        return calls[0] if len(calls) == 1 else running
