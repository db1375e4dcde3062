"""State dicts of parameters and of optimizers, whole or as DTensors, and new parameters made by a function."""
