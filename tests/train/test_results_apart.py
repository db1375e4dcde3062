"""What a function of parameters returns stays as it is when a donated step overwrites them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.steps import QUIET
from support.worlds import simulated
from torch import Tensor
from torch.utils import _pytree as pytree

import fshard
from fshard import optim

pytestmark = pytest.mark.filterwarnings(QUIET, "ignore:Sparse CSR")


class Marked(Tensor):
    """A subclass without anything of its own."""


class Pair(Tensor):
    """Two tensors as one, which has no storage of its own."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a: Tensor, b: Tensor):
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = [pytree.tree_map_only(Pair, lambda x, n=name: getattr(x, n), args) for name in "ab"]
        return cls(*(func(*part, **(kwargs or {})) for part in parts))


class Named(NamedTuple):
    """A tuple with names."""

    w: Any


@dataclass
class Output:
    """A class that torch has registered."""

    w: Any


pytree.register_dataclass(Output)
ROWS = 6  # of the leaf, a matrix of two columns


def as_numbers(x: Any) -> Tensor:
    return torch.as_tensor(np.asarray(x))


Alias = tuple[Callable[[Tensor], Any], Callable[[Any], Any]]
# how to get elements of a leaf without a copy, and how to read them
ALIASES: dict[str, Alias] = {
    "itself": (lambda w: w, lambda x: x),
    "detach": (lambda w: w.detach(), lambda x: x),
    "a view": (lambda w: w[1:, 0], lambda x: x),
    "data": (lambda w: w.data.t(), lambda x: x),
    "dict": (lambda w: {"a": [w[1:]]}, lambda x: x["a"][0]),
    "named tuple": (lambda w: Named(w[1:]), lambda x: x.w),
    "dataclass": (lambda w: Output(w[1:]), lambda x: x.w),
    "subclass": (lambda w: w.detach().as_subclass(Marked), lambda x: x.as_subclass(Tensor)),
    "wrapper": (lambda w: Pair(w.detach(), w.detach()[:, :1]), lambda x: x.a),
    "sparse": (lambda w: torch.sparse_coo_tensor(torch.arange(ROWS)[None], w.detach()), lambda x: x._values()),
    "compressed": (
        lambda w: torch.sparse_csr_tensor(torch.tensor([0, ROWS]), torch.arange(ROWS), w.detach()[:, 0]),
        lambda x: x.values(),
    ),
    "jagged": (
        lambda w: torch.nested.nested_tensor_from_jagged(w.detach(), torch.tensor([0, 2, ROWS])),
        lambda x: x.values(),
    ),
    "array": (lambda w: w.detach().numpy(), as_numbers),
    "array of a view": (lambda w: w.detach()[1:].numpy(), as_numbers),
    "from_numpy": (lambda w: torch.from_numpy(w.detach().numpy()), lambda x: x),
    "from_numpy of a view": (lambda w: torch.from_numpy(w.detach().numpy()[2:]), lambda x: x),
    "as_tensor": (lambda w: {"x": torch.as_tensor(w.detach().numpy()[:, 1])}, lambda x: x["x"]),
    "DLPack": (lambda w: torch.from_dlpack(w.detach()), lambda x: x),
    "DLPack of a view": (lambda w: torch.from_dlpack(w.detach()[3:]), lambda x: x),
    "DLPack, NumPy": (lambda w: np.from_dlpack(w.detach()), lambda x: torch.as_tensor(np.array(x))),
    "frombuffer": (lambda w: torch.frombuffer(memoryview(w.detach().numpy()), dtype=w.dtype), lambda x: x),
    "memoryview": (lambda w: memoryview(w.detach().numpy()), as_numbers),
    "set_": (lambda w: torch.empty(0, dtype=w.dtype).set_(w.detach().untyped_storage()), lambda x: x[: 2 * ROWS]),
    "storage": (lambda w: w.detach().untyped_storage(), lambda x: torch.tensor(x.tolist()[: 8 * ROWS])),
    "bits": (lambda w: w.detach().view(torch.int32), lambda x: x),
}


def loss_of(w: Tensor) -> Any:
    return fshard.Mean(w.square().sum(), w.numel())


def by_predict(take: Any, state: Any, wrap: Any) -> Any:
    return wrap(fshard.predict(lambda p: take(p["w"])))(state.params)


def by_evaluate(take: Any, state: Any, wrap: Any) -> Any:
    return wrap(fshard.evaluate(lambda p: (loss_of(p["w"]), [take(p["w"])]), has_aux=True))(state.params)[1][0]


def by_step(donate: bool, extra: bool, **how: Any) -> Callable[..., Any]:
    """As aux or extra of a step; a donated one writes to the parameters itself."""

    def result(take: Any, state: Any, wrap: Any) -> Any:
        if not extra:
            run = wrap(fshard.train_step(lambda p, x: (loss_of(p["w"]), take(p["w"])), TX, has_aux=True, **how))
            return run(state, torch.ones(2))[1]["aux"]
        first = fshard.init_state(state.params, TX, extra=take(torch.zeros(ROWS, 2)))
        run = wrap(fshard.train_step(lambda p, e, x: (loss_of(p["w"]), take(p["w"])), TX, with_extra=True, **how))
        return run(first, torch.ones(2))[0].extra

    how = {**how, "donate": donate}
    return result


TX = optim.sgd(0.1)
RESULTS: dict[str, Callable[..., Any]] = {
    "predict": by_predict,
    "evaluate": by_evaluate,
    "aux": by_step(False, False),
    "aux, donated": by_step(True, False),
    "aux, in the backward": by_step(True, False, in_backward=True),
    "extra": by_step(False, True),
    "extra, donated": by_step(True, True),
}
WORLDS: dict[str, Any] = {
    "one device": None,
    "whole": {"params_over": ()},
    "sharded": {},
    "gathered": {"regather": False},
}
NEW = 7.5  # what later steps write to the parameters


def kept(mesh: Any, name: str, result: str, cuts: Any, wrap: Any) -> list[Tensor]:
    """What a result says when the parameters are other ones, and what it has to say."""
    take, read = ALIASES[name]
    whole = {"w": torch.arange(float(2 * ROWS)).view(ROWS, 2).cos()}
    expected = torch.as_tensor(read(take(whole["w"].clone()))).clone()
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh, **(cuts or {}))), TX)
    rows = list(state.params.tensors)
    got = RESULTS[result](take, state, wrap)
    for row in rows:  # where a donated step has written, the next one will again
        row.fill_(NEW)
    return [torch.as_tensor(read(got)), expected]


@pytest.fixture
def _quiet() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        yield


# no tensors, whose values may not change in an extra, or other shapes in each call: errors
NO_EXTRA = {"array", "array of a view", "DLPack, NumPy", "memoryview", "storage", "set_", "jagged"}


@pytest.mark.law
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("name", ALIASES)
def test_results_are_apart(name: str, result: str, world: str) -> None:
    """An alias under a storage of its own, as torch.from_numpy makes, would change with the next donated step."""
    if result.startswith("extra") and name in NO_EXTRA:
        return
    run = lambda mesh: kept(mesh, name, result, WORLDS[world], lambda fn: fn)  # noqa: E731
    for got, expected in [run(None)] if world == "one device" else simulated(run):
        assert torch.equal(got, expected)


def test_a_result_in_memory_of_its_own_is_no_copy() -> None:
    """A large result would be in memory twice."""
    whole, made = {"w": torch.ones(3)}, list[Tensor]()
    sharded = fshard.shard_params(whole, fshard.make_plan(whole))
    got = fshard.predict(lambda p: made.append(p["w"].detach() * 2) or made[0])(sharded)
    assert got.data_ptr() == made[0].data_ptr()


# a trace has no arrays, and no memory that others could read
TRACED = ["itself", "detach", "a view", "data", "dict", "named tuple", "dataclass", "bits"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("result", [name for name in RESULTS if name != "aux, in the backward"])
@pytest.mark.parametrize("name", TRACED)
def test_results_of_graphs_are_apart(name: str, result: str, world: str) -> None:
    """A graph that returned one of its inputs would return what the next donated step writes to."""
    wrap = lambda fn: fshard.jit(fn, donate=result.endswith("donated"), backend="eager")  # noqa: E731
    run = lambda mesh: kept(mesh, name, result, WORLDS[world], wrap)  # noqa: E731
    for got, expected in [run(None)] if world == "one device" else simulated(run):
        assert torch.equal(got, expected)
