"""Updates of parameters, as pairs of pure functions over trees: what a step runs, and the elementwise optimizers."""
