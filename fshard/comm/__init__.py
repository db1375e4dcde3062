"""Ranks of a mesh, and what they send."""
