"""Ranks on one host: direct links, shared memory, and the comparison of calls."""
