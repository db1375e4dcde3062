"""Whole leaves: moved to their owners, copied to all ranks; a user's updates and states, without knowledge of ranks."""
