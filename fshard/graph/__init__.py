"""A graph of operators: how its values flow, what it keeps in memory, and the passes that rearrange it."""
