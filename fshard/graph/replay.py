"""Copies of the nodes of a traced function, for calls with other tensors of the same shapes.

Note [Replays]
    1. `RecordedCall` traces a function on new fake tensors, into a graph of its own, a `_Piece`.
    2. A replay copies the nodes of the piece into the traced graph, inside one autograd node. The autograd node's
       backward copies the nodes of the derivative, which is traced from the tensors saved by autograd, once for each
       combination of present gradients and their strides.
    3. A replay keeps a call's order of nodes, without running the function. Saved tensors pass through the active
       saved-tensor hooks, so a loss gathers its units again as always.
    4. A random operator has one more argument and result, states of a stream (Note [Random numbers in a graph] in
       `random.py`).

    A call is not recorded if a copy could differ from a call, because the function
    - changes variables outside, or calls collectives;
    - writes to its arguments, or returns them or views of them;
    - asks autograd about an argument (a derivative, a hook, `is_leaf`);
    - runs in forward mode, autocast or another library's mode;
    - reads a tensor twice that code outside may read as well: autograd would add gradients in another order.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

# Experimental in torch (test_scan.py): functions to trace inside a trace, and to add a tensor to a graph.
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    get_torch_dispatch_modes,
    make_fx,
    track_tensor_tree,
)
from torch.overrides import TorchFunctionMode

from ..core import func_levels, tree
from ..core.random import stream
from ..core.storage import address, addresses, with_tensors
from ..core.tracing import UNROLLS, Args, Ctx, Kwargs, Operator, is_tracing, kind_of, node_of, unrecorded
from ..core.tree import Tree, tensors
from .dataflow import written
from .inspect import operator as name_of

_BY_TEXT = (bool, int, float, complex, str, bytes, type(None))
_OWN = ("fshard.draw", "fshard.forked", "fshard.materialize")  # operators of fshard without effects


# These functions ask autograd about a tensor. For the arguments of a recorded call, answers would differ.
_ASKS = (
    *(torch.autograd.grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
    *(Tensor.is_leaf.__get__, Tensor.grad_fn.__get__),  # type: ignore[attr-defined, union-attr]
)


def can_record() -> bool:
    is_cast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    if not is_tracing() or get_proxy_mode() is None or func_levels.inside() or is_cast or UNROLLS.get():
        return False
    # another library's mode may change the function's operators
    kinds = [type(mode).__module__ for mode in get_torch_dispatch_modes()]
    return all(kind.startswith(("fshard.", "torch._subclasses.", "torch.fx.")) for kind in kinds)


class Repeated:
    """A function called several times in a trace: two calls run, later calls are copies."""

    def __init__(self, fn: Callable[..., Tree]):
        self._fn, self._count = fn, 0
        self._seen: list[Tree] = []  # leaves of the first two calls' units
        self._is_steady = False  # the last call changed no variable, and called no collective
        self._recorded: RecordedCall | None = None

    def __call__(self, *args: Tree) -> Tree:
        if tree.nodes(args, tree.StandIn):  # they are several units: only a call decides when to gather each
            return self._fn(*args)
        self._count += 1
        if self._count == 3 and self._is_steady:
            self._recorded = _recorded(self._fn, args, {id(x) for x in self._seen})
        leaves, spec = tree.flatten(args)
        if self._recorded is not None and self._recorded.fits(leaves, spec):
            return self._recorded(leaves)
        node, before = _last_node(), _surroundings(self._fn)
        out, after = self._fn(*args), _surroundings(self._fn)
        is_same = len(before) == len(after) and all(map(operator.is_, before, after))
        self._is_steady = is_same and not _talks(node)
        self._seen += tree.leaves(args[0]) * (self._count < 3)
        return out


def _surroundings(fn: object) -> list[object]:
    """Return the objects in a function's closure and globals: a call may change them."""
    read, waiting = list[object](), [fn]
    while waiting:
        x = waiting.pop()
        if any(x is other for other in read):
            continue
        read.append(x)
        if isinstance(x, FunctionType) and not (x.__module__ or "").startswith(("torch.", "fshard.")):
            for cell in x.__closure__ or ():
                with suppress(ValueError):  # an unset variable
                    waiting.append(cell.cell_contents)
            waiting += [x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__]
        elif type(x) in (list, set, deque):
            read += x  # type: ignore[arg-type]
        elif type(x) is dict:
            read += x.values()
        elif isinstance(x, SimpleNamespace):
            read += vars(x).values()
    return read


def _last_node() -> fx.Node:
    return next(iter(reversed(_tracer().graph.nodes)))


def _talks(since: fx.Node) -> bool:
    node = _last_node()
    while node is not since and not _is_foreign(node):
        node = node.prev
    return node is not since


def _is_foreign(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.inplace_view in node.target.tags:
        return True
    return node.target.namespace == "fshard" and name_of(node) not in _OWN


def _tracer() -> Any:  # private to torch
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def _empty_like(x: Tensor) -> Tensor:
    with unrecorded():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _leaf_form(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        # as text: 0.0 and -0.0 are equal, and so are 1 and True
        return type(leaf), repr(leaf) if type(leaf) in _BY_TEXT else id(leaf)
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, kind_of(leaf), _is_plain(leaf)


def _is_plain(x: Tensor) -> bool:
    with unrecorded():
        return forward_ad.unpack_dual(x).tangent is None and not (x.is_conj() or x.is_neg())


class _Piece:
    """A function of fake tensors as nodes of its own graph, unread nodes included."""

    def __init__(self, run: Callable[..., Sequence[Tensor | None]], inputs: Sequence[Tensor]):
        self.copies: dict[fx.Node, fx.Node] = {}  # by nodes of the tracer, which later drops some

        def traced(*inputs: Tensor) -> list[Tensor]:
            self._tracer = _tracer()
            results = run(*inputs)
            nodes = [None if x is None else _traced(x) for x in results]
            graph, read = fx.Graph(), dict[object, fx.Node]()
            for node in self._tracer.graph.nodes:
                copied = graph.node_copy(node, self.copies.__getitem__)
                # the tracer makes a new node at each read of an outside tensor
                self.copies[node] = read.setdefault(node.target, copied) if node.op == "get_attr" else copied
            self.results = [None if node is None else self.copies[node] for node in nodes]
            return [x for x in results if x is not None]

        make_fx(traced)(*inputs)
        nodes = [*dict.fromkeys(self.copies.values())]
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.calls = [node for node in nodes if node.op == "call_function"]
        self.made = [node for node in self.results if node is not None]
        # outside tensors: read, and no inputs
        self.others = {node: getattr(self._tracer.root, str(node.target)) for node in nodes if node.op == "get_attr"}

    def at(self, x: Tensor) -> fx.Node | None:
        slot = get_proxy_slot(x, self._tracer, None)
        read = (node for node, other in self.others.items() if other is x)
        return next(read, None) if slot is None else self.copies[slot.proxy.node]

    def insert(self, values: dict[fx.Node, Tensor]) -> dict[fx.Node, fx.Node]:
        """Copy the calls into the traced graph; return the copies. Add the results of calls to `values`."""
        values.update((node, x) for node, x in self.others.items() if node not in values)
        nodes, tracer = {node: _traced(x) for node, x in values.items()}, _tracer()
        with unrecorded(), torch.no_grad():
            for node in self.calls:
                copied = nodes[node] = tracer.graph.node_copy(node, nodes.__getitem__)
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                target: Operator = node.target
                values[node] = copied.meta["val"] = target(*args, **kwargs)
        return nodes


def _known(x: Tensor, node: fx.Node) -> Tensor:
    before, tracer = node.meta.get("val"), _tracer()
    track_tensor_tree(x, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    if before is not None:
        node.meta["val"] = before
    return x


def _traced(x: Tensor) -> fx.Node:
    """Return a tensor's node; a tensor without a node becomes a constant."""
    return node_of(x) or _tracer().create_arg(x)


class _Derivative(NamedTuple):
    piece: _Piece
    reads: dict[fx.Node, fx.Node]  # nodes of the call, by inputs other than gradients


class _Instead(TorchFunctionMode):
    """Replace tensors, found by id, in arguments of torch functions."""

    def __init__(self, instead: Mapping[int, Tensor], refuses: bool):
        super().__init__()
        self._instead, self._refuses = instead, refuses

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        args, kwargs = tree.map(lambda x: self._instead.get(id(x), x), (args, kwargs or {}))
        if self._refuses and func in _ASKS:
            of = args[1:2] if func is torch.autograd.grad else args[:1]
            nodes = [node_of(x) for x in tensors(tree.leaves((of, kwargs.get("inputs"))))]
            if any(node is None or node.op == "placeholder" for node in nodes):
                raise RuntimeError("it asks autograd about what it was given")
        return func(*args, **kwargs)


class RecordedCall:
    """A recorded function of trees: calls with trees like `args` become copies."""

    def __init__(self, fn: Callable[..., Tree], args: Sequence[Tree]):
        self._leaves, self._spec = tree.flatten(args)
        self._forms, self._stream = [*map(_leaf_form, self._leaves)], stream()
        self._saves: list[fx.Node]  # nodes of tensors saved by autograd
        self._keeps: list[fx.Node] = []  # further nodes read by the derivative
        self._draws_late = False  # the derivative draws random numbers
        self._trace(fn, [])
        # An outside tensor that requires grad becomes an argument, because the derivative ends at arguments.
        if read := [x for x in self._read.values() if x.requires_grad]:
            self._trace(fn, read)
        if any(out.requires_grad for out in self._outs):
            reads = self._derivative([out if out.requires_grad else None for out in self._outs]).reads
            # a checkpoint in the function reads more than saved values when it runs again
            self._keeps = [node for node in dict.fromkeys(reads.values()) if node not in self._saves]

    def _trace(self, fn: Callable[..., Tree], read: Sequence[Tensor]) -> None:
        self._given, self._more = [*tensors(self._leaves), *read], read
        self._inputs = [_empty_like(x).requires_grad_(x.requires_grad) for x in self._given]
        stand_ins = self._inputs[len(self._inputs) - len(read) :]
        self._instead = {id(x): stand_in for x, stand_in in zip(read, stand_ins, strict=True)}
        self._saved: dict[fx.Node, Tensor] = {}  # by the tracer's nodes
        self._derivatives: dict[object, _Derivative] = {}  # by shapes, strides and dtypes of the gradients
        start = None if self._stream is None else self._stream.state

        def run(*inputs: Tensor) -> list[Tensor]:
            with (
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved),
                _Instead(self._instead, True),
            ):
                out = fn(*tree.unflatten(self._spec, with_tensors(self._leaves, inputs)))
            self._result, self._out_spec = tree.flatten(out)
            end = None if self._stream is None else self._stream.state
            return [*tensors(self._result), *([] if end is None or end is start else [end])]

        try:
            self._call = _Piece(run, self._inputs)
        finally:
            if self._stream is not None and start is not None:
                self._stream.go_on(start)
        self._outs = tensors(self._result)
        # outside tensors, no constants; the stream's state is another in each call
        self._read = {node: x for node, x in self._call.others.items() if node_of(x) is not None}
        self._is_start = [x is start for x in self._read.values()]
        self._saves = [self._call.copies[node] for node in self._saved]

    def _pack(self, x: Tensor) -> Tensor:
        """Replace a saved tensor by an alias without derivatives, to trace the derivative from the alias."""
        node = _traced(x)
        if node not in self._saved:
            with unrecorded():
                alias = x.detach()
            # derivatives inside the function read the alias
            self._saved[node] = _known(alias, node)
        return self._saved[node]

    def _derivative(self, grads: Sequence[Tensor | None]) -> _Derivative:
        key = tuple(None if g is None else (g.shape, g.stride(), g.dtype) for g in grads)
        if key not in self._derivatives:
            pairs = [(out, _empty_like(g)) for out, g in zip(self._outs, grads, strict=False) if g is not None]
            outs, given = zip(*pairs, strict=True)
            wanted = [x for x in self._inputs if x.requires_grad]

            def run(*inputs: Tensor) -> Sequence[Tensor | None]:
                # autograd must run on this thread, the owner of the traces
                with torch.autograd.set_multithreading_enabled(False), _Instead(self._instead, False):
                    return torch.autograd.grad(outs, wanted, inputs[: len(outs)], retain_graph=True, allow_unused=True)

            state = None if self._stream is None else self._stream.state
            piece, call = _Piece(run, [*given, *self._saved.values()]), self._call
            if self._stream is not None and state is not None and self._stream.state is not state:
                self._draws_late = True
                self._stream.go_on(state)
            reads = dict(zip(piece.inputs[len(outs) :], (call.copies[node] for node in self._saved), strict=True))
            reads.update((node, at) for node, x in piece.others.items() if (at := call.at(x)) is not None)
            self._derivatives[key] = _Derivative(piece, reads)
        return self._derivatives[key]

    def is_faithful(self, shared: Container[int]) -> bool:
        """Return True if a copy equals a call. `shared`: ids of arguments that other code may read."""
        return self._is_plain() and self._is_apart() and self._adds_once(shared)

    def _is_plain(self) -> bool:
        pieces = [(self._call, self._read), *((d.piece, d.reads) for d in self._derivatives.values())]
        # a fake tensor without a node in either trace belongs to another trace
        constants = [x for piece, known in pieces for node, x in piece.others.items() if node not in known]
        return (
            not self._draws_late
            and (torch.is_grad_enabled() or not any(x.requires_grad for x in self._outs))
            and not any(_is_foreign(node) for piece, _ in pieces for node in piece.calls)
            and all(type(x) is Tensor for x in constants)
            and not any(x.requires_grad for x in self._read.values())
            and all(map(_is_plain, (*self._given, *self._read.values(), *self._outs)))
        )

    def _is_apart(self) -> bool:
        given = addresses([*self._inputs, *self._read.values()])
        kept = addresses([x for node, x in self._saved.items() if self._call.copies[node] not in self._call.results])
        memory = [address(out) for out in self._outs if out.numel()]
        calls = [node for piece in (self._call, *(d.piece for d in self._derivatives.values())) for node in piece.calls]
        return len({*memory} - given - kept) == len(memory) and not written(calls) & given

    def _adds_once(self, shared: Container[int]) -> bool:
        times, first_more = Counter[fx.Node](), len(self._given) - len(self._more)
        for node in self._call.calls:
            fx.node.map_arg((node.args, node.kwargs), lambda read: times.update([read]))
        given = enumerate(zip(self._call.inputs, self._given, strict=True))
        is_shared = ((node, x) for n, (node, x) in given if n >= first_more or id(x) in shared)
        return all(times[node] < 2 for node, x in is_shared if x.requires_grad)

    def fits(self, leaves: Sequence[object], spec: tree.Spec) -> bool:
        given = tensors(leaves)
        is_known = all(node_of(x) is not None for x in given) and len({*map(id, given)}) == len(given)
        # as text: keys 1 and True are equal
        is_alike = spec == self._spec and str(spec) == str(self._spec)
        return is_known and is_alike and [*map(_leaf_form, leaves)] == self._forms

    def __call__(self, leaves: Sequence[object]) -> Tree:
        read = zip(self._read.values(), self._is_start, strict=True)
        others = [self._stream.state if self._stream is not None and is_start else x for x, is_start in read]
        outs = _Replay.apply(self, *tensors(leaves), *self._more, *others)
        if self._stream is not None and len(outs) > len(self._outs):
            self._stream.go_on(outs[-1])
        return tree.unflatten(self._out_spec, with_tensors(self._result, outs))

    def forward(self, ctx: Ctx, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = dict(zip([*self._call.inputs, *self._read], inputs, strict=True))
        known = dict(values)
        nodes = self._call.insert(values)
        # give results their own memory: torch refuses writes to views made in an autograd node
        known.update((node, _known(_empty_like(values[node]), nodes[node])) for node in self._call.made)
        rest = (node for node in (*self._saves, *self._keeps) if node not in known)
        known.update((node, _known(values[node], nodes[node])) for node in rest)
        outs = tuple(known[node] for node in self._call.made)
        ctx.save_for_backward(*(known[node] for node in self._saves))
        ctx.kept = [known[node].detach() if node in self._call.made else known[node] for node in self._keeps]
        is_derived = [*(x.requires_grad for x in self._outs), False]
        ctx.mark_non_differentiable(*(out for out, derived in zip(outs, is_derived, strict=False) if not derived))
        return outs

    def backward(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        given = [None if g is None else g.resolve_conj().resolve_neg() for g in grads]
        piece, reads = self._derivative(given)
        if self._draws_late:
            raise RuntimeError("scan: the body's derivative draws random numbers: write the loop in its place")
        of = dict(zip([*self._saves, *self._keeps], saved, strict=True))
        values = dict(zip(piece.inputs, (g for g in given if g is not None), strict=False))
        values.update((node, of[source]) for node, source in reads.items())
        known = dict(values)
        nodes = piece.insert(values)
        known.update((node, _known(values[node], nodes[node])) for node in piece.made if node not in known)
        results = (None if node is None else known[node] for node in piece.results)
        return [next(results) if x.requires_grad else None for x in (*self._inputs, *self._read.values())]


def _recorded(fn: Callable[..., Tree], args: Sequence[Tree], shared: Container[int]) -> RecordedCall | None:
    try:
        recorded = RecordedCall(fn, args)
    except Exception:  # the call itself then raises the function's errors
        return None
    return recorded if recorded.is_faithful(shared) else None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, call: RecordedCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return call.forward(ctx, inputs)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("scan: create_graph=True around it, in a graph: write the loop in its place")
        if not any(grad is not None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return None, *ctx.call.backward([*ctx.saved_tensors, *ctx.kept], grads)
