"""Encodings of a flat tensor for sending: casts, 8 bits, or your own.

Note [Wires]
    1. A `Wire` encodes a flat floating tensor as another flat tensor, and decodes the result.
    2. `sizes`: the number of elements of each leaf in the tensor, in order, padding after the leaf included. All ranks
       must send equally many bytes, so the encoded length must depend only on the sum and the number of `sizes`.
    3. `make_plan(param_wire=...)`: every shard is encoded, all-gathered, and decoded into the compute dtype.
    4. `make_plan(grad_wire=...)`: each rank encodes its summand of a gradient; the rank that adds the summands decodes
       all of them, and adds in float32, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .comm.reduction import Sizes, Wire
from .core import storage
from .core.arguments import check_whole, wrong

__all__ = ["Cast", "Float8", "Identity", "Int8", "Wire", "pack", "unpack"]


def pack(*tensors: Tensor) -> Tensor:
    """Pack flat tensors of any dtypes into a tensor of bytes, each at a multiple of 16 bytes. Dual: `unpack`.

    >>> unpack(pack(torch.ones(1), torch.tensor([2, 3])), (torch.float32, 1), (torch.int64, 2))
    [tensor([1.]), tensor([2, 3])]
    """
    return storage.pack_bytes(tensors)


def unpack(data: Tensor, *held: tuple[torch.dtype, int]) -> list[Tensor]:
    """Return the tensors packed in `data`. `held`: dtype and number of elements of each tensor. Dual: `pack`.

    >>> unpack(pack(torch.tensor([True])), (torch.bool, 1))
    [tensor([True])]
    """
    return storage.unpack_bytes(data, held)


@dataclass(frozen=True)
class Identity:
    """Send shards in their stored dtype, and cast them on arrival.

    >>> Identity().encode(torch.ones(1), [1])
    tensor([1.])
    """

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Return the tensor unchanged."""
        return x

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return the data unchanged."""
        return data


@dataclass(frozen=True)
class Cast:
    """Send tensors in another dtype: bfloat16 has half the bytes of float32.

    >>> Cast(torch.bfloat16).encode(torch.ones(1), [1])
    tensor([1.], dtype=torch.bfloat16)
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"Cast: {wrong('dtype', self.dtype, 'a floating dtype of torch')}")

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Cast to `dtype`, rounding to the nearest."""
        return x.to(self.dtype)

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Return the data in the sent dtype."""
        return data


@dataclass(frozen=True)
class Int8:
    """Send 8 bits for each element, and a float32 scale for each block: s = max |x| / 127, code = round(x / s).

    `block`: elements of a block. If an element is not finite, its block arrives as NaN.

    >>> wire = Int8(block=2)
    >>> wire.decode(wire.encode(torch.tensor([127.0, -1.0, 0.0]), [3]), [3])
    tensor([127.,  -1.,   0.])

    Source: the quantised gather of Wang et al., ZeRO++ (2023).
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_whole("Int8: block", self.block, what="a number of elements")

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
    """Send a float8 for each element, and a float32 scale for each leaf: s = max |x| / largest float8.

    `dtype`: one of torch's float8 dtypes. If an element is not finite, its leaf arrives as NaN.

    >>> wire = Float8()
    >>> wire.decode(wire.encode(torch.tensor([1.0, -2.0, 1e6]), [2, 1]), [2, 1])
    tensor([ 1.0000e+00, -2.0000e+00,  1.0000e+06])

    Source: Micikevicius et al., FP8 formats for deep learning (2022).
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point or self.dtype.itemsize > 1:
            raise TypeError(f"Float8: {wrong('dtype', self.dtype, 'a floating dtype of 8 bits')}")

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Pack the scales, then the codes."""
        leaves = x.float().split(list(sizes))
        zero = x.new_zeros((), dtype=torch.float32)
        # (leaves,). `leaf.abs()` would take the memory of a leaf again
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
