"""Classes as nodes by a decorator: each field is a child, or static."""

from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from support.models import rand, same_bits
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import checkpoint, gather_params, optim, tree


@tree.node
class Linear:
    """No dataclass: the decorator makes it one."""

    w: Tensor
    b: Tensor | None = None
    act: Any = tree.static(torch.tanh)

    def __call__(self, x: Tensor) -> Tensor:
        """(n, in) to (n, out)."""
        y = x @ self.w
        return self.act(y if self.b is None else y + self.b)


@tree.node
class Scaled(Linear):
    """A node that inherits fields, and methods."""

    scale: Tensor = field(default_factory=lambda: rand(1, seed=7))
    power: int = tree.static(2)

    def __call__(self, x: Tensor) -> Tensor:
        """Call the base class's method."""
        return super().__call__(x) * self.scale**self.power


@tree.node
@dataclass(frozen=True)
class Net:
    """A frozen dataclass, with tied leaves."""

    layers: list[Linear]
    head: Linear
    width: int = tree.static()

    @property
    def last(self) -> Linear:
        """A child by another name."""
        return self.head

    def __call__(self, x: Tensor) -> Tensor:
        """Run all layers; a loss sees the class and its static fields."""
        assert isinstance(self, Net)
        assert self.width == 4
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def net() -> Net:
    """A network with the first layer's weights tied to the head's."""
    w = rand(4, 4, seed=0)
    layers = [Linear(w, rand(4, seed=1)), Linear(rand(4, 4, seed=2)), Scaled(rand(4, 4, seed=3), rand(4, seed=4))]
    return Net(layers, Linear(w, act=torch.sin), width=4)


def loss(p: Any, x: Tensor) -> Tensor:
    """The mean square of the results."""
    return p(x).square().mean()


PATHS = ["layers.0.w", "layers.0.b", "layers.1.w", "layers.2.w", "layers.2.b", "layers.2.scale", "head.w"]


def test_paths_and_maps_keep_classes_and_static_fields() -> None:
    """For fshard and for torch alike."""
    whole = net()
    assert tree.paths(whole) == PATHS
    assert len(pytree.tree_leaves(whole)) == len(PATHS) + 2  # torch takes None for a leaf
    for mapped in (tree.map(lambda x: x + 1, whole), pytree.tree_map(lambda x: None if x is None else x + 1, whole)):
        assert [type(x) for x in (mapped, *mapped.layers)] == [Net, Linear, Linear, Scaled]
        assert (mapped.width, mapped.head.act, mapped.layers[2].power) == (4, torch.sin, 2)
        same_bits(mapped.layers[2].scale, whole.layers[2].scale + 1)
        with pytest.raises(FrozenInstanceError):
            mapped.width = 5


def trained(mesh: Any, tx: Any, how: Any, folder: str) -> Any:
    """Parameters after two steps, from a checkpoint between them."""
    whole = net()
    plan = fshard.make_plan(whole, mesh, units=["layers.*"])
    assert list(plan.paths) == PATHS
    state, step = fshard.init_state(fshard.shard_params(whole, plan), tx), how(fshard.train_step(loss, tx))
    rank = 0 if mesh is None else mesh.get_rank()
    state, _ = step(state, rand(3, 4, seed=10 + rank))
    checkpoint.save(folder, state, 1)
    state = checkpoint.restore(folder, state)
    state, _ = step(state[0] if isinstance(state, tuple) else state, rand(3, 4, seed=20 + rank))
    return gather_params(state.params)


@pytest.mark.parametrize("how", [lambda step: step, partial(fshard.jit, backend="eager")], ids=["eager", "jit"])
@pytest.mark.parametrize("shard", [None, 1, 2, 3])
def test_a_node_trains_as_plain_torch(how: Any, shard: int | None, tmp_path: Path) -> None:
    """Steps of SGD against torch.autograd on the same object."""
    tx, whole = optim.sgd(0.1), net()
    leaves = list(dict.fromkeys(x.requires_grad_() for x in tree.leaves(whole)))
    for seed in (10, 20):
        values = [loss(whole, rand(3, 4, seed=seed + rank)) for rank in range(shard or 1)]
        grads = torch.autograd.grad(sum(values) / len(values), leaves)
        with torch.no_grad():
            for x, grad in zip(leaves, grads, strict=True):
                x -= 0.1 * grad
    job = partial(trained, tx=tx, how=how, folder=str(tmp_path))
    for found in [job(None)] if shard is None else simulated(job, shard=shard):
        assert type(found) is Net
        for x, y in zip(tree.leaves(found), tree.leaves(whole), strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-10, atol=1e-12)


def test_static_fields_are_compared() -> None:
    """A map over two trees, and a jitted function, see another static value."""
    x = torch.ones(2)
    one, other = Linear(x), Linear(x, act=torch.sin)
    with pytest.raises(ValueError, match=r"[Ee]xpected|differ|mismatch"):
        tree.map(torch.add, one, other)
    fn = fshard.jit(lambda layer: layer.act(layer.w), backend="eager")
    same_bits([fn(one), fn(other), fn(one)], [torch.tanh(x), torch.sin(x), torch.tanh(x)])


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), [torch.tensor(1)], {"a": (np.ones(1),)}])
def test_static_arrays_are_refused(value: Any) -> None:
    """They have no == that is true or false."""
    with pytest.raises(TypeError, match=r"Linear\.act: a static field holds a (Tensor|ndarray), .*make the field a"):
        tree.leaves(Linear(torch.ones(2), act=value))
    assert len(tree.leaves(Linear(torch.ones(2), act=(1, "a", np.float32(2), torch.float32)))) == 1


def test_each_class_needs_the_decorator() -> None:
    """A subclass without it is no node; its fields, too, are total with it."""
    child: Any = type("Child", (Linear,), {"__annotations__": {"more": Tensor}, "more": None})
    assert len(tree.leaves(child(torch.ones(1)))) == 1  # a leaf: the object itself
    assert tree.paths(tree.node(child)(torch.ones(1), more=torch.ones(2))) == ["w", "more"]
