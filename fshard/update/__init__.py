"""Updates of parameters, as pairs of pure functions over trees, and the elementwise optimizers."""
