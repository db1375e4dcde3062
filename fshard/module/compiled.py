"""Submodules wrapped by torch.compile: in a copy, their graphs take the current call's tensors as arguments.

Note [Compiled submodules]
    The graph of `torch.compile(part)` holds the tensors of the part. A copy compiles a function of these tensors
    instead, with the user's backend and options. Tensors are read before the graph runs, so gathers stay outside of it;
    the graph writes to the call's buffers. In a trace, and if submodules of the part cast or synchronise (their forward
    belongs to the copy), the part runs uncompiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ..core.tracing import Args, is_tracing
from .skeleton import Slots, Stand, Weight, member_of, same_stands

ByName = dict[str, Tensor]


def compile_again(part: Any) -> None:
    """See Note [Compiled submodules]."""
    original: nn.Module = part._orig_mod
    if any("forward" in vars(inner) for inner in original.modules()):
        vars(part)["forward"] = original
        return
    params = {name: x for name, x in original.named_parameters(remove_duplicate=False) if isinstance(x, Stand)}
    slots = {name: _slots_of(original, name) for name, _ in original.named_buffers(remove_duplicate=False)}
    compiled = part.dynamo_ctx(_functional(_without_stands(original)))

    def forward(*args: object, **kwargs: object) -> object:
        if is_tracing():
            return original(*args, **kwargs)
        given = {name: buffers[last] for name, (buffers, last) in slots.items()}
        read = {name: member_of(stand).read() for name, stand in params.items()}
        # dynamo cannot trace the class `Weight`
        read = {name: x.as_subclass(Tensor) if isinstance(x, Weight) else x for name, x in read.items()}
        out, after = compiled(read, given, args, kwargs)
        for name, (buffers, last) in slots.items():
            if after[name] is not given[name]:
                buffers[last] = after[name]
        return out

    vars(part)["forward"] = forward


def _slots_of(module: nn.Module, name: str) -> tuple[Slots, str]:
    path, _, last = name.rpartition(".")
    return vars(module.get_submodule(path))["_buffers"], last


def _functional(module: nn.Module) -> Callable[..., tuple[object, ByName]]:
    def run(params: ByName, buffers: ByName, args: Args, kwargs: dict[str, object]) -> tuple[object, ByName]:
        tensors = {**params, **buffers}
        out = functional_call(module, tensors, args, kwargs)  # stores assigned buffers in `tensors`
        return out, {name: tensors[name] for name in buffers}

    return run


def _without_stands(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module, same_stands(module))
    for part in copied.modules():
        for kind in ("_parameters", "_buffers"):
            stands = vars(part)[kind].stands.items()
            vars(part)[kind] = {name: None if x is None else member_of(x).form for name, x in stands}
    return copied
