"""Steps that update each unit in the backward: they train as other steps do, and keep few gradients."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from support.memory import Live
from support.models import LM_UNITS, NARROW, STRATEGIES, WIRED, WORLDS, lm_batch, lm_params, mean_loss, same_bits
from support.optimizers import KERNELS, TRANSFORMS
from support.worlds import gloo, simulated
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.comm.ranks import Pending
from fshard.core.storage import DonatedError
from fshard.sharding.sharded import empty_params
from fshard.train import in_backward


def _is_matrix(path: str, leaf: torch.Tensor) -> bool:
    return leaf.ndim > 1


TRANSFORMS = TRANSFORMS | {
    "decay": lambda: optim.by_label(
        {True: optim.adagrad(0.1, weight_decay=0.1), False: optim.adagrad(0.1), "no leaf": optim.lion(0.1)}, _is_matrix
    ),
    "decay-kernel": lambda: optim.masked(optim.adamw(0.1), _is_matrix),
}
KERNELS = KERNELS | {"decay-kernel"}
ELEMENTWISE = [
    name
    for name, make in TRANSFORMS.items()
    if (tx := make()).elementwise or (tx.parts and all(part.elementwise for part in tx.parts.values()))
]


def train(
    mesh: Any, in_backward: bool, name: str, strategy: dict[str, Any], clip: float | None, num_steps: int = 4
) -> Any:
    """Train on this rank's data: whole parameters, whole optimizer state and metrics."""
    params, tx = lm_params(), TRANSFORMS[name]()
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, whole=["**.b", "tail.right"], **strategy)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(mean_loss, tx, clip_norm=clip, donate=True, in_backward=in_backward)
    metrics = []
    for i in range(num_steps):
        state, row = step(state, lm_batch(i, mesh.get_rank()))
        metrics.append(row)
    return fshard.gather_params(state.params), fshard.gather_params(state.opt_state), metrics


def far(x: Any, y: Any) -> float:
    """The largest difference between two trees, relative to the largest element of each leaf."""
    pairs = zip(fshard.tree.leaves(x), fshard.tree.leaves(y), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs if b.numel())


CASES = [(w, s, None) for w, s in product(WORLDS, STRATEGIES) if w == "2x2" or s in NARROW]
CASES += [("2x2", s, 0.5) for s in STRATEGIES] + [("3", s, None) for s in WIRED if s not in STRATEGIES]


@pytest.mark.parametrize(("world", "strategy", "clip"), CASES)
def test_it_trains_as_a_step_that_updates_last(world, strategy, clip):
    """Some strategy would update a unit with other gradients, twice, or not at all."""
    (replicate, shard), how = WORLDS[world], WIRED[strategy]
    for name in ("sgd-all", "rmsprop-all"):
        last, first = (
            simulated(train, in_backward, name, how, clip, replicate=replicate, shard=shard)
            for in_backward in (False, True)
        )
        assert all(far(a, b) < (1e-10 if strategy in STRATEGIES else 1e-3) for a, b in zip(first, last, strict=True))
        assert all(same_bits(rank, first[0]) for rank in first)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer(name):
    """An optimizer's counts would go on with every unit, or its state would lose a unit."""
    last, first = (simulated(train, how, name, {}, None, shard=3) for how in (False, True))
    assert all(far(a, b) < 1e-10 for a, b in zip(first, last, strict=True))
    if name not in KERNELS:
        assert all(same_bits(a[:2], b[:2]) for a, b in zip(first, last, strict=True))


@pytest.mark.parametrize(("strategy", "clip"), [("full", 0.5), ("zero2", None)])
def test_in_processes(strategy, clip):
    """Simulated ranks would prove nothing about real processes."""
    args = (True, "adamw", STRATEGIES[strategy], clip)
    assert same_bits(gloo(train, *args, shard=3), simulated(train, *args, shard=3))


def stack(num: int, width: int = 32) -> Any:
    """Parameters of square layers."""
    generator = torch.Generator().manual_seed(0)
    return {"layers": [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(num)]}


def stack_loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
    """The mean square of what the layers make of a batch."""
    for layer in params["layers"]:
        batch = batch @ layer
    return batch.square().mean()


def peak_of_step(mesh: Any, num: int, strategy: str = "full", **how: Any) -> int:
    """The most bytes alive in a step, above those of the state."""
    params, tx = stack(num), optim.sgd(0.1)
    plan = fshard.make_plan(params, mesh, units="layers.*", **STRATEGIES[strategy])
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(stack_loss, tx, donate=True, **how)
    state, _ = step(state, torch.ones(1, 32))
    with Live() as live:
        step(state, torch.ones(1, 32))
    return live.peak


def grown(mesh: Any, strategy: str, clip: float | None, in_backward: bool) -> int:
    """What twelve more layers add to the peak of a step."""
    how = {"strategy": strategy, "clip_norm": clip, "in_backward": in_backward}
    return peak_of_step(mesh, 24, **how) - peak_of_step(mesh, 12, **how)


@pytest.mark.parametrize("strategy", ["full", "ddp"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_of_few_units_are_in_memory(clip, strategy):
    """All gradients would be kept until the end of the backward, or for the norm."""
    for shard in (2, 3):
        of_last, of_first = (simulated(grown, strategy, clip, how, shard=shard) for how in (False, True))
        parts = shard if strategy == "full" else 1
        own = 12 * 4 * 32 * 32 // parts  # bytes of twelve layers on a rank: those of the parameters count as well
        assert min(of_last) >= 2 * own
        assert max(of_first) < 1.25 * own


def test_whole_parameters_travel_in_the_backward():
    """ZeRO's update would wait for the whole backward, and the gather of new parameters for the update."""

    def law(mesh: Any) -> None:
        params, tx = stack(4), optim.adamw(0.1)
        plan = fshard.make_plan(params, mesh, units="layers.*", **STRATEGIES["zero1"])
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        step = fshard.train_step(stack_loss, tx, donate=True, in_backward=True)
        with fshard.collectives.tally() as calls:
            step(state, torch.ones(1, 32))
        order = [(call.kind, call.label) for call in calls if call.label.startswith("layers")]
        assert {kind for kind, _ in order} == {"all_reduce", "all_gather"}
        assert order.index(("all_gather", "layers.3")) < order.index(("all_reduce", "layers.1"))

    simulated(law, shard=2)


def read_later(params: Any, batch: torch.Tensor) -> torch.Tensor:
    """A loss whose backward reads the last layer after that layer's gradient is there."""
    layers = params["layers"]
    with torch.no_grad():  # no node of the backward belongs to this read
        last = layers[2]
    h = batch @ layers[0] @ last  # whose derivative takes the last layer
    # the gradient of the last layer comes first, and takes no value of that layer
    return (h @ layers[1]).square().mean() + (torch.ones(1, 32) @ layers[2]).sum()


def graphed(mesh: Any, jitted: bool) -> Any:
    """Two steps of a stack of two layers: parameters and metrics."""
    params, tx = stack(2), optim.adamw(0.1)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units="layers.*")), tx)
    step: Any = fshard.train_step(stack_loss, tx, donate=True, in_backward=True)
    step = fshard.jit(step, donate=True, backend="eager") if jitted else step
    for i in range(2):
        state, metrics = step(state, torch.full((1, 32), 1.0 + i))
    return fshard.gather_params(state.params), metrics


def read_in_a_checkpoint(params: Any, batch: torch.Tensor) -> torch.Tensor:
    """A loss with a checkpoint that reads the last layer again, without its gradient."""
    layers = params["layers"]

    def first(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            last = layers[2]
        return (x @ layers[0] @ last).sin()

    h = checkpoint(first, batch, use_reentrant=False)
    return (h @ layers[1] @ layers[2]).square().mean()


class Attribute(torch.autograd.Function):
    """The identity, whose backward reads an attribute that autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        """The same."""
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient times the sum of what is held now."""
        return grads[0] * ctx.held[0].sum(), None


def read_by_an_attribute(params: Any, batch: torch.Tensor) -> torch.Tensor:
    """A loss in which an early node reads the last layer, whose gradient comes first."""
    layers, held = params["layers"], list[torch.Tensor]()
    h = Attribute.apply(batch @ layers[0], held)
    for n in (1, 3, 4):  # the sums of the units before the last are under way
        h = h @ layers[n]
    last = layers[2]
    held.append(last.detach())
    return h.square().mean() + (torch.ones(1, 32) @ last).sum()


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("whole", [[], ["layers.2"]])
@pytest.mark.parametrize("loss", [read_later, read_in_a_checkpoint, read_by_an_attribute])
def test_a_unit_that_is_read_late(loss, whole, shard):
    """A unit would be updated before the backward has read its old value, also a leaf that a rank has whole."""
    last, first = (simulated(five_layers, loss, how, whole, shard=shard) for how in (False, True))
    assert same_bits(last, first)


@dataclass(frozen=True)
class Same:
    """A gather that gives what it is given, for one rank."""

    def all_gather(self, x: torch.Tensor, ranks: Any, label: str) -> Pending:
        """The same tensor."""
        return Pending(None, lambda _: x)


def test_a_gather_may_give_the_shard_itself():
    """The loss would read the parameters where the optimizer writes them."""
    last, first = (simulated(five_layers, read_by_an_attribute, how, [], Same(), shard=1) for how in (False, True))
    assert same_bits(last, first)


def five_layers(mesh: Any, loss: Any, in_backward: bool, whole: list[str], gather: Any = None) -> Any:
    """Three steps of a stack of five layers, of which a loss may leave some: parameters."""
    params, tx = stack(5), optim.sgd(0.1)
    plan = fshard.make_plan(params, mesh, units="layers.*", whole=whole, gather=gather)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(loss, tx, donate=True, in_backward=in_backward)
    for _ in range(3):
        state, _ = step(state, torch.ones(1, 32))
    return fshard.gather_params(state.params)


def failing_backward(params: Any, batch: torch.Tensor) -> torch.Tensor:
    """A loss whose backward fails at the first layer."""
    h = batch @ params["layers"][0]
    h.register_hook(_fail)
    return (h @ params["layers"][1] @ params["layers"][2]).square().mean()


def _fail(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no gradient of this")


def test_an_error_after_an_update_gives_the_state_away():
    """A state of which some units were updated would be trained on."""

    def run(mesh: Any) -> None:
        params, tx = stack(3), optim.sgd(0.1)
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units="layers.*")), tx)
        step = fshard.train_step(failing_backward, tx, donate=True, in_backward=True)
        with pytest.raises(RuntimeError, match="no gradient of this") as failure:
            step(state, torch.ones(1, 32))
        assert any("the state is lost" in note for note in failure.value.__notes__)
        with pytest.raises(DonatedError):
            print(state.params)

    simulated(run, shard=2)


def test_a_state_may_hold_numbers():
    """A state of an optimizer of the user's, with numbers and names in it, would be refused, and lost."""

    def init(params: Any) -> Any:
        return {"mean": fshard.tree.map(torch.zeros_like, params), "lr": 0.1, "name": "mine", "none": None}

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        mean = fshard.tree.map(lambda m, g: 0.9 * m + g, state["mean"], grads)
        return fshard.tree.map(lambda m: -state["lr"] * m, mean), {**state, "mean": mean}

    def run(mesh: Any, in_backward: bool) -> Any:
        params, tx = stack(3), optim.Transform(init, update, elementwise=True)
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units="layers.*")), tx)
        step = fshard.train_step(stack_loss, tx, donate=True, in_backward=in_backward)
        for _ in range(2):
            state, _ = step(state, torch.ones(1, 32))
        return fshard.gather_params((state.params, state.opt_state["mean"])), state.opt_state["name"]

    assert same_bits(simulated(run, True, shard=2), simulated(run, False, shard=2))


def test_a_loss_that_fails_in_the_forward_leaves_the_state():
    """A state would be lost, though nothing was updated."""

    def failing(params: Any, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no loss of {params['layers'][0].shape}")

    def run(mesh: Any) -> None:
        params, tx = stack(2), optim.sgd(0.1)
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units="layers.*")), tx)
        with pytest.raises(RuntimeError, match="no loss of"):
            fshard.train_step(failing, tx, donate=True, in_backward=True)(state, torch.ones(1, 32))
        assert same_bits(fshard.gather_params(state.params), params)

    simulated(run, shard=2)


def test_in_a_graph():
    """A jitted step would train otherwise."""
    eager, jitted = (simulated(graphed, how, shard=2) for how in (False, True))
    assert all(far(a, b) < 1e-5 for a, b in zip(eager, jitted, strict=True))


def test_parameters_without_elements():
    """The count of updates would stand still, and with it a schedule."""
    params, tx = {"w": torch.zeros(0)}, optim.adamw(0.1)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx)
    step = fshard.train_step(lambda p, x: p["w"].sum() + x.sum(), tx, donate=True, in_backward=True)
    state, _ = step(state, torch.ones(1))
    assert optim.state.gather_state(state.opt_state)["count"] == 1


def test_the_loss_may_return_more():
    """Extra and aux would be lost, or an extra that is a view of parameters would change with them."""

    def loss(params: Any, extra: Any, batch: torch.Tensor) -> Any:
        return stack_loss(params, batch), {"last": params["layers"][1][0]}, batch.sum()

    def run(mesh: Any, in_backward: bool) -> Any:
        params, tx = stack(2), optim.sgd(0.1)
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units="layers.*"))
        state = fshard.init_state(sharded, tx, extra={"last": torch.zeros(32)})
        step = fshard.train_step(loss, tx, has_aux=True, with_extra=True, donate=True, in_backward=in_backward)
        for _ in range(2):
            state, metrics = step(state, torch.ones(1, 32))
        return state.extra, metrics["aux"], metrics["loss"]

    for mesh in ({"shard": 1}, {"shard": 2}):
        assert same_bits(simulated(run, True, **mesh), simulated(run, False, **mesh))
    assert same_bits(run(None, True), run(None, False))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kept": ({"donate": False}, "donate=False: the state is updated in place"),
    "micro": ({"accumulate": 2}, "accumulate=2: gradients of micro-batches are added up first"),
    "tree": ({"reduction": "tree"}, "reduction='tree'"),
    "once": ({"reduce_once": True}, "reduce_once=True: there is one micro-batch"),
    "matrix": ({"tx": optim.muon(0.1)}, "tx: expected a transformation with over='elements'"),
    "label": ({"tx": TRANSFORMS["masked"]()}, "tx: expected a transformation with over='elements'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_must_see_all_gradients_is_an_error(name):
    """A step would ignore an argument, or update with a part of the gradients."""
    how, message = WRONG[name]
    how = {"tx": optim.sgd(0.1), "donate": True} | how
    with pytest.raises(ValueError, match=message):
        fshard.train_step(stack_loss, how.pop("tx"), in_backward=True, **how)


def test_a_state_that_must_see_all_gradients_is_an_error():
    """An overflow would be seen after parameters were updated with it."""
    params, tx = stack(2), optim.sgd(0.1)
    step = fshard.train_step(stack_loss, tx, donate=True, in_backward=True)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx, fshard.DynamicLossScale())
    with pytest.raises(ValueError, match="expected a state without a loss scale, got one with DynamicLossScale"):
        step(state, torch.ones(1, 32))

    def on_the_host(mesh: Any) -> None:
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, offload="**")), tx)
        with pytest.raises(ValueError, match="trainable leaves in host memory"):
            step(state, torch.ones(1, 32))

    simulated(on_the_host)


def test_where_labels_lie_is_worked_out_once():
    """Each step would go through all leaves of a model once more, though layouts never change."""
    tx = TRANSFORMS["decay"]()
    state = fshard.init_state(fshard.shard_params(stack(2), fshard.make_plan(stack(2))), tx)
    for label, layout in state.opt_state.layouts:
        runs, again = (in_backward._shard_runs(layout, state.params.for_state.view) for _ in range(2))
        assert runs is again
        assert runs or label == "no leaf"


@pytest.mark.parametrize("how", [{}, {"in_backward": True}, {"in_backward": True, "clip_norm": 1.0}, {"accumulate": 2}])
@pytest.mark.parametrize("policy", [None, "compute=bf16", "compute=bf16, reduce=f32", "reduce=f16"])
def test_a_plan_without_a_mesh_computes_where_its_parameters_are(how: dict[str, Any], policy: str | None) -> None:
    """Sums would be allocated on the CPU. The meta device stands for a GPU: operators refuse tensors of the two."""
    like, tx = lm_params(), optim.adamw(0.1)
    plan = fshard.make_plan(like, units=LM_UNITS, policy=policy)
    state = fshard.init_state(empty_params(plan, torch.device("meta")), tx)
    step = fshard.train_step(mean_loss, tx, donate=True, **how)
    batch = fshard.tree.map(lambda x: x.to("meta"), lm_batch(0, 0))
    for _ in range(2):
        state, metrics = step(state, batch)
    leaves = fshard.tree.leaves((state.params, state.opt_state, metrics))
    assert {x.device.type for x in leaves if x.numel() > 1 or x is metrics["loss"]} == {"meta"}
