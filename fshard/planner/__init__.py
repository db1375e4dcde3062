"""Estimates before a step runs: memory by purpose, traffic, and room on a device."""
