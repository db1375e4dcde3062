"""How a flat tensor is encoded to be sent: casts, 8 bits, or an encoding of your own."""

from .comm.wire import Cast, Float8, Identity, Int8, Wire, pack, unpack

__all__ = ["Cast", "Float8", "Identity", "Int8", "Wire", "pack", "unpack"]
