"""What tests share: models, worlds of ranks, faults, and functions that processes of their own import."""
