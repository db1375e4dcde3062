"""A copy of a module without its tensors: where the module holds a tensor, the copy reads that of the current call.

Note [Stands]
    The code of modules reaches tensors in three ways. `self.weight` indexes `_parameters`, which is a `Slots` in the
    copy: it returns the tensor of the current call. Lists and closures that hold a parameter (an RNN's
    `_flat_weights`) hold a `Stand` in the copy, a tensor of a class of its own: an operator that is given one is
    called with the tensor of the current call instead. `parameters()` yields stands, too: to ask one for its dtype,
    device or shape gathers nothing. What is read is a `Weight`: a parameter for all code that asks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..core import tree
from ..sharding.access import Leaves
from .current import Call, Calls

# Functions that ask for the form of a tensor and not for its values.
_ATTRIBUTES = ("dtype", "device", "shape", "ndim", "layout", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta")
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
_FORM = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {getattr(Tensor, name) for name in _METHODS}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_FORM |= {torch.is_floating_point, torch.is_complex, torch.numel}
# Parameters are leaves of autograd in the module itself.
_OF_LEAVES = {getattr(Tensor, name).__get__: value for name, value in (("is_leaf", True), ("grad_fn", None))}


class Weight(nn.Parameter):
    """A parameter of the current call, as the code of a module reads it (Note [Stands]).

    In truth it is a view of a gathered buffer or of the caller's tensor. It says that it is a leaf, so that torch puts
    it into other modules (a slice of a ParameterList). `.data` counts writes, so that they are noticed.
    """

    stand: Stand

    is_leaf = property(lambda self: True)
    grad_fn = property(lambda self: None)
    data = property(Tensor.detach, lambda self, value: self.stand.refuse("set the data of"))

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook on the gradient with respect to what is read."""
        return self._as_tensor(Tensor.register_hook, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """RuntimeError of torch: no gradient is accumulated in it."""
        return self._as_tensor(Tensor.register_post_accumulate_grad_hook, hook)

    def set_(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Do nothing for itself, as when a parametrization is registered; else ValueError."""
        return self if source is self else self.stand.refuse("set the data of")

    def _as_tensor(self, method: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        kind = type(self)
        self.__class__ = kind.__mro__[kind.__mro__.index(nn.Parameter) + 1]  # torch asks for the true `grad_fn`
        try:
            return method(self, hook)
        finally:
            self.__class__ = kind

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.stand.refuse("copied (copy.deepcopy)")


@functools.cache
def _weights(kind: type[Tensor]) -> type[Weight]:
    """The class of weights that are tensors of a class: while a graph is traced, of fake ones."""
    return Weight if kind is Tensor else type(kind.__name__, (Weight, kind), {})


class Stand(Tensor):
    """Stands for a parameter or buffer of the current call (Note [Stands])."""

    calls: Calls
    path: str
    number: int
    is_buffer: bool
    form: Tensor  # on meta, with the shape and dtype in the module
    trains: bool
    attributes: dict[str, Any]  # those that the module's code has put on its parameter

    @staticmethod
    def of(calls: Calls, path: str, number: int, is_buffer: bool, x: Tensor) -> Stand:
        """Stand for the parameter or buffer of this path and number, which is `x` in the module."""
        stand = torch.empty(0, dtype=torch.float32, device="cpu").as_subclass(Stand)
        stand.attributes = {} if is_buffer else dict(vars(x))
        vars(stand).update(stand.attributes)
        stand.calls, stand.path, stand.number, stand.is_buffer = calls, path, number, is_buffer
        stand.form, stand.trains = torch.empty_like(x, device="meta"), x.requires_grad
        # Private: what isinstance(x, nn.Parameter) asks for (test_module.py notices when it goes)
        stand._is_param = not is_buffer
        with torch._C.DisableTorchFunctionSubclass():
            # An autograd function takes a stand as it is: then the graph of its result ends at this one (`checks.py`)
            stand.requires_grad_(stand.trains and not is_buffer)
        return stand

    def read(self) -> Tensor:
        """The tensor of the current call; its unit is gathered."""
        return self.read_from(self.calls.current())

    def read_from(self, call: Call) -> Tensor:
        """The tensor of a call; its unit is gathered."""
        return call.buffer(self.number, self.path) if self.is_buffer else self._worn(call.params.read(self.number))

    def _worn(self, x: Any) -> Tensor:
        """The same tensor, which says that it is this parameter."""
        if not isinstance(x, Weight | Stand):
            kind: Any = type(x)
            x.__class__ = _weights(kind)
            vars(x).update(self.attributes, stand=self)
        return x

    def refuse(self, done: str) -> NoReturn:
        """Raise ValueError for what a forward has done to the parameter."""
        raise ValueError(
            f"{self.calls.name}: the module {done} its parameter {self.path!r} in its forward: return new values, or "
            "make it a buffer"
        )

    def like(self) -> Tensor:
        """A tensor of the same form as that of the current call."""
        call = self.calls.current()
        return call.buffers[self.number] if self.is_buffer else call.params.like(self.number)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with what the stands stand for."""
        if func == _REQUIRES_GRAD:
            return args[0].trains
        if func in _OF_LEAVES and not args[0].is_buffer:
            return _OF_LEAVES[func]
        if func == _SET_DATA:
            args[0].refuse("set the data of")
        if func in _SET_REQUIRES_GRAD:
            args[0].refuse("set requires_grad of")
        form = func in _FORM

        def current(x: Any) -> Any:
            return (x.like() if form else x.read()) if isinstance(x, Stand) else x

        args, kwargs = tree.map_tops(current, Stand, (args, kwargs or {}))
        return args[0].data if func == _DATA else func(*args, **kwargs)  # `Weight.data` is not torch's

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.refuse("copied (copy.deepcopy)")


class Slots(dict[str, Any]):
    """The `_parameters` or `_buffers` of a submodule of the copy: indexing reads the tensor of the current call.

    Code may put another tensor in the place of a parameter, as functional_call does, if it puts it back.
    """

    def __init__(self, stands: Mapping[str, Stand | None]):
        super().__init__(stands)
        self._deleted: dict[str, Stand] = {}

    def __getitem__(self, name: str) -> Tensor | None:
        stand = super().__getitem__(name)
        if stand is None:
            return None
        call = stand.calls.current()
        _, value = call.put.get((id(self), name), (stand, stand)) if call.put else (stand, stand)
        return value.read_from(call) if isinstance(value, Stand) else value

    def __setitem__(self, name: str, value: Any) -> None:
        stand = self.get(name, self._deleted.get(name))
        if stand is None or not isinstance(value, Tensor):
            raise ValueError(
                f"the module set {name!r} in its forward, which was not there when it was made a function, or is no "
                "tensor now: make buffers in __init__ (register_buffer), and return new values of parameters"
            )
        call = stand.calls.current()
        if stand.is_buffer:
            call.set_buffer(stand.number, stand.path, value.read() if isinstance(value, Stand) else value)
            return
        super().__setitem__(name, stand)
        self._deleted.pop(name, None)
        call.put[id(self), name] = stand, value
        if value is stand or getattr(value, "stand", None) is stand:
            del call.put[id(self), name]

    def __delitem__(self, name: str) -> None:
        stand = self.pop(name)
        if stand is not None:
            self._deleted[name] = stand
            stand.calls.current().put[id(self), name] = stand, stand

    def __deepcopy__(self, memo: Any) -> Slots:
        return Slots({name: copy.deepcopy(stand, memo) for name, stand in self.items()})


def stands_for(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], calls: Calls) -> dict[int, Stand]:
    """Stands by the identity of the tensors; these are numbered in the order of the dicts, tied ones once."""
    stands: dict[int, Stand] = {}
    for tensors, is_buffer in ((params, False), (buffers, True)):
        for number, (path, x) in enumerate(tensors.items()):
            stands.setdefault(id(x), Stand.of(calls, path, number, is_buffer, x))
    return stands


def stands_in(part: nn.Module) -> list[Stand]:
    """The stands for the parameters of a submodule of a copy, and of all submodules inside it; tied ones once."""
    return [x for x in part.parameters() if isinstance(x, Stand)]


def skeleton(module: nn.Module, stands: Mapping[int, Stand]) -> nn.Module:
    """Copy a module, with stands for its parameters and buffers."""
    copied = _copy(module, dict(stands))
    for part in copied.modules():
        for kind in ("_parameters", "_buffers"):
            tensors = vars(part)[kind]
            if not all(x is None or isinstance(x, Stand) for x in tensors.values()):
                raise TypeError(f"functionalize: {type(part).__name__} copies itself (__deepcopy__), with its tensors")
            vars(part)[kind] = Slots(tensors)
    return copied


def in_eval_mode(skeleton: nn.Module) -> nn.Module:
    """Put a skeleton into evaluation mode, without its own `train()`, which may compute with weights."""
    for part in skeleton.modules():
        part.training = False
    return skeleton


def copy_of(skeleton: nn.Module, calls: Calls) -> nn.Module:
    """Copy a skeleton: what a forward assigns to attributes stays in the copy."""
    # an RNN reads its weights while it is copied, and keeps what it reads
    with calls.during(Call(_Stands(skeleton), [])):
        return _copy(skeleton, same_stands(skeleton))


def same_stands(part: nn.Module) -> dict[int, Any]:
    """What to give copy.deepcopy so that a copy of a part of a skeleton has the same stands."""
    return {id(x): x for kind in (part.parameters(), part.buffers()) for x in kind}


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except Exception as failure:
        raise TypeError(
            f"functionalize: {type(module).__name__} cannot be copied: {type(failure).__name__}: {failure}. Remove "
            "what it keeps of graphs, locks and files (instead of the old weight_norm and prune: parametrizations)"
        ) from failure


class _Stands(Leaves):
    """The stands of a skeleton's parameters, by number, each for itself."""

    def __init__(self, skeleton: nn.Module):
        self._stands = {stand.number: stand for stand in stands_in(skeleton)}

    def read(self, number: int) -> Tensor:
        """The stand itself, which the copy has as well."""
        return self._stands[number]

    def like(self, number: int) -> Tensor:
        """A meta tensor with the form of the parameter."""
        return self._stands[number].form


def nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nested dicts of tensors with dotted names, in the order of the names.

    >>> nested({"a.b": 1, "c": 2, "a.d": 3})
    {'a': {'b': 1, 'd': 3}, 'c': 2}
    """
    root: dict[str, Any] = {}
    for path, value in tensors.items():
        *above, name = path.split(".")
        node = root
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return root


def in_tree_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same in the order of the leaves of `nested(tensors)`, where a submodule's tensors lie together."""
    root = nested(tensors)
    return dict(zip(tree.paths(tree.flatten(root)[1]), tree.leaves(root), strict=True))
