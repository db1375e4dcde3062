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
