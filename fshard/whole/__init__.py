"""Whole leaves: moved to their owners, copied to all ranks; updates and states of a user, which know no ranks."""
