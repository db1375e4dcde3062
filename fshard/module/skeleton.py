"""A copy of a module without its tensors: instead of each tensor, the copy reads a tensor of the current call.

Note [Stands]
    The code of modules reaches tensors in three ways:

    1. `self.weight` indexes `_parameters`. In the copy, `_parameters` is a `Slots`: indexing returns the tensor of the
       current call (for a parameter, a `Weight`).
    2. In the copy, lists and closures (an RNN's `_flat_weights`) hold stands: tensors of the class `Stand`. An operator
       on a stand runs on the tensor of the current call.
    3. `parameters()` yields stands. To read a stand's dtype, device or shape gathers nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

# Private: the class of tensors while torch.compile traces; `_weights` subclasses it
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from ..core import func_levels, tree
from ..core.tracing import RERUN, SET_DATA, Args, Kwargs, Operator, is_tracing, unseen
from .current import Calls, ModuleCall
from .leaves import Leaves

_ATTRIBUTES = ("dtype", "device", "shape", "ndim", "layout", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta")
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
_FORM = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {getattr(Tensor, name) for name in _METHODS}
_FORM |= {torch.is_floating_point, torch.is_complex, torch.numel}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# a stand answers like a parameter of the original module: a leaf
_OF_LEAVES = {getattr(Tensor, name).__get__: value for name, value in (("is_leaf", True), ("grad_fn", None))}
_REFUSED: dict[object, str] = {
    SET_DATA: "set the data of",
    Tensor.register_hook: "registered a hook on",
    Tensor.register_post_accumulate_grad_hook: "registered a hook on",
}

T = TypeVar("T")
_NEW_VALUES = "return new values, or make it a buffer"
_REMEDIES = {
    "hook": "change the gradients that value_and_grad returns",
    "requires_grad": "set it before functionalize, and make a second function where a forward runs with other settings "
    "(PEFT: `with model.disable_adapter(): base, _, _ = functionalize(model)`, called with the same parameters)",
}


class Member:
    """A parameter or buffer of the original module, with attributes set by code; in the copy, a stand replaces it."""

    def __init__(self, calls: Calls, path: str, number: int, is_buffer: bool, x: Tensor):
        self.calls, self.path, self.number, self.is_buffer = calls, path, number, is_buffer
        self.form = torch.empty_like(x, device="meta")
        self.trains = x.requires_grad
        self.attributes: dict[str, object] = {}

    def read(self) -> Tensor:
        return self.read_from(self.calls.current())

    def read_from(self, call: ModuleCall, where: tuple[int, str] | None = None) -> Tensor:
        """The tensor of a call, gathering its unit. `where`: (id of `Slots`, name) by which a buffer is read."""
        if self.is_buffer:
            x = call.buffer(self.number, self.path, where)
            vars(x).update(self.attributes, of_call=True)
            return x
        x = call.params.read(self.number)
        for known in (x, vars(x).get("_worn", x)):
            if vars(known).get("_place") is self:
                return known
        return self._worn(x, call.params.is_gathered(self.number))

    def _worn(self, x: Tensor, is_gathered: bool) -> Tensor:
        """A call's tensor `x` as a `Weight`: `x` itself, or if it was gathered a view, stored in `x._worn`."""
        worn = x
        kind = type(x)
        rerun = RERUN.get() is not None  # `remat` runs a function again, on fresh tensors
        if (is_gathered and not rerun) or kind is FunctionalTensor:  # a view: other code may read `x` as a plain tensor
            # if `x` has a tangent (`hvp`), a view made at another level of torch.func would have none
            with nullcontext() if func_levels.is_wrapped(x) else func_levels.aside(), torch.enable_grad():
                worn = x[...]  # `view_as` takes no sparse gradients
                if kind is FunctionalTensor:
                    vars(worn)["_plain"] = x[...]
            if not rerun:
                vars(x)["_worn"] = worn
        worn.__class__ = _weights(kind)
        vars(worn).update(self.attributes, _place=self)
        return worn

    def like(self) -> Tensor:
        call = self.calls.current()
        return call.buffers[self.number] if self.is_buffer else call.params.like(self.number)

    def train(self, x: Tensor, requires_grad: bool = True) -> Tensor:
        """`x` if `requires_grad` is unchanged, as parametrizations need; else refuse."""
        return x if requires_grad is self.trains else self.refuse("set requires_grad of")

    def refuse(self, done: str) -> NoReturn:
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in done), _NEW_VALUES)
        raise ValueError(f"{self.calls.name}: the module {done} its parameter {self.path!r} in its forward: {remedy}")


def _refusing(done: str) -> Callable[..., NoReturn]:
    return lambda self, *args, **kwargs: self._place.refuse(done)


class Weight(nn.Parameter):
    """A parameter of the current call, as the code of a module reads it (Note [Stands]).

    A `Weight` is a view of a gathered buffer or of the caller's tensor. `is_leaf` is True, because torch registers only
    leaves as parameters. `.data` is a detached view, and autograd notices writes to `.data`.
    """

    _place: Member
    _plain: Tensor  # while torch.compile traces: a view in the class that operators accept

    is_leaf = property(lambda self: True)
    grad_fn = property(lambda self: None)
    data = property(Tensor.detach, _refusing("set the data of"))
    requires_grad = property(lambda self: self._place.trains, lambda self, trains: self._place.train(self, trains))
    register_hook = _refusing("registered a hook on")
    register_post_accumulate_grad_hook = _refusing("registered a hook on")
    __deepcopy__ = _refusing("copied (copy.deepcopy)")

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        return self._place.train(self, requires_grad)

    def set_(self, source: object, *args: object, **kwargs: object) -> Tensor:
        """Do nothing if `source` is this tensor, as parametrizations need; else refuse."""
        return self if source is self else self._place.refuse("set the data of")


@functools.cache
def _weights(kind: type[Tensor]) -> type[Weight]:
    """A `Weight` class for tensors of class `kind`: in a trace, fake or functional tensors."""
    more: dict[str, object] = {"__torch_function__": classmethod(_with_plain)} if kind is FunctionalTensor else {}
    return Weight if kind is Tensor else type(kind.__name__, (Weight, kind), more)


def _with_plain(cls: type, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
    """Call `func` with a plain tensor for each `Weight`: functionalization accepts only its own class."""
    args, kwargs = tree.map_tops(lambda x: x._plain if isinstance(x, Weight) else x, Weight, (args, kwargs or {}))
    return func(*args, **kwargs)


class Stand(Tensor):
    """A tensor without memory in place of a parameter or buffer of the current call (Note [Stands])."""

    reads_itself = True  # `remat` must not replace a stand: an operator on it reads the call's tensor
    _place: Member

    @staticmethod
    def of(place: Member, x: Tensor) -> Stand:
        """`x`: the original module's tensor."""
        # A torch.autograd.Function takes the stand itself; `check_graph` then finds the stand in the result's graph
        requires_grad = place.trains and not place.is_buffer
        # Private: no public function makes a tensor without memory (test_module.py)
        stand: Stand = Tensor._make_wrapper_subclass(
            Stand, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device, requires_grad=requires_grad
        )
        stand._place = place
        # Private: isinstance(x, nn.Parameter) reads `_is_param` (test_module.py)
        stand._is_param = not place.is_buffer
        return stand

    def know(self, attributes: Mapping[str, object], stands: Mapping[int, Stand]) -> None:
        """Copy attributes that the module's code has put on the tensor; tensors in them become stands."""
        self._place.attributes = copy.deepcopy(dict(attributes), dict(stands))
        vars(self).update(self._place.attributes)

    @classmethod
    def __torch_function__(cls, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        place = args[0]._place if args and isinstance(args[0], Stand) else None
        if place is not None and func == _REQUIRES_GRAD:
            return place.trains
        if place is not None and not place.is_buffer:
            if func in _OF_LEAVES:
                return _OF_LEAVES[func]
            if func in _SET_REQUIRES_GRAD:
                return place.train(*args, **(kwargs or {}))
            if func in _REFUSED:
                place.refuse(_REFUSED[func])
        form = func in _FORM
        args, kwargs = tree.map_tops(lambda x: _current(x, form), Stand, (args, kwargs or {}))
        return args[0].data if func == _DATA else func(*args, **kwargs)  # `Weight` overrides `data`

    @classmethod
    def __torch_dispatch__(cls, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:  # type: ignore[override]
        """Replace stands for an operator that skips `__torch_function__` (torch.vmap).

        ValueError if derivatives would be lost.
        """
        differentiated = torch.is_grad_enabled() and func is not torch.ops.aten.detach.default

        def current(x: object) -> object:
            if not isinstance(x, Stand):
                return x
            place = x._place
            lost = differentiated and place.trains and not place.is_buffer
            with torch.overrides.enable_reentrant_dispatch():  # autograd must record a gather by this read
                read = place.read()
            if lost or is_tracing() or func_levels.is_wrapped(read):
                raise ValueError(
                    f"{place.calls.name}: an operator that asks no class of tensors (torch.func, torch.jit) was given "
                    f"{place.path!r} from parameters(), a list or a closure, and would take it for a constant: give "
                    "it the attribute (self.weight)"
                )
            return read

        args, kwargs = tree.map_tops(current, Stand, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._place.refuse("copied (copy.deepcopy)")


def member_of(stand: Tensor) -> Member:
    place: Member = vars(stand)["_place"]
    return place


def _current(x: T, form: bool) -> T | Tensor:
    if not isinstance(x, Stand):
        return x
    return x._place.like() if form else x._place.read()


class Slots(dict[str, Tensor | None]):
    """The `_parameters` or `_buffers` of a submodule of the copy: indexing reads the tensor of the current call.

    A forward may replace a parameter if it restores the old parameter, as functional_call does.
    """

    def __init__(self, stands: Mapping[str, Tensor | None]):
        super().__init__(stands)
        self._deleted: dict[str, Tensor] = {}

    @property
    def stands(self) -> dict[str, Tensor | None]:
        return dict(super().items())

    def __getitem__(self, name: str) -> Tensor | None:
        stand = super().__getitem__(name)
        if stand is None:
            return None
        place = member_of(stand)
        call = place.calls.current()
        value = call.put.get((id(self), name), (place, stand))[1] if call.put else stand
        return place.read_from(call, (id(self), name)) if value is stand else _current(value, False)

    def _listed(self, name: str, stand: Tensor | None) -> Tensor | None:
        call = None if stand is None else member_of(stand).calls.found()
        return stand if call is None else call.put.get((id(self), name), (stand, stand))[1]

    def get(self, name: str, default: object = None) -> Any:
        return self._listed(name, super().get(name)) if name in self else default

    def items(self) -> Any:
        return [(name, self._listed(name, stand)) for name, stand in super().items()]

    def values(self) -> Any:
        return [x for _, x in self.items()]

    def __setitem__(self, name: str, value: object) -> None:
        stand = super().get(name, self._deleted.get(name))
        if stand is None or not isinstance(value, Tensor):
            raise ValueError(
                f"the module set {name!r} in its forward, which was not there when it was made a function, or is no "
                "tensor now: make buffers in __init__ (register_buffer), and return new values of parameters"
            )
        place = member_of(stand)
        call = place.calls.current()
        super().__setitem__(name, stand)
        self._deleted.pop(name, None)
        if place.is_buffer:
            call.set_buffer((id(self), name), place, _current(value, False))
            return
        call.put[id(self), name] = place, value
        if getattr(value, "_place", None) is place:
            del call.put[id(self), name]

    def __delitem__(self, name: str) -> None:
        stand = self.pop(name)
        if stand is not None:
            self._deleted[name] = stand
            place = member_of(stand)
            place.calls.current().put[id(self), name] = place, stand

    def __deepcopy__(self, memo: Any) -> Slots:
        return Slots({name: copy.deepcopy(stand, memo) for name, stand in super().items()})


def stands_for(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], calls: Calls) -> dict[int, Stand]:
    """One stand for each tensor, by the tensor's id, numbered in the order of the dicts."""
    stands: dict[int, Stand] = {}
    for tensors, is_buffer in ((params, False), (buffers, True)):
        for number, (path, x) in enumerate(tensors.items()):
            stands.setdefault(id(x), Stand.of(Member(calls, path, number, is_buffer, x), x))
    for x in (*params.values(), *buffers.values()):
        stands[id(x)].know(vars(x), stands)
    return stands


def ties(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return, for each name, the number of the first name with the same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(x), number) for number, x in enumerate(tensors.values())]


def places_in(part: nn.Module) -> list[Member]:
    """The parameters of a submodule; tied parameters count once."""
    return [member_of(x) for x in part.parameters() if isinstance(x, Stand)]


def skeleton(module: nn.Module, stands: Mapping[int, Stand]) -> nn.Module:
    copied = _deep_copy(module, dict(stands))
    for part in copied.modules():
        for kind in ("_parameters", "_buffers"):
            tensors = vars(part)[kind]
            if not all(x is None or isinstance(x, Stand) for x in tensors.values()):
                raise TypeError(f"functionalize: {type(part).__name__} copies itself (__deepcopy__), with its tensors")
            vars(part)[kind] = Slots(tensors)
    return copied


def in_eval_mode(skeleton: nn.Module) -> nn.Module:
    """Set evaluation mode without the module's own `train()`, which may compute with weights."""
    for part in skeleton.modules():
        part.training = False
    return skeleton


def copy_of(skeleton: nn.Module, calls: Calls) -> nn.Module:
    # an RNN that is copied reads and keeps its weights: these reads must return stands
    with calls.during(ModuleCall(_Stands(skeleton), [])), _Constants() if is_tracing() else nullcontext():
        return _deep_copy(skeleton, same_stands(skeleton))


class _Constants(TorchFunctionMode):
    """In a trace, copy tensors that are neither parameters nor buffers as constants: they never change."""

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if args and type(args[0]) in (Tensor, nn.Parameter) and func in (Tensor.__deepcopy__, _DATA):
            with unseen():  # a parameter in a list becomes a plain tensor
                x = args[0].detach()
            return torch.ops.aten.lift_fresh.default(x) if x.layout is torch.strided else x
        return func(*args, **(kwargs or {}))


def same_stands(part: nn.Module) -> dict[int, object]:
    """A memo with which copy.deepcopy keeps stands as they are."""
    return {id(x): x for kind in (part.parameters(), part.buffers()) for x in kind}


def _deep_copy(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except Exception as failure:
        raise TypeError(
            f"functionalize: {type(module).__name__} cannot be copied: {type(failure).__name__}: {failure}. Remove "
            "what it keeps of graphs, locks and files"
        ) from failure


class _Stands(Leaves):
    def __init__(self, skeleton: nn.Module):
        self._stands = {member_of(stand).number: stand for stand in skeleton.parameters()}

    def read(self, number: int) -> Tensor:
        return self._stands[number]

    def like(self, number: int) -> Tensor:
        return member_of(self._stands[number]).form


def nested(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Nest tensors with dotted names in dicts, in their order.

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
    return dict(tree.paths_to(nested(tensors), Tensor))
