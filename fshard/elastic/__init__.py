"""Elastic runs: a state in the memory of several ranks, and any other ranks' state made from it."""

from .keeping import Kept, keep
from .meeting import Meeting
from .moving import LostError, last_whole, move, replan
from .rounds import Member, run

__all__ = ["Kept", "LostError", "Meeting", "Member", "keep", "last_whole", "move", "replan", "run"]
