"""Plans, sharded trees, and one forward and backward over them."""
