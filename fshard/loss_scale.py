"""Loss scaling as values: immutable scalers that a step takes in and hands out.

A gradient in half precision underflows; multiplying the loss by a scale and the gradient by its inverse avoids it.
Where a scaled gradient overflows the update is skipped, and a dynamic scale backs off. Source: Micikevicius et al.,
Mixed precision training (2018); the dynamic rule is torch.amp.GradScaler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import comm, kernels, tree
from .shard import Sharded


class _Scale(Tensor):
    """A 0-d tensor that multiplies a tree when called: a scaler's field `scale` and its method are one."""

    # Private, but what torch.nn.Parameter does: results of operations are plain tensors (test_loss_scale.py notices).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __call__(self, x: Any) -> Any:
        """Every leaf times the scale."""
        plain = self.as_subclass(Tensor)
        return tree.map(lambda t: t * plain.to(t.device), x)


def _as_scale(scale: Any) -> Tensor:
    plain = scale.as_subclass(Tensor) if isinstance(scale, Tensor) else torch.tensor(float(scale))
    if plain.dim():
        raise ValueError(f"a loss scale is a number or a 0-d tensor, got a tensor of shape {tuple(plain.shape)}")
    return plain


def _unscale(grads: Any, scale: Tensor) -> tuple[Any, Tensor]:
    inverse = scale.double().reciprocal()
    leaves = tree.leaves(grads)
    finite = [torch.isfinite(g).all() for g in leaves]
    found = 1 - torch.stack(finite).all().float() if finite else torch.zeros(())
    for part in tree.nodes(grads, Sharded)[:1]:
        found = comm.total(found, part.plan.live_mesh(), op="max", label="found_inf")
    return tree.map(lambda g: g * inverse.to(g.device, torch.promote_types(g.dtype, torch.float32)), grads), found


@dataclass(frozen=True, init=False)
class StaticLossScale:
    """A fixed scale. An update whose scaled gradients are not finite is skipped.

    >>> StaticLossScale(8.0).scale(torch.tensor(2.0))
    tensor(16.)
    """

    _scale: Tensor

    def __init__(self, scale: Any = 2.0**16):
        vars(self).update(_scale=_as_scale(scale))

    @property
    def scale(self) -> _Scale:
        """The scale, 0-d float32; called on a tree, the tree times the scale."""
        return self._scale.as_subclass(_Scale)

    def unscale(self, grads: Any) -> tuple[Any, Tensor]:
        """grads / scale, and whether any rank's are not finite (float32, 0-d, 1 or 0, equal on all ranks)."""
        return _unscale(grads, self._scale)

    def adjust(self, found_inf: Tensor) -> StaticLossScale:
        """The scaler of the next step."""
        return self


@dataclass(frozen=True, init=False)
class DynamicLossScale(StaticLossScale):
    """A scale that backs off where gradients overflow, and grows after `growth_interval` updates that did not.

    >>> scaler = DynamicLossScale(16.0, growth_interval=1)
    >>> scaler.adjust(torch.tensor(1.0)).scale.item(), scaler.adjust(torch.tensor(0.0)).scale.item()
    (8.0, 32.0)
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: Tensor  # updates since the scale last changed, int32, 0-d

    def __init__(
        self,
        scale: Any = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        growth_tracker: Tensor | int = 0,
    ):
        if growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"DynamicLossScale: expected growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= 1, got "
                f"{growth_factor}, {backoff_factor} and {growth_interval}"
            )
        plain = _as_scale(scale)
        tracker = torch.as_tensor(growth_tracker, dtype=torch.int32, device=plain.device)
        vars(self).update(_scale=plain, growth_factor=growth_factor, backoff_factor=backoff_factor)
        vars(self).update(growth_interval=growth_interval, growth_tracker=tracker)

    def adjust(self, found_inf: Tensor) -> DynamicLossScale:
        """The scaler of the next step: no host read."""
        found = found_inf.to(self._scale.device)
        counted = self.growth_tracker + 1
        due = counted == self.growth_interval
        larger = self._scale * self.growth_factor
        grown = torch.where(due & larger.isfinite(), larger, self._scale)
        return DynamicLossScale(
            kernels.where(found, self._scale * self.backoff_factor, grown),
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            torch.where(found.to(torch.bool) | due, torch.zeros_like(counted), counted),
        )


@dataclass(frozen=True)
class NoLossScale:
    """No scaling: gradients are not looked at, and no update is skipped.

    >>> NoLossScale().scale(torch.tensor(2.0))
    tensor(2.)
    """

    @property
    def scale(self) -> _Scale:
        """One."""
        return torch.ones(()).as_subclass(_Scale)

    def unscale(self, grads: Any) -> tuple[Any, Tensor]:
        """grads, and 0."""
        leaves = tree.leaves(grads)
        return grads, torch.zeros((), device=leaves[0].device if leaves else None)

    def adjust(self, found_inf: Tensor) -> NoLossScale:
        """Itself."""
        return self


tree.register_fields(StaticLossScale, ("_scale",))
tree.register_fields(
    DynamicLossScale, ("_scale", "growth_tracker"), ("growth_factor", "backoff_factor", "growth_interval")
)
tree.register_fields(NoLossScale, ())


def select(found_inf: Tensor, if_inf: Any, if_finite: Any) -> Any:
    """One of two trees of one structure, by a 0-d tensor: no host read.

    >>> select(torch.tensor(1.0), {"w": torch.tensor(1)}, {"w": torch.tensor(2)})
    {'w': tensor(1)}
    """
    return tree.map(lambda a, b: kernels.where(found_inf, a, b), if_inf, if_finite)
