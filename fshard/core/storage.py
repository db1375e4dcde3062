"""Memory of tensors: storages, byte ranges, packed and flat tensors, values given away."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeGuard, TypeVar

import torch
from torch import Tensor

from . import tree
from .tracing import define, is_tracing
from .tree import Tree

Static = TypeVar("Static", bound=Hashable)
CACHED = 1 << 15  # elements that fit a CPU's cache with their moments
_LARGE_BLOCK = 1 << 24  # elements that fill an accelerator with work
MOST = 1 << 30  # limit of elements in a foreach kernel or reduction: some kernels index with int32


def address(x: Tensor) -> int:
    """Return a storage's identity, unique while the storage, or a weak reference to it, is alive."""
    return x.untyped_storage()._cdata  # private: no public name (test_tape.py)


def addresses(x: Tree) -> set[int]:
    return {*map(address, _with_storage(x))}


def _with_storage(x: Tree) -> Iterator[Tensor]:
    # sparse tensors have no storage, empty tensors no elements
    rows = (leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    return (row for row in rows if row.numel())


def address_range(storage: torch.UntypedStorage) -> range:
    """Return a storage's addresses; without memory (meta, fake), its identity as a range."""
    try:
        start = 0 if storage.device.type == "meta" else storage.data_ptr()
    except RuntimeError:  # earlier than 2.15, torch returns 0
        start = 0
    return range(start, start + storage.nbytes()) if start else range(storage._cdata, storage._cdata + 1)


class MemoryRanges:
    """Address ranges of storages: storages may share memory (torch.from_numpy, DLPack)."""

    def __init__(self, held: Tree):
        # sorted, disjoint
        self._starts, self._ends = list[int](), list[int]()
        for row in _with_storage(held):
            self.add(address_range(row.untyped_storage()))

    def add(self, place: range) -> None:
        met = slice(bisect_right(self._ends, place.start), bisect_left(self._starts, place.stop))
        if place:
            self._starts[met] = [min([place.start, *self._starts[met]])]
            self._ends[met] = [max([place.stop, *self._ends[met]])]

    def has(self, x: Tree) -> bool:
        return any(map(self._meets, (address_range(row.untyped_storage()) for row in _with_storage(x))))

    def _meets(self, place: range) -> bool:
        first = bisect_right(self._ends, place.start)
        return first < len(self._starts) and self._starts[first] < place.stop


def copied_aside(x: Tree, written: Tree) -> Tree:
    """Copy the tensors in `x` that share memory with `written`, which will change."""
    memory = MemoryRanges(written)
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and memory.has(leaf) else leaf, x)


def writes(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version  # private: no public name (test_tape.py)


def byte_range(x: Tensor) -> range:
    begin = int(x.storage_offset()) * x.itemsize
    steps = zip(x.shape, x.stride(), strict=True)
    return range(begin, begin + (1 + sum((size - 1) * stride for size, stride in steps)) * x.itemsize * bool(x.numel()))


def ranges_meet(x: Tensor, y: Tensor) -> bool:
    first, second = byte_range(x), byte_range(y)
    return address(x) == address(y) and max(first.start, second.start) < min(first.stop, second.stop)


def share_elements(x: Tensor, y: Tensor) -> bool:
    return ranges_meet(x, y) and runs_meet(x, y)


def runs_meet(x: Tensor, y: Tensor) -> bool:
    """True if tensors of one storage share a byte."""
    ends = [0, 0]  # of each tensor's runs so far; runs of one tensor may overlap
    for start, stop, number in sorted((*run, number) for number, z in enumerate((x, y)) for run in _byte_runs(z)):
        if start < ends[1 - number]:
            return True
        ends[number] = max(ends[number], stop)
    return False


def _byte_runs(x: Tensor) -> list[tuple[int, int]]:
    starts, length = [byte_range(x).start], x.itemsize
    for stride, size in sorted((stride * x.itemsize, size) for size, stride in zip(x.shape, x.stride(), strict=True)):
        if stride == length and len(starts) == 1:
            length *= size
        elif stride and size > 1:
            starts = [start + i * stride for start in starts for i in range(size)]
    return [(start, start + length) for start in starts]


STEP = 16  # bytes: kernels load 16 at once
Held = Sequence[tuple[torch.dtype, int]]  # (dtype, number of elements) of packed tensors


def pack_bytes(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Pack tensors into a flat uint8 tensor, with zeros between them. Dual: `unpack_bytes`.

    >>> unpack_bytes(pack_bytes([torch.ones(1), torch.tensor([2, 3])]), [(torch.float32, 1), (torch.int64, 2)])
    [tensor([1.]), tensor([2, 3])]
    """
    parts = list[Tensor]()
    for data in map(as_bytes, tensors):
        gap = -data.numel() % STEP
        parts += [data, data.new_zeros(gap)] if gap else [data]
    return torch.cat(parts, out=out)


def aligned(end: int) -> int:
    return -(-end // STEP) * STEP


def packed_size(held: Held) -> int:
    return sum(aligned(dtype.itemsize * numel) for dtype, numel in held)


def unpack_bytes(data: Tensor, held: Held) -> list[Tensor]:
    tensors = list[Tensor]()
    for dtype, numel in held:
        tensors.append(from_bytes(data[: dtype.itemsize * numel], dtype))  # (numel,)
        data = data[packed_size([(dtype, numel)]) :]
    return tensors


def bitcast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Inductor fuses bit casts wrongly on CPUs (torch 2.13, test_compile.py)
    return torch.ops.fshard.bitcast(x, dtype) if is_tracing() and x.dtype != dtype else x.view(dtype)


def as_bytes(x: Tensor) -> Tensor:
    flat = x.detach().reshape(-1)
    if flat.numel() < 2 and flat.stride() != (1,):  # torch calls any stride contiguous; `view` needs 1
        flat = flat.as_strided((flat.numel(),), (1,))
    return bitcast(torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat, torch.uint8)


def is_inexact(x: object) -> TypeGuard[Tensor]:
    """True if `x` can have a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def value_bytes(x: Tensor) -> Tensor:
    """Return the elements' bytes in order: flat, uint8."""
    return as_bytes(x.detach().resolve_conj().resolve_neg().contiguous())


def words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor's 8-byte words, int64 (n,), and the remaining bytes, uint8."""
    data = as_bytes(x)
    data = data.clone() if data.storage_offset() % 8 else data  # words must be aligned
    end = len(data) // 8 * 8
    return data[:end].view(torch.int64), data[end:]


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(bitcast(data, dtype.to_real()).view(-1, 2))
    return bitcast(data, dtype)


define(
    "bitcast(Tensor x, ScalarType dtype) -> Tensor",
    # copies: `view` needs a last stride of 1, and a compiler may give one element another
    lambda x, dtype: x.new_empty(x.numel()).copy_(x).view(dtype),
    lambda x, dtype: x.new_empty(x.nbytes // dtype.itemsize, dtype=dtype),
)


class DonatedError(RuntimeError):
    """A value was used after a call had taken it over."""


@dataclass
class Life:
    """Record that a value was given away, shared by all values with the same tensors."""

    given_away: bool = False

    def check(self, name: str, touched: str) -> None:
        """Raise DonatedError if the value was given away; `touched`: the attribute read."""
        if self.given_away:
            raise DonatedError(
                f"this {name} was given away: a step, or another call, with donate=True wrote to its tensors in place "
                f"(touched: .{touched}). Use the state which that call returned, or donate=False."
            )

    def __getstate__(self) -> dict[str, object]:
        self.check("value", "__getstate__")  # a copy or file would get the values written later
        return vars(self)


@dataclass(frozen=True, eq=False)
class Source(Generic[Static]):
    """Metadata of a node with `give_away`: `static` is compared, `of` is a weak reference to the node."""

    static: Static
    of: weakref.ref[Tree]

    # without `of`: two nodes with equal `static` have equal structures
    def __eq__(self, other: object) -> bool:
        return self.static == (other.static if isinstance(other, Source) else other)

    def __hash__(self) -> int:
        return hash(self.static)

    def __repr__(self) -> str:
        return repr(self.static)


def with_tensors(leaves: Sequence[object], tensors: Iterable[Tensor]) -> list[object]:
    """Replace the tensors among leaves, in order.

    >>> with_tensors([1, torch.ones(1), "a"], [torch.zeros(1)])
    [1, tensor([0.]), 'a']
    """
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def block_size(x: Tensor, cached: int) -> int:
    return cached if x.device.type == "cpu" else max(cached, _LARGE_BLOCK)


def _gaps(length: int, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    end = 0
    for start, stop in (*spans, (length, length)):
        if start > end:
            yield end, start
        end = stop


def clear_outside_(row: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    for start, stop in _gaps(len(row), spans):
        row[start:stop].zero_()
    return row


def cleared_outside(row: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    """Return a flat tensor with zeros outside sorted intervals: a copy, or `row` if they cover it.

    >>> cleared_outside(torch.tensor([1.0, torch.nan, 3.0]), [(0, 1), (2, 3)])
    tensor([1., 0., 3.])
    """
    gaps = list(_gaps(len(row), spans))
    if not gaps:
        return row
    # for the longest gap; a product with 0 would keep NaN
    zeros = row.new_zeros(max(stop - start for start, stop in gaps))
    begins = [0, *(stop for _, stop in gaps)]  # of kept intervals
    parts = [
        x for begin, (start, stop) in zip(begins, gaps, strict=False) for x in (row[begin:start], zeros[: stop - start])
    ]
    return torch.cat([*parts, row[begins[-1] :]])
