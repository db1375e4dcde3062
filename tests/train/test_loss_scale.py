"""Loss scaling: the dynamic rule is torch's, scalers are immutable values, and a skipped update selects the old
tree."""

import copy
import dataclasses
import functools
import inspect
import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from support.models import rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor, nn

import fshard
from fshard import DynamicLossScale, NoLossScale, StaticLossScale, optim, select, tree
from fshard.train.loss_scale import Unscaled
from fshard.update import kernels

SCALERS = {
    "dynamic": lambda: DynamicLossScale(
        24.0, 3.0, 0.25, 7, 5, min_scale=2.0, max_scale=99.0, hysteresis=3, hysteresis_tracker=2
    ),
    "static": lambda: StaticLossScale(12.0),
    "none": NoLossScale,
}
BITS = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize(("growth", "backoff", "start"), [(2.0, 0.5, 2.0**16), (3.0, 0.25, 5.0), (2.0, 0.5, 2.0**126)])
def test_the_dynamic_scale_follows_torch(interval, growth, backoff, start):
    """The dynamic scale equals torch.amp.GradScaler's after every step: otherwise a float16 run would skip other
    steps."""
    scaler = DynamicLossScale(start, growth, backoff, interval)
    scale, tracker = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
    for bit in BITS:
        found_inf = torch.tensor(float(bit))
        scaler = scaler.adjust(found_inf)
        torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)
        assert same_bits([scaler.value, scaler.growth_tracker], [scale, tracker])


@pytest.mark.parametrize(("bounds", "hysteresis"), [((8.0, 64.0), 1), ((8.0, 64.0), 3), ((0.0, math.inf), 2)])
def test_bounds_and_hysteresis(bounds, hysteresis):
    """Bounds and hysteresis follow Megatron-LM's rule: otherwise the scale would leave its bounds or back off too
    early."""
    low, high = bounds
    scaler = DynamicLossScale(32.0, 2.0, 0.5, 2, min_scale=low, max_scale=high, hysteresis=hysteresis)
    scale, good, borne = 32.0, 0, hysteresis
    for bit in [*BITS, 1, 1, 1, 1, 1, *[0] * 12]:
        scaler = scaler.adjust(torch.tensor(float(bit)))
        good, borne = (0, borne - 1) if bit else (good + 1, borne)
        if bit and borne <= 0:
            scale = max(scale * 0.5, low)
        if good == 2:
            scale, good, borne = min(scale * 2, high), 0, hysteresis
        assert (scaler.value.item(), scaler.growth_tracker.item()) == (scale, good)


def test_a_run_follows_grad_scaler():
    """A run unscales, skips and scales like torch.amp.GradScaler: otherwise a port from torch would train
    differently."""
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    leaf = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([leaf], 0.5)
    ours, params = DynamicLossScale(64.0, growth_interval=2), leaf.detach().clone()
    for bit in BITS:
        weight = torch.tensor([1.0, torch.inf if bit else 0.5])
        optimizer.zero_grad()
        theirs.scale((leaf * weight).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        grads, found_inf = ours.unscale(ours.scale(weight))
        params = select(found_inf, params, params - 0.5 * grads)
        ours = ours.adjust(found_inf)
        assert found_inf == bit
        assert same_bits(params, leaf.detach())
        assert ours.value.item() == theirs.get_scale()


@pytest.mark.parametrize("name", SCALERS)
def test_every_field_survives_a_round_trip(name):
    """Every field of a scaler survives flatten, pickle and copy: otherwise a loaded scaler would use default
    settings."""
    scaler = SCALERS[name]()
    fields = vars(scaler)
    defaults = vars(type(scaler)())
    assert all(fields[key] != defaults[key] for key in fields)
    ways = [
        optree.tree_map(lambda x: x, scaler),
        optree.tree_unflatten(*reversed(optree.tree_flatten(scaler))),
        pytree.tree_map(lambda x: x, scaler),
        pickle.loads(pickle.dumps(scaler)),
        copy.deepcopy(scaler),
    ]
    for other in ways:
        assert type(other) is type(scaler)
        assert vars(other).keys() == fields.keys()
        assert all(vars(other)[key] == fields[key] and type(vars(other)[key]) is type(fields[key]) for key in fields)
        assert pytree.tree_structure(other) == pytree.tree_structure(scaler)


def test_structures_with_other_settings_differ():
    """Scalers with other settings have other tree structures: otherwise a graph traced for one would run for the
    other."""
    one, other = (DynamicLossScale(growth_interval=n) for n in (3, 4))
    assert optree.tree_structure(one) != optree.tree_structure(other)
    assert optree.tree_structure(one) == optree.tree_structure(one.adjust(torch.tensor(1.0)))


@pytest.mark.parametrize("name", SCALERS)
def test_scalers_are_immutable(name):
    """`adjust` returns a new scaler: otherwise a step would change the scaler that an older state holds."""
    scaler = SCALERS[name]()
    before = copy.deepcopy(vars(scaler))
    for bit in (0.0, 1.0):
        scaler.adjust(torch.tensor(bit))
    assert vars(scaler) == before
    with pytest.raises(AttributeError):
        scaler.value = torch.tensor(1.0)
    assert name == "dynamic" or same_bits(scaler.adjust(torch.tensor(1.0)), scaler)


@pytest.mark.parametrize("name", SCALERS)
def test_value_is_a_tensor_and_scale_a_method(name):
    """`value` is a 0-d float32 tensor and `scale(tree)` a method: otherwise code that multiplies by the value would
    fail."""
    scaler = SCALERS[name]()
    number = {"dynamic": 24.0, "static": 12.0, "none": 1.0}[name]
    assert type(scaler.value) is torch.Tensor
    assert (scaler.value.shape, scaler.value.dtype, float(scaler.value)) == ((), torch.float32, number)
    assert inspect.ismethod(scaler.scale)
    assert name == "none" or "value" in {field.name for field in dataclasses.fields(scaler)}
    values = {
        "a": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "b": (torch.tensor([3.0], dtype=torch.bfloat16), None),
    }
    scaled = scaler.scale(values)
    assert same_bits(scaled, fshard.tree.map(lambda x: x * number, values))
    assert all(type(x) is torch.Tensor for x in optree.tree_leaves(scaled))


LOSSES: dict[str, Any] = {
    "float count": lambda x: fshard.Mean(x.sum(), x.new_tensor(3.0)),
    "whole count": lambda x: fshard.Mean(x.sum(), torch.tensor(3)),
    "number": lambda x: fshard.Mean(x.sum(), 3),
    "sum": lambda x: fshard.Sum(x.sum()),
    "terms": lambda x: fshard.Mean(x.sum(), x.new_tensor(3.0)) + 0.5 * fshard.Sum(x.square().sum()),
    "plain": lambda x: x.mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "scaler", [StaticLossScale(8.0), DynamicLossScale(8.0), NoLossScale()], ids=lambda x: type(x).__name__
)
def test_a_scaled_loss_has_scaled_gradients(loss, scaler):
    """The scale of a mean would cancel with that of its count, and unscaling would make its gradients too small."""
    params = torch.tensor([1.0, -2.0, 0.5])
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    scaled = fshard.value_and_grad(lambda w: scaler.scale(LOSSES[loss](w * w)))(sharded)
    value, grads = fshard.value_and_grad(lambda w: LOSSES[loss](w * w))(sharded)
    assert scaled[0] == scaler.scale(value)
    assert torch.equal(fshard.gather_params(scaler.unscale(scaled[1])[0]), fshard.gather_params(grads))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCALERS)
def test_unscale_undoes_scale(name, dtype):
    """Unscaling by a power of two undoes scaling to the bit: otherwise a loss scale would change training."""
    scaler = {"dynamic": DynamicLossScale(8.0), "static": StaticLossScale(4.0), "none": NoLossScale()}[name]
    grads = {"w": torch.tensor([1.5, -3.0, 0.0], dtype=dtype), "e": torch.zeros(0, dtype=dtype)}
    unscaled, found_inf = scaler.unscale(scaler.scale(grads))
    assert (found_inf.shape, found_inf.dtype, found_inf.item()) == ((), torch.float32, 0)
    assert same_bits(fshard.tree.map(lambda x: x.to(dtype), unscaled), grads)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_unscale_finds_what_is_not_finite(bad):
    """`unscale` finds inf or NaN in any leaf: otherwise an update would write them to the parameters."""
    for grads in ({"a": torch.tensor([1.0, bad]), "b": torch.ones(2)}, [torch.ones(3), torch.tensor(bad)]):
        assert DynamicLossScale().unscale(grads)[1] == 1
        assert StaticLossScale().unscale(grads)[1] == 1
        assert NoLossScale().unscale(grads)[1] == 0


def by_parts(x: torch.Tensor) -> bool:
    """The path of bfloat16 on CUDA, where torch's kernel does not take it."""
    return bool(kernels.unscale_by_parts_(x.clone(), torch.tensor(0.5).double()))


SEEN: dict[str, Callable[[torch.Tensor], bool]] = {
    "unscale": lambda x: bool(StaticLossScale(2.0).unscale({"w": x})[1]),
    "labels": lambda x: bool(StaticLossScale(2.0).unscale({"w": x}, labels={"w": "a"})[1]["a"]),
    "leaves": lambda x: bool(fshard.tree.nonfinite_leaves({"w": x})),
    "sharded": lambda x: bool(fshard.tree.nonfinite_leaves(fshard.shard_params({"w": x}, fshard.make_plan({"w": x})))),
    "by parts": by_parts,
}


HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float64, torch.float32, torch.complex64]


@pytest.mark.parametrize(("how", "dtype"), [(how, x) for how in SEEN for x in DTYPES if how != "by parts" or x in HALF])
def test_whatever_is_not_finite_is_seen(how, dtype):
    """One sign of infinity would pass, and be written to the parameters."""
    numel = kernels.CACHED + 2  # more than one block
    limit = torch.finfo(dtype).max
    finite = torch.tensor([-limit, limit], dtype=torch.float64).to(dtype).repeat(numel // 2)
    assert not SEEN[how](finite)
    odd = [torch.inf, -torch.inf, torch.nan]
    for bad in [complex(*x) for y in odd for x in ((y, 0), (0, y))] if dtype.is_complex else odd:
        for place in (0, kernels.CACHED, numel - 1):
            x = finite.clone()
            x[place] = bad
            assert SEEN[how](x), (bad, place)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("scale", [8.0, 3.0])
def test_one_pass_is_the_reference(dtype, scale):
    """torch's fused kernel unscales and checks like plain tensor code: otherwise results would depend on the dtype
    or device."""
    values = (torch.randn(2, 37, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    for bad in (None, torch.inf, -torch.inf, torch.nan):
        grads = {"a": values[0].clone(), "e": values[:0], "t": values.clone().t()}
        if bad is not None:
            grads["t"][5, 1] = bad
        want = fshard.tree.map(lambda g: kernels.unscaled(g, torch.tensor(scale).double().reciprocal()), grads)
        kept = copy.deepcopy(grads)
        for own in (False, True):
            found, found_inf = StaticLossScale(scale).unscale(grads, own=own)
            assert found_inf == (bad is not None)
            for name, (x, bad_x) in want.items():
                close = torch.allclose(found[name], x, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)
                assert close, name
                assert bad_x == (bad is not None and name == "t")
            assert same_bits(grads, found if own else kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_one_pass_on_ranks_is_the_reference(dtype, bad):
    """Sharded gradients are unscaled as whole ones are: otherwise a mesh would change what a scaler divides by, or an
    overflow that one rank holds would be missed."""
    whole = {name: (100 * rand(3, 5, seed=seed)).to(dtype) for seed, name in enumerate("ab")}
    if bad is not None:
        whole["b"][2, 4] = bad  # the last rank has it
    want = tree.map(lambda g: kernels.unscaled(g, torch.tensor(3.0).double().reciprocal())[0], whole)

    def run(mesh: Any) -> None:
        params = tree.map(torch.ones_like, whole)
        sharded = fshard.shard_params(whole, fshard.make_plan(params, mesh, units=["a"]))
        for own in (False, True):
            found, found_inf = StaticLossScale(3.0).unscale(tree.map(torch.clone, sharded), own=own)
            assert found_inf == (bad is not None)
            for x, expected in zip(tree.leaves(fshard.gather_params(found)), tree.leaves(want), strict=True):
                assert torch.allclose(x, expected, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)

    simulated(run, shard=3)


def test_sparse_gradients_are_coalesced():
    """Duplicates in a sparse gradient are summed before the check: otherwise an overflow of their sum would go
    unnoticed."""
    values = torch.tensor([4e4, 4e4, 8.0], dtype=torch.float16)
    half = torch.sparse_coo_tensor([[1, 1, 0]], values, (3,), check_invariants=True)
    for own in (False, True):
        unscaled, found_inf = StaticLossScale(4.0).unscale({"w": half}, own=own)
        assert found_inf == 1
        assert unscaled["w"].to_dense()[0] == 2
        assert StaticLossScale(4.0).unscale(half.float().coalesce(), own=own)[1] == 0


def test_unscaling_twice_is_an_error():
    """Unscaling a tree twice is an error that names the leaf; without it gradients would be divided by the scale
    twice."""
    grads, _ = StaticLossScale(4.0).unscale({"a": [torch.ones(2)]})
    with pytest.raises(ValueError, match=re.escape("leaf 'a.0' was unscaled already")):
        StaticLossScale(4.0).unscale(grads)
    with pytest.raises(ValueError, match="leaf 'b' was unscaled already"):
        StaticLossScale(4.0).unscale({"a": torch.ones(2), "b": grads["a"][0]})
    StaticLossScale(4.0).unscale(fshard.tree.map(lambda g: 4 * g, grads))
    for bad, words in (({"n": torch.tensor(1)}, "leaf 'n': expected a gradient, a floating tensor, got torch.int64"),):
        with pytest.raises(TypeError, match=re.escape(words)):
            StaticLossScale(4.0).unscale(bad)


def labelled(mesh: Any, bad: str) -> tuple[Any, ...]:
    """A step with two labels where one leaf overflows on the last rank: what moved, counts, found_inf, scale,
    culprits."""
    tx = optim.by_label({"w": optim.adamw(0.1), "b": optim.sgd(0.1, momentum=0.9)}, lambda path, x: path[0])
    params = {"w1": rand(5, seed=1), "w2": rand(3, 3, seed=2), "b1": rand(7, seed=3)}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))

    def loss(p: Any, weight: torch.Tensor) -> Any:
        return sum((p[k] * (weight if k == bad else 1.0)).sum() for k in p)

    state = fshard.init_state(sharded, tx, DynamicLossScale(4.0))
    step = fshard.train_step(loss, tx, skip_labels=lambda path, x: path[0])
    last = mesh is None or mesh.get_rank() == mesh.size() - 1
    after, metrics = step(state, torch.tensor(torch.inf if last else 1.0, dtype=torch.float64))
    grads = fshard.value_and_grad(loss)(sharded, torch.tensor(torch.inf if last else 1.0, dtype=torch.float64))[1]
    counts = {key: int(x) for key, x in optim.state.gather_state(after.opt_state).items() if key.endswith("count")}
    moved = fshard.tree.map(lambda a, b: not torch.equal(a, b), params, fshard.gather_params(after.params))
    return (
        moved,
        counts,
        metrics["found_inf"].item(),
        after.loss_scale.value.item(),
        fshard.tree.nonfinite_leaves(grads),
    )


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 3), (2, 2)])
def test_one_label_is_skipped_alone(replicate, shard):
    """An overflow skips its own label and lowers the scale: otherwise other labels would stop, or the scale stay too
    high."""
    for found in simulated(labelled, "w2", replicate=replicate, shard=shard):
        moved, counts, found_inf, scale, culprits = found
        assert moved == {"w1": False, "w2": False, "b1": True}
        assert counts == {"inner.w.count": 0, "inner.b.count": 1}
        assert (found_inf, scale, culprits) == (1, 2, ["w2"])


def test_labels_need_their_found_inf():
    """A label without an overflow flag of its own is an error; without it that label would be updated with inf."""
    tx = optim.by_label({"a": optim.sgd(0.1)}, lambda path, x: "a")
    with pytest.raises(ValueError, match=re.escape("found_inf is for 'b', not for 'a'")):
        tx.step(torch.ones(1), tx.init(torch.ones(1)), torch.ones(1), {"b": torch.tensor(0.0)})
    with pytest.raises(ValueError, match="clip by label"):
        fshard.train_step(lambda p: p, tx, clip_norm=1.0, skip_labels=lambda path, x: "a")


def test_a_scaler_without_arguments_is_torchs():
    """The defaults are torch.amp.GradScaler's: otherwise a port from torch would start with another scale."""
    assert DynamicLossScale().state_dict() == torch.amp.GradScaler("cpu").state_dict()
    assert StaticLossScale().value.item() == DynamicLossScale().value.item()


def test_torchs_state_dict():
    """State dicts load from and into torch.amp.GradScaler: otherwise a run could not move between torch and fshard."""
    theirs = torch.amp.GradScaler("cpu", 64.0, 3.0, 0.25, 7)
    ours = DynamicLossScale(64.0, 3.0, 0.25, 7)
    for bit in BITS:
        theirs.scale(torch.ones(1))
        torch._amp_update_scale_(theirs._scale, theirs._growth_tracker, torch.tensor(float(bit)), 3.0, 0.25, 7)
        ours = ours.adjust(torch.tensor(float(bit)))
        assert ours.state_dict() == theirs.state_dict()
    loaded = DynamicLossScale(hysteresis=2, max_scale=9e9).load_state_dict(theirs.state_dict())
    assert (loaded.hysteresis, loaded.max_scale) == (2, 9e9)
    assert loaded.state_dict().items() > theirs.state_dict().items()
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == theirs.state_dict()
    for bad, words in (({}, "is empty"), ({"scale": 1.0}, "lacks 'growth_factor'; it has scale")):
        with pytest.raises(ValueError, match=words):
            ours.load_state_dict(bad)


def test_states_of_disabled_scalers():
    """A run whose scaler is off would not save, or not go on where torch does; one that is on, with another scale."""
    off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", 64.0)
    assert NoLossScale().state_dict() == off.state_dict()
    for saved in (off.state_dict(), on.state_dict()):
        off.load_state_dict(saved)
        assert NoLossScale().load_state_dict(saved) == NoLossScale()
    with pytest.raises(RuntimeError, match="disabled"):
        on.load_state_dict(NoLossScale().state_dict())
    with pytest.raises(ValueError, match=r"not enabled\. NoLossScale loads it"):
        DynamicLossScale().load_state_dict(NoLossScale().state_dict())


def test_a_scale_may_be_set():
    """`adjust(new_scale=)` sets the scale and keeps the count: otherwise a user's scale would be ignored, or growth
    delayed."""
    scaler = DynamicLossScale(8.0, growth_interval=3).adjust(torch.tensor(0.0))
    new = scaler.adjust(torch.tensor(0.0), new_scale=4.0)
    assert (new.value.item(), new.growth_tracker, scaler.value.item()) == (4.0, 1, 8.0)


def found_on(mesh: Any, bad: int) -> tuple[float, float]:
    """Whether this rank's part is not finite, and the found_inf that `unscale` gives."""
    plan = fshard.make_plan(torch.ones(12), mesh)
    grads = fshard.shard_params(torch.ones(12), plan)
    if mesh.get_rank() == bad:
        grads.tensors[0][0] = torch.nan
    return grads.tensors[0].isnan().any().item(), DynamicLossScale().unscale(grads)[1].item()


@pytest.mark.parametrize("bad", [0, 3, -1])
def test_found_inf_is_agreed_by_all_ranks(bad):
    """An overflow on one rank reaches the found_inf of all: otherwise that rank would skip an update that the others
    make."""
    rows = simulated(found_on, bad, replicate=2)
    assert [own for own, _ in rows] == [rank == bad for rank in range(4)]
    assert {found for _, found in rows} == {float(bad >= 0)}


def test_select_picks_one_of_two_trees():
    """`select` takes every leaf from one tree alone: otherwise NaN of a skipped update would reach the parameters."""
    a, b = ({"x": torch.tensor([v, torch.nan]), "n": (torch.tensor(int(v)), None)} for v in (1.0, 2.0))
    for condition in (torch.tensor(1.0), torch.tensor(True), torch.tensor(1)):
        assert same_bits(select(condition, a, b), a)
        assert same_bits(select(torch.zeros_like(condition), a, b), b)
    with pytest.raises(ValueError, match="not of the structure of if_inf: it lacks"):
        select(torch.tensor(1.0), a, {"x": b["x"], "m": b["n"]})


@pytest.mark.parametrize(
    "bad",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}, {"growth_interval": 0}],
    ids=str,
)
def test_settings_that_make_no_sense_are_errors(bad):
    """Factors and intervals that make no sense are refused: without the error the scale would never grow, or never
    back off."""
    words = "expected growth_factor > 1 and 0 < backoff_factor < 1|growth_interval=0: expected a number of updates"
    with pytest.raises(ValueError, match=words):
        DynamicLossScale(**bad)


@pytest.mark.parametrize("bad", [{"min_scale": 2.0, "max_scale": 1.0}, {"min_scale": -1.0}, {"hysteresis": 0}], ids=str)
def test_bounds_that_make_no_sense_are_errors(bad):
    """Impossible bounds or hysteresis are refused: without the error the scale would be clamped to a wrong value."""
    words = "expected 0 <= min_scale <= max_scale|hysteresis=0: expected a number of overflows, at least 1"
    with pytest.raises(ValueError, match=words):
        DynamicLossScale(**bad)


@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
def test_a_scale_is_one_number(kind):
    """A scale must be one positive finite number: otherwise a vector, zero or NaN would spoil every gradient without
    a word."""
    for bad in (0, 0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="a loss scale is a finite number above 0, got"):
            kind(bad)
    with pytest.raises(ValueError, match="a number or a 0-d tensor"):
        kind(torch.ones(2))


def whole_tree(rank: int, bad: int) -> dict[str, Tensor]:
    """The gradients of one rank; leaf `w2` of rank `bad` has an infinite element."""
    grads = {"w1": rand(5, seed=rank), "w2": rand(2, 3, seed=10 + rank), "b1": rand(4, seed=20 + rank)}
    if rank == bad:
        grads["w2"][1, 2] = torch.inf
    return grads


def agreed_on(mesh: Any, kind: str, own: bool, bad: int) -> Any:
    """found_inf of every scaler, whole and by label, for gradients of one kind; and the leaves that are not finite."""
    grads: Any = whole_tree(mesh.get_rank(), bad)
    given: dict[str, Any] = {"mesh": mesh}
    if kind != "plain":
        plan = fshard.make_plan(grads, mesh, units=["w2"])
        loss = fshard.value_and_grad(lambda p, x: fshard.Sum(sum((p[k] * x[k]).sum() for k in p)), reduce=False)
        data = grads
        given, grads = {}, loss(fshard.shard_params(tree.map(torch.ones_like, grads), plan), data)[1]
        grads = fshard.reduce_grads(grads) if kind == "sharded" else grads
    culprits = fshard.tree.nonfinite_leaves(grads, **given)
    found = []
    for scaler in (DynamicLossScale(8.0), StaticLossScale(2.0), NoLossScale()):
        for labels in (None, lambda path, leaf: path[0]):
            value = scaler.unscale(tree.map(torch.clone, grads), own=own, labels=labels, **given)[1]
            found.append({k: x.item() for k, x in value.items()} if isinstance(value, dict) else value.item())
    return found, culprits


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["plain", "unreduced", "sharded"])
@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 2), (1, 3), (2, 2)])
def test_every_rank_has_the_same_found_inf(replicate, shard, kind, own):
    """All ranks get one found_inf, whichever rank overflows: otherwise some ranks would skip an update that others
    make."""
    for bad in {-1, 0, replicate * shard - 1}:
        hit = float(bad >= 0)
        want = [hit, {"w": hit, "b": 0.0}] * 2 + [0.0, 0.0], ["w2"] if hit else []
        assert simulated(agreed_on, kind, own, bad, replicate=replicate, shard=shard) == [want] * (replicate * shard)


def of_two_meshes(mesh: Any) -> Any:
    """found_inf and what is not finite, of gradients on one axis of a mesh, asked for on the other as well."""
    grads = {"w": torch.full((8,), torch.inf if mesh.get_rank() == 3 else 1.0)}
    sharded = fshard.shard_params(grads, fshard.make_plan(grads, mesh["shard"]))
    other = mesh["replicate"]
    whole, labelled = (StaticLossScale().unscale(sharded, labels=x, mesh=other)[1] for x in (None, {"**": "a"}))
    return whole.item(), labelled["a"].item(), fshard.tree.nonfinite_leaves(sharded, other)


def test_ranks_of_two_meshes_agree():
    """Only the ranks of the first mesh would skip an update."""
    assert gloo(of_two_meshes, shard=2, replicate=2) == [(1, 1, ["w"])] * 4


def test_processes_agree_on_found_inf():
    """Processes agree on found_inf like simulated ranks: otherwise simulated tests of overflows would prove nothing."""
    for kind in ("plain", "unreduced"):
        assert gloo(agreed_on, kind, False, 1, shard=2) == simulated(agreed_on, kind, False, 1, shard=2)


def by_hand(mesh: Any, partition: str, given: bool, tx: Any, labels: Any, jitted: bool) -> Any:
    """The parameters and the scale after three ZeRO updates; rank 1's gradients overflow in the second."""
    params = {"w1": torch.ones(5), "w2": torch.ones(2, 3), "b1": torch.ones(4)}
    zero = fshard.zero(tx, mesh, partition, "local", bucket=4 * 4)
    state, scaler = zero.init(params), DynamicLossScale(8.0)

    def one(params: Any, state: Any, scaler: Any, grads: Any) -> Any:
        grads, found_inf = scaler.unscale(scaler.scale(grads), labels=labels, mesh=mesh if given else None)
        params, state = zero.step(grads, state, params, found_inf)
        return params, state, scaler.adjust(found_inf)

    run = fshard.jit(one, backend="eager") if jitted else one
    for i in range(3):
        grads = whole_tree(mesh.get_rank() + 100 * i, bad=101)
        params, state, scaler = run(params, state, scaler, tree.map(lambda x: x.float(), grads))
    return params, scaler.value.item()


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("partition", ["flat", "leaf"])
@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 2)])
def test_zero_skips_an_update_on_all_ranks_or_on_none(replicate, shard, partition, jitted):
    """Under `zero` all ranks skip an update or none does: otherwise ranks would hold different parameters."""
    skip_w = optim.by_label({"w": optim.sgd(0.1), "b": optim.sgd(0.1)}, lambda path, x: path[0])
    for tx, labels in ((optim.sgd(0.1), None), (skip_w, lambda path, x: path[0])):
        if jitted and labels:
            continue
        want = {key: torch.ones_like(x) for key, x in whole_tree(0, -1).items()}
        for i in (0, 1, 2):
            for rank in range(replicate * shard):
                for key, g in whole_tree(rank + 100 * i, -1).items():
                    want[key] -= 0.1 * g * (i != 1 or (labels is not None and key == "b1"))
        for given in (True, False):
            runs = simulated(by_hand, partition, given, tx, labels, jitted, replicate=replicate, shard=shard)
            for params, _ in runs:
                assert same_bits(params, runs[0][0])
                torch.testing.assert_close(tree.map(lambda x: x.double(), params), want, rtol=1e-5, atol=1e-6)
            assert [scale for _, scale in runs] == [4.0 if given or r == 1 else 8.0 for r in range(replicate * shard)]


def local_grads(mesh: Any, kind: str) -> tuple[Any, dict[str, Any]]:
    """This rank's gradients as a plain tree, a `Sharded` or `Unreduced`, and what `unscale` takes besides."""
    grads = whole_tree(mesh.get_rank(), -1)
    if kind == "plain":
        return grads, {"mesh": mesh}
    sharded = fshard.shard_params(grads, fshard.make_plan(tree.map(torch.ones_like, grads), mesh))
    return fshard.reduction.Unreduced(sharded) if kind == "unreduced" else sharded, {}


KINDS = ["plain", "sharded", "unreduced"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unscaling_twice_is_noticed_on_every_rank(own, kind):
    """A second `unscale` of one tree is an error on every rank: without it gradients would be divided by the scale
    twice."""

    def law(mesh: Any) -> None:
        scaler = StaticLossScale(4.0)
        grads, given = local_grads(mesh, kind)
        once, _ = scaler.unscale(grads, own=own, **given)
        for again in (once, tree.map(lambda x: x, once)):
            for flag in (False, True):
                with pytest.raises(ValueError, match="was unscaled already: use what unscale gave the first time"):
                    scaler.unscale(again, own=flag, **given)
        scaler.unscale(tree.map(lambda x: 4 * x, once), own=own, **given)
        for row in tree.leaves(grads):
            row.fill_(1.0)  # a buffer that the next backward writes to
        scaler.unscale(grads, own=own, **given)

    simulated(law, shard=2)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unscaled_is_a_type_not_an_attribute(own, kind):
    """`unscale` marks results by type, and only `own` reuses memory: otherwise a caller's tensors would be marked or
    overwritten."""

    def law(mesh: Any) -> None:
        grads, given = local_grads(mesh, kind)
        addresses = [row.data_ptr() for row in tree.leaves(grads)]
        once, _ = StaticLossScale(4.0).unscale(grads, own=own, **given)
        assert [vars(row) for row in (*tree.leaves(grads), *tree.leaves(once))] == [{}] * 2 * len(addresses)
        assert {type(row) for row in tree.leaves(grads)} == {Tensor}
        assert {type(row) for row in tree.leaves(once)} == {Unscaled}
        assert ([row.data_ptr() for row in tree.leaves(once)] == addresses) == own

    simulated(law, shard=2)


# What becomes of gradients between two calls of `unscale`, and whether the second is refused.
BETWEEN: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda x: x, True),
    "mapped": (lambda x: tree.map(lambda leaf: leaf, x), True),
    "detached": (lambda x: tree.map(torch.detach, x), True),
    "one leaf": (lambda x: tree.map(lambda leaf: leaf if leaf is tree.leaves(x)[-1] else 4 * leaf, x), True),
    "scaled": (lambda x: tree.map(lambda leaf: 4 * leaf, x), False),
    "cloned": (lambda x: tree.map(torch.clone, x), False),
}
as_graph = functools.partial(fshard.jit, backend="eager")


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_refuse_what_is_refused_eagerly(kind, between):
    """A second `unscale` is an error wherever a graph begins or ends: otherwise jitted gradients would be divided by
    the scale twice."""
    change, refused = BETWEEN[between]

    def law(mesh: Any) -> None:
        grads, given = local_grads(mesh, kind)
        scaler = StaticLossScale(4.0)

        def unscale(x: Any) -> Any:
            return scaler.unscale(x, **given)[0]

        ways = {
            "eager": lambda x: unscale(change(unscale(x))),
            "inside": as_graph(lambda x, s: s.unscale(change(s.unscale(x, **given)[0]), **given)[0]),
            "before": lambda x: as_graph(lambda y, s: s.unscale(change(y), **given)[0])(unscale(x), scaler),
            "after": lambda x: unscale(change(as_graph(lambda y, s: s.unscale(y, **given)[0])(x, scaler))),
            "between": lambda x: unscale(as_graph(change)(unscale(x))),
        }
        want = None if refused else ways["eager"](grads)
        for name, way in ways.items():
            args = (grads, scaler) if name == "inside" else (grads,)
            if refused:
                with pytest.raises(ValueError, match="was unscaled already: use what unscale gave the first time"):
                    way(*args)
            else:
                found = way(*args)
                assert same_bits(found, want), name
                assert {type(x) for x in tree.leaves(found)} == {Unscaled}, name

    simulated(law, shard=2)


def test_a_graph_knows_the_class_of_what_it_is_given():
    """A jitted function traces unscaled gradients and others apart: otherwise the first call would decide what the
    later ones may be given."""
    scaler, grads = StaticLossScale(4.0), {"w": torch.full((2,), 16.0)}
    unscale = as_graph(lambda x, s: s.unscale(x)[0])
    once = unscale(grads, scaler)
    with pytest.raises(ValueError, match="leaf 'w' was unscaled already"):
        unscale(once, scaler)
    assert same_bits(unscale(grads, scaler), once)
    double = as_graph(lambda x: tree.map(lambda leaf: 2 * leaf, x))
    for given in (grads, once, grads):
        assert type(double(given)["w"]) is Tensor
    assert "of class Unscaled" in double.explain()
    compiled = double.lower(grads).compile("eager")
    with pytest.raises(ValueError, match="of class Unscaled"):
        compiled(once)


def test_copies_of_unscaled_gradients():
    """Unscaled gradients can be copied, saved and made parameters of: otherwise code that takes any tensor would fail
    in torch's words, and a file could not be loaded without fshard."""
    x = torch.tensor([8.0, 4.0])
    grads, _ = StaticLossScale(4.0).unscale({"a": x, "b": x})
    grads["view"] = grads["a"].detach()
    copied = copy.deepcopy(grads)
    assert same_bits(copied, grads)
    assert {type(leaf) for leaf in copied.values()} == {Unscaled}
    assert copied["a"].data_ptr() == copied["view"].data_ptr() != grads["a"].data_ptr()
    with pytest.raises(ValueError, match="leaf 'a' was unscaled already"):
        StaticLossScale(4.0).unscale(copied)

    file = io.BytesIO()
    torch.save(grads, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True), pickle.loads(pickle.dumps(grads))):
        assert same_bits(loaded, {key: leaf.as_subclass(Tensor) for key, leaf in grads.items()})
        assert {type(leaf) for leaf in loaded.values()} == {Tensor}


def test_a_parameter_made_of_an_unscaled_gradient():
    """A parameter that starts as an unscaled gradient trains, is copied and is saved as any other: otherwise a module
    with such a parameter could not be written to a file."""
    grad = StaticLossScale(4.0).unscale(torch.tensor([8.0, 4.0]))[0]
    module = nn.Module()
    module.w = nn.Parameter(grad)
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(same.w, nn.Parameter)
        assert same.w.is_leaf
        assert same.w.requires_grad
        same.w.square().sum().backward()
        torch.optim.SGD(same.parameters(), 0.25).step()
        assert same.w.tolist() == [1.0, 0.5]
        same.w.grad = None
        with torch.no_grad():
            same.w.copy_(torch.tensor([2.0, 1.0]))
        assert type(same.state_dict()["w"].clone()) is Tensor


def test_what_is_computed_from_unscaled_gradients_is_plain():
    """What is computed from unscaled gradients is a plain Tensor: otherwise new gradients would be refused as
    unscaled already."""
    grad = StaticLossScale(4.0).unscale(torch.tensor([8.0, 4.0]))[0]
    assert type(grad) is Unscaled
    made = [grad * 2, grad + grad, grad.clone(), grad.detach() + 0, grad[:1], grad.view(2, 1), torch.stack([grad])]
    made += [*torch._foreach_mul([grad], 2.0), *grad.split(1), grad.to(torch.float64), grad.to("cpu", copy=True)]
    assert {type(x) for x in made} == {Tensor}


@pytest.mark.parametrize("tx", ["sgd", "adamw", "lion", "lamb"])
@pytest.mark.parametrize("jitted", [False, True])
def test_optimizers_take_unscaled_gradients(tx, jitted):
    """Updates with unscaled gradients have the bits of plain ones: otherwise a loss scale would change training or
    parameter types."""
    one = getattr(optim, tx)(0.1)
    params = {"w": rand(5, seed=1), "b": rand(2, 3, seed=2)}
    grads = tree.map(lambda x: x / 3, params)
    unscaled = StaticLossScale(2.0).unscale(tree.map(lambda x: 2 * x, grads))[0]

    def run(grads: Any, params: Any) -> Any:
        return one.step(grads, one.init(params), params)

    update = fshard.jit(run, backend="eager") if jitted else run
    got, want = update(unscaled, params), update(grads, params)
    assert same_bits(got, want)
    assert {type(x) for x in tree.leaves(got)} == {Tensor}


def test_inference_tensors_are_unscaled():
    """Tensors made in inference mode can be unscaled: otherwise a scaler would fail on such gradients."""
    with torch.inference_mode():
        assert same_bits(StaticLossScale(4.0).unscale(torch.tensor([8.0]), own=True)[0].clone(), torch.tensor([2.0]))


def test_a_state_dict_has_every_field():
    """A state dict has every field: otherwise a loaded scaler would silently use default settings."""
    scaler = SCALERS["dynamic"]()
    again = DynamicLossScale(hysteresis=9, max_scale=5.0).load_state_dict(scaler.state_dict())
    assert vars(again) == vars(scaler)
    assert again.state_dict() == scaler.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert scaler.state_dict().items() > theirs.state_dict().items()
    for kw in ({"min_scale": 2.0}, {"max_scale": 9e4}, {"hysteresis": 3, "hysteresis_tracker": 2}):
        one = DynamicLossScale(64.0, **kw)
        assert vars(DynamicLossScale(min_scale=1.0, hysteresis=7).load_state_dict(one.state_dict())) == vars(one)


def test_a_scaler_owns_its_tensors():
    """A scaler copies the tensors that it is given: otherwise a later write to them would change the scale."""
    scale, count = torch.tensor(8.0, requires_grad=True), torch.tensor(2, dtype=torch.int32)
    made = [
        DynamicLossScale(scale, growth_tracker=count, hysteresis=3, hysteresis_tracker=count),
        StaticLossScale(scale),
        DynamicLossScale().adjust(torch.tensor(0.0), new_scale=scale),
    ]
    with torch.no_grad():
        scale.fill_(3.0)
        count.fill_(1)
    assert [scaler.value.item() for scaler in made] == [8.0] * 3
    assert not any(scaler.value.requires_grad for scaler in made)
    assert (made[0].growth_tracker, made[0].hysteresis_tracker) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", SCALERS)
def test_scaling_keeps_dtypes(name, dtype):
    """`scale` keeps the dtype of every loss: otherwise a bfloat16 loss would become float32 and cost more memory."""
    scaler = SCALERS[name]()
    losses = {
        "a": torch.tensor(3.0, dtype=dtype),
        "b": [torch.ones(2, dtype=dtype), (None, torch.ones(0, dtype=dtype))],
    }
    scaled = scaler.scale(losses)
    assert [x.dtype for x in tree.leaves(scaled)] == [dtype] * 3
    assert same_bits(scaled["a"], (3 * scaler.value).to(dtype))


def test_what_cannot_be_scaled():
    """Scaling an integer or a Python number is an error that names the leaf; without it a loss would be scaled in
    part only."""
    for bad, words in (({"n": [torch.tensor(1)]}, "torch.int64"), ({"n": [3.0]}, "float")):
        with pytest.raises(TypeError, match=re.escape(f"scale: leaf 'n.0': expected a floating tensor, got {words}")):
            StaticLossScale(4.0).scale(bad)


def test_scaled_losses_of_ranks_have_scaled_gradients():
    """Gradients of several scaled losses are the unscaled ones times the scale: otherwise such losses would train
    wrongly."""

    def run(mesh: Any) -> Any:
        w, scaler = torch.ones(3, dtype=torch.float16, requires_grad=True), DynamicLossScale(64.0)
        losses = [(w * x).sum() for x in rand(2, 3, seed=mesh.get_rank(), dtype=torch.float16)]
        (grad,) = torch.autograd.grad(scaler.scale(losses), w, [torch.ones_like(x) for x in losses])
        return *scaler.unscale(grad, mesh=mesh), rand(2, 3, seed=mesh.get_rank(), dtype=torch.float16).sum(0)

    for grad, found_inf, want in simulated(run, shard=3):
        assert found_inf == 0
        torch.testing.assert_close(grad, want, rtol=2e-3, atol=1e-3)


def emptied(mesh: Any, scale: Any, accumulate: int, reduction: str, masked: bool, labels: Any) -> Any:
    """Three steps, in the second of which no rank counts anything: NaN losses, found_inf, unchanged states, and the
    last scale."""
    params = {"w": torch.ones(6), "v": torch.ones(3)}
    plan = fshard.make_plan(params, mesh, units=["v"])
    tx = optim.adamw(0.1) if labels is None else optim.by_label({"w": optim.adamw(0.1), "v": optim.sgd(0.1)}, labels)

    def loss(p: Any, batch: Any) -> Any:
        rows = (batch["x"] * p["w"]).sum(1) + 7 + p["v"].sum()
        on = batch["on"]
        return fshard.Mean(rows[on > 0].sum() if masked else rows.sum(), on.sum())

    step = fshard.train_step(loss, tx, accumulate=accumulate, reduction=reduction, skip_labels=labels)
    state, rows = fshard.init_state(fshard.shard_params(params, plan), tx, scale), []
    for i in range(3):
        on = torch.zeros(4)
        if i != 1 and mesh.get_rank() == 1:
            on[-1] = 1.0  # others, and the first micro-batches, count nothing
        batch = {"x": rand(4, 6, seed=10 * i + mesh.get_rank(), dtype=torch.float32), "on": on}
        before, (state, metrics) = state, step(state, batch)
        same = same_bits((before.params, before.opt_state), (state.params, state.opt_state))
        rows.append((metrics["loss"].isnan().item(), metrics["found_inf"].item(), same))
    return rows, state.params.tensors[0].isnan().any().item(), state.loss_scale.value.item()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["exact", "tree"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mean_of_nothing_is_skipped(accumulate, reduction, masked):
    """A mean over no elements is NaN and a scaler skips the update: otherwise 0 / 0 would make every parameter NaN."""
    good, bad = (False, 0.0, False), (True, 1.0, True)
    for labels in (None, lambda path, leaf: path[0]):
        how = DynamicLossScale(4.0), accumulate, reduction, masked, labels
        for shard in (2, 4):
            assert simulated(emptied, *how, shard=shard) == [([good, bad, good], False, 2.0)] * shard
    if not masked:  # without a scaler what is not finite shows
        for rows, is_nan, _ in simulated(emptied, None, accumulate, reduction, masked, None, shard=2):
            assert rows[1][:2] == (True, 1.0)
            assert is_nan


def test_a_gradient_of_nothing_is_nan():
    """A mean over no elements has a NaN gradient: otherwise a batch that counts nothing would make an arbitrary
    update."""

    def run(mesh: Any, counts: list[int]) -> Any:
        sharded = fshard.shard_params(torch.ones(3), fshard.make_plan(torch.ones(3), mesh))
        rank = mesh.get_rank()
        loss = fshard.value_and_grad(lambda w: fshard.Mean((w * (rank + 1)).sum(), counts[rank]))
        value, grads = loss(sharded)
        return value.item(), fshard.gather_params(grads).tolist()

    assert all(x != x for value, grads in simulated(run, [0, 0], shard=2) for x in (value, *grads))
    assert simulated(run, [0, 2], shard=2) == [(4.5, [1.5] * 3)] * 2


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 2)])
def test_the_rules_of_a_scale_are_followed_on_every_rank(mesh_shape):
    """An overflow on one rank moves the scale on all ranks by Megatron's rule: otherwise ranks would use different
    scales."""

    def run(mesh: Any) -> list[Any]:
        scaler, rows = DynamicLossScale(32.0, growth_interval=2, min_scale=16.0, max_scale=64.0, hysteresis=2), []
        for i, bad in enumerate([-1, -1, -1, -1, 0, 1, 0, 1, -1, -1]):
            grads = {"w": torch.full((3,), torch.inf if bad == mesh.get_rank() else 1.0 + mesh.get_rank())}
            found_inf = scaler.unscale(grads, mesh=mesh)[1]
            scaler = scaler.adjust(found_inf, new_scale=None if i != 6 else 48.0)
            rows.append((scaler.value.item(), int(scaler.growth_tracker), int(scaler.hysteresis_tracker)))
        return rows

    want = [(32, 1, 2), (64, 0, 2), (64, 1, 2), (64, 0, 2), (64, 0, 1), (32, 0, 0), (48, 0, 0), (24, 0, 0)]
    want += [(24, 1, 0), (48, 0, 2)]
    replicate, shard = mesh_shape
    assert simulated(run, replicate=replicate, shard=shard) == [want] * (replicate * shard)


def test_saved_scalers_go_on_alike():
    """A run resumed from a saved scaler has the same scales and parameters: otherwise a resume would change
    training."""

    def run(mesh: Any, resumed: bool) -> Any:
        params = {"w": torch.ones(5)}
        scaler: Any = DynamicLossScale(8.0, growth_interval=2, max_scale=32.0, hysteresis=2)
        tx = optim.sgd(0.1)
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx, scaler)
        step, rows = fshard.train_step(lambda p, x: fshard.Sum((p["w"] * x).sum()), tx), []
        for i, bit in enumerate(BITS):
            if resumed and i == 4:  # one overflow was borne
                loaded = DynamicLossScale().load_state_dict(state.loss_scale.state_dict())
                state = dataclasses.replace(state, loss_scale=loaded)
            bad = bit and mesh.get_rank() == i % 2
            state, _ = step(state, torch.tensor(torch.inf if bad else 1.0 + mesh.get_rank()))
            rows.append(state.loss_scale.state_dict())
        return rows, fshard.gather_params(state.params)

    runs = [simulated(run, resumed, shard=2) for resumed in (False, True)]
    assert runs[0][0][0] == runs[1][0][0] == runs[0][1][0]
    assert same_bits([p for _, p in runs[0]], [p for _, p in runs[1]])


def test_culprits_are_named_on_every_rank_wherever_they_lie():
    """Every rank names all leaves that are not finite, sharded or not: otherwise a user would look for NaN in the
    wrong leaf."""

    def run(mesh: Any) -> list[str]:
        rank = mesh.get_rank()
        whole = {"a": torch.ones(3), "b": [torch.ones(7), torch.ones(2, dtype=torch.complex64)]}
        sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, whole="a"))
        if rank == 0:
            sharded.tensors[1][0] = torch.nan
        values = torch.tensor([1.0, torch.inf if rank == 1 else 1.0])
        sparse = torch.sparse_coo_tensor([[0, 2]], values, (4,), check_invariants=True)
        plain = {
            "n": torch.arange(3),
            "c": torch.tensor([1j, complex(1, torch.inf) if rank == 1 else 1]),
            "e": torch.ones(0),
        }
        return fshard.tree.nonfinite_leaves({"s": sharded, "plain": plain, "sparse": sparse})

    assert simulated(run, shard=2) == [["s.b.0", "plain.c", "sparse"]] * 2
