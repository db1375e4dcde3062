"""Runs watched: values observed and recorded, two runs compared, a step guarded while training."""
