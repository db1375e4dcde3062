"""Sharded trees: their shards, names and values, and how a loss reads them."""
