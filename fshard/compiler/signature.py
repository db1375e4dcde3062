"""The cache key of a traced graph: calls with equal signatures run the same graph.

Note [What a graph depends on]
    A traced function reads its arguments, their defaults, torch's global state, and variables of closures and modules.
    A graph reads the values of tensor arguments each time it runs. Everything else is fixed during tracing, so it
    belongs to the cache key: tree structures, shapes, numbers, meshes (each rank has its own), global settings such as
    autocast, and the numbers, strings and functions in closures, globals and defaults. The contents of other objects in
    those variables (a list, a dict, an attribute) are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from numbers import Number
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import MESHES, OnMesh, is_mesh
from ..core import tree
from .captures import Capture


class Ambient(NamedTuple):
    """Torch's global settings that change which operators a function calls, or how a compiler compiles them."""

    grad_mode: bool
    inference_mode: bool
    default_dtype: torch.dtype
    default_device: torch.device
    deterministic: tuple[bool, bool]
    matmul_precision: tuple[str, str]
    attention: tuple[bool, ...]
    autocast: tuple[tuple[str, torch.dtype], ...]


class Signature(NamedTuple):
    """The part of the cache key that the arguments and torch's settings determine (Note [What a graph depends on])."""

    spec: tree.Spec
    kinds: tuple[Any, ...]
    meshes: tuple[str, ...]
    ambient: Ambient


def ambient() -> Ambient:
    """Return the current values of the global settings of torch that a trace depends on."""
    cuda, devices = torch.backends.cuda, {"cpu", torch.get_default_device().type}
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        devices.add(accelerator.type)
    return Ambient(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        (cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        tuple((d, torch.get_autocast_dtype(d)) for d in sorted(devices - {"meta"}) if torch.is_autocast_enabled(d)),
    )


def flatten(args: Any, kwargs: Any) -> tuple[list[Any], tree.Spec]:
    """Return leaves and structure of a call's arguments, with conjugate and negative bits of tensors resolved."""
    leaves, spec = tree.flatten((args, kwargs))
    return [leaf.resolve_conj().resolve_neg() if _is_lazy(leaf) else leaf for leaf in leaves], spec


def _is_lazy(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_conj() or leaf.is_neg())


def on_meshes(x: Any) -> list[Any]:
    """Return the nodes of a tree that lie on a mesh."""
    return tree.nodes(x, OnMesh)


def signature(leaves: Sequence[Any], spec: tree.Spec, nodes: Sequence[OnMesh] = ()) -> Signature:
    """Return the signature of a call. `nodes` are the nodes of the arguments that lie on a mesh.

    Raises TypeError for an argument that cannot be hashed and compared with the argument of a later call.
    """
    try:
        kinds = tuple(map(_kind, leaves))
        hash((spec, kinds))
    except (TypeError, RuntimeError) as failure:
        raise _incomparable(leaves, spec) from failure
    meshes = (node.home.mesh for node in nodes if node.home is not None)
    return Signature(spec, kinds, tuple("" if mesh is None else MESHES.of(mesh) for mesh in meshes), ambient())


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise TypeError(f"a tensor of layout {leaf.layout}")
        device = torch.get_default_device() if leaf.device.type == "meta" else leaf.device  # as in `trace`
        return Tensor, leaf.shape, leaf.stride(), leaf.dtype, device, leaf.requires_grad
    return fixed(leaf)


def fixed(x: Any) -> Any:
    """Return a key that is equal for values that are the same to a graph.

    The keys of 1, 1.0 and True differ, and so do the keys of 0.0 and -0.0. The keys of two NaNs are equal.
    """
    kind = type(x)
    if isinstance(x, Number):
        return kind, repr(x)  # also equal for NaN
    if isinstance(x, list | tuple | set | frozenset):
        return kind, *map(fixed, x)
    if is_dataclass(x) and not isinstance(x, type):
        return kind, *(fixed(getattr(x, field.name)) for field in fields(x))
    if is_mesh(x):  # not compared with ==: meshes of different ranks or simulated worlds may be equal
        return kind, MESHES.of(x)
    return kind, x


class _Same:
    """A wrapper that compares an object by identity."""

    def __init__(self, thing: Any):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def held(found: Sequence[Capture]) -> tuple[Any, ...]:
    """Return a key for the values of captured variables, one pair of name and content for each.

    Numbers and strings are compared by value, tensors by shape, dtype and device, and other objects by identity.
    """
    return tuple((capture.name, _content(capture.read())) for capture in found)


def _content(value: Any) -> Any:
    if type(value) is FunctionType:  # functions already compare by identity; most captured values are functions
        return value
    if value is None or isinstance(value, Number | str | bytes):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.dtype, value.device
    if isinstance(value, tuple):
        return type(value), *map(_content, value)
    return MESHES.of(value) if is_mesh(value) else _Same(value)


def _incomparable(leaves: Sequence[Any], spec: tree.Spec) -> Exception:
    for path, leaf in zip(tree.paths(spec), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            return TypeError(
                f"jit: argument {path!r} is a tensor of layout {leaf.layout}: make it dense with .to_dense()"
            )
        try:
            hash(_kind(leaf))
        except (TypeError, RuntimeError) as failure:
            return TypeError(
                f"jit: argument {path!r} is a {type(leaf).__name__}, which cannot be compared with the next call's "
                f"({failure}): pass tensors, numbers, strings, trees of those, or hashable objects, as frozen "
                "dataclasses are"
            )
    return TypeError("jit: the structure of the arguments has a node whose metadata is not hashable")


def difference(old: Signature, new: Signature) -> str:
    """Describe the first difference between two signatures, for `explain`."""
    if old.spec != new.spec:
        return "the structure of the arguments, or what their nodes carry (a plan, say), differs"
    for path, a, b in zip(tree.paths(new.spec), old.kinds, new.kinds, strict=True):
        if a != b:
            return f"argument {path!r} was {_words(a)}, is {_words(b)}"
    for name, a, b in zip(Ambient._fields, old.ambient, new.ambient, strict=True):
        if a != b:
            return f"torch's {name.replace('_', ' ')} was {a}, is {b}"
    return "the mesh that the arguments lie on is another one, or another rank's"


def changed(old: Sequence[Any], new: Sequence[Any]) -> str:
    """Name the captured variables whose contents differ between `old` and `new`, for `explain`."""
    before = dict(old)
    names = [name for name, content in new if before.get(name) != content]
    return f"{', '.join(names) or 'a function'} changed"


def _words(kind: Any) -> str:
    if kind[0] is not Tensor:
        return str(kind[1]) if issubclass(kind[0], Number) else repr(kind[1])
    _, shape, stride, dtype, device, requires_grad = kind
    words = f"{str(dtype).removeprefix('torch.')}{list(shape)} strides {list(stride)} on {device}"
    return words + " that requires a gradient" * requires_grad
