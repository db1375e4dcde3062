"""Trees of tensors, in the order of use."""

from .core.tree import detached, flatten, leaves, map, node, paths, register, register_fields, static, unflatten
from .layout.norms import dot
from .train.loss_scale import nonfinite_leaves

__all__ = [
    "detached",
    "dot",
    "flatten",
    "leaves",
    "map",
    "node",
    "nonfinite_leaves",
    "paths",
    "register",
    "register_fields",
    "static",
    "unflatten",
]
