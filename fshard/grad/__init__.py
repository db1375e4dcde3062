"""One forward and backward over sharded parameters: gathers on access, gradients summed unit by unit."""
