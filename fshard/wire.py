"""How a flat tensor is encoded to be sent: casts, 8 bits, the largest elements, or an encoding of your own."""

from .comm.wire import Cast, Float8, Identity, Int8, LowRank, TopK, Wire, pack, unpack

__all__ = ["Cast", "Float8", "Identity", "Int8", "LowRank", "TopK", "Wire", "pack", "unpack"]
