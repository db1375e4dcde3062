"""What travels instead of a shard or of gradients: encoded by who sends it, decoded by who gets it.

Note [Wires]
    A `Wire` makes of a flat floating tensor another flat tensor, whose length is decided by the sum and the number of
    `sizes` alone (all ranks send equally much), and of that one the elements again. `make_plan(param_wire=...)` has
    every shard encoded, the codes gathered, and decoded into what is computed with; `grad_wire` has every rank's part
    of a gradient encoded for the rank that sums it, which decodes what all ranks sent and adds it up in float32, in
    rank order. `sizes` are the elements of each leaf in the tensor, in order, padding among them: a wire may treat each
    leaf by itself. A wire with `feedback` loses much: a step keeps what was lost of gradients, in its state, and adds
    it to the next ones.
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
    """How a flat tensor travels. Make it a frozen dataclass: plans are compared by its fields, and between ranks."""

    feedback: bool

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Flat (n,) -> flat, of a length that n, the sum of `sizes`, and their number decide."""

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """The inverse: flat (n,), floating."""


def pack(*tensors: Tensor) -> Tensor:
    """Flat tensors of any dtypes as one of bytes, each from a multiple of 16 on. Dual: `unpack`.

    >>> unpack(pack(torch.ones(1), torch.tensor([2, 3])), (torch.float32, 1), (torch.int64, 2))
    [tensor([1.]), tensor([2, 3])]
    """
    return bits.pack(tensors)


def unpack(data: Tensor, *held: tuple[torch.dtype, int]) -> list[Tensor]:
    """The tensors that were packed, told by dtype and number of elements. Dual: `pack`.

    >>> unpack(pack(torch.tensor([True])), (torch.bool, 1))
    [tensor([True])]
    """
    return bits.unpack(data, held)


@dataclass(frozen=True)
class Identity:
    """As it is stored: shards travel in full, and are cast on arrival.

    >>> Identity().encode(torch.ones(1), [1])
    tensor([1.])
    """

    feedback: bool = False

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Itself."""
        return x

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Itself."""
        return data


@dataclass(frozen=True)
class Cast:
    """In another dtype: with bfloat16 half the bytes of float32.

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
        """Rounded to the nearest."""
        return x.to(self.dtype)

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """As it arrived."""
        return data


@dataclass(frozen=True)
class Int8:
    """8 bits an element, and a float32 scale for every block: s = max |x| / 127, code = round(x / s).

    A block that is not finite arrives as NaN.

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
        """Scales, then codes."""
        blocks = F.pad(x.float(), (0, -x.numel() % self.block)).view(-1, self.block)
        scales = blocks.abs().amax(1, keepdim=True) / 127 if x.numel() else blocks[:, :1]
        codes = (blocks / torch.where(scales > 0, scales, 1)).round().nan_to_num(0).to(torch.int8)
        return pack(torch.where(scales.isfinite(), scales, torch.nan).view(-1), codes.view(-1)[: x.numel()])

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Codes times scales."""
        numel = sum(sizes)
        scales, codes = unpack(data, (torch.float32, -(-numel // self.block)), (torch.int8, numel))
        blocks = F.pad(codes.float(), (0, -numel % self.block)).view(-1, self.block)
        return (blocks * scales.unsqueeze(1)).view(-1)[:numel]


@dataclass(frozen=True)
class Float8:
    """A float of 8 bits an element, and a float32 scale for every leaf: s = max |x| / largest float8.

    A leaf that is not finite arrives as NaN.

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
        """Scales, then codes."""
        leaves = x.float().split(list(sizes))
        zero = x.new_zeros((), dtype=torch.float32)
        top = torch.stack(
            [torch.maximum(leaf.amin().abs(), leaf.amax().abs()) if len(leaf) else zero for leaf in leaves]
        )
        scales = torch.where(top.isfinite(), top / torch.finfo(self.dtype).max, torch.nan)
        parts = [leaf / torch.where(s == 0, 1, s) for leaf, s in zip(leaves, scales.unbind(), strict=True)]
        return pack(scales, torch.cat(parts).to(self.dtype))

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Codes times scales."""
        scales, codes = unpack(data, (torch.float32, len(sizes)), (self.dtype, sum(sizes)))
        leaves = codes.float().split(list(sizes))
        return torch.cat([leaf * s for leaf, s in zip(leaves, scales.unbind(), strict=True)])


@dataclass(frozen=True)
class TopK:
    """The largest elements alone, a `share` of all: 8 bytes for each. Of gradients the step keeps the others.

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
        """Places, then values."""
        places = x.abs().topk(self._num_kept(sizes)).indices
        return pack(places.int(), x[places].float())

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Zero but for what was sent."""
        num = self._num_kept(sizes)
        places, values = unpack(data, (torch.int32, num), (torch.float32, num))
        return values.new_zeros(sum(sizes)).index_copy(0, places.long(), values)


@dataclass(frozen=True)
class LowRank:
    """A nearly square matrix M of `rank`: M is near P Qᵀ, with P orthonormal and Q = Mᵀ P; both travel, in float32.

    Two power iterations from a fixed start. What takes no more bytes than P and Q travels in full, what is not finite
    arrives as NaN. The matrix is of all that one rank sends another: of each leaf by itself, ranks would send unequally
    much. Of gradients the step keeps the rest.

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
        """Rows, columns and rank of what is sent, or None for what travels in full."""
        n = sum(sizes)
        rows = math.isqrt(max(n - 1, 0)) + 1
        cols = -(-n // rows)
        rank = min(self.rank, cols)
        size = bits.packed_size([(torch.float32, side * rank) for side in (rows, cols)])
        return (rows, cols, rank) if size < torch.float32.itemsize * n else None

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """P, then Q."""
        x, shape = x.float(), self._shape(sizes)
        if shape is None:
            return x
        (rows, cols, rank), finite = shape, x.isfinite().all()
        m = F.pad(torch.where(finite, x, 0), (0, rows * cols - x.numel())).view(rows, cols)
        q = torch.arange(1, cols * rank + 1, dtype=x.dtype, device=x.device).cos().view(cols, rank)
        for _ in range(2):
            p = torch.linalg.qr(m @ q).Q
            q = m.T @ p
        return pack(p.reshape(-1), torch.where(finite, q, torch.nan).reshape(-1))

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """P Qᵀ."""
        shape = self._shape(sizes)
        if shape is None:
            return data
        rows, cols, rank = shape
        held = ((torch.float32, n * rank) for n in (rows, cols))
        p, q = (part.view(-1, rank) for part in unpack(data, *held))
        return (p @ q.T).reshape(-1)[: sum(sizes)]
