"""Derivatives beyond a backward: functions that run again, Hessian-vector products, gradients that a program made."""
