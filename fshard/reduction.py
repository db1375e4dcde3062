"""Protocols for your own sums of gradients and gathers of parameters, and the collectives to build them from.

`start_all_gather(x, ranks)` and the like start a collective along one axis, without a derivative, and return a
`Pending`; `Pending.wait()` returns the result. `fshard.all_gather(x, mesh, axis)` and the like return the result
themselves, and have a derivative.
"""

from .comm.primitives import all_gather as start_all_gather
from .comm.primitives import all_reduce as start_all_reduce
from .comm.primitives import all_to_all as start_all_to_all
from .comm.primitives import broadcast as start_broadcast
from .comm.primitives import reduce_scatter as start_reduce_scatter
from .comm.primitives import scatter as start_scatter
from .comm.ranks import Pending, Ranks
from .comm.reduction import Gather, Reduction, Sums, TreeSums
from .derivatives.unreduced import unreduced
from .layout.pieces import Unreduced

__all__ = [
    "Gather",
    "Pending",
    "Ranks",
    "Reduction",
    "Sums",
    "TreeSums",
    "Unreduced",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_broadcast",
    "start_reduce_scatter",
    "start_scatter",
    "unreduced",
]
