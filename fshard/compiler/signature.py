"""The cache key of a traced graph: calls with equal signatures run the same graph.

Note [What a graph depends on]
    A graph reads the values of tensor arguments at each call. Tracing fixes everything else, so the cache key has:
    - tree structures, shapes and classes (`core.tracing.Marked`) of arguments, and arguments other than tensors;
    - meshes: each simulated rank of a process has its own mesh object;
    - torch's global settings, such as autocast;
    - numbers, strings, arrays, functions and shapes of tensors in closures, globals and defaults, also inside Python's
      containers. Of another object, the key has the attributes that code names, as in `a.b.c` (`captures.py`).

    An object in the metadata of a tree's node is compared by all attributes (`Structure`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.mesh import MESHES, Mesh, OnMesh, is_mesh
from ..core import tree
from ..core.storage import Source, address
from ..core.tracing import Marked
from ..core.tree import Tree
from ..layout.layout import Layout
from ..plan.plan import Plan
from ..sharding.schedule import View
from .captures import Capture, is_of_library, is_users
from .trace import kind_in_key, resolved

ValueKey = tuple[type, *tuple[object, ...]]  # type of a value, and its compared parts
Captured = tuple[tuple[str, object], ...]  # (name, key of the value) for each captured variable


class Ambient(NamedTuple):
    """Torch's global settings that change operators or their compilation."""

    grad_mode: bool
    inference_mode: bool
    default_dtype: torch.dtype
    default_device: torch.device
    deterministic: tuple[bool, bool]
    matmul_precision: tuple[str, str]
    attention: tuple[bool, ...]
    autocast: tuple[tuple[str, torch.dtype], ...]


class TensorKey(NamedTuple):
    """The properties of a tensor that two calls must share."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: type


class Signature(NamedTuple):
    """The part of the cache key from arguments and torch's settings (Note [What a graph depends on])."""

    structure: Structure
    kinds: tuple[TensorKey | ValueKey, ...]  # one key for each leaf
    trained: tuple[tuple[object, ...], ...]  # shared memory of leaves that require a gradient
    meshes: tuple[str, ...]
    ambient: Ambient

    @property
    def spec(self) -> tree.Spec:
        return self.structure.spec

    @property
    def grids(self) -> dict[str, Mesh]:
        return {name: MESHES.find(name) for name in self.meshes if name}

    @property
    def mesh(self) -> Mesh | None:
        return next(iter(self.grids.values()), None)

    @property
    def is_on_accelerator(self) -> bool:
        return any(isinstance(key, TensorKey) and key.device.type not in ("cpu", "meta") for key in self.kinds)


def ambient() -> Ambient:
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


def flat_call(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> tuple[list[object], tree.Spec]:
    """Flatten arguments and resolve conjugate and negative bits: a graph reads plain memory."""
    leaves, spec = tree.flatten((args, kwargs))
    return [resolved(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def on_meshes(x: Tree) -> list[OnMesh]:
    tops = tree.tops(x, lambda node: isinstance(node, OnMesh) or bool(_order(node)))
    if any(map(_order, tops)):
        path = next(path for path, node in tree.paths_to(x, lambda node: bool(_order(node))) if _order(node))
        raise TypeError(
            f"jit: argument {path!r} is an OrderedDict whose order `move_to_end` has changed, which optree does not "
            "see: pass OrderedDict(it.items()), or a plain dict"
        )
    return [node for node in tops if isinstance(node, OnMesh)]


def _order(x: Tree) -> tuple[object, ...]:
    """Return an OrderedDict's keys if `move_to_end` has changed their order, unseen by optree; else ()."""
    if not isinstance(x, OrderedDict) or [*x] == [*dict.keys(x)]:
        return ()
    return *x, *(_orders(value) for value in x.values())


def _orders(x: Tree) -> tuple[object, ...]:
    return tuple(filter(None, map(_order, tree.tops(x, lambda node: bool(_order(node))))))


def signature(leaves: Sequence[object], spec: tree.Spec, nodes: Sequence[OnMesh] = ()) -> Signature:
    """Return a call's signature. `nodes`: the arguments' nodes on a mesh."""
    try:
        structure, kinds = Structure(spec), tuple(map(key_of, leaves))
        _check_classes({key.kind for key in kinds if isinstance(key, TensorKey)})
        hash(kinds)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise _incomparable(leaves, spec, failure) from failure
    homes = (node.home.mesh for node in nodes if node.home is not None)
    meshes = tuple("" if mesh is None else MESHES.of(mesh) for mesh in homes)
    return Signature(structure, kinds, _trained(leaves), meshes, ambient())


def _trained(leaves: Sequence[object]) -> tuple[tuple[object, ...], ...]:
    """Return the shared memory of leaves that require a gradient: autograd sums the gradients of all views."""
    first: dict[int, int] = {}  # first leaf, by id of the tensor or address of its storage
    return tuple(
        (first.setdefault(id(x), i), first.setdefault(address(x), i), x.storage_offset(), x.is_leaf)
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and x.requires_grad
    )


def _check_classes(kinds: Iterable[type]) -> None:
    for kind in kinds:
        if kind not in (Tensor, nn.Parameter, nn.Buffer) and not issubclass(kind, Marked):
            raise TypeError(f"a tensor of class {kind.__name__}")


def key_of(leaf: object) -> TensorKey | ValueKey:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise TypeError(f"a tensor of layout {leaf.layout}")
        device = torch.get_default_device() if leaf.device.type == "meta" else leaf.device  # as `trace` does
        return TensorKey(leaf.shape, leaf.stride(), leaf.dtype, device, leaf.requires_grad, kind_in_key(leaf))
    return fixed(leaf)


_VALUES = (Number, str, bytes, list, tuple, set, frozenset)


def fixed(x: Any) -> ValueKey:  # Any: mypy does not narrow by `is_mesh`
    """Return a value's key: different for 1, 1.0 and True, and for 0.0 and -0.0; equal for NaNs."""
    kind: Any = type(x)
    attributes = getattr(x, "__dict__", None)
    more = [_content(attributes, {})] if attributes and isinstance(x, _VALUES) else []
    if isinstance(x, Number):
        return kind, repr(x), *more  # as text: NaN != NaN, 0.0 == -0.0
    if isinstance(x, list | tuple | set | frozenset):
        return kind, *map(fixed, x), *more
    if is_dataclass(x) and not isinstance(x, type):
        return kind, *(fixed(getattr(x, field.name)) for field in fields(x))
    if is_mesh(x):  # by name: meshes of different ranks or simulated worlds may be equal by ==
        return kind, MESHES.of(x)
    # by content, if the object equals only itself
    inside = parts if isinstance(x, FunctionType | MethodType) else of_metadata
    return kind, _content(x, {}, inside) if kind.__hash__ in _BY_IDENTITY else x, *more


_BY_IDENTITY = (object.__hash__, BuiltinFunctionType.__hash__, ContextVar.__hash__)


class Structure:
    """A tree structure, compared by its nodes and their metadata as of construction.

    optree's == compares metadata as changed later, and takes 1, 1.0 and True for equal.
    """

    def __init__(self, spec: tree.Spec, seen: _Seen | None = None):
        self.spec, around = spec, {} if seen is None else seen
        self._nodes = tuple(
            node[0] if node[0] == _LEAF else (*node[:2], node[4], _carried(node[2], node[4] is not None, around))
            for node in _nodes(spec)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._nodes == other._nodes

    def __hash__(self) -> int:
        return hash(self.spec)  # does not change: optree hashes no metadata of registered classes


def _nodes(spec: tree.Spec) -> Any:  # optree shows metadata only in pickles
    """Return a tuple for each node: kind, number of children, metadata, and, at index 4, the registered class."""
    return spec.__getstate__()[0]  # type: ignore[index]  # a tuple


_LEAF = _nodes(tree.flatten(0)[1])[0][0]


def _carried(x: object, is_registered: bool, seen: _Seen) -> object:
    if not is_registered:
        keys = x[1] if isinstance(x, tuple) else x  # a defaultdict's metadata is (default_factory, keys)
        if not isinstance(keys, list):
            return x
        named = tuple(k if type(k) in (str, int) else fixed(k) for k in keys)
        return (x[0], named) if isinstance(x, tuple) else named
    return tuple(_of_metadata(y, seen) for y in x) if type(x) is tuple else _of_metadata(x, seen)


def _of_metadata(x: object, seen: _Seen) -> object:
    if type(x) in (int, str, type(None)):  # such a value equals no other key
        return x
    try:
        return _content(x, seen, of_metadata)
    except RecursionError:  # a list that contains itself
        return _Same(x)


class _Same:
    def __init__(self, value: object):
        self.value = value  # alive, so no other object gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_Seen = dict[int, tuple[int, object]]  # (number, object) by id, for objects met before in one variable
Inside = Callable[[object], Iterable[object] | None]  # `parts` or `of_metadata`


Inputs = dict[tuple[int, str], list[Tensor]]  # by `Capture.identity`


def inputs_of(variables: Sequence[Capture]) -> Inputs:
    return {variable.identity: variable.tensors() for variable in variables if variable.is_input}


def contents(variables: Sequence[Capture], inputs: Inputs) -> Captured:
    """Return the keys of captured variables, and which of `inputs` are one tensor."""
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(x), i) for i, x in enumerate(chain(*inputs.values())))
    known = ((variable.name, _compared(variable)) for variable in variables)
    return *known, *([("one of two tensors that were one, or the other way round,", same)] if same else [])


def _compared(variable: Capture) -> object:
    if variable.of_tensors:
        return tuple(_content(x, {}) for x in variable.tensors())
    value = variable.read()
    if variable.is_code or (type(value) is tuple and not value):
        return value
    # If code reads only attributes of a mutable object, unread ones may change: compare its identity.
    params = getattr(type(value), "__dataclass_params__", None)
    changes = isinstance(value, SimpleNamespace) if params is None else not params.frozen
    try:
        return _Same(value) if changes and variable.by_name else _content(value, {})
    except RecursionError:  # a list contains itself, or a chain of objects is long
        return _Same(value)


# Modules of classes compared by value: Python's containers and buffers, dates, paths, partials, numpy's arrays.
_OF_VALUES = {"_ctypes", "_io", "array", "builtins", "collections", "functools", "numpy", "types"}
_OF_VALUES |= {"datetime", "pathlib", "pathlib._local", "uuid"}


def parts(x: object) -> Iterable[object] | None:
    """Return an object's parts to compare: its fields, or its state for `pickle`. None: compare its identity."""
    if is_dataclass(x) and not isinstance(x, type) and not is_of_library(type(x)):
        return [getattr(x, field.name, None) for field in fields(x)]
    if isinstance(x, ContextVar):
        return [x.name, x.get(None)]
    if isinstance(x, type) or not any(base.__module__ in _OF_VALUES for base in type(x).__mro__[:-1]):
        return None
    if isinstance(x, memoryview | MappingProxyType):
        return (x.format, x.shape, x.tobytes()) if isinstance(x, memoryview) else [dict(x)]
    if isinstance(x, KeysView | ValuesView | ItemsView):
        return list(x)
    try:
        saved = x.__reduce_ex__(4)
    except Exception:  # `pickle` refuses a lock, a generator
        return None
    return None if isinstance(saved, str) else [list(y) if isinstance(y, Iterator) else y for y in saved]


def of_metadata(x: object) -> Iterable[object] | None:
    """Return the parts to compare of an object in metadata: the result of `parts`, or else all attributes."""
    if isinstance(x, FunctionType):
        cells = [Capture("", cell, "").read() for cell in x.__closure__ or ()]
        return [_Same(x), x.__code__, x.__defaults__, x.__kwdefaults__, vars(x), *cells]
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, type) and not is_of_library(x):
        return [_Same(x), *_shared(x)]
    if isinstance(x, type | Enum) or (isinstance(x, BuiltinFunctionType) and isinstance(x.__self__, _NO_OBJECTS)):
        return None
    if (of_value := parts(x)) is not None:
        return of_value
    if is_dataclass(x) and hasattr(x, "__dataclass_params__"):  # a dataclass of torch around a constant of fshard
        return [getattr(x, field.name, None) for field in fields(x)]
    package = type(x).__module__.partition(".")[0]
    is_own = package == "torch" or (package in sys.stdlib_module_names and package != "argparse")
    return None if is_own and not hasattr(x, "named_parameters") else [object.__getstate__(x), *_shared(type(x))]


def _shared(kind: type) -> Iterator[object]:
    stored = (item for base in kind.__mro__ if not is_of_library(base) for item in vars(base).items())
    return (x for name, x in stored if name[:2] != "__" and not hasattr(type(x), "__get__"))


def _of_ours(x: object, seen: _Seen) -> object:
    x = x.static if isinstance(x, Source) else x
    home = x.plan if isinstance(x, View) else x
    if not isinstance(home, Plan | Layout) or not (more := _changing(home)):
        return x
    # Compare a plan by identity: == of its arrays gives no bool. A subtree's position stands for its structure.
    place = x if not isinstance(x, View) else (_Same(home), x.over, x.kinds, x.first, x.spec.num_nodes, x.units, x.room)
    return place, *(_content(y, seen, of_metadata) for y in more)


def _changing(home: Plan | Layout) -> tuple[object, ...]:
    known = home.derived
    if known.changing is None:
        known.changing = tuple(node[2] for node in _nodes(home.spec) if node[4] is not None and not _is_fixed(node[2]))
    return known.changing


_NO_OBJECTS = (type(None), type, ModuleType)  # types of `__self__` of C functions; methods of objects have others
_FIXED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _is_fixed(x: object) -> bool:
    """Return True if a value and all its parts are immutable."""
    if type(x) is tuple or type(x) is frozenset:
        return all(map(_is_fixed, x))
    if isinstance(x, FunctionType | BuiltinFunctionType):
        return not is_users(x) and isinstance(getattr(x, "__self__", None), _NO_OBJECTS)
    if is_dataclass(x) and not isinstance(x, type):
        is_frozen = getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False)
        return is_frozen and all(_is_fixed(getattr(x, field.name, None)) for field in fields(x))
    return type(x) in _FIXED or (isinstance(x, type) and is_of_library(x))


def _content(value: Any, seen: _Seen, inside: Inside = parts) -> object:
    if type(value) in (FunctionType, ModuleType, CodeType) and (inside is parts or not is_users(value)):
        return value  # == compares these, the most frequent values
    if type(value) is MethodType and inside is parts:
        return MethodType, value.__func__, _Same(value.__self__)
    if value is None or isinstance(value, Number | str | bytes | torch.device):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        try:
            key = key_of(value) if value.layout is torch.strided else (Tensor, value.shape, value.dtype, value.device)
        except RuntimeError:  # a nested or uninitialized tensor has no shape
            return _Same(value)
        return key, value.is_conj(), value.is_neg()  # both bits decide the strides after `resolved`
    if isinstance(value, dict | list | tuple) and not (flat := tree.flatten(value))[1].is_leaf():
        return Structure(flat[1], seen), _orders(value), *(_content(x, seen, inside) for x in flat[0])
    if isinstance(value, set | frozenset):
        return type(value), len(value), frozenset(_content(x, seen, inside) for x in value)
    if is_mesh(value):
        return MESHES.of(value)
    if inside is of_metadata and type(value).__module__.startswith("fshard."):
        return _of_ours(value, seen)
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value  # alive, as in `_Same`
    compared = inside(value)
    return _Same(value) if compared is None else (type(value), *(_content(x, seen, inside) for x in compared))


def _incomparable(leaves: Sequence[object], spec: tree.Spec, why: Exception) -> TypeError:
    for path, leaf in zip(tree.leaf_paths(spec), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            return TypeError(
                f"jit: argument {path!r} is a tensor of layout {leaf.layout}: make it dense with .to_dense()"
            )
        try:
            _check_classes([kind_in_key(leaf)] if isinstance(leaf, Tensor) else [])
        except TypeError as failure:
            return TypeError(
                f"jit: argument {path!r} is {failure}, whose operators and class a graph does not have: pass plain "
                "tensors (x.as_subclass(torch.Tensor), or the tensors in it), and make its class outside"
            )
        try:
            hash(key_of(leaf))
        except (TypeError, ValueError, RuntimeError) as failure:
            return TypeError(
                f"jit: argument {path!r} is a {type(leaf).__name__}, which cannot be compared with the next call's "
                f"({failure}): pass tensors, numbers, strings, trees of those, or hashable objects, as frozen "
                "dataclasses are"
            )
    return TypeError(f"jit: a node of the arguments carries what cannot be compared with the next call's ({why})")


def unlike_call(old: Signature, new: Signature) -> str:
    if old.structure != new.structure:
        return "the structure of the arguments, or what their nodes carry (a plan, say), differs"
    for path, before, now in zip(tree.leaf_paths(new.spec), old.kinds, new.kinds, strict=True):
        if before != now:
            return f"argument {path!r} was {words_of_key(before)}, is {words_of_key(now)}"
    if old.trained != new.trained:
        return "other arguments are one tensor that requires a gradient, or views of one"
    for name, was, value in zip(Ambient._fields, old.ambient, new.ambient, strict=True):
        if was != value:
            return f"torch's {name.replace('_', ' ')} was {was}, is {value}"
    return "the mesh that the arguments lie on is another one, or another rank's"


def changed(old: Captured, new: Captured) -> str:
    before = dict(old)
    names = [name for name, content in new if before.get(name) != content]
    return f"{', '.join(names) or 'a function'} changed"


def words_of_key(key: TensorKey | ValueKey) -> str:
    if not isinstance(key, TensorKey):
        kind, *content = key
        if not content:  # an empty set, a dataclass without fields
            return f"an empty {kind.__name__}"
        return str(content[0]) if issubclass(kind, Number) else repr(getattr(content[0], "value", content[0]))
    dtype = str(key.dtype).removeprefix("torch.")
    words = f"{dtype}{list(key.shape)} strides {list(key.stride)} on {key.device}"
    words += f" of class {key.kind.__name__}" * (key.kind is not Tensor)
    return words + " that requires a gradient" * key.requires_grad
