"""Plans: every tree, laid out over any number of ranks, comes back whole; intervals are what plain arithmetic says."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import STRATEGIES, TREES, WORLDS, Pair, counting, padding, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import gather_params, make_plan, shard_params
from fshard.comm.mesh import coordinate
from fshard.core import tree
from fshard.sharding.sharded import whole_view
from fshard.wire import Int8

UNITS = {"root": None, "leaves": "**", "size": 6, "top": lambda path, part: path != "" and "." not in path}
CUTS = {"full": {}, "wide": STRATEGIES["wide"], "wide_state": STRATEGIES["wide_state"], "ddp": STRATEGIES["ddp"]}
CUTS["whole"] = {"whole": "**"}


def lay_out(mesh: Any, name: str) -> list[Any]:
    """One tree, every way to cut it: what every rank can see by itself is checked, what all must see is returned."""
    params, rows = TREES[name](), []
    for cut in CUTS.values():
        for units in UNITS.values():
            plan = make_plan(params, mesh, units=units, **cut)
            sharded = shard_params(params, plan)
            assert same_bits(gather_params(sharded), params)
            assert not any(x.count_nonzero() for x in padding(sharded))
            assert all(x.dim() == 1 and x.is_contiguous() for x in sharded.tensors)
            assert [x.dtype for x in sharded.tensors] == [kind.dtype for kind in plan.kinds]
            check_intervals(plan)
            over, rest = (coordinate(mesh, a) for a in (plan.params_over, plan.rest(plan.params_over)))
            rows.append((plan, over, rest, sharded.local_views()))
    return rows


def check_intervals(plan: fshard.Plan) -> None:
    """Multiples of 16 bytes, no longer than an equal share of the leaves, each rounded up, and one such block."""
    for unit in range(len(plan.units)):
        for kind, what in enumerate(plan.kinds):
            size = what.dtype.itemsize
            sizes = [s.numel * size for s in plan.slots if (s.unit, s.kind) == (unit, kind)]
            least = sum(-(-nbytes // 16) * 16 for nbytes in sizes)
            for over in (plan.params_over, plan.grads_over, plan.state_over) if sizes else ():
                row = whole_view(plan, over, [kind]).rows[unit, kind]
                assert row.shards == (1 if what.whole else plan.num_ranks(over))
                assert row.length * size % 16 == row.start * size % 16 == 0
                assert least <= row.length * size * row.shards < least + 16 * plan.num_ranks(plan.axis_names)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", TREES)
def test_gathering_undoes_sharding(name, world):
    """A gathered leaf would have other bits, dtype or shape than the leaf that was sharded, or two ranks would hold
    one element."""
    replicate, shard = WORLDS[world]
    params = TREES[name]()
    expected = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    for ranks in zip(*simulated(lay_out, name, replicate=replicate, shard=shard), strict=True):
        plans = [plan for plan, *_ in ranks]
        assert len({hash(plan) for plan in plans}) == len(set(plans)) == 1
        copies: dict[int, list[Any]] = {}
        for _, over, rest, views in ranks:
            assert list(views) == list(expected)
            copies.setdefault(rest, []).append((over, views))
        for parts in copies.values():
            pieces = [views for _, views in sorted(parts, key=lambda row: row[0])]
            for number, (path, leaf) in enumerate(expected.items()):
                whole = plans[0].kinds[plans[0].slots[plans[0].leaves[number]].kind].whole
                flats = [views[path] for views in pieces]
                assert all(same_bits(x, leaf.reshape(-1)) for x in (flats if whole else [torch.cat(flats)]))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
LEAVES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
    min_size=1,
    max_size=9,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(LEAVES, st.sets(st.integers(0, 3)), st.integers(1, 5))
def test_intervals_by_brute_force(leaves, claimed, num_ranks):
    """A rank would hold other elements than a plain loop over padded leaves gives it."""
    params: dict[str, dict[str, Tensor]] = {}
    for i, (group, dtype, shape) in enumerate(leaves):
        params.setdefault(f"g{group}", {})[f"x{i}"] = counting(*shape, dtype=dtype, start=5 * i)
    patterns = [f"g{group}" for group in sorted(claimed) if f"g{group}" in params]
    at = [i for i, group in enumerate(params) if group in patterns]
    by_unit: dict[str, list[Tensor]] = {"(root)": []}
    for i, (group, part) in enumerate(params.items()):
        between = "(root)" if not at or at[0] < i < at[-1] else "(first)" if i < at[0] else "(last)"
        by_unit.setdefault(group if group in patterns else between, []).extend(part.values())
    units = list(by_unit.values())
    order = list(dict.fromkeys(x.dtype for part in params.values() for x in part.values()))

    def run(mesh: Any) -> None:
        sharded = shard_params(params, make_plan(params, mesh, units=patterns))
        for dtype, tensor in zip(order, sharded.tensors, strict=True):
            held = [torch.empty(0, dtype=dtype)]
            for unit in units:
                numbers = []
                for x in (x for x in unit if x.dtype == dtype):
                    numbers += x.reshape(-1).tolist()
                    while len(numbers) % (16 // dtype.itemsize):
                        numbers.append(0)
                while len(numbers) % (num_ranks * (16 // dtype.itemsize)):
                    numbers.append(0)
                length = len(numbers) // num_ranks
                mine = numbers[mesh.get_rank() * length : (mesh.get_rank() + 1) * length]
                held.append(torch.tensor(mine, dtype=dtype))
            assert same_bits(tensor, torch.cat(held))
        assert same_bits(gather_params(sharded), params)

    simulated(run, shard=num_ranks)


GRADIENT_CUTS = {
    "root": {},
    "leaves": {"units": "**"},
    "size": {"units": 4},
    "whole": {"units": "**", "whole": "**"},
}


def weighted(params: Any, rank: int) -> Tensor:
    """A sum of squares in which every rank, and every other leaf, has another weight; exact in small numbers."""
    total = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(tree.leaves(params)):
        if x.is_floating_point() or x.is_complex():
            total = total + ((1 + rank + i % 2) * (x * x.conj()).real.double()).sum()
    return total


def differentiate(mesh: Any, name: str, strategy: str) -> None:
    """The gathered gradient is the one of the sum over all ranks, where there is one."""
    params = TREES[name]()
    twin = tree.map(lambda x: x, params)
    variables = {id(x): x.detach().clone() for x in tree.leaves(twin)}
    for x in variables.values():
        x.requires_grad_(x.is_floating_point() or x.is_complex())
    twin = tree.map(lambda x: variables[id(x)], twin)
    torch.stack([weighted(twin, rank) for rank in range(mesh.size())]).sum().backward()
    expected = [x.grad for x in tree.leaves(twin)]
    for cut in GRADIENT_CUTS.values():
        plan = make_plan(params, mesh, **cut, **STRATEGIES[strategy])
        _, grads = fshard.value_and_grad(lambda p: fshard.Sum(weighted(p, mesh.get_rank())))(shard_params(params, plan))
        got = plan.spec.flatten_up_to(gather_params(grads))
        for a, b in zip(got, expected, strict=True):
            assert (a is None and b is None) or same_bits(a, b)
        assert not any(x.count_nonzero() for x in padding(grads))


@pytest.mark.parametrize("world", ["1", "3", "2x2"])
@pytest.mark.parametrize("name", TREES)
def test_every_tree_is_differentiated(name, world):
    """Of some kind of tree, gradients would be lost: of tied leaves, leaves kept whole, or leaves beside integers."""
    replicate, shard = WORLDS[world]
    for strategy in ("full", "wide", "zero2"):
        simulated(differentiate, name, strategy, replicate=replicate, shard=shard)


def test_frozen_leaves_are_carried():
    """A frozen leaf would get a gradient, optimizer state, or other bits after a step."""

    def run(mesh: Any) -> None:
        params = TREES["nested"]()
        plan = make_plan(params, mesh, units="blocks.*", frozen=["blocks.1", "blocks.*.b"], whole="blocks.0")
        tx = fshard.optim.adamw(0.1)
        state = fshard.init_state(shard_params(params, plan), tx)
        _, grads = fshard.value_and_grad(lambda p: fshard.Sum(weighted(p, 0)))(state.params)
        still = [path.startswith("blocks.1") or path.endswith(".b") for path in tree.leaf_paths(plan.spec)]
        flat = plan.spec.flatten_up_to
        assert [x is None for x in flat(gather_params(grads))] == still
        assert [x is None for x in flat(gather_params(state.opt_state.mu))] == still
        after, _ = fshard.train_step(lambda p, _: fshard.Sum(weighted(p, 0)), tx)(state, torch.zeros(1))
        now = flat(gather_params(after.params))
        assert [same_bits(a, b) for a, b in zip(now, flat(params), strict=True)] == still

    simulated(run, shard=3)


def names(plan: fshard.Plan) -> dict[str, str]:
    """The unit of every leaf."""
    return {s.path: plan.units[s.unit].name for s in plan.slots}


def test_units_by_pattern():
    """A pattern would claim the wrong subtrees: `*` more than one component, `**` too few, an outer claim the leaves
    of an inner one."""
    params = {
        "embed": counting(1),
        "enc": [{"w": counting(2), "b": counting(3)} for _ in range(2)],
        "head": counting(4),
    }
    assert set(names(make_plan(params)).values()) == {"(root)"}
    for units in (
        "enc.*",
        ["enc.*"],
        ["enc", "enc.*"],
        ["enc.*", "enc"],
        lambda path, _: path.startswith("enc.") and path[-1] in "01",
    ):
        assert names(make_plan(params, units=units)) == {
            "embed": "(first)",
            **{f"enc.{i}.{x}": f"enc.{i}" for i in range(2) for x in "wb"},
            "head": "(last)",
        }
    found = names(make_plan(params, units=["**.w", "enc", "h?ad"]))
    assert found == {
        "embed": "(first)",
        "enc.0.w": "enc.0.w",
        "enc.0.b": "enc",
        "enc.1.w": "enc.1.w",
        "enc.1.b": "enc",
        "head": "head",
    }
    assert [u.name for u in make_plan(params, units=["enc.*"]).units] == ["(first)", "enc.0", "enc.1", "(last)"]


@pytest.mark.parametrize(
    "units",
    ["*", ["enc", "enc.*"], 12, lambda path, _: path.startswith("enc.")],
    ids=["path", "paths", "size", "predicate"],
)
def test_ranks_send_the_units_that_were_asked_for(units):
    """A mesh would change which leaves are a unit, or ranks would send units that nobody asked for."""
    params = {"embed": counting(7), "enc": [{"w": counting(2, 3), "b": counting(3)} for _ in range(2)]}

    def run(mesh: Any) -> list[str]:
        plan = make_plan(params, mesh, units=units)
        assert names(plan) == names(make_plan(params, units=units))
        with fshard.collectives.tally() as sent:
            gather_params(shard_params(params, plan))
        return [record.label for record in sent]

    asked = [unit.name for unit in make_plan(params, units=units).units]
    assert len(asked) > 1
    assert simulated(run, shard=3) == [asked] * 3


def test_a_predicate_sees_paths_and_subtrees():
    """A predicate of units would not be asked about some subtree."""
    params, seen = Pair([counting(2)], {"none": None, "x": counting(3)}), {}

    def note(path: str, part: Any) -> bool:
        seen[path] = part
        return False

    make_plan(params, units=note)
    assert list(seen) == ["", "left", "left.0", "right", "right.x"]
    assert same_bits(seen[""], params)
    assert same_bits(seen["right"], params.right)


@pytest.mark.parametrize(("size", "units"), [(1, 4), (2, 3), (4, 2), (5, 2), (9, 1)])
def test_units_by_size(size, units):
    """Units by size would be closed too early or too late."""
    plan = make_plan([counting(2), counting(2), counting(1), counting(4)], units=size)
    assert len(plan.units) == units
    for unit in range(units - 1):
        sizes = [s.numel for s in plan.slots if s.unit == unit]
        assert sum(sizes) >= size > sum(sizes[:-1])


def test_one_leaf_in_two_places():
    """A tied tensor would be stored twice, or two equal tensors once."""
    shared = counting(5)
    params = {"a": shared, "b": [shared, counting(5)]}

    def run(mesh: Any) -> None:
        plan = make_plan(params, mesh, units="b")
        assert (len(plan.slots), plan.leaves) == (2, (0, 0, 1))
        back = gather_params(shard_params(params, plan))
        assert back["a"] is back["b"][0]
        assert back["a"] is not back["b"][1]
        assert same_bits(back, params)

    run(None)
    simulated(run, shard=3)


def carry(mesh: Any) -> list[Any]:
    """What survives a pickle, on a mesh; the plans themselves."""
    plans = []
    for make in TREES.values():
        params = make()
        plan = make_plan(params, mesh, units=3)
        twin = pickle.loads(pickle.dumps(plan))
        assert (twin, hash(twin), twin.mesh) == (plan, hash(plan), None)
        assert str(twin) == str(plan)
        with pytest.raises(ValueError, match=r"no mesh.*plan\.on\(mesh\)"):
            shard_params(params, twin)
        live = twin.on(mesh)
        assert live == plan
        assert same_bits(gather_params(shard_params(params, live)), params)
        plans.append(plan)
    return plans


def test_plans_are_values():
    """A plan could be changed, would not survive a pickle, or would differ between ranks."""
    simulated_plans = simulated(carry, shard=2)
    assert simulated_plans[0] == simulated_plans[1]
    first, second = gloo(carry, shard=2)
    assert first == second
    assert [hash(p) for p in first] == [hash(p) for p in second]
    plan = simulated_plans[0][0]
    with pytest.raises(FrozenInstanceError):
        plan.units = ()
    assert all(plan != other for other in simulated_plans[0][1:])
    assert len(set(simulated_plans[0])) == len(TREES)


def test_a_plan_is_read_off_shapes():
    """A plan would depend on values, or not notice another shape, dtype, unit or order."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = {"w": counting(3, 4), "b": counting(3)}
    plan = make_plan(real)
    assert plan == make_plan(tree.map(lambda x: x.to("meta"), real)) == make_plan(tree.map(torch.zeros_like, real))
    with FakeTensorMode() as mode:
        assert plan == make_plan(tree.map(mode.from_tensor, real))
    others = [
        {"w": counting(4, 3), "b": counting(3)},
        {"w": counting(3, 4).double(), "b": counting(3)},
        {"b": counting(3), "w": counting(3, 4)},
        {"w": counting(3, 4), "c": counting(3)},
        {"w": counting(3, 4), "b": [counting(3)]},
    ]
    assert plan not in [make_plan(other) for other in others]
    assert plan not in [
        make_plan(real, **kw) for kw in ({"units": "w"}, {"whole": "b"}, {"frozen": "b"}, {"regather": False})
    ]


def test_ranks_compare_every_argument():
    """Ranks whose plans differ in some argument would take them for equal."""
    real, int8 = {"w": counting(3, 4), "b": counting(3)}, fshard.wire.Int8()
    said = {
        "whole": {"whole": "b"},
        "frozen": {"frozen": "b"},
        "host": {"offload": "b"},
        "frozen whole host": {"whole": "b", "frozen": "b", "offload": "b"},
        "unit 'b'": {"units": "b"},
        "regather=False": {"regather": False},
        "block=2": {"block": 2},
        "computed in bf16": {"policy": "compute=bf16"},
        "param_wire=Int8": {"param_wire": int8},
        "grad_wire=Int8": {"grad_wire": int8},
        "together=True": {"together": True},
        "params_over=()": {"params_over": ()},
        "grads_over=()": {"params_over": (), "grads_over": ()},
        "state_over=()": {"params_over": (), "grads_over": (), "state_over": ()},
    }

    def run(mesh: Any) -> None:
        cuts = {"params_over": "shard", "grads_over": "shard", "state_over": "shard"}
        defaults = {"regather": True, "block": 1, "policy": None, "together": False}
        assert make_plan(real, mesh) == make_plan(real, mesh, **cuts, **defaults)
        plain, plans = make_plan(real, mesh), {words: make_plan(real, mesh, **kw) for words, kw in said.items()}
        assert len({plan.fingerprint for plan in (plain, *plans.values())}) == 1 + len(plans)
        for words, plan in plans.items():
            assert words in plan.describe(), words
            assert words not in plain.describe(), words
            assert plan != plain
            assert words.split()[0] in plan.first_difference(plain), words

    simulated(run, shard=2)


def test_a_deep_copy_lies_on_the_same_mesh():
    """A copied state would have lost its mesh, or a pickle would carry one."""

    def run(mesh: Any) -> None:
        whole = {"w": counting(3, 4), "b": counting(3)}
        sharded = shard_params(whole, make_plan(whole, mesh))
        twin = copy.deepcopy(sharded)
        assert twin.mesh is sharded.mesh
        for row in sharded.tensors:
            row.zero_()
        assert same_bits(gather_params(twin), whole)

    simulated(run, shard=2)


def test_one_rank_gives_its_values_to_all():
    """With `src` a rank would keep its own values, or ranks without values could not take part."""

    def run(mesh: Any, src: int) -> None:
        mine = {"w": counting(3, 5), "n": counting(4, dtype=torch.int64)}
        empty = tree.map(lambda x: x.to("meta"), mine)
        given = mine if mesh.get_rank() == src else empty
        assert same_bits(gather_params(shard_params(given, make_plan(given, mesh), src=src)), mine)

    for src in range(4):
        simulated(run, src, shard=2, replicate=2)


def test_a_plan_prints_as_a_table():
    """`print(plan)` would not show the strategy, units, and the bytes of a rank."""

    def run(mesh: Any) -> str:
        return str(make_plan({"a": counting(100), "b": [counting(3), counting(4)]}, mesh, units="b", params_over=()))

    assert simulated(run, shard=2)[0].splitlines() == [
        "Plan on {'replicate': 1, 'shard': 2}: leaves 3, elements 107",
        "params_over=- grads_over=shard state_over=shard regather=True",
        "Bytes of a line's units, and of a rank; state: of one tensor (AdamW has two).",
        "unit     bytes  parameters  gradients  state",
        "(first)  416 B       416 B      208 B  208 B",
        "b         32 B        32 B       16 B   16 B",
        "total    448 B       448 B      224 B  224 B",
    ]


ERRORS = {
    "pattern": ({"units": ["a", "z.*"]}, "units: the pattern 'z.*' matches nothing; the tree's top level is 'a', 'b'"),
    "whole": ({"whole": "c"}, "whole: the pattern 'c' matches nothing"),
    "frozen": ({"frozen": "b.1"}, "frozen: the pattern 'b.1' matches nothing"),
    "size": ({"units": 0}, "units=0"),
    "axis": (
        {"params_over": "model"},
        "params_over='model': the mesh has no axis 'model', it has 'replicate', 'shard'",
    ),
    "twice": ({"state_over": ("shard", "shard")}, "must name each axis once"),
    "narrower": ({"grads_over": ()}, "contain the axes .'shard',. of the partition before it"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_arguments_that_make_no_sense_are_errors(error):
    """A wrong argument of `make_plan` would be taken, or its error would not name it and what is allowed."""
    kw, words = ERRORS[error]
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        simulated(lambda mesh: make_plan({"a": counting(2), "b": [counting(1)]}, mesh, **kw))


def test_leaves_that_are_no_dense_tensors_are_errors():
    """A leaf that cannot be sharded would be taken, or the error would not name its path."""
    with pytest.raises(ValueError, match=r"leaf 'b\.0': expected a tensor, got float"):
        make_plan({"a": counting(2), "b": [1.0]})
    with pytest.raises(ValueError, match=r"leaf 'a': expected a dense tensor, got layout torch\.sparse_coo"):
        make_plan({"a": torch.eye(2).to_sparse()})


def test_a_tree_that_is_not_the_plans_is_an_error():
    """A tree of another structure, shape or dtype, or without its ties, would be cut as if it were the plan's."""
    shared = counting(2)
    params = {"a": shared, "b": [shared, counting(3)]}
    plan = make_plan(params)
    for other, words in (
        ({"a": shared, "b": [shared]}, r"lacks \['b\.1'\]"),
        ({**params, "c": shared}, r"has \['c'\] besides"),
        (
            {"a": shared, "b": [shared, counting(4)]},
            r"leaf 'b\.1': expected torch.float32 \[3\], got torch.float32 \[4\]",
        ),
        (
            {"a": shared, "b": [shared, counting(3).double()]},
            r"leaf 'b\.1': expected torch.float32 \[3\], got torch.float64",
        ),
        ({"a": shared, "b": [counting(2), counting(3)]}, r"leaf 'b\.0': expected the very tensor of 'a'"),
    ):
        with pytest.raises(ValueError, match=words):
            shard_params(other, plan)


def test_paths_that_look_alike_are_not_confused():
    """A leaf would silently get the values of another whose path looks alike: a key with a dot, `1` and `"1"`."""
    for params in ({"a.b": counting(3), "a": {"b": counting(3, start=4)}}, {1: counting(3), "1": counting(3, start=4)}):
        with pytest.raises(ValueError, match=r"two leaves have the path .*Rename one"):
            make_plan(params)


def test_a_plan_keeps_to_its_mesh():
    """A plan could be used on a mesh that it was not made for."""

    def run(mesh: Any) -> fshard.Plan:
        return make_plan({"w": counting(4)}, mesh)

    (plan, *_) = simulated(run, shard=2)
    with pytest.raises(
        ValueError, match=r"made for a mesh with axes .*'shard': 2.*this one has .*'shard': 3.*make the plan again"
    ):
        simulated(lambda mesh: plan.on(mesh), shard=3)


def test_ranks_with_other_trees_are_told():
    """Ranks with different trees would go on, or only some of them would get the error."""

    def run(mesh: Any) -> None:
        make_plan({"w": counting(4), "b": counting(1 + mesh.get_rank() // 2)}, mesh)

    words = r"plan differs between ranks.*ank 0 has leaf 'b' float32\[1\].*rank 2 has leaf 'b' float32\[2\]"
    with pytest.raises(fshard.MismatchError, match=words):
        simulated(run, shard=3)


def test_an_axis_of_one_rank_cuts_nothing():
    """Each part of a step would ask again how many ranks there are; a user's wire would round less on one rank."""
    params, over = {"a": torch.ones(4), "b": torch.ones(4)}, ("replicate", "shard")

    def law(mesh: Any, **how: Any) -> set[tuple[str, ...]]:
        plan = fshard.make_plan(params, mesh, whole="b", params_over=over, grads_over=over, state_over=over, **how)
        assert plan.params_over == over  # as it was asked for
        return {row.over for row in fshard.shard_params(params, plan).view.rows.values()}

    for sizes, cut in (((1, 1), ()), ((1, 2), ("shard",)), ((2, 1), ("replicate",)), ((2, 2), over)):
        found = simulated(law, replicate=sizes[0], shard=sizes[1])
        assert found == [{(), cut}] * len(found)
        assert simulated(partial(law, param_wire=Int8(16)), replicate=sizes[0], shard=sizes[1])[0] == {(), over}
