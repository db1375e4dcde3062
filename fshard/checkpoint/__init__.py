"""Parameters to files and back, in the formats of others: safetensors, as Hugging Face writes them."""

from .params import load_safetensors, save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
