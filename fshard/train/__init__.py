"""The training step, and its arguments."""
