"""Every transformation against its authority (torch.optim, optax, TorchOpt), over plain, sharded and ZeRO's parameters.

A row of `CASES` is a transformation and a function that gives its authority's displacement: the parameters after
`STEPS` updates less the first ones, in float64. A new row is one line, and is run in every way.
"""

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
import torch.optim as to
from models import WORLDS
from optimizers import TRANSFORMS
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, OneCycleLR
from worlds import gloo, simulated

import fshard
from fshard import optim

STEPS = 6
CLOSE = 1e-11
MILESTONES = {2: 0.5, 4: 0.5}  # of the rates: where they change, and by what
Make = Callable[..., Any]
Keep = Callable[[Tensor], bool]
Authority = Callable[[], list[Tensor]]


def tree(seed: int) -> Any:
    """Matrices, vectors, a 0-d leaf, a 3-d leaf and one without elements; sizes that 2, 3 and 4 do not divide."""
    random = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    blocks = [{"tall": leaf(4, 3), "bias": leaf(4)} for _ in range(2)]
    return {"wide": leaf(5, 7), "blocks": blocks, "scale": leaf(), "cube": leaf(2, 3, 5), "none": leaf(0, 3)}


START = tree(0)
GRADS = [tree(step) for step in range(1, STEPS + 1)]


def kept(x: Any, keep: Keep) -> Any:
    """A tree with some leaves alone."""
    if isinstance(x, dict):
        return {name: kept(part, keep) for name, part in x.items() if not isinstance(part, Tensor) or keep(part)}
    return [kept(part, keep) for part in x] if isinstance(x, list) else x


def displacement(params: Any, start: Any = START) -> list[Tensor]:
    """Of every leaf, from where it began."""
    return [after.detach() - before for after, before in zip(*map(optree.tree_leaves, (params, start)), strict=True)]


# ---- the authorities


def full(leaf: Tensor) -> bool:
    """Leaves with elements, as some classes of torch want them."""
    return leaf.numel() > 0


def matrix(leaf: Tensor) -> bool:
    """Matrices, as torch's Muon wants them."""
    return leaf.ndim == 2


def by_torch(
    cls: Make,
    keep: Keep = full,
    rest: Make | None = None,
    before: Make | None = None,
    rate: Make | None = None,
    dtype: torch.dtype = torch.float32,
    **kw: Any,
) -> Authority:
    """A class of torch.optim on the leaves to `keep`, and `rest` on the others.

    `before` clips the gradients of leaves, `rate(optimizer)` is a scheduler, `dtype` that of the optimizer's scalars.
    """

    def run() -> list[Tensor]:
        params = optree.tree_map(lambda x: x.clone().requires_grad_(), START)
        leaves = optree.tree_leaves(params)
        optimizers = [cls([x for x in leaves if keep(x)], **kw)]
        if rest is not None:
            optimizers.append(rest([x for x in leaves if not keep(x)]))
        schedulers = [rate(optimizer) for optimizer in optimizers if rate]
        for grads in GRADS:
            for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
                leaf.grad = grad.clone()
            if before:
                before([x for x in leaves if full(x)])
            for each in (*optimizers, *schedulers):
                each.step()
        return displacement(params)

    def with_dtype() -> list[Tensor]:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return run()
        finally:
            torch.set_default_dtype(usual)

    return with_dtype


@functools.cache
def libraries() -> tuple[Any, Any]:
    """jax, in 64 bits, and optax: loaded where they are asked for, so not by the processes of `gloo`."""
    import jax
    import optax
    import optax.contrib

    jax.config.update("jax_enable_x64", True)
    return jax, optax


def run_optax(make: Make) -> tuple[Any, Any]:
    """State and parameters after the updates of `make(optax)`."""
    jax, optax = libraries()

    def to_jax(x: Any) -> Any:
        return optree.tree_map(lambda leaf: jax.numpy.asarray(leaf.numpy()), x)

    tx, params = make(optax), to_jax(START)
    state = tx.init(params)
    update = jax.jit(tx.update, compiler_options={"xla_backend_optimization_level": 0})  # it runs a few times
    for grads in GRADS:
        updates, state = update(to_jax(grads), state, params)
        params = optax.apply_updates(params, updates)
    return state, params


def to_torch(x: Any) -> Any:
    """A tree of jax's arrays as tensors."""
    return optree.tree_map(lambda leaf: torch.from_numpy(np.array(leaf)), x)


def by_optax(make: Make) -> Authority:
    """A transformation of optax, `make(optax)`."""
    return lambda: displacement(to_torch(run_optax(make)[1]))


# ---- rows of the table


class Case(NamedTuple):
    """Our transformation, its authority's displacement, and the leaves it is run on."""

    ours: optim.Transform
    authority: Authority
    keep: Keep = lambda leaf: True


def both(make: Make) -> Case:
    """What is written alike with fshard.optim and with optax."""
    return Case(make(optim), by_optax(make))


def grid(**values: list[Any]) -> list[dict[str, Any]]:
    """All combinations."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def named(family: str, cases: list[Case]) -> dict[str, Case]:
    """The rows of one family: family/0, family/1, ..."""
    return {f"{family}/{i}": case for i, case in enumerate(cases)}


OUR_NAMES = {
    "decoupled_weight_decay": "decoupled",
    "adjust_lr_fn": "adjust_lr",
    "learning_rate": "lr",
    "weight_lr_power": "weight_power",
}


def our_names(kw: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of torch or optax as ours."""
    found = {OUR_NAMES.get(name, name): value for name, value in kw.items() if name != "betas"}
    return found | (dict(zip(("b1", "b2"), kw["betas"], strict=True)) if "betas" in kw else {})


def torch_cases(make: Make, cls: Make, kws: list[dict[str, Any]], **fixed: Any) -> dict[str, Case]:
    """A transformation over a grid, and at last with a tensor and with a schedule for a rate."""
    cases = [Case(make(**our_names(kw)), by_torch(cls, **kw, **fixed)) for kw in kws]
    last, lr = our_names(kws[-1]), kws[-1]["lr"]
    tensor, schedule = torch.tensor(lr, dtype=torch.float64), optim.piecewise(lr, MILESTONES)
    scheduled = by_torch(cls, rate=lambda o: MultiStepLR(o, [*MILESTONES], 0.5), **kws[-1], **fixed)
    rates = [Case(make(**last | {"lr": tensor}), cases[-1].authority), Case(make(**last | {"lr": schedule}), scheduled)]
    return named(make.__name__, cases + rates)


def optax_cases(make: Make, theirs: Make, kws: list[dict[str, Any]], schedule: bool = True) -> dict[str, Case]:
    """A transformation over a grid, and at last with a schedule. `theirs(optax)` is a function."""
    cases = [Case(make(**our_names(kw)), by_optax(lambda o, kw=kw: theirs(o)(**kw))) for kw in kws]
    if schedule:
        ours, last = our_names(kws[-1]) | {"lr": optim.piecewise(0.1, MILESTONES)}, kws[-1]
        scheduled = by_optax(
            lambda o: theirs(o)(**last | {"learning_rate": o.piecewise_constant_schedule(0.1, MILESTONES)})
        )
        cases.append(Case(make(**ours), scheduled))
    return named(make.__name__, cases)


def class_cases(cls: Any, *kws: dict[str, Any], keep: Keep = full) -> dict[str, Case]:
    """A class of torch.optim as a transformation, against itself."""
    cases = [Case(optim.from_torch(cls, **kw), by_torch(cls, keep, **kw), keep) for kw in kws]
    return named(f"from_torch-{cls.__name__}", cases)


def clip_cases(make: Make, clip: Make) -> dict[str, Case]:
    """Gradients clipped before SGD, always, at times and never; `clip(leaves, max_norm, p)` is torch's."""
    kws = grid(max_norm=[1e3, 7.0, 0.5], p=[1, 3, float("inf"), 2])
    ours = [optim.chain(make(**kw), optim.sgd(0.1)) for kw in kws]
    theirs = [by_torch(to.SGD, lr=0.1, before=functools.partial(clip, **kw)) for kw in kws]
    return named(make.__name__, [*map(Case, ours, theirs)])


def clip_all(leaves: list[Tensor], max_norm: float, p: float) -> None:
    """torch's clip_grad_norm_."""
    clip_grad_norm_(leaves, max_norm, p)


def clip_each(leaves: list[Tensor], max_norm: float, p: float) -> None:
    """torch's clip_grad_norm_, leaf by leaf."""
    for leaf in leaves:
        clip_grad_norm_([leaf], max_norm, p)


def muon_case(nesterov: bool, adjust_lr: str | None) -> Case:
    """Muon in float64 against optax's, without its correction of m's bias, which matters to Nesterov's sum.

    The sum is made before, by a transformation of optax's shape. optax has matrices as (in, out).
    """

    def theirs(optax: Any) -> Any:
        jax, muon = libraries()[0], optax.contrib.muon
        axes, rms = optax.contrib._muon.MuonDimensionNumbers(1, 0), 0.2 if adjust_lr == "match_rms_adamw" else None

        def mean(m: Any, g: Any) -> Any:
            return jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g if g.ndim == 2 else g, m, g)

        def update(grads: Any, m: Any, params: Any = None) -> tuple[Any, Any]:
            m = mean(m, grads)
            return (mean(m, grads) if nesterov else m), m

        def which(params: Any) -> Any:
            return jax.tree.map(lambda x: axes if x.ndim == 2 else None, params)

        momentum = optax.GradientTransformation(lambda params: jax.tree.map(jax.numpy.zeros_like, params), update)
        kw = {"beta": 0.0, "nesterov": False, "eps": 1e-30, "weight_decay": 0.1, "consistent_rms": rms}
        return optax.chain(momentum, muon(0.1, muon_weight_dimension_numbers=which, **kw))

    rest = optim.adamw(0.1, eps=1e-30, weight_decay=0)
    kw = {"eps": 1e-30, "adjust_lr": adjust_lr, "dtype": torch.float64, "rest": rest}
    return Case(optim.muon(0.1, 0.1, 0.9, nesterov, **kw), by_optax(theirs))


MATRICES = optree.tree_map(lambda leaf: leaf.ndim > 1, START)
WIDE = {"wide": True, "**": False}
ON = [0.0, 0.1]  # weight decays
ADAM = grid(lr=[0.1], betas=[(0.0, 0.5), (0.9, 0.999), (0.7, 0.95)], eps=[1e-2, 1e-8], weight_decay=ON)
SGD = grid(lr=[0.1], momentum=[0], weight_decay=ON) + grid(lr=[0.1], momentum=[0.9], nesterov=[0, 1], weight_decay=ON)
NADAM = grid(
    lr=[0.1],
    betas=[(0.5, 0.9), (0.9, 0.999)],
    momentum_decay=[4e-3, 0.1],
    weight_decay=ON,
    decoupled_weight_decay=[False, True],
)
RMS = grid(lr=[0.1], alpha=[0.5, 0.99], eps=[1e-2, 1e-8], weight_decay=ON, momentum=[0, 0.9], centered=[False, True])
ADAGRAD = grid(lr=[0.1], lr_decay=ON, eps=[1e-10, 1e-2], weight_decay=ON, initial_accumulator_value=[0.0, 0.3])
DELTA = grid(lr=[1.0, 0.5], rho=[0.5, 0.9], eps=[1e-6, 1e-2], weight_decay=ON)
FACTOR = grid(lr=[1.0, 0.1], beta2_decay=[-0.5, -0.8], eps=[(1e-3, 0.5), (None, 1e-3)], d=[1.5, 1.0], weight_decay=ON)
MUON = grid(lr=[0.1], weight_decay=ON, momentum=[0.5, 0.95], nesterov=[0, 1], adjust_lr_fn=["match_rms_adamw", None])
LION = grid(learning_rate=[0.1], b1=[0.5, 0.9], b2=[0.99], weight_decay=ON)
LAMB = grid(learning_rate=[0.1], b1=[0.9], b2=[0.9, 0.999], eps=[1e-2, 1e-6], weight_decay=[0.1]) + [{"learning_rate": 0.1}]
FREE = grid(learning_rate=[0.1], b1=[0.5, 0.9], weight_decay=ON, weight_lr_power=[0.0, 2.0])
