"""Differentiable collectives over a mesh axis, gathers started early, the tally, and data of unequal length."""

from .comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, shift, vary
from .comm.ranks import Call, Tally, tally
from .sharding.access import prefetch
from .train.accumulate import join_batches

__all__ = [
    "Call",
    "Tally",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "join_batches",
    "prefetch",
    "reduce_scatter",
    "shift",
    "tally",
    "vary",
]
