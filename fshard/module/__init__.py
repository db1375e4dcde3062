"""Any torch.nn.Module as a function of its parameters and buffers."""

from .functionalize import ModuleFunction, functionalize

__all__ = ["ModuleFunction", "functionalize"]
