"""A function as one graph: traced, rearranged, compiled, inspected."""
