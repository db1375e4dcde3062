"""What autograd saves while a loss runs: places in gathered buffers, and other tensors with their versions."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.storage import address

# private: nothing public tells which hooks are on (test_prefetch.py notices when it goes)
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def in_checkpoint() -> bool:
    """Whether a checkpoint of torch runs, which will run again in the backward: its hooks on saved tensors are on."""
    hooks = _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


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
        # private, as in `storage.writes`; not by a call, because every saved tensor comes here
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


class Owners:
    """The gathered buffers of a tape, by which a tensor that autograd saves is known to be a view of one."""

    def __init__(self) -> None:
        # by the address of a storage: a reference that keeps the address taken, unit, kind, the buffer's first byte
        self._owners: dict[int, tuple[StorageWeakRef, int, int, int]] = {}
        self._kept: dict[int, StorageWeakRef] = {}  # of buffers that stay, of which a saved tensor is no place

    def add(self, full: Tensor, unit: int, kind: int, regathers: bool) -> None:
        """Note whose buffer this is; `regathers` says whether the backward gathers the unit again."""
        storage = full.untyped_storage()
        if regathers:
            first_byte = int(full.storage_offset()) * full.itemsize
            self._owners[address(full)] = StorageWeakRef(storage), unit, kind, first_byte
        else:
            self._kept[address(full)] = StorageWeakRef(storage)

    def addresses(self) -> set[int]:
        """The addresses of the storages of all buffers."""
        return {*self._owners, *self._kept}

    def place(self, x: Tensor) -> tuple[int, int, torch.Size, tuple[int, ...], int, torch.dtype, bool, bool] | None:
        """The fields of the `SavedView` of a tensor, after `tape`; None if it is no view of a buffer to be gathered."""
        owner = self._owners.get(address(x)) if x.layout is torch.strided else None
        if owner is None:
            return None
        _, unit, kind, first_byte = owner
        offset = int(x.storage_offset()) - first_byte // x.itemsize
        return unit, kind, x.size(), x.stride(), offset, x.dtype, x.is_conj(), x.is_neg()
