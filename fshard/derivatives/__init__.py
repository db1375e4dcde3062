"""Derivatives beyond a backward: functions that run again, Hessian-vector products, gradients from a user's program."""
