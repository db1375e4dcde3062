"""Every transformation against a reference (torch.optim, optax, TorchOpt): over plain and sharded parameters, and ZeRO.

A row of `CASES` is a transformation and a function that gives the reference's displacement: the parameters after
`STEPS` updates minus the initial ones, in float64. A new row is one line, and is run in every way.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
import torch.optim as to
from support.models import WORLDS
from support.optimizers import TRANSFORMS
from support.worlds import gloo, simulated
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, MultiStepLR

import fshard
from fshard import optim

STEPS = 5
CLOSE = 1e-11
Make = Callable[..., Any]
Keep = Callable[[Tensor], Any]


def tree(seed: int) -> Any:
    """A tree of matrices, vectors, a 0-d, a 3-d and an empty leaf; 2, 3 and 4 do not divide the sizes."""
    random = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    blocks = [{"tall": leaf(4, 3), "bias": leaf(4)} for _ in range(2)]
    return {"wide": leaf(5, 7), "blocks": blocks, "scale": leaf(), "cube": leaf(2, 3, 5), "none": leaf(0, 3)}


START = tree(0)
GRADS = [tree(step) for step in range(1, STEPS + 1)]


def kept(x: Any, keep: Keep) -> Any:
    """The tree with only those leaves for which `keep` holds."""
    if isinstance(x, dict):
        return {name: kept(part, keep) for name, part in x.items() if not isinstance(part, Tensor) or keep(part)}
    return [kept(part, keep) for part in x] if isinstance(x, list) else x


def displacement(params: Any, start: Any = START) -> list[Tensor]:
    """How far every leaf has moved from its initial value."""
    return [after.detach() - before for after, before in zip(*map(optree.tree_leaves, (params, start)), strict=True)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside the block."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def by_torch(
    cls: Make, keep: Keep = torch.numel, rest: Any = None, clip: Make = list, rate: Any = None, dtype=torch.float, **kw
) -> Make:
    """The displacement by a class of torch.optim on the leaves to `keep`, and by `rest` on the others.

    `clip` clips the gradients, `rate(optimizer)` makes a scheduler, `dtype` is that of the optimizer's scalars.
    """

    @default_dtype(dtype)
    def run() -> list[Tensor]:
        params = optree.tree_map(lambda x: x.clone().requires_grad_(), START)
        leaves = optree.tree_leaves(params)
        optimizers = [cls([x for x in leaves if keep(x)], **kw)]
        optimizers += [rest([x for x in leaves if not keep(x)])] if rest else []
        schedulers = [rate(optimizer) for optimizer in optimizers if rate]
        for grads in GRADS:
            for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
                leaf.grad = grad.clone()
            clip([x for x in leaves if x.numel()])
            for each in (*optimizers, *schedulers):
                each.step()
        return displacement(params)

    return run


@functools.cache
def libraries() -> tuple[Any, Any]:
    """Import jax (with 64 bits) and optax on first use, so that the processes of `gloo` do not import them."""
    pytest.importorskip("optax")  # `make versions` has no jax
    import jax
    import optax.contrib

    jax.config.update("jax_enable_x64", True)
    return jax, optax


def by_optax(make: Make) -> Make:
    """The displacement by a transformation of optax, `make(optax)`."""

    def run() -> list[Tensor]:
        jax, optax = libraries()
        params, *grads = [optree.tree_map(lambda x: jax.numpy.asarray(x.numpy()), given) for given in (START, *GRADS)]
        tx = make(optax)
        state = tx.init(params)
        update = jax.jit(tx.update, compiler_options={"xla_backend_optimization_level": 0})  # it runs only a few times
        for each in grads:
            updates, state = update(each, state, params)
            params = optax.apply_updates(params, updates)
        return displacement(optree.tree_map(lambda x: torch.from_numpy(np.array(x)), params))

    return run


class Case(NamedTuple):
    """A transformation of fshard, the reference's displacement, and the leaves that both run on."""

    ours: optim.Transform
    authority: Make
    keep: Keep = lambda leaf: True


def both(make: Make) -> Case:
    """A case that is written in the same way with fshard.optim and with optax."""
    return Case(make(optim), by_optax(make))


def grid(**values: list[Any]) -> list[dict[str, Any]]:
    """All combinations of these values, as keyword arguments."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def named(family: str, cases: list[Case]) -> dict[str, Case]:
    """Name the cases of one family: family/0, family/1, ..."""
    return {f"{family}/{i}": case for i, case in enumerate(cases)}


def our_names(kw: dict[str, Any]) -> dict[str, Any]:
    """Translate torch's hyper-parameters to the names that fshard uses."""
    found = {OUR_NAMES.get(name, name): value for name, value in kw.items() if name != "betas"}
    return found | (dict(zip(("b1", "b2"), kw["betas"], strict=True)) if "betas" in kw else {})


def torch_cases(name: str, make: Make, cls: Make, kws: list[dict[str, Any]], **fixed: Any) -> dict[str, Case]:
    """A transformation over a grid of hyper-parameters, then with a tensor and with a schedule as learning rate."""
    cases = [Case(make(**our_names(kw)), by_torch(cls, **kw, **fixed)) for kw in kws]
    last, lr = our_names(kws[-1]), kws[-1]["lr"]
    tensor, constant = torch.tensor(lr, dtype=torch.float64), optim.schedules.constant
    schedule = optim.schedules.join([constant(lr), constant(lr * 0.5), constant(lr * 0.25)], [2, 4])
    scheduled = by_torch(cls, rate=STEPPED, **kws[-1], **fixed)
    rates = [Case(make(**last | {"lr": tensor}), cases[-1].authority), Case(make(**last | {"lr": schedule}), scheduled)]
    return named(name, cases + rates)


def class_cases(cls: Any, *kws: dict[str, Any], keep: Keep = torch.numel) -> dict[str, Case]:
    """A class of torch.optim, run as a transformation, against the class itself."""
    cases = [Case(optim.from_torch(cls, **kw), by_torch(cls, keep, **kw), keep) for kw in kws]
    return named(f"from_torch-{cls.__name__}", cases)


def clip_cases(make: Make, together: bool) -> dict[str, Case]:
    """Clipping by norm before SGD, never to always, against torch's clip_grad_norm_ on all leaves or on each."""
    found = []
    for max_norm, p in itertools.product([1e3, 7.0, 0.5], [1, 3, float("inf"), 2]):
        norm = functools.partial(clip_grad_norm_, max_norm=max_norm, norm_type=p)
        clip = norm if together else lambda leaves, norm=norm: [*map(norm, leaves)]
        found.append(Case(optim.chain(make(max_norm, p), optim.sgd(0.1)), by_torch(to.SGD, lr=0.1, clip=clip)))
    return named(make.__name__, found)


def muon_case(rest: Any, **kw: Any) -> Case:
    """Muon in float64. optax corrects the bias of the momentum, which changes the result only with Nesterov."""
    theirs = by_optax(lambda o: o.contrib.muon(0.1, beta=0.9, nesterov=False, consistent_rms=0.2, **kw))
    ours = {"momentum": 0.9, "nesterov": False, "adjust_lr": "match_rms_adamw", "dtype": torch.float64}
    return Case(optim.muon(0.1, rest=rest, **ours, **kw), theirs)


def halving(count: Any) -> Any:
    """A schedule for torch and jax that halves at every step: exact in every dtype."""
    return 0.5 ** (count + 2)


class Lbfgs(to.LBFGS):
    """L-BFGS with one iteration per update and without tolerances, on the gradients that are already computed."""

    def __init__(self, params: Any, **kw: Any):
        super().__init__(params, max_iter=1, tolerance_grad=0.0, tolerance_change=0.0, **kw)

    def step(self) -> Any:
        """Take one step without a closure."""
        return super().step(lambda: 0.0)


MATRICES = optree.tree_map(lambda leaf: leaf.ndim > 1, START)
WIDE = {**optree.tree_map(lambda _: False, START), "wide": True}
OUR_NAMES = {"adjust_lr_fn": "adjust_lr"}
ON = [0.0, 0.1]  # weight decays
BOOLS = [False, True]
HALVED = functools.partial(ExponentialLR, gamma=0.5)
STEPPED = functools.partial(MultiStepLR, milestones=[2, 4], gamma=0.5)
ADAM = grid(lr=[0.1], betas=[(0.0, 0.5), (0.9, 0.999), (0.7, 0.95)], eps=[1e-2, 1e-8], weight_decay=ON)
SGD = grid(lr=[0.1], momentum=[0], weight_decay=ON) + grid(lr=[0.1], momentum=[0.9], nesterov=BOOLS, weight_decay=ON)
RMS = grid(lr=[0.1], alpha=[0.5, 0.99], eps=[1e-2, 1e-8], weight_decay=ON, momentum=[0, 0.9], centered=BOOLS)
ADAGRAD = grid(lr=[0.1], lr_decay=ON, eps=[1e-10, 1e-2], weight_decay=ON, initial_accumulator_value=[0.0, 0.3])
FACTOR = grid(lr=[1.0, 0.1], beta2_decay=[-0.5, -0.8], eps=[(1e-3, 0.5), (None, 1e-3)], d=[1.5, 1.0], weight_decay=ON)
MUON = grid(lr=[0.1], weight_decay=ON, momentum=[0.5, 0.95], nesterov=BOOLS, adjust_lr_fn=["match_rms_adamw", None])
LION = [*itertools.product([0.1, halving], grid(b1=[0.5], b2=[0.9], weight_decay=ON))]
LAMB = [(0.1, {}), *itertools.product([0.1, halving], grid(b1=[0.5, 0.9], eps=[1e-2], weight_decay=[0.1]))]
MATRICES_ONLY = {"keep": lambda leaf: leaf.ndim == 2, "rest": lambda leaves: to.AdamW(leaves, 0.1)}
CLIP = functools.partial(clip_grad_value_, clip_value=0.3)
NUMBERS = optim.adafactor(lambda count: 0.1 if count < 2 else 0.05 if count < 4 else 0.025)

CASES: dict[str, Case] = {
    **torch_cases("sgd", optim.sgd, to.SGD, SGD),
    **torch_cases("adam", optim.adam, to.Adam, ADAM),
    **torch_cases("adamw", optim.adamw, to.AdamW, ADAM),
    **torch_cases("rmsprop", optim.rmsprop, to.RMSprop, RMS),
    **torch_cases("adagrad", optim.adagrad, to.Adagrad, ADAGRAD),
    **torch_cases("adafactor", optim.adafactor, to.Adafactor, FACTOR),
    **torch_cases("muon", optim.muon, to.Muon, MUON, **MATRICES_ONLY),
    "muon-float64": muon_case(optim.adam(0.1, eps=1e-30), eps=1e-30, weight_decay=0.1),
    **named("lion", [both(lambda o, lr=lr, kw=kw: o.lion(lr, **kw)) for lr, kw in LION]),
    **named("lamb", [both(lambda o, lr=lr, kw=kw: o.lamb(lr, **kw)) for lr, kw in LAMB]),
    **clip_cases(optim.clip_by_global_norm, together=True),
    **clip_cases(optim.clip_by_leaf_norm, together=False),
    "lbfgs/0": Case(optim.lbfgs(0.1, history_size=2), by_torch(Lbfgs, lr=0.1, history_size=2)),
    "lbfgs/1": Case(optim.lbfgs(halving), by_torch(Lbfgs, lr=0.25, history_size=10, rate=HALVED)),
    "clip": Case(optim.chain(optim.clip(0.3), optim.adam(0.1)), by_torch(to.Adam, lr=0.1, clip=CLIP)),
    "whole_leaves": Case(optim.whole_leaves(NUMBERS), by_torch(to.Adafactor, lr=0.1, rate=STEPPED)),
    "identity": both(lambda o: o.chain(o.identity(), o.lion(0.1))),
    "scale": both(lambda o: o.scale(-0.1)),
    "scale_by_schedule": both(lambda o: o.chain(o.scale_by_schedule(halving), o.scale(-1.0))),
    "add_decayed_weights": both(lambda o: o.chain(o.add_decayed_weights(0.1), o.scale(-0.1))),
    "masked": both(lambda o: o.masked(o.lamb(0.1), MATRICES)),
    "by_label": Case(
        optim.by_label({True: optim.lion(0.1), False: optim.sgd(0.1, 0.9)}, {"wide": True, "**": False}),
        by_optax(lambda o: o.multi_transform({True: o.lion(0.1), False: o.sgd(0.1, 0.9)}, WIDE)),
    ),
    "resting": Case(optim.resting(optim.adamw(0.1)), by_torch(to.AdamW, lr=0.1)),
    "with_hyperparams": Case(
        optim.with_hyperparams(optim.lamb, lr=halving, b1=0.8, weight_decay=0.1),
        by_optax(lambda o: o.inject_hyperparams(o.lamb)(halving, b1=0.8, weight_decay=0.1)),
    ),
    **class_cases(to.SGD, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.3}),
    **class_cases(to.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}),
    **class_cases(to.AdamW, {"lr": 0.1, "foreach": False}),
    **class_cases(to.NAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    **class_cases(to.RAdam, {"lr": 0.1, "betas": (0.9, 0.6)}),
    **class_cases(to.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    **class_cases(to.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    **class_cases(to.Adadelta, {}),
    **class_cases(to.RMSprop, {"centered": True, "momentum": 0.5}),
    **class_cases(to.ASGD, {"lr": 0.1, "lambd": 0.1, "t0": 2}),
    **class_cases(to.Rprop, {"lr": 0.1}),
    **class_cases(to.Adafactor, {"weight_decay": 0.1}),
    **class_cases(to.Muon, {"lr": 0.1}, keep=lambda leaf: leaf.ndim == 2),
}
# The last case of each family, and of each class of torch.optim: these are run on many ranks.
LAST = list({name if name.startswith("from_torch") else name.split("/")[0]: name for name in CASES}.values())


def data(name: str) -> tuple[Any, list[Any]]:
    """The parameters and gradients of a case."""
    keep = CASES[name].keep
    return kept(START, keep), [kept(grads, keep) for grads in GRADS]


@functools.cache
def expected(name: str) -> list[Tensor]:
    """The reference's displacement of the leaves that the case keeps; it must not be zero."""
    case = CASES[name]
    found = [x for x, leaf in zip(case.authority(), optree.tree_leaves(START), strict=True) if case.keep(leaf)]
    assert max(float(x.abs().max()) for x in found if x.numel()) > 1e-3
    return found


def agree(got: list[Tensor], want: list[Tensor], where: str) -> None:
    """Assert that two displacements have the same shapes and dtypes and differ by at most `CLOSE`."""
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want], where
    worst = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True) if a.numel())
    assert worst <= CLOSE, f"{where}: off by {worst}"


def run(tx: Any, how: str, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """State and parameters after all updates: by `update`, by `step`, or alternately by both."""
    state = tx.init(params)
    for i, each in enumerate(grads):
        if how == "step" or (how == "turns" and i % 2):
            params, state = tx.step(each, state, params, donate=i > 0)
        else:
            updates, state = tx.update(each, state, params)
            params = optim.apply_updates(params, updates)
    return state, params


def local(mesh: Any, grads: list[Any]) -> list[Any]:
    """Gradients that differ on every rank and whose sum over the ranks is the given gradients."""
    world, rank = mesh.size(), mesh.get_rank()
    more, less = (grads[r % world + 1 :] + grads[: r % world + 1] for r in (rank, rank + 1))
    return [optree.tree_map(lambda g, a, b: g / world + a - b, *row) for row in zip(grads, more, less, strict=True)]


def through(mesh: Any, tx: Any, hows: list[str], start: Any, grads: list[Any]) -> dict[str, list[Tensor]]:
    """The displacements by a transformation over sharded parameters, and by ZeRO over whole parameters."""
    wide = [("replicate", "shard")] if mesh.ndim > 1 and mesh.shape[0] > 1 else []
    given, found = {"reduced": grads, "local": local(mesh, grads)}, {}
    for how, over in itertools.product(hows, [None, *wide]):
        parting = dict.fromkeys(("params_over", "grads_over", "state_over"), over) if over else {}
        plan = fshard.make_plan(start, mesh, units=["blocks.*"], **parting)
        own = tx if isinstance(tx, optim.Transform) else optim.chain(tx)
        params = run(own, how, fshard.shard_params(start, plan), [fshard.shard_params(g, plan) for g in grads])[1]
        found[f"Sharded, {how}, {over}"] = fshard.gather_params(params)
        for partition, kind in itertools.product(("flat", "leaf"), ("local",) if over else ("local", "reduced")):
            zero = fshard.zero(tx, mesh, partition, kind, over=over, bucket=8 * 40)
            found[f"zero, {partition}, {kind}, {how}, {over}"] = run(zero, how, start, given[kind])[1]
    return {where: displacement(params, start) for where, params in found.items()}


def cases_through(mesh: Any, names: list[str], hows: list[str]) -> dict[tuple[str, str], list[Tensor]]:
    """The displacements of several cases, each run in every way."""
    found = {name: through(mesh, CASES[name].ours, hows, *data(name)) for name in names}
    return {(name, where): got for name, ways in found.items() for where, got in ways.items()}


@pytest.mark.law
@pytest.mark.parametrize("name", CASES)
def test_a_transformation_equals_its_authority(name):
    """Parameters move as in the reference: otherwise a model would train differently than with torch or optax."""
    start, grads = data(name)
    for how in ("update", "step"):
        agree(displacement(run(CASES[name].ours, how, start, grads)[1], start), expected(name), how)


@pytest.mark.law
@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_change_nothing(world, name):
    """Sharded parameters and ZeRO move as in the reference: otherwise results would depend on the mesh."""
    (replicate, shard), hows = WORLDS[world], ["update", "step"] if world == "3" else ["turns"]
    for found in simulated(cases_through, [name], hows, replicate=replicate, shard=shard):
        for (_, where), got in found.items():
            agree(got, expected(name), where)


def test_processes_change_nothing():
    """Real processes move parameters as in the reference: otherwise only simulated ranks would train correctly."""
    for found in gloo(cases_through, LAST, ["turns"]):
        for (name, where), got in found.items():
            agree(got, expected(name), f"{name}: {where}")


@pytest.mark.parametrize("cls", [to.Adam, to.Adafactor, to.Muon])
def test_ranks_without_a_leaf(cls):
    """A rank that holds no leaf takes part in the update: otherwise from_torch would fail on a large mesh."""
    start = {"a": torch.eye(2, dtype=torch.float64), "b": torch.ones(2, 3, dtype=torch.float64)}

    def updated(mesh: Any) -> Any:
        tx, params = optim.from_torch(cls, lr=0.1), fshard.shard_params(start, fshard.make_plan(start, mesh))
        state = tx.init(params)
        for _ in range(2):
            params, state = tx.step(params, state, params)
        return fshard.gather_params(params), optim.state.gather_state(state)

    expected = updated(None)
    for found in simulated(updated, shard=3):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_every_transformation_has_a_row():
    """Every transformation but adamw_8bit has a case, and so have torch's classes: else a fault would go unnoticed."""
    families = {name.split("/")[0] for name in CASES}
    for name in {x.split("-")[0] for x in TRANSFORMS} - {"adamw_8bit"}:  # its moments are rounded
        assert name in {x.split("-")[0] for x in families}, (
            f"optim.{name}: add a row to CASES of test_authority.py: **torch_cases({name!r}, ...) if torch has "
            f"it, {name!r}: both(lambda o: o.{name}(0.1)) if optax has it, or Case(ours, a reference of your own)"
        )
    classes = {x.__name__ for x in vars(to).values() if isinstance(x, type) and issubclass(x, to.Optimizer)}
    assert {f"from_torch-{name}" for name in classes - {"Optimizer", "LBFGS", "SparseAdam"}} <= families


def test_torchopt_is_taken():
    """TorchOpt's Adam runs as it is over shards and in ZeRO: otherwise users would have to port their optimizers."""
    adam, want = pytest.importorskip("torchopt").adam(0.1), by_torch(to.Adam, lr=0.1)()
    with default_dtype(torch.float64):  # TorchOpt computes bias corrections in the default dtype
        results = simulated(through, adam, ["update", "step"], START, GRADS, replicate=2, shard=3)
    for where, got in itertools.chain(*(found.items() for found in results)):
        agree(got, want, where)


def by_scheduler(cls: Make, lr: float, *args: Any, **kw: Any) -> Make:
    """The learning rate of a class of torch.optim.lr_scheduler, as a function of the number of updates."""
    optimizer, rates = to.SGD([torch.zeros(1)], lr, momentum=0.9), list[float]()
    scheduler = cls(optimizer, *args, **kw)
    for _ in range(13):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates.__getitem__


def optax_rate(make: Make) -> Make:
    """A schedule of optax, called with floats: it converts integers to float32."""
    return lambda count: float(make(libraries()[1])(np.float64(count)))


SCHEDULES: dict[str, tuple[Make, Make]] = {
    "constant": (optim.schedules.constant(0.1), lambda count: 0.1),
    "linear": (optim.schedules.linear(0.1, 0.7, 5), optax_rate(lambda o: o.linear_schedule(0.1, 0.7, 5))),
    "linear-torch": (optim.schedules.linear(0.1, 0.4, 4), by_scheduler(LinearLR, 0.4, 0.25, 1.0, 4)),
    "cosine": (optim.schedules.cosine(0.5, 7, 0.05), optax_rate(lambda o: o.cosine_decay_schedule(0.5, 7, 0.1))),
    "cosine-torch": (optim.schedules.cosine(0.5, 12, 0.1), by_scheduler(CosineAnnealingLR, 0.5, 12, 0.1)),
    "warmup_cosine": (
        optim.schedules.warmup_cosine(0.5, 3, 9, 0.1, 0.2),
        optax_rate(lambda o: o.warmup_cosine_decay_schedule(0.1, 0.5, 3, 9, 0.2)),
    ),
    "join": (
        optim.schedules.join([optim.schedules.linear(0.1, 0.5, 3), optim.schedules.cosine(0.5, 4)], [5]),
        optax_rate(lambda o: o.join_schedules([o.linear_schedule(0.1, 0.5, 3), o.cosine_decay_schedule(0.5, 4)], [5])),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_equals_its_authority(name):
    """For 0 to 12 updates a schedule gives the rate of its reference: otherwise learning rates would be wrong."""
    ours, theirs = SCHEDULES[name]
    for count in range(13):
        assert abs(float(ours(torch.tensor(float(count)))) - theirs(count)) <= CLOSE, count
