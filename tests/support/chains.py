"""Chains of blocks: parameters, losses, and what is watched of them."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fshard
from fshard.core import tree


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random numbers from a seed of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def chain_params(depth: int = 3, dim: int = 5) -> dict[str, Any]:
    """Leaves used first and last, and a stack of blocks."""
    blocks = [{"w": randn(dim, dim, seed=i), "b": randn(dim, seed=100 + i)} for i in range(depth)]
    return {"scale": randn(dim, seed=7), "blocks": blocks, "head": randn(dim, seed=8)}


def apply_block(block: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer that needs its weight in the backward, if `x` needs a gradient."""
    return torch.tanh(x @ block["w"] + block["b"])


def mean(x: torch.Tensor) -> fshard.Mean:
    """A mean by count."""
    return fshard.Mean(x.square().sum(), x.numel())


def chain(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Every unit's weights are needed in the backward."""
    x = x * p["scale"].sin()
    for block in p["blocks"]:
        x = apply_block(block, x)
    return mean(x * p["head"])


def input_first(p: Any, x: torch.Tensor) -> fshard.Mean:
    """The first block's weight is not needed in the backward: the input needs no gradient."""
    for block in p["blocks"]:
        x = apply_block(block, x)
    return mean(x * p["head"])


def shared_depth(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Units touched several times, in turns."""
    for i in (0, 1, 0, 2, 1, 0):
        x = apply_block(p["blocks"][i], x)
    return mean(x * p["head"] + p["scale"])


def again_alone(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Of unit 0 the second touch alone matters; of the others touches give sparse and dense gradients, in turns."""
    rows, blocks = torch.arange(len(x)) % 5, p["blocks"]
    unused = apply_block(blocks[0], x)
    assert unused.shape == x.shape
    x = x + torch.nn.functional.embedding(rows, blocks[1]["w"], sparse=True)
    x = apply_block(blocks[2], x)
    x = apply_block(blocks[1], x) + torch.nn.functional.embedding(rows, blocks[2]["w"], sparse=True)
    return mean(apply_block(blocks[0], x))


def backwards(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Units in the opposite of the plan's order, so what is fetched ahead is not what comes."""
    for i in reversed(range(len(p["blocks"]))):
        x = apply_block(p["blocks"][i], x)
    return mean(x * p["head"])


def held(p: Any, x: torch.Tensor) -> fshard.Mean:
    """All units held at once by the user."""
    blocks = list(p["blocks"])
    for block in [*blocks, *blocks]:
        x = apply_block(block, x)
    return mean(x * p["head"])


def sparse(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Units 0 and 2 alone; block 1 is touched, but does not matter; the root is not touched."""
    unused = apply_block(p["blocks"][1], x)
    assert unused.shape == x.shape
    return mean(apply_block(p["blocks"][2], apply_block(p["blocks"][0], x)))


def checkpointed(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Every block is recomputed in the backward, its parameters touched inside."""
    x = x * p["scale"].sin()
    for i in range(len(p["blocks"])):
        x = checkpoint(lambda y, i=i: apply_block(p["blocks"][i], y), x, use_reentrant=False)
    return mean(x * p["head"])


def checkpointed_outside(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Recomputed with parameters touched outside."""
    for block in p["blocks"]:
        x = checkpoint(apply_block, block, x, use_reentrant=False)
    return mean(x * p["head"])


def checkpointed_twice(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Checkpoints inside a checkpoint, parameters touched in both."""

    def outer(x: torch.Tensor) -> torch.Tensor:
        for i in range(len(p["blocks"])):
            x = checkpoint(lambda y, i=i: apply_block(p["blocks"][i], y), x * p["scale"].cos(), use_reentrant=False)
        return x

    return mean(checkpoint(outer, x * p["scale"].sin(), use_reentrant=False) * p["head"])


def without_gradients_first(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Every unit is touched under no_grad first, and at once again outside; some leaves are detached as well."""
    with torch.no_grad():
        target = x * p["scale"]
    x = x * p["scale"].sin()
    for block in p["blocks"]:
        with torch.no_grad():
            y = apply_block(block, x)
        x = apply_block(block, x) + y * block["b"].detach()
    return mean((x - target) * p["head"])


def without_gradients_again(p: Any, x: torch.Tensor) -> fshard.Mean:
    """The same container's leaves asked for where gradients are off, and only later where they are on."""
    with torch.no_grad():
        first = [p["blocks"][i]["w"].sum() for i in (2, 0)]
        scale = p["scale"].clone()
    x = x * p["scale"].sin() + scale * sum(first)
    for i in (0, 2, 1):
        x = apply_block(p["blocks"][i], x)
    with torch.no_grad():
        last = p["blocks"][1]["w"].sum()
    return mean(apply_block(p["blocks"][1], x) * p["head"] + last)


def tied(p: Any, x: torch.Tensor) -> fshard.Mean:
    """A leaf used at both ends."""
    x = x @ p["embed"]
    for block in p["blocks"]:
        x = apply_block(block, x)
    return mean(x @ p["head"].t())


def views(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Views of views: transposed, sliced, reversed, diagonal, expanded."""
    for block in p["blocks"]:
        w, b = block["w"], block["b"]
        x = torch.tanh(x @ w.t()[:, 1:].flip(1) @ w[:-1] + b.expand(2, -1)[1] * w.diagonal().exp() + b[::2].sum().sin())
    return mean(x * p["head"])


def penalty(p: Any, x: torch.Tensor) -> fshard.Mean:
    """A gradient taken, and differentiated, inside the loss."""
    x = x.clone().requires_grad_()
    y = x * p["scale"].sin()
    for block in p["blocks"]:
        y = apply_block(block, y)
    (slope,) = torch.autograd.grad((y * p["head"]).sum(), x, create_graph=True)
    return fshard.Mean(y.square().sum() + slope.square().sum(), y.numel())


def whole_tree(p: Any, x: torch.Tensor) -> fshard.Mean:
    """The tree flattened inside the loss: every unit gathered."""
    return mean(sum(leaf.sin().sum() for leaf in tree.leaves(p)) * x)


def mixed(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Several dtypes, a scalar, an empty leaf and an integer one."""
    y = (x @ p["w"]).float() * p["half"].float() + p["scalar"] + p["empty"].sum()
    z = y[:, p["order"]].to(torch.complex64) @ p["complex"]
    return fshard.Mean((z * z.conj()).real.sum(), z.numel())


def mixed_params() -> dict[str, Any]:
    """Parameters of several dtypes and shapes."""
    return {
        "w": randn(5, 5),
        "half": randn(5, seed=1, dtype=torch.bfloat16),
        "scalar": randn(seed=2, dtype=torch.float32),
        "empty": torch.zeros(0, 3),
        "order": torch.tensor([4, 2, 0, 1, 3]),
        "complex": randn(5, 3, seed=3, dtype=torch.complex64),
    }


def tied_params() -> dict[str, Any]:
    """One tensor at both ends."""
    params = {"embed": randn(5, 5, seed=9), "blocks": chain_params()["blocks"]}
    return {**params, "head": params["embed"]}


CHAIN: dict[str, Any] = {"params": chain_params, "units": ["blocks.*"]}

CASES: dict[str, dict[str, Any]] = {
    "chain": {**CHAIN, "loss": chain},
    "one unit": {"params": chain_params, "loss": chain},
    "a unit per leaf": {**CHAIN, "loss": chain, "units": ["scale", "head", "blocks.*.*"]},
    "units by size": {**CHAIN, "loss": chain, "units": 20},
    "input first": {**CHAIN, "loss": input_first},
    "shared across depth": {**CHAIN, "loss": shared_depth},
    "touched again alone": {**CHAIN, "loss": again_alone},
    "backwards": {**CHAIN, "loss": backwards},
    "held by the user": {**CHAIN, "loss": held},
    "units not touched": {**CHAIN, "loss": sparse},
    "checkpointed": {**CHAIN, "loss": checkpointed},
    "checkpointed outside": {**CHAIN, "loss": checkpointed_outside},
    "checkpointed twice": {**CHAIN, "loss": checkpointed_twice},
    "frozen first, checkpointed": {**CHAIN, "loss": checkpointed, "frozen": ["scale", "blocks.0.*"]},
    "no gradients first": {**CHAIN, "loss": without_gradients_first},
    "no gradients again": {**CHAIN, "loss": without_gradients_again},
    "frozen leaf": {**CHAIN, "loss": chain, "frozen": ["blocks.*.b", "blocks.1.w"]},
    "whole leaf": {**CHAIN, "loss": chain, "whole": ["blocks.*.b"]},
    "views": {**CHAIN, "loss": views},
    "gradient inside": {**CHAIN, "loss": penalty},
    "whole tree": {**CHAIN, "loss": whole_tree},
    "tied across units": {"params": tied_params, "loss": tied, "units": ["embed", "blocks.*", "head"]},
    "tied to the root": {"params": tied_params, "loss": tied, "units": ["blocks.*", "head"]},
    "dtypes": {"params": mixed_params, "loss": mixed, "units": ["w", "half"]},
}


def batch_of(rank: int) -> torch.Tensor:
    """Different data on every rank, and a different number of rows."""
    return randn(2 + rank, 5, seed=1000 + rank)


def by_path(x: Any) -> dict[str, torch.Tensor]:
    """The leaves of a tree by their paths; None is no leaf."""
    flat, spec = tree.flatten(x)
    return dict(zip(tree.leaf_paths(spec), flat, strict=True))


def make(mesh: Any, case: dict[str, Any], **strategy: Any) -> fshard.Sharded:
    """The parameters of a case, sharded."""
    params = case["params"]()
    chosen = {key: case[key] for key in ("units", "frozen", "whole") if key in case}
    return fshard.shard_params(params, fshard.make_plan(params, mesh, **chosen, **strategy))


TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2e-2}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: Any) -> None:
    """Equal as far as the dtype goes, relative to the largest element."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    if expected.numel():
        error = (actual - expected).abs().max()
        assert error <= TOLERANCE.get(expected.dtype, 1e-5) * max(1.0, float(expected.abs().max())), (what, error)


class Watch(TorchDispatchMode):
    """The storages of `nbytes` bytes that operations inside the block make: how many are alive, and were at most."""

    def __init__(self, nbytes: int):
        super().__init__()
        self.nbytes, self.peak, self.refs = nbytes, 0, list[StorageWeakRef]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        fresh = [x.untyped_storage() for x in tree.leaves(out) if isinstance(x, torch.Tensor)]
        fresh = [x for x in fresh if x._cdata not in given and x.nbytes() == self.nbytes]
        self.refs += [StorageWeakRef(x) for x in fresh]
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self) -> int:
        """How many are alive now."""
        self.refs = [ref for ref in self.refs if not ref.expired()]
        return len(self.refs)


class Probe(torch.autograd.Function):
    """The identity, whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call()
        return grad, None
