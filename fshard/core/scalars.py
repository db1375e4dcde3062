"""Numbers as 0-d tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Number = float | Tensor


def double(x: Number) -> Tensor:
    """Return a 0-d float64 tensor; for a number, on the CPU.

    >>> double(0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    return x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")


def on_device(x: Number, device: torch.device) -> Tensor:
    """Return a 0-d float64 tensor on the device; the host does not wait.

    >>> on_device(0.5, torch.device("cpu"))
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(x, Tensor):
        return x.to(device, torch.float64, non_blocking=x.is_cpu)
    return torch.full((), x, dtype=torch.float64, device=device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scalars that multiply tensors of `dtype`."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def beside(number: object, x: Tensor) -> Any:  # a `Number` or None
    # torch takes 0-d CPU tensors with tensors of any device
    return number.to(x.device) if isinstance(number, Tensor) and x.device.type == "cpu" else number


def is_zero(x: object) -> bool:
    return not isinstance(x, Tensor) and x == 0
