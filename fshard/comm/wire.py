"""Wires: how shards and gradients are encoded before they are sent, and decoded when they arrive.

Note [Wires]
    A `Wire` encodes a flat floating tensor as another flat tensor, and decodes that. The length of the encoded tensor
    depends only on the sum and the number of `sizes`, because all ranks must send equally much. `sizes` has the number
    of elements of each leaf in the tensor, in order, the padding after a leaf included: a wire may treat each leaf by
    itself. With `make_plan(param_wire=...)` every shard is encoded, all-gathered, and decoded into the compute dtype.
    With `grad_wire` each rank's part of a gradient is encoded for the rank that sums it, which decodes the parts of all
    ranks and adds them in float32, in rank order. A wire with `feedback` is lossy: a step keeps in its state what was
    not sent of gradients, and adds it to the next gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import bits
from ..core.arguments import check_flags, check_whole, is_number, wrong

Sizes = Sequence[int]


class Wire(Protocol):
    """How a flat tensor is encoded. Make yours a frozen dataclass: ranks compare plans by the fields of their wires."""

    feedback: bool

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Encode (n,), n the sum of `sizes`, as a flat tensor; only n and the number of `sizes` decide its length."""

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Decode what `encode` returned: (n,), floating."""


def pack(*tensors: Tensor) -> Tensor:
    """Pack flat tensors of any dtypes into one of bytes, each from a multiple of 16 bytes on. Dual: `unpack`.

    >>> unpack(pack(torch.ones(1), torch.tensor([2, 3])), (torch.float32, 1), (torch.int64, 2))
    [tensor([1.]), tensor([2, 3])]
    """
    return bits.pack(tensors)


def unpack(data: Tensor, *held: tuple[torch.dtype, int]) -> list[Tensor]:
    """Return the packed tensors, given dtype and number of elements of each. Dual: `pack`.

    >>> unpack(pack(torch.tensor([True])), (torch.bool, 1))
    [tensor([True])]
    """
    return bits.unpack(data, held)


@dataclass(frozen=True)
class Identity:
    """Send shards in the dtype they are stored in; they are cast on arrival.

    >>> Identity().encode(torch.ones(1), [1])
    tensor([1.])
    """

    feedback: bool = False

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Return the tensor unchanged."""
        return x

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return the data unchanged."""
        return data


@dataclass(frozen=True)
class Cast:
    """Send another dtype: with bfloat16 half the bytes of float32.

    >>> Cast(torch.bfloat16).encode(torch.ones(1), [1])
    tensor([1.], dtype=torch.bfloat16)
    """

    dtype: torch.dtype
    feedback: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"Cast: {wrong('dtype', self.dtype, 'a floating dtype of torch')}")
        check_flags(**{"Cast: feedback": self.feedback})

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Cast to `dtype`, rounding to the nearest."""
        return x.to(self.dtype)

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return the data in the dtype it was sent in."""
        return data


@dataclass(frozen=True)
class Int8:
    """Send 8 bits an element, and a float32 scale for every block: s = max |x| / 127, code = round(x / s).

    A block with an element that is not finite arrives as NaN.

    >>> wire = Int8(block=2)
    >>> wire.decode(wire.encode(torch.tensor([127.0, -1.0, 0.0]), [3]), [3])
    tensor([127.,  -1.,   0.])

    Source: the quantised gather of Wang et al., ZeRO++ (2023).
    """

    block: int = 256
    feedback: bool = False

    def __post_init__(self) -> None:
        check_whole("Int8: block", self.block, what="a number of elements")
        check_flags(**{"Int8: feedback": self.feedback})

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Pack the scales, then the codes."""
        blocks = F.pad(x.float(), (0, -x.numel() % self.block)).view(-1, self.block)  # (blocks, block)
        scales = blocks.abs().amax(1, keepdim=True) / 127 if x.numel() else blocks[:, :1]  # (blocks, 1)
        codes = (blocks / torch.where(scales > 0, scales, 1)).round().nan_to_num(0).clamp(-127, 127).to(torch.int8)
        return pack(torch.where(scales.isfinite(), scales, torch.nan).view(-1), codes.view(-1)[: x.numel()])

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return codes times scales, float32."""
        numel = sum(sizes)
        scales, codes = unpack(data, (torch.float32, -(-numel // self.block)), (torch.int8, numel))
        blocks = F.pad(codes.float(), (0, -numel % self.block)).view(-1, self.block)  # (blocks, block)
        return (blocks * scales.unsqueeze(1)).view(-1)[:numel]


@dataclass(frozen=True)
class Float8:
    """Send a float8 for each element, and a float32 scale for every leaf: s = max |x| / largest float8.

    A leaf with an element that is not finite arrives as NaN.

    >>> wire = Float8()
    >>> wire.decode(wire.encode(torch.tensor([1.0, -2.0, 1e6]), [2, 1]), [2, 1])
    tensor([ 1.0000e+00, -2.0000e+00,  1.0000e+06])

    Source: Micikevicius et al., FP8 formats for deep learning (2022).
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    feedback: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point or self.dtype.itemsize > 1:
            raise TypeError(f"Float8: {wrong('dtype', self.dtype, 'a floating dtype of 8 bits')}")
        check_flags(**{"Float8: feedback": self.feedback})

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Pack the scales, then the codes."""
        leaves = x.float().split(list(sizes))
        zero = x.new_zeros((), dtype=torch.float32)
        # (leaves,); by amin and amax, because `abs` of a leaf would take as much memory again
        top = torch.stack(
            [torch.maximum(leaf.amin().abs(), leaf.amax().abs()) if len(leaf) else zero for leaf in leaves]
        )
        scales = torch.where(top.isfinite(), top / torch.finfo(self.dtype).max, torch.nan)
        parts = [leaf / torch.where(s == 0, 1, s) for leaf, s in zip(leaves, scales.unbind(), strict=True)]
        return pack(scales, torch.cat(parts).to(self.dtype))

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return codes times scales, float32."""
        scales, codes = unpack(data, (torch.float32, len(sizes)), (self.dtype, sum(sizes)))
        leaves = codes.float().split(list(sizes))
        return torch.cat([leaf * s for leaf, s in zip(leaves, scales.unbind(), strict=True)])


@dataclass(frozen=True)
class TopK:
    """Send only the elements of largest magnitude, a `share` of all, 8 bytes for each; a step keeps the others.

    >>> wire = TopK(0.5)
    >>> wire.decode(wire.encode(torch.tensor([1.0, -3.0]), [2]), [2])
    tensor([ 0., -3.])

    Source: Lin et al., Deep gradient compression (2018); Karimireddy et al., Error feedback fixes SignSGD (2019).
    """

    share: float = 0.01
    feedback: bool = True

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ValueError(f"TopK: {wrong('share', self.share, 'a number above 0, at most 1')}")
        check_flags(**{"TopK: feedback": self.feedback})

    def _num_kept(self, sizes: Sizes) -> int:
        return min(sum(sizes), max(1, round(self.share * sum(sizes))))

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Pack the indices (int32), then the values (float32)."""
        indices = x.abs().topk(self._num_kept(sizes)).indices  # (kept,), int64
        return pack(indices.int(), x[indices].float())

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return the values that were sent at their indices, zeros elsewhere."""
        num = self._num_kept(sizes)
        indices, values = unpack(data, (torch.int32, num), (torch.float32, num))
        return values.new_zeros(sum(sizes)).index_copy(0, indices.long(), values)


@dataclass(frozen=True)
class LowRank:
    """Send a low-rank approximation P Qᵀ of the elements as a nearly square matrix M: P orthonormal, Q = Mᵀ P, float32.

    Two power iterations from a fixed start. A tensor that takes no more bytes than P and Q is sent in full; one that is
    not finite arrives as NaN. M has all elements that one rank sends another: with one matrix for each leaf, ranks
    would send unequally much. A step keeps the rest of gradients.

    >>> wire = LowRank(rank=1)
    >>> wire.decode(wire.encode(torch.full((16,), 3.0), [16]), [16])[:2].round(decimals=3)
    tensor([3., 3.])

    Source: Vogels et al., PowerSGD: practical low-rank gradient compression (2019).
    """

    rank: int = 4
    feedback: bool = True

    def __post_init__(self) -> None:
        check_whole("LowRank: rank", self.rank, what="a number of columns")
        check_flags(**{"LowRank: feedback": self.feedback})

    def _shape(self, sizes: Sizes) -> tuple[int, int, int] | None:
        """Rows and columns of M and the rank, or None if the tensor is sent in full."""
        n = sum(sizes)
        rows = math.isqrt(max(n - 1, 0)) + 1
        cols = -(-n // rows)
        rank = min(self.rank, cols)
        size = bits.packed_size([(torch.float32, side * rank) for side in (rows, cols)])
        return (rows, cols, rank) if size < torch.float32.itemsize * n else None

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Pack P, then Q."""
        x, shape = x.float(), self._shape(sizes)
        if shape is None:
            return x
        (rows, cols, rank), finite = shape, x.isfinite().all()
        m = F.pad(torch.where(finite, x, 0), (0, rows * cols - x.numel())).view(rows, cols)
        q = torch.arange(1, cols * rank + 1, dtype=x.dtype, device=x.device).cos().view(cols, rank)
        for _ in range(2):
            p = torch.linalg.qr(m @ q).Q  # (rows, rank), orthonormal columns
            q = m.T @ p  # (cols, rank)
        return pack(p.reshape(-1), torch.where(finite, q, torch.nan).reshape(-1))

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return P Qᵀ, flat."""
        shape = self._shape(sizes)
        if shape is None:
            return data
        rows, cols, rank = shape
        factors = ((torch.float32, n * rank) for n in (rows, cols))
        p, q = (part.view(-1, rank) for part in unpack(data, *factors))  # (rows, rank), (cols, rank)
        return (p @ q.T).reshape(-1)[: sum(sizes)]
