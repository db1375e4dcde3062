"""Programs of benchmarks/proof.py: each has `start`, `step` and `batches`, and a loop in plain torch."""
