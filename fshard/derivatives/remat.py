"""`remat`: a function of which autograd keeps the arguments alone, and which runs again for derivatives of any kind.

Note [Remat]
    torch.utils.checkpoint hooks on to what autograd saves, which torch.func forbids. Here a function runs without
    derivatives at any level, and a `torch.autograd.Function`, the identity of its results, then gives these a rule for
    each kind of derivative: `vjp`, `jvp` and `vmap` of the function, run again. The rules are functions of all that the
    function read (Note [Reads] in `reads.py`), and are rematerialized themselves: so derivatives of any order run
    again, and torch.func.grad, which always keeps what a second derivative needs, keeps the arguments alone as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

# Private, as what a vmap rule is made of: nothing public runs a function for a level as torch's own rules do
from torch._functorch.autograd_function import unwrap_batched, wrap_batched
from torch._functorch.pyfunctorch import VmapInterpreter, coerce_cinterpreter, retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

# Private: nothing public lists the function modes that are on (test_remat.py notices when it goes)
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.checkpoint import checkpoint

from ..core import func_levels, tree
from ..core.arguments import wrong
from ..core.lazy import Branch
from ..core.random import bookmark
from ..core.storage import address, is_inexact, share_elements
from ..core.tracing import RERUN, assigned
from ..core.tree import Tree
from .reads import FirstReads, Reads, SecondReads, is_active, stripped

P = ParamSpec("P")
R = TypeVar("R")
Ctx = Any  # torch's context of a function, on which setup_context sets any attributes
_Again = Callable[..., tuple[Tensor, ...]]  # of tensors, inputs and results
_Tensors = Sequence[Tensor]
_Levels = Sequence[tuple[object, ...]]  # of torch.func
_NUM_OTHERS = 3  # arguments of `_Rules` before the tensors


def remat(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn` with its values and derivatives, which keeps its arguments alone: derivatives run `fn` again.

    `fn(*args, **kwargs) -> results`: trees of tensors and other objects. Derivatives of any order are those of `fn`, by
    backward and by torch.func (grad, vjp, jvp, vmap, hessian), with respect to arguments, to tensors that `fn` takes
    from outside, and to parameters that it reads, which are gathered once more in the backward. What it draws at random
    is drawn again. Of a function of several units all units are in memory together. For torch.autograd alone
    `torch.utils.checkpoint` does the same, unit by unit.

    Raises RuntimeError where a gradient would be lost or wrong: `fn` writes to an argument, or to a tensor from outside
    (batch norm in training); keeps what it computes beside its results; reads other tensors, or other values of
    constants, when it runs again; or differentiates by a tensor from outside in a transform of its own.

    >>> def loss(w, x):
    ...     return remat(lambda x: (x @ w).tanh())(x).sum()
    >>> w = torch.ones(2)
    >>> torch.allclose(torch.func.grad(loss)(w, torch.eye(2)), 1 - w.tanh() ** 2)
    True

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    if not callable(fn):
        raise TypeError(wrong("remat: fn", fn, "fn(*args, **kwargs), a function or a module"))

    def rematerialized(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # it knows torch's checkpoint, and has derivatives of its own
            return cast(R, checkpoint(lambda *xs: fn(*xs, **kwargs), *args, use_reentrant=False))
        outer = cast("Reads | None", RERUN.get())
        with assigned(RERUN, None):  # what is done here is no part of a function outside
            return _rematerialized(fn, args, kwargs, outer)

    return functools.update_wrapper(rematerialized, fn, updated=())


_TENSOR = object()  # stands for a tensor among leaves


def _rematerialized(fn: Callable[..., R], args: Any, kwargs: Any, outer: Reads | None) -> R:
    leaves, spec = tree.tops((args, kwargs), Branch), tree.structure_above((args, kwargs), Branch)
    reads = FirstReads([x for x in leaves if isinstance(x, Tensor)], outer)
    call = _Rematerialized(fn, spec, leaves, reads)
    results, out, form = call.first(reads)
    ruled = iter(_ruled_by(call.again, _levels(), results, reads.inputs))
    out = [next(ruled) if x is _TENSOR else x for x in out]
    if outer is not None:
        outer.note(remat, tuple(reads.inputs), None, out)
    return tree.unflatten(form, out)


class _Rematerialized:
    """One call of a function, which can run again as a function of what it read."""

    def __init__(self, fn: Callable[..., Tree], spec: tree.Spec, leaves: Sequence[object], reads: FirstReads):
        self._fn, self._spec = fn, spec
        self._leaves = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        self._kept = reads.kept
        # in a backward: the call of a module that reads its parameters, and the like
        self._context = copy_context()
        self._modes = [mode for mode in function_modes() if not isinstance(mode, Reads)]
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu", *(x.device.type for x in reads.inputs), *([accelerator.type] if accelerator else ())} - {"meta"}
        self._casts = [(x, torch.get_autocast_dtype(x), torch.is_autocast_enabled(x)) for x in kinds]

    def _run(self, reads: Reads) -> Tree:
        given = iter(reads.given)
        args, kwargs = tree.unflatten(self._spec, [next(given) if x is _TENSOR else x for x in self._leaves])
        return reads.run(functools.partial(self._fn, *args, **kwargs))

    def first(self, reads: FirstReads) -> tuple[list[Tensor], list[object], tree.Spec]:
        """Run without derivatives: the floating results; the leaves of all, `_TENSOR` for these; the structure of all.

        RuntimeError for what would have no gradient.
        """
        leaves, form = tree.flatten(self._run(reads))
        out = [reads.instead_of(x) if isinstance(x, Tensor) and is_active(x) else x for x in leaves]
        if active := [x for x in out if isinstance(x, Tensor) and is_active(x)]:
            raise RuntimeError(
                f"fshard.remat: a result ({active[0].dtype} of shape {list(active[0].shape)}) depends on a tensor from "
                "outside that cannot be seen there (in a torch.autograd.Function, or torch.jit.script): give it to the "
                "function as an argument"
            )
        others = [_TENSOR if is_inexact(x) else x for x in out]
        # others in the same memory: what the function made is to be gone
        results = [stripped(x) for x in out if is_inexact(x)]
        del leaves, out
        self._known = reads.end(others)
        self._generators = reads.generators
        return results, others, form

    def again(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The floating results, as a function of all that the first run read."""
        reads = SecondReads(inputs, *self._known)
        casts = [torch.autocast(kind, dtype, on, cache_enabled=False) for kind, dtype, on in self._casts]
        active = function_modes()
        modes = [mode for mode in self._modes if not any(mode is x for x in active)]
        with ExitStack() as stack:
            for block in (self._rewound(), *casts, *modes):  # those that the call was in
                stack.enter_context(block)
            out = tree.leaves(self._context.copy().run(self._run, reads))
        results = tuple(reads.instead_of(x) if id(x) in reads.positions else x for x in out if is_inexact(x))
        reads.check()
        return results

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        """Inside the block draw what the first run drew."""
        with func_levels.aside():
            back = bookmark(*self._generators)
            for rewind in self._generators.values():
                rewind()
        try:
            yield
        finally:
            with func_levels.aside():
                back()


def _levels() -> _Levels:
    """The transforms of torch.func that run: of each its kind, its level, and of `vmap` how it draws random numbers."""
    return [coerce_cinterpreter(x).get_state() for x in torch._C._functorch.get_interpreter_stack() or ()]


def _ruled(again: _Again, levels: _Levels, inputs: _Tensors, now: _Again | None = None) -> tuple[Tensor, ...]:
    """`again(*inputs)`, or `now(*inputs)`, of whose derivatives autograd keeps the inputs alone."""
    return _ruled_by(again, levels, _drawn_once(now or again, levels, [*map(stripped, inputs)]), inputs)


def _ruled_by(again: _Again, levels: _Levels, results: _Tensors, inputs: _Tensors) -> tuple[Tensor, ...]:
    """The results of `again(*inputs)`, of whose derivatives autograd keeps the inputs alone.

    `levels` are those in which the function ran first: what it draws at random may differ along these.
    """
    return _Rules.apply(again, levels, len(results), *results, *inputs) if results else ()


def _drawn_once(again: _Again, levels: _Levels, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`again` of tensors without derivatives, for which a vmap that is not of `levels` draws once, as the first run."""
    if all(level in levels or level[0] != "Vmap" or level[-1] == "same" for level in _levels()):
        return again(*inputs)
    top = retrieve_current_functorch_interpreter()
    if not isinstance(top, VmapInterpreter):
        with top.lower():
            return _drawn_once(again, levels, inputs)
    flat, dims = unwrap_batched(inputs, top.level())
    with top.lower():
        results = _drawn_once(_mapped(again, top.batch_size(), dims, "same"), levels, flat)
    return wrap_batched(results, (0,) * len(results), top.level())


def _mapped(again: _Again, size: int, dims: Sequence[int | None], randomness: str) -> _Again:
    """`again`, mapped over dims of its inputs."""

    def mapped(*inputs: Tensor) -> tuple[Tensor, ...]:
        rows = torch.empty(size, 0, dtype=torch.float32, device="cpu")  # vmap asks for an argument that it cuts
        return torch.func.vmap(lambda _, *x: again(*x), (0, *dims), randomness=randomness)(rows, *inputs)

    return mapped


class _Rules(torch.autograd.Function):
    """The identity of results, whose derivatives are those of `again`, a function of the tensors after them."""

    @staticmethod
    def forward(again: _Again, levels: _Levels, num: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results, in memory that is no one else's, since the program may write to them."""
        results, others = list[Tensor](), dict[int, list[Tensor]]()  # by the address of their memory
        for x in tensors[num:]:
            others.setdefault(_address(x), []).append(x)
        for x in tensors[:num]:
            beside = others.setdefault(_address(x), [])
            # `data`: a view could not be written to, one of several at least
            results.append(x.clone() if any(share_elements(x, y) for y in beside) else x.data)
            beside.append(x)
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.again, ctx.levels, ctx.num, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.num :])
        ctx.save_for_forward(*tensors[ctx.num :])
        ctx.set_materialize_grads(False)  # what has no use has no derivative: zero times infinity would be NaN

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[_NUM_OTHERS + ctx.num :]
        which = [number for number, needs in enumerate(needed) if needs]
        seeds = {number: x for number, x in enumerate(grads) if x is not None}
        pull = _pull(ctx.again, which, [*seeds], len(inputs))
        sums = dict(zip(which, _ruled(pull, ctx.levels, [*inputs, *seeds.values()]), strict=True))
        return (None,) * (_NUM_OTHERS + ctx.num) + tuple(map(sums.get, range(len(inputs))))

    @staticmethod
    def jvp(ctx: Ctx, _again: None, _levels: None, _num: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        # torch switches forward mode off here, at all levels: operators would lose tangents, silently (test_remat.py
        # notices). Private: nothing public switches it on
        with forward_ad._set_fwd_grad_enabled(True):
            inputs = [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            along = {n: x for n, x in enumerate(tangents[ctx.num :]) if x is not None}
            tensors = [*inputs, *along.values()]
            # without torch.func there is one level, that of torch.autograd.forward_ad, and it may be over later
            now, later = (_push(ctx.again, [*along], len(inputs), x) for x in (func_levels.inside(), True))
            return _ruled(later, ctx.levels, tensors, now)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], again: _Again, levels: _Levels, num: int, *tensors: Tensor) -> Any:
        dims, size = in_dims[_NUM_OTHERS:], info.batch_size
        pairs = zip(tensors[:num], dims, strict=False)
        results = [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]
        around = _levels()
        was_there = ("Vmap", len(around) + 1, info.randomness) in levels
        mapped = _mapped(again, size, dims[num:], info.randomness if was_there else "same")
        levels = [level for level in levels if level in around]
        return _Rules.apply(mapped, levels, num, *results, *tensors[num:]), (0,) * num


def _address(x: Tensor) -> int:
    return address(x) if x.layout is torch.strided else id(x)


def _leaf(x: Tensor) -> Tensor:
    """A tensor to differentiate by, also if `x` is given twice; `detach` would drop a tangent of torch.autograd."""
    return (x.view_as(x) if x.requires_grad or x.layout is torch.strided else x.detach()).requires_grad_()


def _pull(again: _Again, which: Sequence[int], used: Sequence[int], num: int) -> _Again:
    """The vjp of some results of `again` in some of its `num` inputs: of all inputs and the results' gradients."""

    def pulled(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, grads = tensors[:num], tensors[num:]
        if func_levels.inside():
            pull = torch.func.vjp(_part(again, inputs, which, used), *[inputs[n] for n in which])[1]
            return pull(grads, retain_graph=False)
        # the same without torch.func, which refuses torch.utils.checkpoint, and takes longer
        with torch.enable_grad():
            is_differentiated = any(x.requires_grad for x in tensors)
            leaves = [_leaf(inputs[n]) for n in which]
            outs = _part(again, inputs, which, used)(*leaves)
            depends = [(x, grad) for x, grad in zip(outs, grads, strict=True) if x.requires_grad]
        if not depends:
            return tuple(map(torch.zeros_like, leaves))
        outs, seeds = zip(*depends, strict=True)
        return torch.autograd.grad(
            outs, leaves, seeds, create_graph=is_differentiated, allow_unused=True, materialize_grads=True
        )

    return pulled


def _push(again: _Again, which: Sequence[int], num: int, nested: bool) -> _Again:
    """The jvp of `again` along some of its `num` inputs, as a function of all inputs and the tangents of those.

    In a level of its own if it is `nested`, else in the one of torch.autograd.forward_ad.
    """

    def pushed(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, along = tensors[:num], tensors[num:]
        # torch lays a tangent out as its primal: elements that share memory, as those of `expand`, would be written to
        is_packed = [inputs[n].is_contiguous() and not func_levels.is_wrapped(inputs[n]) for n in which]
        pairs = zip([inputs[n] for n in which], is_packed, strict=True)
        primals = [x if packed else x.clone(memory_format=torch.contiguous_format) for x, packed in pairs]
        if nested:
            return torch.func.jvp(_part(again, inputs, which), tuple(primals), along)[1]
        out = _part(again, inputs, which)(*map(forward_ad.make_dual, primals, along))
        duals = [(x, forward_ad.unpack_dual(x).tangent) for x in out]
        return tuple(torch.zeros_like(x) if tangent is None else tangent for x, tangent in duals)

    return pushed


def _part(again: _Again, inputs: _Tensors, which: Sequence[int], used: Sequence[int] | None = None) -> _Again:
    """`again` as a function of some of its inputs, with some of its results or all."""

    def of(*some: Tensor) -> tuple[Tensor, ...]:
        all_inputs = list(inputs)
        for number, x in zip(which, some, strict=True):
            all_inputs[number] = x
        results = again(*all_inputs)
        return results if used is None else tuple(results[number] for number in used)

    return of
