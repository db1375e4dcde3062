"""What the tests share: strategies, worlds, a registry of trees, a small language model and its data."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

import fshard
from fshard.core.tree import Tree

from .wires import FIRST

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "zero1": {"params_over": (), "grads_over": ()},
    "zero2": {"params_over": ()},
    "keep": {"regather": False},
    "full": {},  # on replicate x shard: hybrid
    "wide_state": {"state_over": ("replicate", "shard")},
    "wide": dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard")),
}
# and what travels as something else than it is kept as
WIRED: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    **{name: {"param_wire": wire, "grad_wire": wire} for name, wire in FIRST.items()},
    "together": {"together": True, "policy": "compute=bf16; blocks.*.scale: compute=f32"},
    "half": {"policy": "compute=f16"},
    "bf16": {"policy": "compute=bf16"},
}
NARROW = [name for name in STRATEGIES if not name.startswith("wide")]  # those that need no axis `replicate`
WORLDS = {"1": (1, 1), "2": (1, 2), "3": (1, 3), "4": (1, 4), "2x2": (2, 2)}  # replicate, shard


class Pair(NamedTuple):
    """A NamedTuple of a user's."""

    left: Tree
    right: Tree


@dataclass
class Linear:
    """A dataclass that optree alone knows."""

    weight: Tree
    bias: Tree


@dataclass
class Norm:
    """A dataclass that torch.utils._pytree alone knows."""

    scale: Tree
    shift: Tree


_register: Any = optree.register_pytree_node  # whose types want a Collection
_register(
    Linear,
    lambda x: ((x.weight, x.bias), None, ("weight", "bias")),
    lambda _, children: Linear(*children),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)
pytree.register_dataclass(Norm)


def counting(*shape: int, dtype: torch.dtype = torch.float32, start: int = 1) -> Tensor:
    """Small whole numbers, exact in every dtype: -8 to 8."""
    numel = torch.Size(shape).numel()
    return (torch.arange(start, start + numel) % 17 - 8).to(dtype).reshape(shape)


def _tied() -> Tree:
    shared = counting(5, 3)
    return {"embed": shared, "blocks": [{"w": counting(2)}, {"w": shared}], "head": shared}


def _dtypes() -> Tree:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
    return {str(dtype): counting(3, 3, dtype=dtype, start=i) for i, dtype in enumerate(kinds)}


TREES = {
    "leaf": lambda: counting(7),
    "scalar": lambda: counting(),
    "order": lambda: {str(i): counting(i + 1, start=i) for i in (1, 2, 10, 3)},
    "integer_keys": lambda: {i: counting(3, start=i) for i in (1, 2, 10, 3)},
    "nested": lambda: {"blocks": [{"w": counting(3, 5), "b": counting(5)} for _ in range(4)], "head": counting(2, 3)},
    "tuples": lambda: (counting(2), [counting(3), (counting(1), counting())]),
    "named": lambda: Pair(counting(4), Pair(counting(5), {"x": counting()})),
    "classes": lambda: [Linear(counting(3, 4), counting(3)), Norm(counting(5), counting()), Linear(counting(1), None)],
    "ordered": lambda: OrderedDict(z=counting(3), a=deque([counting(2), counting(5)])),
    "nothing": lambda: {"a": None, "b": counting(3), "c": {}, "d": [], "e": (None, counting(2))},
    "empty_leaves": lambda: {"a": counting(0, 3), "b": [counting(0), counting(2)], "c": counting(4, 0)},
    "dtypes": _dtypes,
    "integers": lambda: {
        "w": counting(5),
        "n": counting(3, dtype=torch.int64),
        "on": counting(4) > 0,
        "m": counting(2),
    },
    "strides": lambda: {"t": counting(3, 5).T, "s": counting(9)[::2], "e": counting(1, 3).expand(4, 3)},
    "tied": _tied,
}


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same for the same seed and shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def lm_params(dtype: torch.dtype = torch.float64) -> Tree:
    """A language model: odd sizes, scalars, leaves smaller than a world, one unused, a head tied to the embedding."""

    def block(seed: int) -> Tree:
        shapes = {"w": (5, 7), "b": (7,), "out": (7, 5), "scale": ()}
        return {name: 0.4 * rand(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}

    embed = 0.5 * rand(11, 5, seed=1, dtype=dtype)
    tail = Pair(rand(1, seed=2, dtype=dtype), rand(3, seed=3, dtype=dtype))
    return {
        "embed": embed,
        "blocks": [block(10), block(20)],
        "unused": rand(3, seed=4, dtype=dtype),
        "tail": tail,
        "head": embed,
    }


LM_UNITS = ["blocks.*", "tail", "unused"]


def lm_batch(step: int, rank: int) -> dict[str, Tensor]:
    """One rank's tokens; rows and counts differ by rank, and a third of rank 1's rows count nothing."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = 6 + 3 * rank
    tokens, targets = (torch.randint(11, (rows, 4), generator=generator) for _ in range(2))
    mask = (torch.rand(rows, 4, generator=generator) < 0.6).double()
    mask[:, 0] = 1
    mask[: rows // 3] *= rank != 1
    return {"tokens": tokens, "targets": targets, "mask": mask}


def lm_total(params: Tree, batch: Tree) -> tuple[Tensor, Tensor]:
    """The sum of the tokens' losses, and how many tokens count."""
    x = params["embed"][batch["tokens"]]
    for block in params["blocks"]:
        x = x + block["scale"] * (torch.tanh(x @ block["w"] + block["b"]) @ block["out"])
    left, right = params["tail"]
    x = x * (1 + left) + F.pad(right, (0, 2))
    losses = F.cross_entropy((x @ params["head"].T).flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return (losses * batch["mask"].flatten()).sum(), batch["mask"].sum()


def mean_loss(params: Tree, batch: Tree) -> fshard.Mean:
    """The mean over all tokens that count."""
    return fshard.Mean(*lm_total(params, batch))


def sum_loss(params: Tree, batch: Tree) -> fshard.Sum:
    """A small multiple of the sum over all tokens that count."""
    return fshard.Sum(0.02 * lm_total(params, batch)[0])


def plain_loss(params: Tree, batch: Tree) -> Tensor:
    """The mean over this rank's own tokens."""
    total, count = lm_total(params, batch)
    return total / count.clamp(min=1)


def padding(x: fshard.Sharded) -> list[Tensor]:
    """The elements of a Sharded's tensors that belong to no leaf."""
    covered = [torch.zeros(len(t), dtype=torch.bool) for t in x.tensors]
    starts = {t.untyped_storage().data_ptr(): (i, t.storage_offset()) for i, t in enumerate(x.tensors)}
    for view in x.local_views().values():
        if view.numel():
            i, start = starts[view.untyped_storage().data_ptr()]
            begin = view.storage_offset() - start
            covered[i][begin : begin + view.numel()] = True
    return [t[~mask] for t, mask in zip(x.tensors, covered, strict=True)]


def same_bits(a: Tree, b: Tree) -> bool:
    """Two trees of one structure whose tensors have the same dtypes, shapes and bits."""
    (xs, one), (ys, other) = fshard.tree.flatten(a), fshard.tree.flatten(b)
    return one == other and all(map(_same_tensor, xs, ys))


def _same_tensor(x: object, y: object) -> bool:
    if not isinstance(x, Tensor):
        return bool(x == y)
    if not isinstance(y, Tensor) or (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    return torch.equal(*(t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (x, y)))


def reads_alike(view: Tree, whole: Tree) -> None:
    """A sharded or lazily gathered tree reads like the plain one: keys, items, attributes, slices, iteration."""
    if whole is None:
        assert view is None
    elif isinstance(whole, Tensor):
        assert same_bits(fshard.gather_params(view), whole)
    elif isinstance(whole, dict):
        assert list(view) == list(view.keys()) == list(whole)
        assert (len(view), view.get("no such key", 7), "no such key" in view) == (len(whole), 7, False)
        assert all(key in view for key in whole)
        for (key, child), value in zip(view.items(), view.values(), strict=True):
            for part in (child, value, view[key], view.get(key)):
                reads_alike(part, whole[key])
    elif isinstance(whole, list | tuple | deque):
        assert len(view) == len(whole)
        for i, (part, child) in enumerate(zip(view, whole, strict=True)):
            for again in (part, view[i], view[i - len(whole)]):
                reads_alike(again, child)
        if isinstance(whole, list):
            assert len(view[1:]) == len(whole[1:])
            for part, child in zip([*view[1:], *view[::-2]], [*whole[1:], *whole[::-2]], strict=True):
                reads_alike(part, child)
    if isinstance(whole, Pair | Linear | Norm):
        for name in getattr(whole, "_fields", vars(whole) if isinstance(whole, Linear | Norm) else ()):
            reads_alike(getattr(view, name), getattr(whole, name))
