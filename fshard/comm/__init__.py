"""Ranks of a mesh, and their messages."""
