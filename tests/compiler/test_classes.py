"""Classes of tensors, and `.data`, in a trace: what a graph computes is what Python does, or an error with a remedy."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from support.models import rand
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

import fshard
from fshard import tree
from fshard.compiler.trace import TraceError

eager = partial(fshard.jit, backend="eager")


class Bare(Tensor):
    """A class without operators of its own."""


class Degrees(Tensor):
    """A tensor in degrees."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [x.as_subclass(Tensor) if isinstance(x, Degrees) else x for x in args]
        if func in (torch.sin, Tensor.sin):
            args[0] = args[0] * torch.pi / 180
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A tensor around another one, twice as large."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        out = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = [2 * x.inner if isinstance(x, Wrapped) else x for x in args]
        return return_and_correct_aliasing(func, args, kwargs or {}, func(*plain, **(kwargs or {})))


class Weight(nn.Parameter):
    """A parameter of a class of the user's."""


CLASSES: dict[str, Any] = {
    "Tensor": lambda x: x,
    "Parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "Buffer": nn.Buffer,
    "Bare": lambda x: x.as_subclass(Bare),
    "Degrees": lambda x: x.as_subclass(Degrees),
    "Wrapped": Wrapped,
    "Weight": lambda x: Weight(x, requires_grad=False),
    "uninitialized": lambda x: nn.UninitializedParameter(requires_grad=False),
    "nested, strided": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.strided),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
}
KNOWN = ("Tensor", "Parameter", "Buffer")
OPERATORS: dict[str, Any] = {
    "a function": lambda x: torch.sin(x) * 2,
    "a method": lambda x: 1 + x.sin(),
    "a Parameter": lambda x: torch.ones(2) * (2 if isinstance(x, nn.Parameter) else 3) + x.sin(),
    "a Buffer": lambda x: torch.ones(2) * (2 if isinstance(x, nn.Buffer) else 3) + x.sin(),
}


def as_an_argument(x: Tensor, operator: Any) -> Any:
    """A function, and its arguments."""
    return operator, (x,)


def by_its_name(x: Tensor, operator: Any) -> Any:
    """The same twice, by position and in a dict."""
    return lambda y, other: operator(other["more"][0]) + operator(y), (x, {"more": [x]})


def in_a_batch(x: Tensor, operator: Any) -> Any:
    """The same in a batch."""
    return lambda batch: operator(batch["angle"][0]) * batch["k"], ({"angle": [x], "k": torch.ones(2)},)


def in_a_closure(x: Tensor, operator: Any) -> Any:
    """A variable around."""
    return lambda k: operator(x) * k, (torch.ones(2),)


def in_a_list(x: Tensor, operator: Any) -> Any:
    """The same in a list."""
    held = [{"x": x}]
    return lambda k: operator(held[0]["x"]) * k, (torch.ones(2),)


PLACES = (as_an_argument, by_its_name, in_a_batch, in_a_closure, in_a_list)
REMEDIES = {
    TypeError: "pass plain tensors|make it dense|cannot be compared",
    TraceError: "pass it as one",
    ValueError: "Call `forward`",
}


def found(fn: Any, args: Any) -> Any:
    """The result as plain tensors, or an error."""
    try:
        return [x.as_subclass(Tensor) for x in tree.leaves(fn(*args))]
    except (TypeError, TraceError, ValueError) as failure:
        return failure


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CLASSES)
def test_classes_of_tensors(kind, place, operator):
    """A graph would lose the operators of a class, or have the branch that another class took."""
    x = CLASSES[kind](rand(2, seed=1))
    fn, args = place(x, OPERATORS[operator])
    got = found(eager(fn), args)
    if kind in KNOWN:
        assert torch.equal(got[0], fn(*args))
    else:
        assert isinstance(got, TypeError if place in PLACES[:3] else TraceError | ValueError), got
        assert re.search(REMEDIES[type(got)], str(got)), "no remedy"


@pytest.mark.parametrize("place", PLACES[:3])
def test_the_class_is_in_the_key(place):
    """The branch that the first call took would be that of a call with a tensor of another class."""
    run = eager(lambda *args: place(None, OPERATORS["a Parameter"])[0](*args))
    for kind in (*KNOWN, *reversed(KNOWN)):
        fn, args = place(CLASSES[kind](rand(2, seed=1)), OPERATORS["a Parameter"])
        assert torch.equal(run(*args), fn(*args))
    assert run.explain().count("\n") == 2


def test_the_words_of_a_class():
    """An error would not say which argument has the class, or what to pass."""
    with pytest.raises(TypeError, match=r"argument '0\.0\.k' is a tensor of class Degrees, .*x\.as_subclass\(torch\.T"):
        eager(lambda x: x)({"k": rand(2, seed=1).as_subclass(Degrees)})


def test_a_distributed_tensor():
    """A graph would compute with the part of a rank."""

    def refused(mesh: Any) -> None:
        x = DTensor.from_local(rand(2, seed=1), torch.distributed.init_device_mesh("cpu", (1,)), run_check=False)
        with pytest.raises(TypeError, match="a tensor of class DTensor"):
            eager(torch.sin)(x)

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        refused(None)
    finally:
        torch.distributed.destroy_process_group()


# --- `.data` ---


def a_result(x: Tensor) -> Any:
    """A result of an operator."""
    y = x * 1
    y.data = y.data * 3
    return y


def another_shape(x: Tensor) -> Any:
    """With a view, which keeps the old memory."""
    y = x * 1
    z = y.view(-1)
    y.data = torch.zeros(5)
    return y, z


def a_view(x: Tensor) -> Any:
    """A view of an argument."""
    y = x.view(-1)
    y.data = y.data * 3
    return y + 1


def an_attribute(x: Tensor) -> Any:
    """A tensor in an object."""
    cell = nn.Module()
    cell.v = x * 1
    cell.v.data = cell.v.data.clamp(max=0.5)
    return cell.v * 2


def a_parameter(x: Tensor) -> Any:
    """A parameter of a module that the function makes."""
    layer = nn.Linear(2, 2, bias=False, dtype=x.dtype)
    layer.weight.data = torch.eye(2, dtype=x.dtype) * 3
    return layer(x).detach()


def by_a_setter(x: Tensor) -> Any:
    """The same by its name."""
    y = x * 1
    setattr(y, "da" + "ta", x * 3)
    return y


def moved(x: Tensor) -> Any:
    """A module that is cast, which swaps or sets its parameters."""
    layer = nn.Linear(2, 2, dtype=torch.float32)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.constant_(layer.bias, 0.5)
    return layer.to(torch.float64)(x).detach()


def swapped(x: Tensor) -> Any:
    """Two tensors that become each other."""
    y, w = x * 1, x * 2
    torch.utils.swap_tensors(y, w)
    return y


def in_a_mode(x: Tensor) -> Any:
    """The same in a mode of the user's."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        return a_result(x)


def in_a_derivative(x: Tensor) -> Any:
    """The same inside a derivative."""
    return torch.autograd.grad(a_result(x.detach().requires_grad_() * 2).sum(), x)


ASSIGNS = (
    *(a_result, another_shape, a_view, an_attribute, a_parameter, by_a_setter, moved, swapped, in_a_mode),
    in_a_derivative,
)


@pytest.mark.parametrize("fn", ASSIGNS)
def test_data_that_is_assigned(fn):
    """A graph would drop the assignment: no operator records it."""
    words = "tracing failed at" if fn in (swapped, moved) else r"assigns to .data of a tensor at .*\.copy_\(\)"
    with pytest.raises(TraceError, match=words):
        eager(fn)(rand(2, seed=1))


def written(x: Tensor) -> Any:
    """Writes through `.data`."""
    y, z = x * 1, x * 1
    y.data.mul_(3)
    z.data[0] = 9
    layer = nn.Linear(2, 2, bias=False, dtype=x.dtype)
    layer.weight.data.copy_(torch.eye(2, dtype=x.dtype) * 3)
    nn.init.constant_(nn.Parameter(y), 2.0)
    return y, z + 0, layer(x).detach(), torch.zeros(2, dtype=x.dtype).set_(x * 2) + 1


def test_data_that_is_written_to():
    """What operators record would be an error."""
    x = rand(2, seed=1)
    torch.manual_seed(0)
    expected = written(x)
    torch.manual_seed(0)
    assert all(map(torch.equal, eager(written)(x), expected))
