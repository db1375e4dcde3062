"""The memory of tensors: their storage, the bytes of it that they use, and how often they were written to."""

from __future__ import annotations

import torch
from torch import Tensor

from . import tree
from .tree import Tree


def address(x: Tensor) -> int:
    """Return the identity of a tensor's storage, which meta and fake tensors have as well.

    No other storage gets it while this one, or a weak reference to it, is alive, as might happen with `data_ptr`.
    """
    return x.untyped_storage()._cdata  # private: it has no public name (test_tape.py notices when it goes)


def addresses(x: Tree) -> set[int]:
    """Return the addresses of the storages of all tensors of a tree that have elements in one."""
    # a sparse tensor has no storage to ask for, and a tensor without elements reads nothing
    rows = (leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    return {address(row) for row in rows if row.numel()}


def writes(x: Tensor) -> int | None:
    """Return how often a tensor was written to in place; None for one of inference mode, which does not count it."""
    return None if x.is_inference() else x._version  # private: it has no public name (test_tape.py notices)


def byte_range(x: Tensor) -> range:
    """Return the bytes of its storage from a tensor's first element to its last."""
    begin = int(x.storage_offset()) * x.itemsize
    steps = zip(x.shape, x.stride(), strict=True)
    return range(begin, begin + (1 + sum((size - 1) * stride for size, stride in steps)) * x.itemsize * bool(x.numel()))


def ranges_meet(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors lie in one storage, and their ranges of bytes have a common one."""
    first, second = byte_range(x), byte_range(y)
    return address(x) == address(y) and max(first.start, second.start) < min(first.stop, second.stop)


def share_elements(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have a byte in common. The ranges of columns of a matrix meet, and they have none."""
    if not ranges_meet(x, y):
        return False
    first, second = byte_range(x), byte_range(y)
    start = min(first.start, second.start)
    used = torch.zeros(max(first.stop, second.stop) - start, dtype=torch.bool, device="cpu")  # one for each byte

    def bytes_of(z: Tensor, begin: int) -> Tensor:  # the view of `used` with the tensor's strides: (*shape, itemsize)
        sizes, strides = (*z.shape, z.itemsize), (*(stride * z.itemsize for stride in z.stride()), 1)
        return used.as_strided(sizes, strides, begin - start)

    bytes_of(x, first.start).fill_(True)
    return bool(bytes_of(y, second.start).any())
