"""Checks that refuse modules: a copy would read the original's own tensors, or lose something of a parameter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..core.storage import runs_meet
from ..core.tree import Tree
from .current import nodes_of
from .skeleton import Stand, member_of

_OLD_HOOKS = [f"torch.nn.utils.{name}" for name in ("spectral_norm", "weight_norm", "prune")]
_AS_IT_IS = "which a copy does not replace: make it a method, or give it these as arguments"


def check_parameters(params: Mapping[str, Tensor]) -> None:
    for path, x in params.items():
        if type(x) not in (nn.Parameter, Tensor):
            raise TypeError(
                f"functionalize: {path!r} is of class {type(x).__name__}, and plans hold plain tensors: make it an "
                "nn.Parameter (of the plain tensors in it, each by itself)"
            )
        # Private, both: no public function tells if tensors have hooks (test_module.py)
        if x._backward_hooks or x._post_accumulate_grad_hooks:
            raise ValueError(
                f"functionalize: {path!r} has hooks on its gradient, which would not run: remove them, and change the "
                "gradients that value_and_grad returns"
            )


def check_references(skeleton: nn.Module, module: nn.Module) -> None:
    """TypeError if functions, weak references and the like in a copy lead to the module itself."""
    paths: dict[int, str] = {id(part): path or "the module" for path, part in module.named_modules()}
    paths |= {id(x): path for named in (module.named_parameters(), module.named_buffers()) for path, x in named}
    for where, name, x in _reached(skeleton):
        if id(x) in paths:
            raise TypeError(
                f"functionalize: {where!r}: the function or object {name!r} holds the module, a submodule or a tensor "
                f"of it ({paths[id(x)]}), {_AS_IT_IS}"
            )


def check_memory(module: nn.Module, tensors: Mapping[int, object]) -> None:
    """ValueError if a parameter or buffer shares elements with another, or with a tensor not replaced in copies.

    `tensors`: the replaced tensors, by id.
    """
    for path, part in module.named_modules():
        where = f"functionalize: {path or type(module).__name__!r}"
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(f"{where} was compiled by torch.jit, and reads its own tensors: functionalize it before")
        # Private: no public function lists hooks (test_module.py)
        if old := [x for x in map(type, part._forward_pre_hooks.values()) if x.__module__ in _OLD_HOOKS]:
            raise TypeError(
                f"{where}: the hook {old[0].__name__} of torch.nn.utils keeps the weight of a call: use torch.nn.utils."
                "parametrizations, or end a pruning by torch.nn.utils.prune.remove(submodule, name)"
            )
    memory: dict[int, list[tuple[str, Tensor]]] = {}
    parameters: list[tuple[str, str, Tensor]] = [("parameter", *pair) for pair in module.named_parameters()]
    for kind, path, tensor in [*parameters, *(("buffer", *pair) for pair in module.named_buffers())]:
        if other := _sharing(memory, tensor):
            raise ValueError(
                f"functionalize: {kind} {path!r} shares memory with {other!r}: .clone() it, or register one of them, "
                "under both names"
            )
        if _has_memory(tensor):
            memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((path, tensor))
    for where, name, x in _reached(module):
        if isinstance(x, Tensor) and id(x) not in tensors and (other := _sharing(memory, x)):
            raise ValueError(
                f"functionalize: {where!r}: {name!r} shares memory with {other!r}, and would not see the value of a "
                "call: compute it in forward, or .clone() it"
            )


def is_compiled(part: nn.Module) -> bool:
    return "dynamo_ctx" in vars(part)


def check_graph(paths: Mapping[int, str], given: Tree, results: Tree, name: str) -> None:
    """ValueError if the graph of a call ends at one of the module's own parameters (`paths` by id).

    A function may find a tensor anywhere (a registry, a C extension), so the check walks the graph from the results.
    """
    seen = nodes_of(given)
    waiting = list(nodes_of(results) - seen)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # only an AccumulateGrad node has a `variable`
        path = paths.get(id(leaf))
        if path is not None:
            raise ValueError(
                f"{name}: the forward computed with the module's own {path!r}, not with that of the call: a function "
                f"or object outside of the module holds it, {_AS_IT_IS}"
            )
        if isinstance(leaf, Stand):
            raise ValueError(
                f"{name}: an autograd function was given {member_of(leaf).path!r} from parameters(), a list or a "
                "closure, where a copy holds no values: give it the attribute (self.weight)"
            )
        following = {after for after, _ in node.next_functions if after is not None} - seen
        waiting += following
        seen |= following


def check_uncached(name: str) -> None:
    # Private: no public function tells (test_module_code.py)
    if parametrize._cache_enabled:
        raise ValueError(
            f"{name}: torch.nn.utils.parametrize.cached() keeps the weight of the first call for all others, whatever "
            "parameters they are given: leave it out"
        )


def _sharing(memory: Mapping[int, list[tuple[str, Tensor]]], x: Tensor) -> str | None:
    if not _has_memory(x):
        return None
    others = memory.get(x.untyped_storage().data_ptr(), [])
    return next((path for path, other in others if x is other or runs_meet(x, other)), None)


def _has_memory(x: Tensor) -> bool:
    return x.layout is torch.strided and x.numel() > 0 and not x.is_meta


def _reached(module: nn.Module) -> Iterator[tuple[str, str, object]]:
    """Yield (submodule's path, name of its attribute, object) for all objects reached from attributes, also weakly."""
    parts = {id(part) for part in module.modules()}
    seen = set[int]()
    for path, part in module.named_modules():
        if is_compiled(part):  # Note [Compiled submodules]
            continue
        for name, value in vars(part).items():
            waiting = [value]
            while waiting:
                x = waiting.pop()
                if id(x) in seen or id(x) in parts or isinstance(x, _NOT_ENTERED):
                    continue
                seen.add(id(x))
                yield path or type(module).__name__, name, x
                waiting += [vars(x)] if isinstance(x, Tensor) else _referents(x)


# Globals are not searched: `check_graph` sees used globals.
_NOT_ENTERED = (ModuleType, type, CodeType, FrameType, str, bytes, int, float, type(None))


def _referents(x: object) -> list[object]:
    if isinstance(x, weakref.ref):
        return [x()]
    if isinstance(x, FunctionType):  # without its globals
        return [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)]
    return gc.get_referents(x)
