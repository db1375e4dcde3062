"""How gradients are summed across ranks, and parameters gathered: protocols for your own, and what they are made of."""

from .comm.primitives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, scatter
from .comm.ranks import Pending, Ranks
from .comm.reduction import Gather, Reduction, Sums
from .grad.unreduced import unreduced
from .layout.pieces import Unreduced

__all__ = [
    "Gather",
    "Pending",
    "Ranks",
    "Reduction",
    "Sums",
    "Unreduced",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "scatter",
    "unreduced",
]
