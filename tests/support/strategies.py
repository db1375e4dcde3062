"""Strategies for Hypothesis: trees of parameters, meshes, plans, optimizers, policies, losses and their batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fshard.core import tree
from fshard.core.lazy import Branch
from fshard.core.losses import Mean, Sum
from fshard.optim import matrix, schedules
from fshard.plan.leaves import first_places
from fshard.plan.precision import Policy
from fshard.update import base, optimizers
from fshard.update.transforms import by_label, chain

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)

# The sharding strategies of FSDP and ZeRO as arguments of make_plan. Hypothesis shrinks to the first, the simplest.
PARTITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"regather": False},
    {"params_over": ()},
    {"params_over": (), "grads_over": ()},
    {"params_over": (), "grads_over": (), "state_over": ()},
    {"state_over": ("replicate", "shard")},
    dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard")),
)
_KEYS = ("w", "b", "10", "2", "blocks", "head")
_WIDTH = 3


@st.composite
def tensors(draw: Any, dtypes: Sequence[torch.dtype] = (torch.float64,), bits: bool = False) -> Tensor:
    """Tensors of up to three dimensions, possibly empty: normally distributed, or with `bits` random bits (also NaNs).

    >>> from hypothesis import find
    >>> find(tensors(), lambda x: x.numel() == 2).shape
    torch.Size([2])
    """
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype, generator = draw(st.sampled_from(dtypes)), torch.Generator().manual_seed(draw(st.integers(0, 999)))
    if bits and dtype != torch.bool:
        numel = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(256, (numel,), dtype=torch.uint8, generator=generator, device="cpu")
        return data.view(dtype).reshape(shape)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(shape, dtype=wide, generator=generator, device="cpu")
    return values > 0 if dtype == torch.bool else (values if dtype.is_floating_point else values * 9).to(dtype)


@st.composite
def trees(draw: Any, dtypes: Sequence[torch.dtype] = (torch.float64,), max_leaves: int = 6, bits: bool = False) -> Any:
    """Trees of parameters: dicts, lists, tuples, empty subtrees, tied leaves. At least one leaf is floating-point.

    `dtypes` are the dtypes of leaves (`DTYPES` has one of each kind); `bits` has the same meaning as in `tensors`.

    >>> from hypothesis import find
    >>> find(trees(), lambda x: isinstance(x, dict) and len(x) == 2)
    {'w': tensor(1.5410, dtype=torch.float64), 'rest': None}
    """
    nodes = st.recursive(
        st.none() | tensors(dtypes, bits),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
        ),
        max_leaves=max_leaves,
    )
    drawn = draw(nodes)
    flat, spec = tree.flatten(drawn)
    if len(flat) > 1 and draw(st.booleans()):
        flat[draw(st.integers(1, len(flat) - 1))] = flat[0]
    drawn = tree.unflatten(spec, flat)
    if any(x.is_floating_point() for x in flat):
        return drawn
    return {"w": draw(tensors([d for d in dtypes if d.is_floating_point], bits)), "rest": drawn}


def meshes(max_ranks: int = 4) -> st.SearchStrategy[dict[str, int]]:
    """Mesh sizes, as dicts of keyword arguments of `testing.simulate`, with at most `max_ranks` ranks.

    >>> from hypothesis import find
    >>> find(meshes(), lambda sizes: sizes["replicate"] > 1)
    {'shard': 1, 'replicate': 2}
    """
    sizes = [{"shard": s, "replicate": r} for r in range(1, max_ranks + 1) for s in range(1, max_ranks // r + 1)]
    return st.sampled_from(sorted(sizes, key=lambda size: (size["shard"] * size["replicate"], size["replicate"])))


def _some(paths: Sequence[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(paths), unique=True, max_size=3) if paths else st.just([])


@st.composite
def plans(draw: Any, params: Any, policies: st.SearchStrategy[Any] | None = None) -> dict[str, Any]:
    """Arguments of `make_plan` for a tree and a mesh with the axes `shard` and `replicate`, except wire formats.

    The first floating-point leaf, and what is tied to it, is never frozen. Keys of `params` must not contain dots or
    wildcards. `policies` is the strategy for the policy; None draws no policy.

    >>> from hypothesis import find
    >>> find(plans({"w": torch.ones(2)}), lambda plan: "units" in plan and "regather" in plan)
    {'regather': False, 'units': 1}
    """
    flat, spec = tree.flatten(params)
    subtrees = [".".join(path) for path, node, _ in tree.walk(spec) if path and node.num_leaves]
    leaves = [path for path in tree.leaf_paths(spec) if path]
    origins = dict(zip(tree.leaf_paths(spec), first_places(flat, tree.leaf_paths(spec)), strict=True))
    trained = next((origins[path] for path, x in zip(origins, flat, strict=True) if x.is_floating_point()), None)
    kept = dict(draw(st.sampled_from(PARTITIONS)))
    units = draw(st.none() | st.integers(1, 20) | _some(subtrees))
    chosen: dict[str, Any] = {"units": units or None}
    chosen |= {name: draw(_some(leaves)) for name in ("whole", "offload")}
    chosen["frozen"] = draw(_some([path for path in leaves if origins[path] != trained]))
    chosen |= {"together": draw(st.booleans()), "block": draw(st.sampled_from([None, 2, 3]))}
    chosen["bucket"] = draw(st.sampled_from([None, 40, 400]))  # bytes
    chosen["policy"] = None if policies is None else draw(policies)
    return kept | {name: value for name, value in chosen.items() if value}


@dataclass(frozen=True)
class Named:
    """A transformation with a readable repr: `make()` returns the transformation, `text` is the code that makes it."""

    text: str
    make: Callable[[], base.Transform]

    def __repr__(self) -> str:
        return self.text


_CHOSEN = (
    Named("sgd(0.1)", lambda: optimizers.sgd(0.1)),
    Named("sgd(0.1, momentum=0.9, nesterov=True)", lambda: optimizers.sgd(0.1, momentum=0.9, nesterov=True)),
    Named("adamw(0.01)", lambda: optimizers.adamw(0.01)),
    Named("adam(0.01, weight_decay=0.1)", lambda: optimizers.adam(0.01, weight_decay=0.1)),
    Named("rmsprop(0.01, momentum=0.5)", lambda: optimizers.rmsprop(0.01, momentum=0.5)),
    Named("adagrad(0.1)", lambda: optimizers.adagrad(0.1)),
    Named(
        "chain(clip_by_leaf_norm(0.1), sgd(linear(0.1, 0.2, 3)))",
        lambda: chain(matrix.clip_by_leaf_norm(0.1), optimizers.sgd(schedules.linear(0.1, 0.2, 3))),
    ),
    Named(
        "by_label(matrices: adamw(0.01), others: sgd(0.1))",
        lambda: by_label(
            {"matrix": optimizers.adamw(0.01), "other": optimizers.sgd(0.1)},
            lambda path, leaf: "matrix" if leaf.ndim > 1 else "other",
        ),
    ),
    Named("lamb(0.01)", lambda: matrix.lamb(0.01)),
)


def _others() -> Iterator[Named]:
    """Yield every other function of `optimizers` that makes an optimizer, with its defaults at a rate of 0.01."""
    chosen = {named.text.partition("(")[0] for named in _CHOSEN}
    for name, make in vars(optimizers).items():
        is_public = inspect.isfunction(make) and make.__module__ == optimizers.__name__ and not name.startswith("_")
        # The sign that lion takes turns with a rounding of a gradient near zero: no two correct runs would agree.
        if is_public and make.__annotations__.get("return") == "Transform" and name not in chosen | {"lion"}:
            yield Named(f"{name}(0.01)", partial(make, 0.01))


_TRANSFORMS = (*_CHOSEN, *_others())


def transforms() -> st.SearchStrategy[Named]:
    """Transformations for leaves of real dtypes: `drawn.make()` returns one, and `repr(drawn)` names it.

    >>> from hypothesis import find
    >>> find(transforms(), lambda drawn: True)
    sgd(0.1)
    """
    return st.sampled_from(_TRANSFORMS)


def _long_path(path: str, subtree: Any) -> bool:
    return isinstance(subtree, Tensor) and subtree.is_floating_point() and len(path) > 2


@st.composite
def policies(draw: Any) -> Policy:
    """Policies with drawn storage, compute, reduce and gradient dtypes, and sometimes an override for long paths.

    >>> from hypothesis import find
    >>> find(policies(), lambda policy: policy.compute is not None)
    Policy('compute=f32,cast_inputs=no')
    """
    dtype = st.sampled_from([None, "f32", "bf16", "f64"])
    first = {name: draw(dtype) for name in ("storage", "compute", "reduce", "grads")}
    override = draw(st.none() | st.builds(Policy, compute=dtype, reduce=dtype))
    return Policy(
        **first, cast_inputs=draw(st.booleans()), overrides=() if override is None else ((_long_path, override),)
    )


def _touched(x: Any) -> Iterator[Tensor]:
    """Yield the floating-point and complex leaves of a tree, gathering each unit of a lazy tree when reached."""
    if isinstance(x, Branch):
        branch: Any = x
        for child in branch.values() if hasattr(branch, "values") else branch:
            yield from _touched(child)
    else:
        yield from (leaf for leaf in tree.leaves(x) if leaf.is_floating_point() or leaf.is_complex())


@dataclass(frozen=True)
class Loss:
    """A smooth loss of any tree and of a batch that `batches` draws. It depends on every leaf, or two of three."""

    kind: str  # "mean", "sum", "plain"
    sparing: bool  # ignores every third leaf
    twice: bool  # reads every leaf twice
    dropout: bool

    def __call__(self, params: Any, batch: Any) -> Any:
        """Return the loss as a Mean, a Sum or a 0-d tensor, according to `kind`."""
        x = batch["x"].double()  # (rows, _WIDTH)
        hidden = x.sum(1) * 0
        for _ in range(1 + self.twice):
            for i, leaf in enumerate(_touched(params)):
                if not (self.sparing and i % 3 == 2):
                    hidden = hidden + _term(leaf, x[:, i % _WIDTH, None])
        if self.dropout:
            hidden = torch.nn.functional.dropout(hidden, 0.3)
        total = (hidden.square() + hidden).sum()
        return {"mean": Mean(total, len(x)), "sum": Sum(0.1 * total), "plain": total / len(x)}[self.kind]


def _term(leaf: Tensor, x: Tensor) -> Tensor:
    flat = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).reshape(-1)
    return torch.tanh(flat * x.to(flat.dtype)).double().sum(1) / max(len(flat), 1)


def losses() -> st.SearchStrategy[Loss]:
    """Loss functions of any tree of parameters, for batches that `batches` draws; see `Loss`.

    >>> from hypothesis import find
    >>> find(losses(), lambda loss: loss.dropout)
    Loss(kind='mean', sparing=False, twice=False, dropout=True)
    """
    return st.builds(Loss, st.sampled_from(["mean", "sum", "plain"]), st.booleans(), st.booleans(), st.booleans())


@st.composite
def batches(draw: Any, num_ranks: int, num_steps: int = 2, accumulate: int = 1, even: bool = False) -> Any:
    """For every step a list with one batch per rank. Batches have different numbers of rows, at least `accumulate`.

    With `even` the numbers of rows are multiples of `accumulate`.

    >>> from hypothesis import find
    >>> [[len(batch["x"]) for batch in step] for step in find(batches(3), lambda drawn: True)]
    [[1, 1, 1], [1, 1, 1]]
    """
    rows = st.integers(1, 3).map(lambda n: n * accumulate) if even else st.integers(accumulate, accumulate + 3)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def one() -> dict[str, Tensor]:
        return {"x": torch.randn(draw(rows), _WIDTH, generator=generator, dtype=torch.float64, device="cpu")}

    return [[one() for _ in range(num_ranks)] for _ in range(num_steps)]
