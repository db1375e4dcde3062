"""Initialization by a module's own methods, one submodule at a time.

Note [What constructors write]
    `init` does not repeat a constructor's writes to parameters of submodules (`self.head.weight.zero_()`, or
    `self.apply(fn)`). Torch's count of writes does not show them: many constructors initialize a parameter twice.
    Unless the module is on meta, `init` compares its parameter with the module's: ValueError if their norms are far
    apart, or if only one is constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..core.random import seeded_by
from ..core.storage import is_inexact
from .skeleton import Member, Slots, member_of


class Initializer:
    """`initializer(path, like)` returns an initialized parameter, and keeps the parameter's submodule for the next."""

    def __init__(self, skeleton: nn.Module, seed: int, device: torch.device, own: Mapping[str, ref[Tensor]]):
        self._skeleton, self._seed, self._device, self._own = skeleton, seed, device, own
        self._made: tuple[str, nn.Module] | None = None

    def __call__(self, path: str, like: Tensor) -> Tensor:
        value = self._tensor(path, "_parameters")
        owner, given = path.rpartition(".")[0], self._own[path]()
        if given is not None and not given.is_meta and _is_other(value, given):  # Note [What constructors write]
            of = type(self._skeleton.get_submodule(owner)).__name__
            raise ValueError(
                f"init: the module has set {path!r} after {owner!r} ({of}) initialized itself, and init does not: set "
                "it in _init_weights or reset_parameters, use fshard.init_params(plan, fn), or make the module on a "
                "device and shard its own values with shard_params"
            )
        return value

    def buffer(self, path: str) -> Tensor:
        return self._tensor(path, "_buffers")

    def _tensor(self, path: str, kind: str) -> Tensor:
        owner, _, name = path.rpartition(".")
        if self._made is None or self._made[0] != owner:
            self._made = None  # free the last submodule first
            self._made = owner, self._owner(owner, 0)
        value = vars(self._made[1])[kind][name].detach()
        # an element that no method set is still NaN, or for integers still `start`: 0, and 1 in a second run
        if is_inexact(value):
            unset = torch.linalg.vector_norm(value, 1).isnan()  # NaN if an element is NaN; `isnan()` takes memory
        else:
            unset = value != vars(self._owner(owner, 1))[kind][name]
        if unset.any():
            of = type(self._skeleton.get_submodule(owner)).__name__
            raise ValueError(
                f"init: neither _init_weights nor reset_parameters of {owner!r} ({of}) sets {path!r}: use "
                "fshard.init_params(plan, fn), or make the module with its values"
            )
        return value

    def _owner(self, path: str, start: int) -> nn.Module:
        """A copy of a submodule, initialized by its own methods, then by methods of the modules around it."""

        def empty(place: Member) -> Tensor:
            fill = torch.nan if is_inexact(place.form) else start
            return torch.full(place.form.shape, fill, dtype=place.form.dtype, device=self._device)

        part = _with_tensors(self._skeleton.get_submodule(path), empty)
        with seeded_by(self._seed, path, self._device), torch.no_grad():
            self._initialize(path, part)
            above = path
            while above:  # from the inside out, as constructors run
                above = above.rpartition(".")[0]
                self._initialize(above, self._around(above, path, part))
        return part

    def _around(self, above: str, path: str, part: nn.Module) -> nn.Module:
        module = _with_tensors(self._skeleton.get_submodule(above), _on_meta)
        parent, _, name = path.removeprefix(above).removeprefix(".").rpartition(".")
        vars(module.get_submodule(parent))["_modules"][name] = part
        return module

    def _initialize(self, path: str, part: nn.Module) -> None:
        names = path.split(".") if path else []
        around = [self._skeleton.get_submodule(".".join(names[:end])) for end in range(len(names), -1, -1)]
        whole = next((module for module in around if callable(getattr(module, "_init_weights", None))), None)
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if callable(reset):
            reset()
        if whole is not None:  # not instead of `reset`: `_init_weights` may skip some classes
            library: Any = whole
            library._init_weights(part)


def _is_other(x: Tensor, y: Tensor) -> bool:
    """True if two tensors surely had different initializations: norms far apart, or only one tensor constant."""
    if (num := x.numel()) < 4:
        return False
    (size, is_constant), (other, is_also) = _moments(x), _moments(y)
    by_chance = 0.0 if is_constant and is_also else 12 / math.sqrt(num)  # log of the norms' ratio: 12 sigma if normal
    is_far = max(size, other) > min(size, other) * math.exp(0.1 + by_chance)
    return is_far or is_constant is not is_also


def _moments(x: Tensor) -> tuple[float, bool]:
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return float(torch.linalg.vector_norm(x)), bool((x == x.flatten()[:1]).all())


def _with_tensors(part: nn.Module, make: Callable[[Member], Tensor]) -> nn.Module:
    """Copy a submodule with tensors from `make`; submodules inside get meta tensors."""
    made = object.__new__(type(part))
    vars(made).update(vars(part))
    for kind in ("_parameters", "_buffers"):
        slots: Slots = vars(part)[kind]
        vars(made)[kind] = {name: x if x is None else _made(member_of(x), make) for name, x in slots.stands.items()}
    inside = {name: child if child is None else _with_tensors(child, _on_meta) for name, child in part._modules.items()}
    vars(made)["_modules"] = inside
    return made


def _made(place: Member, make: Callable[[Member], Tensor]) -> Tensor:
    x = make(place)
    return x if place.is_buffer else nn.Parameter(x, requires_grad=place.trains)


def _on_meta(place: Member) -> Tensor:
    return place.form
