"""Calls of a module's function: where its submodules read parameters, and where they read and write buffers.

Note [The current call]
    The code of a module reads `self.weight`, and passes no parameters on. So the parameters of a call are found by a
    context variable, which is set while the call runs. Activation checkpointing runs parts of a forward again in the
    backward, when the call has returned. The call is then found by the autograd node that runs: torch numbers the nodes
    of a thread in order, and a call remembers the numbers between which it made its nodes. A call lives as long as the
    graph of its results, whose nodes refer to it; the skeleton refers to it weakly.

Note [Hooks of a backward]
    What runs again in the backward may write to buffers: that is dropped, since the forward has written the same. What
    a hook of the backward writes would be lost, so it is an error. A hook is told by its code: it touches a buffer, and
    is none of the code that touched buffers in the forward.
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
from ..sharding.access import placed
from .leaves import Leaves

# The calls that run in this context, by skeleton: those of other threads and of other simulated ranks are not seen.
_RUNNING: ContextVar[dict[Calls, ModuleCall] | None] = ContextVar("fshard.module", default=None)


class ModuleCall:
    """One call of a module's function: its parameters by number, its buffers, and what it wrote to buffers."""

    def __init__(self, params: Leaves, buffers: Sequence[Tensor]):
        self.params = params
        self.buffers = buffers
        self.put: dict[tuple[int, str], tuple[Any, Any]] = {}  # places, and what the module put there
        self._copies: dict[object, Tensor] = {}  # of the buffers that were read
        self._after: dict[object, Tensor] = {}  # what was put in the place of buffers, once the call has returned
        self._touching = set[CodeType]()  # the code that read or wrote buffers in the forward
        self._returned = False
        self._nodes = (0, 0)  # the numbers of the first node made in the call, and of the first one after it
        self.thread = get_ident()  # nodes are numbered by thread; in a backward, that of the backward

    def buffer(self, number: int, path: str, where: tuple[int, str] | None = None) -> Tensor:
        """A copy of a buffer, which the module may write to: the caller's buffer is not changed."""
        key, old = (where, self._after[where]) if where in self._after else (number, self.buffers[number])
        if self._is_hook():
            return self._read_only(old, path)
        if key not in self._copies:
            self._copies[key] = old.clone()
        return self._copies[key]

    def set_buffer(self, where: tuple[int, str], place: Any, value: Tensor) -> None:
        """Put a tensor in a place of a buffer, and nothing in the other places of a tied one."""
        if self._is_hook():
            _refuse(place.path)
        self.put[where] = place, value
        if value is self._copies.get(place.number):  # functional_call puts back what it has replaced
            del self.put[where]

    def _is_hook(self) -> bool:
        """Whether a hook of the backward touches a buffer now (Note [Hooks of a backward])."""
        code = _touching_code()
        if not self._returned:
            self._touching.add(code)
        return code not in self._touching

    def _read_only(self, buffer: Tensor, path: str) -> Tensor:
        """A copy of a new buffer; ValueError at the end of the backward if it was written to."""
        read = buffer.clone()
        version = writes(read)
        # Private: nothing public runs at the end of a backward (test_module_code.py notices when it goes)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: None if writes(read) == version else _refuse(path))
        return read

    def new_buffers(self, ties: Sequence[int], replaced: Mapping[int, Tensor]) -> list[Tensor]:
        """The buffers after the call: the caller's own tensors where the module read and wrote nothing.

        `ties` has for each buffer the number of the first that is the same tensor in the module: that one is read.
        `replaced` are tensors that the module put in the places of buffers.

        A copy that was read counts as written to: batch norm writes without counting the version of a tensor up. What
        runs again in the backward reads copies of the new buffers, as in a module, and what it writes is dropped.
        """
        kept = [self._copies.get(number, old) for number, old in zip(ties, self.buffers, strict=True)]
        self.buffers = [replaced.get(number, x) for number, x in enumerate(kept)]
        self._after = {where: value for where, (place, value) in self.put.items() if place.is_buffer}
        self.put, self._copies, self._returned = {}, {}, True
        return list(self.buffers)

    def replaced(self) -> list[str]:
        """The paths of parameters in whose places the module has put other tensors, and of what it has deleted."""
        put = self.put.values()
        return [place.path for place, x in put if not place.is_buffer or getattr(x, "_place", None) is place]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Remember the numbers of the autograd nodes that are made in the block."""
        # Private: torch has no public counter of autograd nodes
        first = torch.autograd._get_sequence_nr()
        yield
        self._nodes = first, torch.autograd._get_sequence_nr()

    def made(self, node: int) -> bool:
        """Whether the node of this number was made in this call."""
        return self._nodes[0] <= node < self._nodes[1]

    def stay_alive_with(self, results: Tree) -> None:
        """Keep this call alive with the graph of the results: parts of the forward may run again in the backward."""
        for node in nodes_of(results):
            metadata: dict[Any, Any] = node.metadata
            metadata[self] = None
            node.register_prehook(self._begin_backward)

    def _begin_backward(self, grads: object) -> None:
        self.thread = get_ident()


# Code that touches buffers for other code: the dicts and stands of a copy, `__getattr__` of torch and of its tracer.
_FOR_OTHERS = (
    os.path.join(os.path.dirname(__file__), "current.py"),
    os.path.join(os.path.dirname(__file__), "skeleton.py"),
    torch.nn.modules.module.__file__,
    os.path.join(os.path.dirname(torch.__file__), "fx"),
    *tree.CODE,
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
    """The last nodes of the graph of some results; parameters that are not gathered are left out."""
    leaves = tree.tops(placed(results), Branch)
    # objects that are not nodes of a tree, such as a user's dataclass
    leaves += tree.leaves([vars(x) for x in leaves if not isinstance(x, Tensor) and hasattr(x, "__dict__")])
    grad_fn: Any = Tensor.grad_fn  # the true one, also of a parameter that says it is a leaf
    nodes = [grad_fn.__get__(x) for x in leaves if isinstance(x, Tensor)]
    return {node for node in nodes if node is not None}


class Calls:
    """The calls of one skeleton whose graphs are alive; `ties` are those of its buffers."""

    def __init__(self, name: str, ties: Sequence[int]):
        self.name, self.ties = name, ties
        self._alive: weakref.WeakSet[ModuleCall] = weakref.WeakSet()

    @contextmanager
    def during(self, call: ModuleCall) -> Iterator[None]:
        """Let the skeleton read from `call` in the block."""
        with assigned(_RUNNING, {**(_RUNNING.get() or {}), self: call}), call.running():
            yield
        if torch.is_grad_enabled():
            self._alive.add(call)

    def current(self) -> ModuleCall:
        """The call that runs, or, in a backward that runs a part of a forward again, the call of that forward."""
        call = self.found()
        if call is None:
            raise RuntimeError(
                f"{self.name}: parameters were read outside of a call: those of the module are arguments of the "
                "function that functionalize returned. Call that, and keep no submodule, parameter or generator of it; "
                "with activation checkpointing, return a tensor, or a tree or object that holds one."
            )
        return call

    def found(self) -> ModuleCall | None:
        """The call that `current` returns; None outside of calls."""
        # Private: no public function tells which node a hook on saved tensors runs for, nor its number
        # (test_module.py notices when these go).
        node: Any = torch._C._current_autograd_node()
        running = (_RUNNING.get() or {}).get(self)
        if node is None:
            return running
        # a forward may contain a backward: of another call, perhaps
        made = [call for call in list(self._alive) if call.made(node._sequence_nr())]
        # a backward on a GPU runs in a thread of its own, unless multithreading is off, as in `value_and_grad`
        calls = [call for call in made if call.thread == get_ident()] or made
        if len(calls) > 1 and running is None:
            raise RuntimeError(
                f"{self.name}: a part of the forward runs again in a backward of another thread, and {len(calls)} "
                "calls may be meant. Run the backward in the thread of the forward: with "
                "torch.autograd.set_multithreading_enabled(False)"
            )
        return calls[0] if len(calls) == 1 else running
