"""Save and restore: checkpoints of a run's state, and parameters in Hugging Face's safetensors files."""

from ..files.directory import delete
from ..files.index import CheckpointError
from .params import load_safetensors, save_safetensors
from .restoring import latest, restore, steps
from .saving import Saving, save

__all__ = [
    "CheckpointError",
    "Saving",
    "delete",
    "latest",
    "load_safetensors",
    "restore",
    "save",
    "save_safetensors",
    "steps",
]
