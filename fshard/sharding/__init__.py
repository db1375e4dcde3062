"""Sharded trees: their shards and values, and how a loss reads them."""
