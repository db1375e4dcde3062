"""Ranks of a mesh, and what they send."""

from . import operators  # noqa: F401  # graphs call what it defines
