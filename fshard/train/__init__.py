"""The training step, and what it takes."""
