"""Numbers as 0-d tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def double(x: Any) -> Tensor:
    """A number as a 0-d float64 tensor in host memory, whatever torch's default device; a tensor where it is.

    >>> double(0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    return x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device="cpu")


def on_device(x: Any, device: torch.device) -> Tensor:
    """A number as a 0-d float64 tensor on a device: filled in there, for a copy from the host would wait for it.

    >>> on_device(0.5, torch.device("cpu"))
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(x, Tensor):
        return x.to(device, torch.float64)
    return torch.full((), x, dtype=torch.float64, device=device)


Number = float | Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The real dtype, float32 or float64, that numbers which multiply a tensor of this dtype are kept in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def beside(number: Any, x: Tensor) -> Any:
    """A number as it multiplies a tensor: those on a device multiply nothing in host memory, the others anything."""
    return number.to(x.device) if isinstance(number, Tensor) and x.device.type == "cpu" else number


def is_zero(x: object) -> bool:
    """Whether a hyper-parameter is the number zero: a tensor is not looked at."""
    return not isinstance(x, Tensor) and x == 0
