"""Modules split over the ranks of a mesh axis, by styles of their submodules."""
