"""Optimizer state in and out: whole, by leaf path, on all ranks or on one; torch's formats; partitions; new leaves."""

from ..state.optimizer import extend, gather_state, load_state_dict, shard_state, state_dict, torch_names

__all__ = ["extend", "gather_state", "load_state_dict", "shard_state", "state_dict", "torch_names"]
