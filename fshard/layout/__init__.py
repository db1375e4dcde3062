"""Layouts: the ranks and tensors of each leaf's elements."""
