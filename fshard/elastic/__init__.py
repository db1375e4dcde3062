"""Elastic runs: a state in the memory of several ranks, and any other ranks' state made from it."""

from .keeping import Kept, keep
from .moving import LostError, last_whole, move, replan

__all__ = ["Kept", "LostError", "keep", "last_whole", "move", "replan"]
