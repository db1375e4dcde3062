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
