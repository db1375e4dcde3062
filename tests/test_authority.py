"""Every transformation against its authority (torch.optim, optax, TorchOpt), over plain, sharded and ZeRO's parameters.

A row of `CASES` is a transformation and a function that gives its authority's displacement: the parameters after
`STEPS` updates less the first ones, in float64. A new row is one line, and gets every way to run it.
"""

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
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
BOTH = ("replicate", "shard")
INF = float("inf")
Make = Callable[..., Any]
Authority = Callable[[], list[Tensor]]
Keep = Callable[[Tensor], bool]


def tree(seed: int) -> Any:
    """Matrices, vectors, a 0-d leaf, a 3-d leaf and one without elements; sizes that 2, 3 and 4 do not divide."""
    random = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    blocks = [{"tall": leaf(4, 3), "bias": leaf(4)} for _ in range(2)]
    return {"wide": leaf(5, 7), "blocks": blocks, "scale": leaf(), "cube": leaf(2, 3, 5), "none": leaf(0, 3)}


START = tree(0)
GRADS = [tree(step) for step in range(1, STEPS + 1)]


def displacement(params: Any, start: Any) -> list[Tensor]:
    """Of every leaf, from where it began."""
    return [after.detach() - before for after, before in zip(*map(optree.tree_leaves, (params, start)), strict=True)]


def kept(x: Any, keep: Keep) -> Any:
    """A tree of some leaves alone."""
    if isinstance(x, dict):
        return {name: kept(part, keep) for name, part in x.items() if not isinstance(part, Tensor) or keep(part)}
    return [kept(part, keep) for part in x] if isinstance(x, list) else x


# ---- the authorities


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype, put back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
    exact: bool = False,
    **kw: Any,
) -> Authority:
    """A class of torch.optim on the leaves to `keep`, and `rest` on the others.

    `before` is done to the leaves before every step, `rate(optimizer)` is a scheduler. If `exact`, scalars are float64.
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
                before([x for x in leaves if x.numel()])
            for each in (*optimizers, *schedulers):
                each.step()
        return displacement(params, START)

    def with_dtype() -> list[Tensor]:
        with default_dtype(torch.float64 if exact else torch.get_default_dtype()):
            return run()

    return with_dtype


@functools.cache
def library() -> tuple[Any, Any]:
    """jax and optax, in 64 bits: loaded where they are asked for, so not by the processes of `gloo`."""
    import jax
    import optax
    import optax.contrib

    jax.config.update("jax_enable_x64", True)
    return jax, optax


def run_optax(make: Make) -> tuple[Any, Any]:
    """State and parameters after the updates of `make(optax)`."""
    jax, optax = library()

    def to_jax(x: Any) -> Any:
        return optree.tree_map(lambda leaf: jax.numpy.asarray(leaf.numpy()), x)

    tx, params = make(optax), to_jax(START)
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in GRADS:
        updates, state = update(to_jax(grads), state, params)
        params = optax.apply_updates(params, updates)
    return state, params


def to_torch(x: Any) -> Any:
    """A tree of jax's arrays as tensors."""
    return optree.tree_map(lambda leaf: torch.from_numpy(np.array(leaf)), x)


def by_optax(make: Make) -> Authority:
    """A transformation of optax, `make(optax)`."""
    return lambda: displacement(to_torch(run_optax(make)[1]), START)


# ---- the table


class Case(NamedTuple):
    """Our transformation, its authority's displacement, and the leaves it can do with."""

    ours: optim.Transform
    authority: Authority
    keep: Keep = lambda leaf: True


def grid(**values: list[Any]) -> list[dict[str, Any]]:
    """All combinations."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def named(family: str, cases: list[Case]) -> dict[str, Case]:
    """The rows of one family: family/0, family/1, ..."""
    return {f"{family}/{i}": case for i, case in enumerate(cases)}


TORCH_NAMES = {
    "decoupled": "decoupled_weight_decay",
    "adjust_lr": "adjust_lr_fn",
    "coefficients": "ns_coefficients",
    "steps": "ns_steps",
}
OPTAX_NAMES = {"lr": "learning_rate", "weight_power": "weight_lr_power"}
MILESTONES = {2: 0.5, 4: 0.5}


def torch_names(kw: dict[str, Any]) -> dict[str, Any]:
    """Our hyper-parameters as torch calls them."""
    found = {TORCH_NAMES.get(name, name): value for name, value in kw.items() if name not in ("b1", "b2")}
    return found | ({"betas": (kw["b1"], kw["b2"])} if "b1" in kw else {})


def torch_cases(make: Make, cls: Make, kws: list[dict[str, Any]], **fixed: Any) -> dict[str, Case]:
    """A transformation over a grid, and at last with a schedule. `fixed` is for `by_torch`."""
    cases = [Case(make(**kw), by_torch(cls, **torch_names(kw), **fixed)) for kw in kws]
    schedule, last = optim.piecewise(kws[-1]["lr"], MILESTONES), torch_names(kws[-1])
    scheduled = by_torch(cls, rate=lambda o: MultiStepLR(o, [*MILESTONES], 0.5), **last, **fixed)
    return named(make.__name__, [*cases, Case(make(**kws[-1] | {"lr": schedule}), scheduled)])


def optax_cases(make: Make, theirs: Make, kws: list[dict[str, Any]], scheduled: bool = True) -> dict[str, Case]:
    """A transformation over a grid, and at last with a schedule. `theirs(optax)` is a function."""

    def authority(kw: dict[str, Any], rate: Make | None) -> Authority:
        theirs_kw = {OPTAX_NAMES.get(name, name): value for name, value in kw.items()}
        return by_optax(lambda o: theirs(o)(**theirs_kw | ({"learning_rate": rate(o)} if rate else {})))

    cases = [Case(make(**kw), authority(kw, None)) for kw in kws]
    if scheduled:
        lr = kws[-1]["lr"]
        schedule = optim.piecewise(lr, MILESTONES)
        steps = authority(kws[-1], lambda o: o.piecewise_constant_schedule(lr, MILESTONES))
        cases.append(Case(make(**kws[-1] | {"lr": schedule}), steps))
    return named(make.__name__, cases)


def class_cases(cls: Any, *kws: dict[str, Any], keep: Keep = full) -> dict[str, Case]:
    """A class of torch.optim as a transformation, against itself."""
    cases = [Case(optim.from_torch(cls, **kw), by_torch(cls, keep, **kw), keep) for kw in kws]
    return named(f"from_torch-{cls.__name__}", cases)


def clipped(ours: Make, max_norms: list[float], clip: Make) -> dict[str, Case]:
    """Gradients clipped before SGD, with p-norms of all kinds; `clip(leaves, max_norm, p)` is torch's."""
    return named(
        ours.__name__,
        [
            Case(
                optim.chain(ours(kw["max_norm"], p=kw["p"]), optim.sgd(0.1, momentum=0.9)),
                by_torch(torch.optim.SGD, lr=0.1, momentum=0.9, before=functools.partial(clip, **kw)),
            )
            for kw in grid(max_norm=max_norms, p=[1, 3, INF, 2])
        ],
    )


def clip_each(leaves: list[Tensor], max_norm: float, p: float) -> None:
    """torch's clip_grad_norm_, leaf by leaf."""
    for leaf in leaves:
        clip_grad_norm_([leaf], max_norm, p)


def clip_all(leaves: list[Tensor], max_norm: float, p: float) -> None:
    """torch's clip_grad_norm_."""
    clip_grad_norm_(leaves, max_norm, p)


def float64(schedule: Make) -> Make:
    """A schedule of optax, which makes float32 of whole numbers."""
    return lambda count: schedule(count.astype(np.float64))


def only_wide(params: Any) -> Any:
    """True for one leaf, for optax."""
    return optree.tree_map(lambda _: False, params) | {"wide": True}


def is_matrix(params: Any) -> Any:
    """Of every leaf whether it has two dims or more, for optax."""
    return optree.tree_map(lambda leaf: leaf.ndim > 1, params)


def muon_case(nesterov: bool, adjust_lr: str | None) -> Case:
    """Muon in float64 against optax's, without its correction of m's bias, which matters to Nesterov's sum.

    The sum is made before, by a transformation of optax's shape. optax has matrices as (in, out).
    """

    def theirs(optax: Any) -> Any:
        jax = library()[0]
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
        return optax.chain(momentum, optax.contrib.muon(0.1, muon_weight_dimension_numbers=which, **kw))

    kw = {"eps": 1e-30, "adjust_lr": adjust_lr, "dtype": torch.float64}
    return Case(
        optim.muon(0.1, 0.1, 0.9, nesterov, rest=optim.adamw(0.1, eps=1e-30, weight_decay=0), **kw), by_optax(theirs)
    )


def annealed(optimizer: Any) -> Any:
    """torch's cosine."""
    return CosineAnnealingLR(optimizer, 8, eta_min=0.01)


def with_momentum(**kw: Any) -> bool:
    """What torch.optim.SGD takes."""
    return kw["momentum"] > 0 or not kw["nesterov"]


TO = torch.optim
ON = [0, 0.1]  # weight decays
ADAM = grid(lr=[0.1], b1=[0.0, 0.9], b2=[0.7, 0.999], eps=[1e-8, 1e-2], weight_decay=ON)
SGD = [kw for kw in grid(lr=[0.1], momentum=[0, 0.9], nesterov=[False, True], weight_decay=ON) if with_momentum(**kw)]
RMS = grid(lr=[0.1], alpha=[0.5, 0.99], eps=[1e-2, 1e-8], weight_decay=ON, momentum=[0, 0.9], centered=[False, True])
NADAM = grid(
    lr=[0.1],
    b1=[0.5, 0.9],
    b2=[0.999],
    eps=[1e-8],
    weight_decay=ON,
    momentum_decay=[4e-3, 0.1],
    decoupled=[False, True],
)
ADAGRAD = grid(lr=[0.1], lr_decay=ON, weight_decay=ON, initial_accumulator_value=[0.0, 0.3], eps=[1e-10, 1e-2])
ADADELTA = grid(lr=[1.0, 0.5], rho=[0.5, 0.9], eps=[1e-6, 1e-2], weight_decay=ON)
ADAFACTOR = grid(
    lr=[1.0, 0.1], beta2_decay=[-0.5, -0.8], eps=[(1e-3, 0.5), (None, 1e-3)], d=[1.0, 1.5], weight_decay=ON
)
MUON = grid(
    lr=[0.1], weight_decay=ON, momentum=[0.5, 0.95], nesterov=[False, True], adjust_lr=["match_rms_adamw", None]
)
LION = grid(lr=[0.1], b1=[0.5, 0.9], b2=[0.99], weight_decay=[0.0, 0.1])
LAMB = grid(lr=[0.1], b1=[0.5, 0.9], b2=[0.999], eps=[1e-2, 1e-6], weight_decay=[0.0, 0.1])
FREE = grid(lr=[0.1], b1=[0.5, 0.9], b2=[0.9], eps=[1e-8], weight_decay=[0.0, 0.1], weight_power=[0.0, 2.0])

CASES: dict[str, Case] = {
    **torch_cases(optim.sgd, TO.SGD, SGD),
    **torch_cases(optim.adam, TO.Adam, ADAM),
    **torch_cases(optim.adamw, TO.AdamW, ADAM),
    **torch_cases(optim.amsgrad, TO.Adam, ADAM, amsgrad=True),
    **torch_cases(optim.nadam, TO.NAdam, NADAM, exact=True),
    **torch_cases(optim.rmsprop, TO.RMSprop, RMS),
    **torch_cases(optim.adagrad, TO.Adagrad, ADAGRAD),
    **torch_cases(optim.adadelta, TO.Adadelta, ADADELTA),
    **torch_cases(optim.adafactor, TO.Adafactor, ADAFACTOR),
    **torch_cases(optim.muon, TO.Muon, MUON, keep=matrix, rest=lambda leaves: TO.AdamW(leaves, 0.1)),
    **named("muon-float64", [muon_case(n, a) for n in (False, True) for a in (None, "match_rms_adamw")]),
    **optax_cases(optim.lion, lambda o: o.lion, LION),
    **optax_cases(optim.lamb, lambda o: o.lamb, LAMB),
    **optax_cases(optim.schedule_free_adamw, lambda o: o.contrib.schedule_free_adamw, FREE, scheduled=False),
    **clipped(optim.clip_by_global_norm, [0.5, 7.0, 1e3], clip_all),
    **clipped(optim.clip_by_leaf_norm, [0.5, 2.0, 1e3], clip_each),
    "clip": Case(
        optim.chain(optim.clip(0.3), optim.adam(0.1)),
        by_torch(TO.Adam, lr=0.1, before=lambda leaves: clip_grad_value_(leaves, 0.3)),
    ),
    "cosine": Case(optim.adamw(optim.cosine(0.1, 8, 0.01)), by_torch(TO.AdamW, lr=0.1, rate=annealed)),
    "whole_leaves": Case(optim.whole_leaves(optim.adafactor(0.1)), by_torch(TO.Adafactor, lr=0.1)),
    "identity": Case(optim.chain(), by_optax(lambda o: o.identity())),
    "scale": Case(optim.scale(-0.1), by_optax(lambda o: o.scale(-0.1))),
    "scale_by_schedule": Case(
        optim.scale_by_schedule(optim.linear(-0.1, -0.4, 4)),
        by_optax(lambda o: o.scale_by_schedule(float64(o.linear_schedule(-0.1, -0.4, 4)))),
    ),
    "add_decayed_weights": Case(
        optim.chain(optim.add_decayed_weights(0.1), optim.lion(0.1)),
        by_optax(lambda o: o.chain(o.add_decayed_weights(0.1), o.lion(0.1))),
    ),
    "ema": Case(optim.chain(optim.ema(0.9), optim.scale(-0.1)), by_optax(lambda o: o.chain(o.ema(0.9), o.scale(-0.1)))),
    "ema-biased": Case(
        optim.chain(optim.ema(0.5, False), optim.sgd(0.1)), by_optax(lambda o: o.chain(o.ema(0.5, False), o.sgd(0.1)))
    ),
    "every_k": Case(
        optim.every_k(optim.adam(0.1), 2),
        by_optax(lambda o: o.MultiSteps(o.adam(0.1), 2, accumulator_dtype=np.float64)),
    ),
    "every_k-lamb": Case(
        optim.every_k(optim.lamb(0.1, weight_decay=0.1), 3),
        by_optax(lambda o: o.MultiSteps(o.lamb(0.1, weight_decay=0.1), 3, accumulator_dtype=np.float64)),
    ),
    "masked": Case(
        optim.masked(optim.lamb(0.1), lambda path, leaf: leaf.ndim > 1),
        by_optax(lambda o: o.masked(o.lamb(0.1), is_matrix)),
    ),
    "masked-decay": Case(
        optim.chain(optim.masked(optim.add_decayed_weights(0.1), {"wide": True, "**": False}), optim.adam(0.1)),
        by_optax(lambda o: o.chain(o.masked(o.add_decayed_weights(0.1), only_wide), o.adam(0.1))),
    ),
    "by_label": Case(
        optim.by_label({True: optim.lion(0.1), False: optim.sgd(0.1, momentum=0.9)}, lambda path, leaf: leaf.ndim > 1),
        by_optax(lambda o: o.multi_transform({True: o.lion(0.1), False: o.sgd(0.1, 0.9)}, is_matrix)),
    ),
    "with_hyperparams": Case(
        optim.with_hyperparams(optim.lamb, lr=0.1, b1=0.8),
        by_optax(lambda o: o.inject_hyperparams(o.lamb)(learning_rate=0.1, b1=0.8)),
    ),
    "with_hyperparams-schedule": Case(
        optim.with_hyperparams(optim.adamw, lr=optim.warmup_cosine(0.1, 2, 8), b2=0.9, weight_decay=0.1),
        by_optax(
            lambda o: o.inject_hyperparams(o.adamw)(
                learning_rate=float64(o.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)), b2=0.9, weight_decay=0.1
            )
        ),
    ),
    **class_cases(TO.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    **class_cases(TO.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}),
    **class_cases(TO.AdamW, {"lr": 0.1, "foreach": False}),
    **class_cases(TO.NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    **class_cases(TO.RAdam, {"lr": 0.1, "betas": (0.9, 0.6)}),
    **class_cases(TO.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    **class_cases(TO.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    **class_cases(TO.Adadelta, {}),
    **class_cases(TO.RMSprop, {"centered": True, "momentum": 0.5}),
    **class_cases(TO.ASGD, {"lr": 0.1, "lambd": 0.1, "t0": 2}),
    **class_cases(TO.Rprop, {"lr": 0.1}),
    **class_cases(TO.Adafactor, {"weight_decay": 0.1}),
    **class_cases(TO.Muon, {"lr": 0.1}, keep=matrix),
}


# ---- every way to run them


@functools.cache
def expected(name: str) -> list[Tensor]:
    """The authority's displacement, of the leaves that are kept."""
    case, leaves = CASES[name], optree.tree_leaves(START)
    found = [x for x, leaf in zip(case.authority(), leaves, strict=True) if case.keep(leaf)]
    assert max(float(x.abs().max()) for x in found if x.numel()) > 1e-3
    return found


def agree(got: list[Tensor], want: list[Tensor], where: str) -> None:
    """Two displacements are equal to `CLOSE`, in shape and dtype too."""
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want], where
    worst = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True) if a.numel())
    assert worst <= CLOSE, f"{where}: off by {worst}"


def run(tx: Any, how: str, params: Any, grads: Any) -> tuple[Any, Any]:
    """State and parameters after the updates, by `update` or by `step`."""
    state = tx.init(params)
    for i, each in enumerate(grads):
        if how == "step":
            params, state = tx.step(each, state, params, donate=i > 0)
        else:
            updates, state = tx.update(each, state, params)
            params = optim.apply_updates(params, updates)
    return state, params


def run_sharded(tx: Any, mesh: Any, how: str, start: Any, grads: Any, **over: Any) -> tuple[Any, Any]:
    """State and whole parameters after the updates of sharded ones."""
    plan = fshard.make_plan(start, mesh, units=["blocks.*"], **over)
    state, params = run(tx, how, fshard.shard_params(start, plan), [fshard.shard_params(g, plan) for g in grads])
    return state, fshard.gather_params(params)


def local(mesh: Any, grads: list[Any]) -> list[Any]:
    """Gradients of this rank, those of all ranks adding up to the given ones."""
    world, found = mesh.size(), []
    for i, each in enumerate(grads):
        more, less = (grads[(i + rank % world + 1) % len(grads)] for rank in (mesh.get_rank(), mesh.get_rank() + 1))
        found.append(optree.tree_map(lambda g, a, b: g / world + a - b, each, more, less))
    return found


def through(mesh: Any, tx: Any, start: Any, grads: Any) -> dict[str, list[Tensor]]:
    """The displacement by a transformation in every way: sharded parameters, and ZeRO."""
    own, found = local(mesh, grads), {}
    for how, over in itertools.product(
        ("update", "step"), (None, BOTH) if "replicate" in mesh.mesh_dim_names else (None,)
    ):
        wide = dict.fromkeys(("params_over", "grads_over", "state_over"), over) if over else {}
        found[f"Sharded, {how}, {over}"] = run_sharded(tx, mesh, how, start, grads, **wide)[1]
        for partition, (kind, given) in itertools.product(("flat", "leaf"), (("reduced", grads), ("local", own))):
            zero = fshard.zero(tx, mesh, partition, kind, over=over, bucket=20)
            found[f"zero, {partition}, {kind}, {how}, {over}"] = run(zero, how, start, given)[1]
    return {where: displacement(params, start) for where, params in found.items()}


def cases_through(mesh: Any, names: list[str]) -> dict[str, dict[str, list[Tensor]]]:
    """Rows of the table in every way."""
    return {name: through(mesh, CASES[name].ours, *data(name)) for name in names}


def data(name: str) -> tuple[Any, Any]:
    """Parameters and gradients for a row."""
    keep = CASES[name].keep
    return kept(START, keep), [kept(grads, keep) for grads in GRADS]


# One of each family: with a schedule and all its hyper-parameters where it is a grid.
LAST = list({name.split("/")[0]: name for name in CASES}.values())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_a_transformation_equals_its_authority(name):
    """By update and by step, over plain parameters."""
    start, grads = data(name)
    for how in ("update", "step"):
        agree(displacement(run(CASES[name].ours, how, start, grads)[1], start), expected(name), how)


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_change_nothing(world, name):
    """Sharded parameters and ZeRO on simulated ranks."""
    replicate, shard = WORLDS[world]
    for found in simulated(cases_through, [name], replicate=replicate, shard=shard):
        for where, got in found[name].items():
            agree(got, expected(name), where)


def test_processes_change_nothing():
    """Sharded parameters and ZeRO in two gloo processes."""
    for found in gloo(cases_through, LAST):
        for name, where in found.items():
            for way, got in where.items():
                agree(got, expected(name), f"{name}: {way}")
