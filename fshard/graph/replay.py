"""A function that is traced once, and put into the graph again for other tensors of the same shapes.

Note [Replays]
    `RecordedCall` traces a function of traced tensors once more, on fake tensors that the graph does not know, into a
    piece of its own. A replay copies the nodes of that piece into the graph that is being traced, as one node of
    autograd. Its backward copies those of the derivative, which is traced from what autograd saved of that run: for the
    gradients that come, since not all may, and in their strides. So a replay leaves the nodes that a call would leave,
    in the same order, and runs no Python of the function, no autograd and no tracer. What is saved goes through the
    hooks on saved tensors that are on: a loss gathers its units again as always.

    A random operator is a node that takes the state of a stream and returns the next one: a further argument and result
    (Note [Random numbers in a graph] in `random.py`). Nothing is recorded where a copy is not what a call is: if the
    function changes between its calls, talks to other ranks, writes to what it is given, returns that or views of it,
    or asks autograd about it (its derivative, a hook, `is_leaf`); under forward mode, autocast and modes of others; and
    where gradients would be summed in another order, as the function reads a tensor twice that others may read, too.
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

# Experimental in torch: to trace inside of a trace, and to make a tensor one of a graph's (test_scan.py notices).
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
from ..core.storage import address, addresses
from ..core.tracing import UNROLLS, Operator, is_tracing, kind_of, node_of, unrecorded
from ..core.tree import Tree, tensors, with_tensors
from .dataflow import written
from .inspect import operator as name_of

Ctx = Any  # torch's context of a function, on which forward sets any attributes for backward
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_OWN = ("fshard.draw", "fshard.forked", "fshard.materialize")  # operators of fshard that only return their result


# What tells a function whether a tensor was computed, and from what: that it was given is another thing than in a call.
_ASKS = (
    *(torch.autograd.grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
    *(Tensor.is_leaf.__get__, Tensor.grad_fn.__get__),  # type: ignore[attr-defined, union-attr]
)


def can_record() -> bool:
    """Whether calls can be recorded: in a trace, without transforms of torch.func, autocast, and modes of others.

    Not where someone looks at each operator (`UNROLLS`).
    """
    is_cast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    if not is_tracing() or get_proxy_mode() is None or func_levels.inside() or is_cast or UNROLLS.get():
        return False
    # a mode of others may change what the function's operators do
    kinds = [type(mode).__module__ for mode in get_torch_dispatch_modes()]
    return all(kind.startswith(("fshard.", "torch._subclasses.", "torch.fx.")) for kind in kinds)


class Repeated:
    """A function that a trace calls several times: twice as it is, and then copied (Note [Replays])."""

    def __init__(self, fn: Callable[..., Tree]):
        self._fn, self._count = fn, 0
        self._seen: list[Tree] = []  # the leaves of the first arguments
        self._is_steady = False  # whether the last call has changed nothing, and not talked to other ranks
        self._recorded: RecordedCall | None = None

    def __call__(self, *args: Tree) -> Tree:
        """Call it. Others may read the tensors of its first argument, and those that it reads by itself."""
        if tree.nodes(args, tree.StandIn):  # of several units: which are gathered, and when, only a call says
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
    """The objects outside that a function, and what it calls, may read and change: variables, and items in them."""
    read, waiting = list[object](), [fn]
    while waiting:
        x = waiting.pop()
        if any(x is other for other in read):
            continue
        read.append(x)
        if isinstance(x, FunctionType) and not (x.__module__ or "").startswith(("torch.", "fshard.")):
            for cell in x.__closure__ or ():
                with suppress(ValueError):  # a variable that is not set yet
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
    """Whether the graph that is traced gathers, or talks to other ranks, after this node."""
    node = _last_node()
    while node is not since and not _is_foreign(node):
        node = node.prev
    return node is not since


def _is_foreign(node: fx.Node) -> bool:
    """Whether a copy of a node may be something else than the node."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.inplace_view in node.target.tags:
        return True
    return node.target.namespace == "fshard" and name_of(node) not in _OWN


def _tracer() -> Any:  # private to torch
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def _alone(x: Tensor) -> Tensor:
    """A fake tensor like `x` that no graph knows."""
    with unrecorded():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _form(leaf: object) -> object:
    """The properties of a leaf that a graph depends on."""
    if not isinstance(leaf, Tensor):
        # as text: 0.0 and -0.0 are equal, and so are 1 and True
        return type(leaf), repr(leaf) if type(leaf) in _NUMBERS else id(leaf)
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, kind_of(leaf), _is_plain(leaf)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has no tangent of forward mode, and no bit that negates or conjugates it."""
    with unrecorded():
        return forward_ad.unpack_dual(x).tangent is None and not (x.is_conj() or x.is_neg())


class _Piece:
    """A function of fake tensors as nodes of a graph of its own, also those that nobody reads."""

    def __init__(self, run: Callable[..., Sequence[Tensor | None]], inputs: Sequence[Tensor]):
        self.copies: dict[fx.Node, fx.Node] = {}  # of the tracer's nodes, of which it drops some

        def traced(*inputs: Tensor) -> list[Tensor]:
            self._tracer = _tracer()
            results = run(*inputs)
            nodes = [None if x is None else _traced(x) for x in results]
            graph, read = fx.Graph(), dict[object, fx.Node]()
            for node in self._tracer.graph.nodes:
                copied = graph.node_copy(node, self.copies.__getitem__)
                # the tracer makes a node for each time that a tensor is read
                self.copies[node] = read.setdefault(node.target, copied) if node.op == "get_attr" else copied
            self.results = [None if node is None else self.copies[node] for node in nodes]
            return [x for x in results if x is not None]

        make_fx(traced)(*inputs)
        nodes = [*dict.fromkeys(self.copies.values())]
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.calls = [node for node in nodes if node.op == "call_function"]
        self.made = [node for node in self.results if node is not None]
        # tensors that are no inputs
        self.others = {node: getattr(self._tracer.root, str(node.target)) for node in nodes if node.op == "get_attr"}

    def at(self, x: Tensor) -> fx.Node | None:
        """The node of a tensor; None if the function has not read or made it."""
        slot = get_proxy_slot(x, self._tracer, None)
        read = (node for node, other in self.others.items() if other is x)
        return next(read, None) if slot is None else self.copies[slot.proxy.node]

    def insert(self, values: dict[fx.Node, Tensor]) -> dict[fx.Node, fx.Node]:
        """Copy the calls into the graph that is traced, with these inputs; their results are put into `values`.

        Returns that graph's nodes.
        """
        values.update((node, x) for node, x in self.others.items() if node not in values)  # constants
        nodes, tracer = {node: _traced(x) for node, x in values.items()}, _tracer()
        with unrecorded(), torch.no_grad():
            for node in self.calls:
                copied = nodes[node] = tracer.graph.node_copy(node, nodes.__getitem__)
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                target: Operator = node.target
                values[node] = copied.meta["val"] = target(*args, **kwargs)
        return nodes


def _known(x: Tensor, node: fx.Node) -> Tensor:
    """The tensor `x` as that of a node of the graph that is traced."""
    before, tracer = node.meta.get("val"), _tracer()
    track_tensor_tree(x, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    if before is not None:
        node.meta["val"] = before
    return x


def _traced(x: Tensor) -> fx.Node:
    """The node of a tensor in the innermost trace, which takes it for a constant if it does not know it."""
    return node_of(x) or _tracer().create_arg(x)


class _Derivative(NamedTuple):
    """The derivative of a call, for some of the gradients of its results, in some strides."""

    piece: _Piece
    reads: dict[fx.Node, fx.Node]  # for inputs beside the gradients: the node of the call whose value it is


class _Instead(TorchFunctionMode):
    """Put tensors in place of others, which are given by their identity, wherever they are read."""

    def __init__(self, instead: Mapping[int, Tensor], refuses: bool):
        super().__init__()
        self._instead, self._refuses = instead, refuses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree.map(lambda x: self._instead.get(id(x), x), (args, kwargs or {}))
        if self._refuses and func in _ASKS:
            of = args[1:2] if func is torch.autograd.grad else args[:1]
            nodes = [node_of(x) for x in tensors(tree.leaves((of, kwargs.get("inputs"))))]
            if any(node is None or node.op == "placeholder" for node in nodes):
                raise RuntimeError("it asks autograd about what it was given")
        return func(*args, **kwargs)


class RecordedCall:
    """A function of trees whose calls are copied (Note [Replays]), for trees like those of `args`."""

    def __init__(self, fn: Callable[..., Tree], args: Sequence[Tree]):
        self._leaves, self._spec = tree.flatten(args)
        self._forms, self._stream = [*map(_form, self._leaves)], stream()
        self._saves: list[fx.Node]  # whose values autograd saves
        self._keeps: list[fx.Node] = []  # whose values the derivative reads, too
        self._draws_late = False  # whether the derivative draws random numbers of its own
        self._trace(fn, [])
        # The derivative must end at what has one and is read beside the arguments, and not go on to what that was made
        # of: it becomes an argument.
        if read := [x for x in self._read.values() if x.requires_grad]:
            self._trace(fn, read)
        if any(out.requires_grad for out in self._outs):
            reads = self._derivative([out if out.requires_grad else None for out in self._outs]).reads
            # a checkpoint inside holds what it reads when it runs again
            self._keeps = [node for node in dict.fromkeys(reads.values()) if node not in self._saves]

    def _trace(self, fn: Callable[..., Tree], read: Sequence[Tensor]) -> None:
        """Trace the function, with `read` for arguments, too."""
        self._given, self._more = [*tensors(self._leaves), *read], read
        self._inputs = [_alone(x).requires_grad_(x.requires_grad) for x in self._given]
        stand_ins = self._inputs[len(self._inputs) - len(read) :]
        self._instead = {id(x): stand_in for x, stand_in in zip(read, stand_ins, strict=True)}
        self._saved: dict[fx.Node, Tensor] = {}  # what autograd saves, by the tracer's nodes
        self._derivatives: dict[object, _Derivative] = {}  # by the gradients that come
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
        # what else is no constant; the state of the stream is another one in each call
        self._read = {node: x for node, x in self._call.others.items() if node_of(x) is not None}
        self._is_start = [x is start for x in self._read.values()]
        self._saves = [self._call.copies[node] for node in self._saved]

    def _pack(self, x: Tensor) -> Tensor:
        """Replace a tensor that autograd saves by one without derivatives, for the trace of a derivative."""
        node = _traced(x)
        if node not in self._saved:
            with unrecorded():
                alias = x.detach()
            # the function may differentiate, and reads it then
            self._saved[node] = _known(alias, node)
        return self._saved[node]

    def _derivative(self, grads: Sequence[Tensor | None]) -> _Derivative:
        key = tuple(None if g is None else (g.shape, g.stride(), g.dtype) for g in grads)
        if key not in self._derivatives:
            pairs = [(out, _alone(g)) for out, g in zip(self._outs, grads, strict=False) if g is not None]
            outs, given = zip(*pairs, strict=True)
            wanted = [x for x in self._inputs if x.requires_grad]

            def run(*inputs: Tensor) -> Sequence[Tensor | None]:
                # on this thread: traces belong to it
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
        """Whether a copy does what a call does. `shared` are the identities of arguments that others read, too."""
        return self._is_plain() and self._is_apart() and self._adds_once(shared)

    def _is_plain(self) -> bool:
        """Whether the nodes depend on their inputs alone, and are the same at any place in a graph."""
        pieces = [(self._call, self._read), *((d.piece, d.reads) for d in self._derivatives.values())]
        # a fake tensor that neither trace knows is no constant: it was made in another one
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
        """Whether results lie in memory of their own, and nothing is written to that was given."""
        given = addresses([*self._inputs, *self._read.values()])
        kept = addresses([x for node, x in self._saved.items() if self._call.copies[node] not in self._call.results])
        memory = [address(out) for out in self._outs if out.numel()]
        calls = [node for piece in (self._call, *(d.piece for d in self._derivatives.values())) for node in piece.calls]
        return len({*memory} - given - kept) == len(memory) and not written(calls) & given

    def _adds_once(self, shared: Container[int]) -> bool:
        """Whether the call reads each tensor that others read, too, once: autograd would add gradients one by one."""
        times, first_more = Counter[fx.Node](), len(self._given) - len(self._more)
        for node in self._call.calls:
            fx.node.map_arg((node.args, node.kwargs), lambda read: times.update([read]))
        given = enumerate(zip(self._call.inputs, self._given, strict=True))
        is_shared = ((node, x) for n, (node, x) in given if n >= first_more or id(x) in shared)
        return all(times[node] < 2 for node, x in is_shared if x.requires_grad)

    def fits(self, leaves: Sequence[object], spec: tree.Spec) -> bool:
        """Whether a call with these arguments is like the one that was recorded, and the graph knows them."""
        given = tensors(leaves)
        is_known = all(node_of(x) is not None for x in given) and len({*map(id, given)}) == len(given)
        # as text: keys 1 and True are equal
        is_alike = spec == self._spec and str(spec) == str(self._spec)
        return is_known and is_alike and [*map(_form, leaves)] == self._forms

    def __call__(self, leaves: Sequence[object]) -> Tree:
        """Copy the recorded call with these leaves of its arguments; what it would return."""
        read = zip(self._read.values(), self._is_start, strict=True)
        others = [self._stream.state if self._stream is not None and is_start else x for x, is_start in read]
        outs = _Replay.apply(self, *tensors(leaves), *self._more, *others)
        if self._stream is not None and len(outs) > len(self._outs):
            self._stream.go_on(outs[-1])
        return tree.unflatten(self._out_spec, with_tensors(self._result, outs))

    def forward(self, ctx: Ctx, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy the nodes of the call."""
        values = dict(zip([*self._call.inputs, *self._read], inputs, strict=True))
        known = dict(values)
        nodes = self._call.insert(values)
        # in memory of their own: torch refuses writes to a view that was made in a node of autograd
        known.update((node, _known(_alone(values[node]), nodes[node])) for node in self._call.made)
        rest = (node for node in (*self._saves, *self._keeps) if node not in known)
        known.update((node, _known(values[node], nodes[node])) for node in rest)
        outs = tuple(known[node] for node in self._call.made)
        ctx.save_for_backward(*(known[node] for node in self._saves))
        ctx.kept = [known[node].detach() if node in self._call.made else known[node] for node in self._keeps]
        is_derived = [*(x.requires_grad for x in self._outs), False]
        ctx.mark_non_differentiable(*(out for out, derived in zip(outs, is_derived, strict=False) if not derived))
        return outs

    def backward(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Copy the nodes of the derivative; the gradients of all inputs."""
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
    except Exception:  # the call that follows raises it, if it is the function's
        return None
    return recorded if recorded.is_faithful(shared) else None


class _Replay(torch.autograd.Function):
    """The copy of a call (Note [Replays])."""

    @staticmethod
    def forward(ctx: Ctx, call: RecordedCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Copy the call's nodes into the graph; its results, and the next state if it draws."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        return call.forward(ctx, inputs)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Copy the nodes of its derivative; None for the call, and the gradients of the inputs."""
        if torch.is_grad_enabled():
            raise RuntimeError("scan: create_graph=True around it, in a graph: write the loop in its place")
        if not any(grad is not None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return None, *ctx.call.backward([*ctx.saved_tensors, *ctx.kept], grads)
