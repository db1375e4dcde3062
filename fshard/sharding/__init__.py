"""Sharded trees: their rows, names and values, and how a loss reads them."""
