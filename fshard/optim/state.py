"""Functions of an optimizer's state: gather and shard it, save and load it in torch's format, extend it by leaves."""

from ..state.optimizer import extend, gather_state, load_state_dict, shard_state, state_dict, torch_names

__all__ = ["extend", "gather_state", "load_state_dict", "shard_state", "state_dict", "torch_names"]
