"""Differentiable collectives over the axes of a mesh."""

from .comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, vary

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "vary"]
