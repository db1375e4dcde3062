"""`remat`: autograd keeps only the arguments of a function, and derivatives of any kind run the function again.

Note [Remat]
    torch.utils.checkpoint hooks into saved tensors, but torch.func forbids hooks. `remat` runs the function without
    derivatives at any level. The results pass through the identity, a `torch.autograd.Function` with rules for
    `vjp`, `jvp` and `vmap`. Each rule runs the function again, with all read tensors as inputs (Note [Reads] in
    `reads.py`), and is itself rematerialized. So derivatives of any order run the function again, and torch.func.grad
    keeps only arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

# Private: nothing public runs a function for one level, as torch's vmap rules do
from torch._functorch.autograd_function import unwrap_batched, wrap_batched
from torch._functorch.pyfunctorch import VmapInterpreter, coerce_cinterpreter, retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

# Private: nothing public lists the active function modes (test_remat.py notices a removal)
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.checkpoint import checkpoint

from ..core import func_levels, tree
from ..core.arguments import expect
from ..core.lazy import Branch
from ..core.random import bookmark
from ..core.storage import address, is_inexact, share_elements
from ..core.tracing import RERUN, Ctx, assigned
from ..core.tree import Tree
from .reads import FirstReads, Reads, SecondReads, is_active, stripped

P = ParamSpec("P")
R = TypeVar("R")
_Again = Callable[..., tuple[Tensor, ...]]
_Tensors = Sequence[Tensor]
_Levels = Sequence[tuple[object, ...]]  # of torch.func
_NUM_OTHERS = 3  # arguments of `_Rules` before the tensors


def remat(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function with `fn`'s values and derivatives. Autograd keeps only arguments: derivatives run `fn` again.

    `fn(*args, **kwargs) -> results`: trees of tensors and other objects.

    - Derivatives of any order are right, in backward and torch.func (grad, vjp, jvp, vmap, hessian), with respect to
      arguments, tensors from outside, and parameters. The backward gathers parameters again.
    - `fn` draws the same random numbers when it runs again.
    - If `fn` reads several units, all are in memory at once. `torch.utils.checkpoint` works unit by unit, only with
      torch.autograd.

    RuntimeError if a gradient would be lost or wrong: `fn` writes to an argument or to a tensor from outside (batch
    norm in training); stores a computed tensor outside its results; reads other tensors or values when it runs again;
    or takes a torch.func derivative by a tensor from outside.

    >>> def loss(w, x):
    ...     return remat(lambda x: (x @ w).tanh())(x).sum()
    >>> w = torch.ones(2)
    >>> torch.allclose(torch.func.grad(loss)(w, torch.eye(2)), 1 - w.tanh() ** 2)
    True

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    expect("remat: fn", fn, callable(fn), "fn(*args, **kwargs), a function or a module")

    def rematerialized(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # dynamo knows torch's checkpoint
            return cast(R, checkpoint(lambda *xs: fn(*xs, **kwargs), *args, use_reentrant=False))
        outer = cast("Reads | None", RERUN.get())
        with assigned(RERUN, None):  # an outer `remat` must not see inside
            return _rematerialized(fn, args, kwargs, outer)

    return functools.update_wrapper(rematerialized, fn, updated=())


_TENSOR = object()  # stands for a tensor among leaves


def _rematerialized(fn: Callable[..., R], args: Tree, kwargs: Tree, outer: Reads | None) -> R:
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
    def __init__(self, fn: Callable[..., Tree], spec: tree.Spec, leaves: Sequence[object], reads: FirstReads):
        self._fn, self._spec = fn, spec
        self._leaves = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        self._kept = reads.kept
        # context variables, such as a module's parameters
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
        """Return (floating results, leaves with `_TENSOR` for floating results, structure), without derivatives."""
        leaves, form = tree.flatten(self._run(reads))
        out = [reads.instead_of(x) if isinstance(x, Tensor) and is_active(x) else x for x in leaves]
        if active := [x for x in out if isinstance(x, Tensor) and is_active(x)]:
            raise RuntimeError(
                f"fshard.remat: a result ({active[0].dtype} of shape {list(active[0].shape)}) depends on a tensor from "
                "outside that cannot be seen there (in a torch.autograd.Function, or torch.jit.script): give it to the "
                "function as an argument"
            )
        others = [_TENSOR if is_inexact(x) else x for x in out]
        # new tensors in the same memory: `reads.end` looks for living tensors of the function
        results = [stripped(x) for x in out if is_inexact(x)]
        del leaves, out
        self._known = reads.end(others)
        self._generators = reads.generators
        return results, others, form

    def again(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return floating results for `inputs`, in place of the first run's reads."""
        reads = SecondReads(inputs, *self._known)
        casts = [torch.autocast(kind, dtype, on, cache_enabled=False) for kind, dtype, on in self._casts]
        active = function_modes()
        modes = [mode for mode in self._modes if not any(mode is x for x in active)]
        with ExitStack() as stack:
            for block in (self._rewound(), *casts, *modes):
                stack.enter_context(block)
            out = tree.leaves(self._context.copy().run(self._run, reads))
        results = tuple(reads.instead_of(x) if id(x) in reads.positions else x for x in out if is_inexact(x))
        reads.check()
        return results

    @contextmanager
    def _rewound(self) -> Iterator[None]:
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
    """Return kind and level of each active transform, for `vmap` with randomness."""
    return [coerce_cinterpreter(x).get_state() for x in torch._C._functorch.get_interpreter_stack() or ()]


def _ruled(again: _Again, levels: _Levels, inputs: _Tensors, now: _Again | None = None) -> tuple[Tensor, ...]:
    return _ruled_by(again, levels, _drawn_once(now or again, levels, [*map(stripped, inputs)]), inputs)


def _ruled_by(again: _Again, levels: _Levels, results: _Tensors, inputs: _Tensors) -> tuple[Tensor, ...]:
    """Return `results` of `again(*inputs)` with derivatives.

    `levels`: transforms around the first run; along these vmaps random numbers may differ.
    """
    return _Rules.apply(again, levels, len(results), *results, *inputs) if results else ()


def _drawn_once(again: _Again, levels: _Levels, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Call `again`; a vmap outside `levels` draws once for all rows, as the first run did."""
    if all(level in levels or level[0] != "Vmap" or level[-1] == "same" for level in _levels()):
        return again(*inputs)
    top = retrieve_current_functorch_interpreter()
    if not isinstance(top, VmapInterpreter):
        with top.lower():
            return _drawn_once(again, levels, inputs)
    flat, dims = unwrap_batched(inputs, top.level())
    with top.lower():
        results = _drawn_once(_vmapped(again, top.batch_size(), dims, "same"), levels, flat)
    return wrap_batched(results, (0,) * len(results), top.level())


def _vmapped(again: _Again, size: int, dims: Sequence[int | None], randomness: str) -> _Again:
    def mapped(*inputs: Tensor) -> tuple[Tensor, ...]:
        rows = torch.empty(size, 0, dtype=torch.float32, device="cpu")  # vmap's batch size
        return torch.func.vmap(lambda _, *x: again(*x), (0, *dims), randomness=randomness)(rows, *inputs)

    return mapped


class _Rules(torch.autograd.Function):
    """The identity of `num` tensors, the results, with derivatives of `again` by the other tensors."""

    @staticmethod
    def forward(again: _Again, levels: _Levels, num: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, others = list[Tensor](), dict[int, list[Tensor]]()  # `others` by address
        for x in tensors[num:]:
            others.setdefault(_address(x), []).append(x)
        for x in tensors[:num]:
            beside = others.setdefault(_address(x), [])
            # clone: the program may write to a result; `data`: torch forbids writes to one of several views
            results.append(x.clone() if any(share_elements(x, y) for y in beside) else x.data)
            beside.append(x)
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.again, ctx.levels, ctx.num, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.num :])
        ctx.save_for_forward(*tensors[ctx.num :])
        ctx.set_materialize_grads(False)  # None for unused results: zero times infinity would be NaN

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
        # torch switches off forward mode in a rule: operators would silently lose tangents. Private: nothing public
        # switches forward mode on (test_remat.py notices a change)
        with forward_ad._set_fwd_grad_enabled(True):
            inputs = [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            along = {n: x for n, x in enumerate(tangents[ctx.num :]) if x is not None}
            tensors = [*inputs, *along.values()]
            # outside torch.func the level is forward_ad's, and may have ended when `later` runs
            now, later = (_push(ctx.again, [*along], len(inputs), x) for x in (func_levels.inside(), True))
            return _ruled(later, ctx.levels, tensors, now)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], again: _Again, levels: _Levels, num: int, *tensors: Tensor) -> object:
        dims, size = in_dims[_NUM_OTHERS:], info.batch_size
        pairs = zip(tensors[:num], dims, strict=False)
        results = [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]
        around = _levels()
        was_there = ("Vmap", len(around) + 1, info.randomness) in levels
        mapped = _vmapped(again, size, dims[num:], info.randomness if was_there else "same")
        levels = [level for level in levels if level in around]
        return _Rules.apply(mapped, levels, num, *results, *tensors[num:]), (0,) * num


def _address(x: Tensor) -> int:
    return address(x) if x.layout is torch.strided else id(x)


def _new_leaf(x: Tensor) -> Tensor:
    """Return a new leaf, even if `x` is given twice. `detach` would drop a tangent."""
    return (x.view_as(x) if x.requires_grad or x.layout is torch.strided else x.detach()).requires_grad_()


def _pull(again: _Again, which: Sequence[int], used: Sequence[int], num: int) -> _Again:
    """Return the vjp of results `used` by inputs `which`, as a function of all inputs and cotangents."""

    def pulled(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, grads = tensors[:num], tensors[num:]
        if func_levels.inside():
            pull = torch.func.vjp(_part(again, inputs, which, used), *[inputs[n] for n in which])[1]
            return pull(grads, retain_graph=False)
        # torch.func is slower, and refuses torch.utils.checkpoint
        with torch.enable_grad():
            is_differentiated = any(x.requires_grad for x in tensors)
            leaves = [_new_leaf(inputs[n]) for n in which]
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
    """Return the jvp along inputs `which`, as a function of all `num` inputs and tangents.

    `nested`: the jvp opens a level; else it uses forward_ad's.
    """

    def pushed(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, along = tensors[:num], tensors[num:]
        # torch writes to a tangent with its primal's strides: expanded elements would share memory
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
    def of(*some: Tensor) -> tuple[Tensor, ...]:
        all_inputs = list(inputs)
        for number, x in zip(which, some, strict=True):
            all_inputs[number] = x
        results = again(*all_inputs)
        return results if used is None else tuple(results[number] for number in used)

    return of
