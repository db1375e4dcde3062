"""A graph of operators: its values, its memory, and passes over it."""
