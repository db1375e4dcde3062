"""What of a module a copy could not read from a call: such modules are refused."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..core import tree


def check_copied(module: nn.Module, tensors: Mapping[int, object]) -> None:
    """Raise if a copy of a module would compute with tensors of the module itself; `tensors` are known by identity.

    TypeError for modules that torch.jit compiled, and for functions on a module that hold the module or its tensors;
    ValueError for buffers and other tensors that share memory with a parameter or a buffer.
    """
    owned = {id(part) for part in module.modules()} | set(tensors)
    memory = _memory(module)
    for path, part in module.named_modules():
        where = f"functionalize: {path or type(module).__name__!r}"
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(f"{where} was compiled by torch.jit, and reads its own tensors: functionalize it before")
        if is_compiled(part):  # Note [Compiled submodules]
            continue
        for name, value in vars(part).items():
            functions = list(value.values()) if name.endswith("_hooks") and isinstance(value, dict) else [value]
            if any(id(x) in owned for function in functions for x in _contents(function, 3)):
                raise TypeError(
                    f"{where}: the function {name!r} holds the module, a submodule or a tensor of it, which a copy "
                    "does not replace: make it a method, or give it these as arguments"
                )
            for x in tree.leaves(value) if isinstance(value, Tensor | list | tuple | dict) else []:
                if isinstance(x, Tensor) and id(x) not in tensors and _has_memory(x) and _address(x) in memory:
                    raise ValueError(
                        f"{where}: {name!r} shares memory with {memory[_address(x)][0]!r}, and would not see the value "
                        "of a call: compute it in forward, or .clone() it"
                    )


def is_compiled(part: nn.Module) -> bool:
    """Whether torch.compile made this module of another one."""
    return "dynamo_ctx" in vars(part)


def _memory(module: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """The parameters and buffers by address. ValueError for a buffer in the memory of another tensor."""
    memory: dict[int, tuple[str, Tensor]]
    memory = {_address(x): (path, x) for path, x in module.named_parameters() if _has_memory(x)}
    for path, x in module.named_buffers():
        if _has_memory(x):
            other, tensor = memory.setdefault(_address(x), (path, x))
            if tensor is not x:
                raise ValueError(
                    f"functionalize: buffer {path!r} shares memory with {other!r}: .clone() it, or register one of them"
                )
    return memory


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _has_memory(x: Tensor) -> bool:
    return x.layout is torch.strided and x.numel() > 0 and not x.is_meta


def _contents(function: object, depth: int) -> Iterator[object]:
    """What a function holds in its closure, and what a cache or a weak reference refers to."""
    if depth == 0:
        return
    if isinstance(function, weakref.ref):
        yield function()
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents
                yield from _contents(cell.cell_contents, depth - 1)
    elif isinstance(function, functools._lru_cache_wrapper):
        wrapped: Any = function.__wrapped__
        yield getattr(wrapped, "__self__", None)
        yield from _contents(wrapped, depth - 1)
