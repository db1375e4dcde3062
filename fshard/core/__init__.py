"""Trees, tensors and tracing: no ranks."""
