"""Loss scaling: the dynamic rule is torch's, scalers are values, and a skipped update selects the old tree."""

import copy
import math
import pickle
import re
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from models import rand, same_bits
from worlds import simulated

import fshard
from fshard import DynamicLossScale, NoLossScale, StaticLossScale, kernels, optim, select

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
    """Scale and tracker of torch.amp.GradScaler's own rule, after every step; growth stops before infinity."""
    scaler = DynamicLossScale(start, growth, backoff, interval)
    scale, tracker = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
    for bit in BITS:
        found_inf = torch.tensor(float(bit))
        scaler = scaler.adjust(found_inf)
        torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)
        assert same_bits([scaler.scale.as_subclass(torch.Tensor), scaler.growth_tracker], [scale, tracker])


@pytest.mark.parametrize(("bounds", "hysteresis"), [((8.0, 64.0), 1), ((8.0, 64.0), 3), ((0.0, math.inf), 2)])
def test_bounds_and_hysteresis(bounds, hysteresis):
    """Megatron-LM's rule, in plain numbers: overflows are borne until there were too many since the scale last grew."""
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
        assert (scaler.scale.item(), scaler.growth_tracker.item()) == (scale, good)


def test_a_run_follows_grad_scaler():
    """The same losses through torch.amp.GradScaler: unscaled gradients, skipped updates and scales."""
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
        assert ours.scale.item() == theirs.get_scale()


@pytest.mark.parametrize("name", SCALERS)
def test_every_field_survives_a_round_trip(name):
    """Flatten and unflatten by optree and by torch, pickle, copy; no field has its default value."""
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
    """What is not a tensor is part of the structure."""
    one, other = (DynamicLossScale(growth_interval=n) for n in (3, 4))
    assert optree.tree_structure(one) != optree.tree_structure(other)
    assert optree.tree_structure(one) == optree.tree_structure(one.adjust(torch.tensor(1.0)))


@pytest.mark.parametrize("name", SCALERS)
def test_scalers_are_immutable(name):
    """Fields cannot be set, and adjust leaves the scaler as it was."""
    scaler = SCALERS[name]()
    before = copy.deepcopy(vars(scaler))
    for bit in (0.0, 1.0):
        scaler.adjust(torch.tensor(bit))
    assert vars(scaler) == before
    with pytest.raises(AttributeError):
        scaler._scale = torch.tensor(1.0)
    assert name == "dynamic" or same_bits(scaler.adjust(torch.tensor(1.0)), scaler)


@pytest.mark.parametrize("name", SCALERS)
def test_scale_is_a_tensor_and_a_function(name):
    """A 0-d tensor; called, it multiplies a tree; what is computed with it is a plain tensor."""
    scaler = SCALERS[name]()
    number = {"dynamic": 24.0, "static": 12.0, "none": 1.0}[name]
    assert isinstance(scaler.scale, torch.Tensor)
    assert (scaler.scale.shape, scaler.scale.dtype, float(scaler.scale)) == ((), torch.float32, number)
    results = [scaler.scale * 2, scaler.scale + scaler.scale, scaler.scale.clone(), torch.stack([scaler.scale])]
    assert [type(x) for x in results] == [torch.Tensor] * 4
    values = {
        "a": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "b": (torch.tensor([3.0], dtype=torch.bfloat16), None),
    }
    scaled = scaler.scale(values)
    assert same_bits(scaled, fshard.tree.map(lambda x: x * number, values))
    assert all(type(x) is torch.Tensor for x in optree.tree_leaves(scaled))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCALERS)
def test_unscale_undoes_scale(name, dtype):
    """To the bit, by a power of two, where nothing overflows."""
    scaler = {"dynamic": DynamicLossScale(8.0), "static": StaticLossScale(4.0), "none": NoLossScale()}[name]
    grads = {"w": torch.tensor([1.5, -3.0, 0.0], dtype=dtype), "e": torch.zeros(0, dtype=dtype)}
    unscaled, found_inf = scaler.unscale(scaler.scale(grads))
    assert (found_inf.shape, found_inf.dtype, found_inf.item()) == ((), torch.float32, 0)
    assert same_bits(fshard.tree.map(lambda x: x.to(dtype), unscaled), grads)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_unscale_finds_what_is_not_finite(bad):
    """In any leaf; NoLossScale does not look."""
    for grads in ({"a": torch.tensor([1.0, bad]), "b": torch.ones(2)}, [torch.ones(3), torch.tensor(bad)]):
        assert DynamicLossScale().unscale(grads)[1] == 1
        assert StaticLossScale().unscale(grads)[1] == 1
        assert NoLossScale().unscale(grads)[1] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("scale", [8.0, 3.0])
def test_one_pass_is_the_reference(dtype, scale):
    """The kernel that reads and writes at once, beside plain tensor code; new tensors, or the caller's own."""
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


def test_sparse_gradients_are_coalesced():
    """Halves of one element that overflow only when they are added up are found; values are divided."""
    values = torch.tensor([4e4, 4e4, 8.0], dtype=torch.float16)
    half = torch.sparse_coo_tensor([[1, 1, 0]], values, (3,), check_invariants=True)
    for own in (False, True):
        unscaled, found_inf = StaticLossScale(4.0).unscale({"w": half}, own=own)
        assert found_inf == 1
        assert unscaled["w"].to_dense()[0] == 2
        assert StaticLossScale(4.0).unscale(half.float().coalesce(), own=own)[1] == 0


def test_unscaling_twice_is_an_error():
    """And a tree that is no gradient; each names its leaf."""
    grads, _ = StaticLossScale(4.0).unscale({"a": [torch.ones(2)]})
    with pytest.raises(ValueError, match=re.escape("leaf 'a.0' was unscaled already")):
        StaticLossScale(4.0).unscale(grads)
    StaticLossScale(4.0).unscale(fshard.tree.map(lambda g: 4 * g, grads))
    for bad, words in (({"n": torch.tensor(1)}, "leaf 'n': expected a gradient, a floating tensor, got torch.int64"),):
        with pytest.raises(TypeError, match=re.escape(words)):
            StaticLossScale(4.0).unscale(bad)


def labelled(mesh: Any, bad: str) -> tuple[Any, ...]:
    """A step of two labels where one leaf overflows on one rank: parameters, counts, found_inf, culprits."""
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
    counts = {key: int(x) for key, x in optim.gather_state(after.opt_state).items() if key.endswith("count")}
    moved = fshard.tree.map(lambda a, b: not torch.equal(a, b), params, fshard.gather_params(after.params))
    return moved, counts, metrics["found_inf"].item(), after.loss_scale.scale.item(), fshard.nonfinite_leaves(grads)


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 3), (2, 2)])
def test_one_label_is_skipped_alone(replicate, shard):
    """The other moves and counts; the scale backs off; the culprit is named on every rank."""
    for found in simulated(labelled, "w2", replicate=replicate, shard=shard):
        moved, counts, found_inf, scale, culprits = found
        assert moved == {"w1": False, "w2": False, "b1": True}
        assert counts == {"inner.w.count": 0, "inner.b.count": 1}
        assert (found_inf, scale, culprits) == (1, 2, ["w2"])


def test_labels_need_their_found_inf():
    """The sentences for labels that are not there, and for a norm over all of them."""
    tx = optim.by_label({"a": optim.sgd(0.1)}, lambda path, x: "a")
    with pytest.raises(ValueError, match=re.escape("found_inf is for 'b', not for 'a'")):
        tx.step(torch.ones(1), tx.init(torch.ones(1)), torch.ones(1), {"b": torch.tensor(0.0)})
    with pytest.raises(ValueError, match="clip by label"):
        fshard.train_step(lambda p: p, tx, clip_norm=1.0, skip_labels=lambda path, x: "a")


def test_torchs_state_dict():
    """GradScaler's own, in and out, from and for one in the middle of a run."""
    theirs = torch.amp.GradScaler("cpu", 64.0, 3.0, 0.25, 7)
    ours = DynamicLossScale(64.0, 3.0, 0.25, 7)
    for bit in BITS:
        theirs.scale(torch.ones(1))
        torch._amp_update_scale_(theirs._scale, theirs._growth_tracker, torch.tensor(float(bit)), 3.0, 0.25, 7)
        ours = ours.adjust(torch.tensor(float(bit)))
        assert ours.state_dict() == theirs.state_dict()
    loaded = DynamicLossScale(hysteresis=2, max_scale=9e9).load_state_dict(theirs.state_dict())
    assert (loaded.state_dict(), loaded.hysteresis, loaded.max_scale) == (theirs.state_dict(), 2, 9e9)
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == theirs.state_dict()
    for bad, words in (({}, "is empty"), ({"scale": 1.0}, "lacks 'growth_factor'; it has scale")):
        with pytest.raises(ValueError, match=words):
            ours.load_state_dict(bad)


def test_a_scale_may_be_set():
    """For the next step; what counts goes on."""
    scaler = DynamicLossScale(8.0, growth_interval=3).adjust(torch.tensor(0.0))
    new = scaler.adjust(torch.tensor(0.0), new_scale=4.0)
    assert (new.scale.item(), new.growth_tracker, scaler.scale.item()) == (4.0, 1, 8.0)


def found_on(mesh: Any, bad: int) -> tuple[float, float]:
    """found_inf where one rank's part is not finite."""
    plan = fshard.make_plan(torch.ones(12), mesh)
    grads = fshard.shard_params(torch.ones(12), plan)
    if mesh.get_rank() == bad:
        grads.tensors[0][0] = torch.nan
    return grads.tensors[0].isnan().any().item(), DynamicLossScale().unscale(grads)[1].item()


@pytest.mark.parametrize("bad", [0, 3, -1])
def test_found_inf_is_agreed_by_all_ranks(bad):
    """One rank alone has it; all hear of it."""
    rows = simulated(found_on, bad, replicate=2)
    assert [own for own, _ in rows] == [rank == bad for rank in range(4)]
    assert {found for _, found in rows} == {float(bad >= 0)}


def test_select_picks_one_of_two_trees():
    """Leaf by leaf, whatever is in the other; the structures must be one."""
    a, b = ({"x": torch.tensor([v, torch.nan]), "n": (torch.tensor(int(v)), None)} for v in (1.0, 2.0))
    for condition in (torch.tensor(1.0), torch.tensor(True), torch.tensor(1)):
        assert same_bits(select(condition, a, b), a)
        assert same_bits(select(torch.zeros_like(condition), a, b), b)
    with pytest.raises(ValueError, match="key"):
        select(torch.tensor(1.0), a, {"x": b["x"], "m": b["n"]})


@pytest.mark.parametrize(
    "bad",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}, {"growth_interval": 0}],
    ids=str,
)
def test_settings_that_make_no_sense_are_errors(bad):
    """The sentence says what was expected."""
    with pytest.raises(ValueError, match="expected growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= 1"):
        DynamicLossScale(**bad)


@pytest.mark.parametrize("bad", [{"min_scale": 2.0, "max_scale": 1.0}, {"min_scale": -1.0}, {"hysteresis": 0}], ids=str)
def test_bounds_that_make_no_sense_are_errors(bad):
    """The sentence says what was expected."""
    with pytest.raises(ValueError, match="expected 0 <= min_scale <= max_scale and hysteresis >= 1"):
        DynamicLossScale(**bad)


@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
def test_a_scale_is_one_number(kind):
    """A vector is refused, and what is no positive finite number."""
    for bad in (0, 0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="a loss scale is a finite number above 0, got"):
            kind(bad)
    with pytest.raises(ValueError, match="a number or a 0-d tensor"):
        kind(torch.ones(2))
