"""What autograd saves while a loss runs: places in gathered buffers, and other tensors with their versions."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Unpacks(Protocol):
    """What gives saved tensors back: a `Tape`."""

    def unpack(self, saved: object) -> Tensor:
        """Return the tensor for which autograd saved this."""


class SavedView(NamedTuple):
    """The place of a view of a gathered buffer, which autograd holds instead of the view."""

    tape: Unpacks  # which gathers the unit again
    unit: int
    kind: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the buffer's first element, in elements of `dtype`
    dtype: torch.dtype  # a view may have another dtype than its buffer
    conj: bool  # whether torch conjugates, or negates, the elements when they are read
    neg: bool

    def view_of(self, full: Tensor) -> Tensor:
        """The same view of another buffer of the unit."""
        buffer = full if full.dtype == self.dtype else full.view(self.dtype)
        view = buffer.as_strided(self.size, self.stride, buffer.storage_offset() + self.offset)
        view = view.conj() if self.conj else view
        return view.neg() if self.neg else view  # a copy: torch has no public way to set the negative bit


class SavedTensor(NamedTuple):
    """A saved tensor that is no view of a gathered buffer, and how often it had been written to by then."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> SavedTensor:
        """The tensor without its node: a result that its own node saves would form a cycle with it."""
        # `_version` is private: a tensor's number of writes has no public name (test_tape.py notices when it goes)
        return cls(x.detach() if x.requires_grad else x, x._version)

    def unchanged(self) -> Tensor:
        """The tensor. RuntimeError if it was written to since, which torch does not check where there are hooks."""
        x = self.tensor
        if x._version != self.version:
            raise RuntimeError(
                f"the loss function: a {x.dtype} tensor of shape {list(x.shape)}, needed for the gradient, was "
                "written to in place after it was used. Make a new tensor instead, or a clone first."
            )
        return x
