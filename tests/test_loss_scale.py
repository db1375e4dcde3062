"""Loss scaling: the dynamic rule is torch's, scalers are values, and a skipped update selects the old tree."""

import copy
import pickle
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from models import same_bits
from worlds import simulated

import fshard
from fshard import DynamicLossScale, NoLossScale, StaticLossScale, select

SCALERS = {
    "dynamic": lambda: DynamicLossScale(24.0, 3.0, 0.25, 7, 5),
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


@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
def test_a_scale_is_one_number(kind):
    """A vector is refused."""
    with pytest.raises(ValueError, match="a number or a 0-d tensor"):
        kind(torch.ones(2))
