"""ZeRO over whole parameters: results, what each rank holds, what is sent and when; and uneven batches."""

import functools
import itertools
import math
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.accelerator import Mesh, on_accelerator
from support.models import counting, rand, same_bits
from support.optimizers import TRANSFORMS
from support.worlds import gloo, simulated
from torch import Tensor, nn

import fshard
from fshard import optim, zero
from fshard.core import tree
from fshard.whole.moves import assign

SHAPES = {"w": (5, 3), "v": (7,), "s": (), "blocks": [{"c": (2, 3, 2), "m": (4, 6)}, {"one": (1,)}]}
NUMELS = [15, 7, 1, 12, 24, 1]
EVEN = [16, 8, 2, 12, 24, 2]  # each even to 16 bytes
BUCKETS, BUCKET = [24, 38, 2], 8 * 20  # w and v, then s, c and m, then one; bytes of 20 elements
THIRDS = [8, 14, 2]  # what each of three ranks has of them, even to 16 bytes
WAYS = [(partition, grads) for partition in ("flat", "leaf") for grads in ("reduced", "local")]
NAMES = ["sgd", "sgd-all", "adamw", "lion", "muon", "lamb", "adafactor", "by_label", "clip_by_global_norm"]
TXS = {name: TRANSFORMS[name]() for name in [*NAMES, "from_torch-Adam", "from_torch-Adafactor"]}
ADAMW, LION = TXS["adamw"], TXS["lion"]
# Steps of these run a kernel of torch's that rounds the last few elements in another way than the others.
KERNELS = {"sgd", "sgd-all", "adamw"}
PARTITIONS, HOWS, BOTH = ("flat", "leaf"), ("step", "update"), ("replicate", "shard")
# (replicate, shard, over): ranks along both axes, and the axes over which the state is partitioned.
PLACES: dict[str, tuple[int, int, Any]] = {str(n): (1, n, None) for n in (1, 2, 3, 4)}
PLACES |= {f"2x2 {i}": (2, 2, over) for i, over in enumerate((None, "replicate", BOTH, BOTH[::-1]))}
alike = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
clone = functools.partial(tree.map, torch.clone)


def test_zero_goes_around_labels():
    """`zero` inside labels is an error with the remedy; without it each label would partition wrongly."""
    tx = optim.by_label({"a": zero(optim.sgd(0.1))}, {"**": "a"})
    with pytest.raises(TypeError, match=r"leaves of one label: zero goes around by_label.* zero\(by_label\("):
        tx.init({"w": torch.ones(2)})


def skipped_on_one(mesh: Any, partition: str, way: str) -> Any:
    """Parameters after a step that overflowed on the last rank alone, with `zero` inside another transformation."""
    local = functools.partial(zero, mesh=mesh, partition=partition, grads="local")
    txs = {
        "alone": lambda: local(optim.sgd(0.1)),
        "chain": lambda: optim.chain(local(optim.sgd(0.1)), optim.scale(0.5)),
        "with_hyperparams": lambda: optim.with_hyperparams(lambda lr: local(optim.sgd(lr)), lr=0.1),
    }
    tx, params = txs[way](), {"w": torch.ones(5)}
    new, _ = tx.step(params, tx.init(params), params, torch.tensor(float(mesh.get_rank() == mesh.size() - 1)))
    return new["w"].tolist()


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("way", ["alone", "chain", "with_hyperparams"])
def test_an_overflow_on_one_rank_skips_on_all_wherever_zero_is(way, partition):
    """An overflow on one rank skips the update on all, also with `zero` inside others: otherwise ranks would hold
    different parameters."""
    assert simulated(skipped_on_one, partition, way, shard=2) == [[1.0] * 5] * 2


def on_ranks(shard: int, *columns: Any) -> Any:
    """Make a test that runs a function on simulated ranks for every combination of arguments."""

    def decorate(law: Any) -> Any:
        @pytest.mark.parametrize("args", list(itertools.product(*columns)), ids=str)
        def test(args: Any) -> None:
            simulated(law, *args, shard=shard)

        test.__doc__ = law.__doc__  # not functools.wraps: pytest would read the arguments of `law` as fixtures
        return test

    return decorate


def tree_of(seed: int) -> Any:
    """Matrices, vectors, a scalar, in float64."""
    seeds = itertools.count(100 * seed)
    return tree.map_tops(lambda shape: rand(*shape, seed=next(seeds)), tuple, SHAPES)


START = tree_of(0)


def added(trees: Any) -> Any:
    """The sum of trees, from the first to the last."""
    return tree.map(lambda *xs: sum(xs), *trees)


def local(step: int, rank: int) -> Any:
    """A rank's own gradients: multiples of 1/64, whose sums are exact in any order."""
    return tree.map(lambda x: (64 * x).round() / 64, tree_of(1 + 10 * step + rank))


@functools.cache
def summed(step: int, num_ranks: int) -> Any:
    """The sum of all ranks' gradients."""
    return added(local(step, rank) for rank in range(num_ranks))


def given(way: tuple[str, str], mesh: Any, steps: int = 3) -> list[Any]:
    """The gradients that a rank passes in each step."""
    return [local(i, mesh.get_rank()) if way[1] == "local" else summed(i, mesh.size()) for i in range(steps)]


def train(tx: Any, params: Any, grads: list[Any], how: str = "step", **kw: Any) -> tuple[Any, Any]:
    """Parameters and state after some updates, by `step`, or by `update` and its application."""
    state = tx.init(params)
    for each in grads:
        new, state = getattr(tx, how)(each, state, params, **kw)
        params = new if how == "step" else optim.apply_updates(params, new)
    return params, state


def trained(mesh: Any, name: str, way: tuple[str, str], how: str, over: Any = None) -> Any:
    """Parameters and whole state after three updates by ZeRO."""
    params, state = train(zero(TXS[name], mesh, *way, over=over, bucket=BUCKET), START, given(way, mesh), how)
    return params, optim.state.gather_state(state)


@functools.cache
def unsharded(name: str, num_ranks: int, how: str) -> Any:
    """Parameters and state by the optimizer itself, from the sum of all ranks' gradients."""
    params, state = train(TXS[name], START, [summed(i, num_ranks) for i in range(3)], how)
    return params, optim.state.gather_state(state)


@pytest.mark.law
@pytest.mark.parametrize("name", TXS)
@pytest.mark.parametrize("world", PLACES)
def test_it_computes_what_the_optimizer_does(world, name):
    """ZeRO gives the optimizer's own parameters and state, equal on all ranks: otherwise ZeRO would change training."""
    replicate, shard, over = PLACES[world]
    for way, how in itertools.product(WAYS, HOWS):
        first, *others = simulated(trained, name, way, how, over, replicate=replicate, shard=shard)
        assert all(same_bits(first, other) for other in others)
        cut_alike = TXS[name].elementwise and (how == "update" or name not in KERNELS)
        if cut_alike if way[0] == "flat" else name != "clip_by_global_norm":
            assert same_bits(first, unsharded(name, replicate * shard, how))
        for oracle in HOWS:
            alike(first, unsharded(name, replicate * shard, oracle))


@on_ranks(3, PARTITIONS)
def test_local_gradients_are_added_in_rank_order(mesh, partition):
    """Local gradients are added from rank 0 upwards, to the bit: otherwise a run could not be repeated exactly."""
    tx, grads = zero(optim.scale(1.0), mesh, partition, "local", bucket=BUCKET), [tree_of(i) for i in range(3)]
    found, _ = tx.update(grads[mesh.get_rank()], tx.init(START), START)
    assert same_bits(found, added(grads))
    assert not same_bits(found, added(grads[::-1]))


def partition_of(numels: list[int], num_ranks: int) -> list[list[int]]:
    """torch's rule: the largest leaf first, to the rank with the fewest elements. The numbers of each rank's leaves."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        min(parts, key=lambda part: sum(numels[j] for j in part)).append(i)
    return [sorted(part) for part in parts]


def torchs_partition(numels: list[int]) -> list[list[int]]:
    """The numbers of each rank's leaves in torch's ZeroRedundancyOptimizer."""
    warnings.simplefilter("ignore")  # what torch says of its own library
    from torch.distributed.optim import ZeroRedundancyOptimizer

    leaves = [nn.Parameter(torch.zeros(n)) for n in numels]
    numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
    parts = ZeroRedundancyOptimizer(leaves, torch.optim.SGD, lr=0.1)._partition_parameters()
    return [sorted(numbers[id(x)] for group in groups for x in group["params"]) for groups in parts]


def large(mesh: Any, way: tuple[str, str]) -> list[int]:
    """Digests of parameters after each of four steps on leaves of megabytes; checks donated and plain steps too."""
    params = {"a": rand(600, 500, seed=1), "b": rand(7, seed=2), "c": rand(300, 400, seed=3)}
    ranks = range(mesh.size() if way[1] == "local" else 1)
    rows = [[tree.map(lambda x, n=i + rank: x.roll(n), params) for rank in ranks] for i in range(4)]
    grads = [row[mesh.get_rank() % len(row)] for row in rows]
    tx, kept, copies = zero(LION, mesh, *way, bucket=8 * 250_000), [params], []
    state = tx.init(params)
    for each in grads:
        after, state = tx.step(each, state, kept[-1])
        kept.append(after)
        copies.append(clone(after))
    assert same_bits(kept[1:], copies)
    assert same_bits(train(tx, clone(params), grads, donate=True)[0], kept[-1])
    assert same_bits(train(LION, params, [added(row) for row in rows])[0], kept[-1])
    return [int(x.reshape(-1).view(torch.int64).sum()) for x in tree.leaves(kept)]


CASES = [(name, way, "step") for name in ("adamw", "muon", "clip_by_global_norm") for way in WAYS]
CASES += [("lamb", WAYS[1], "update"), ("by_label", WAYS[3], "update")]
UNEVEN = [[4, 9, 9, 1, 16, 2, 2], [1], [5, 5, 5], NUMELS]


def runs(mesh: Any) -> Any:
    """Results on small trees and large ones; and each rank's leaves, by torch's ZeRO in processes, else by its rule."""
    parts = [torchs_partition(row) if dist.is_initialized() else partition_of(row, 2) for row in UNEVEN]
    return [trained(mesh, *case) for case in CASES], [large(mesh, way) for way in WAYS], parts


def test_processes_change_nothing():
    """Processes give the bits of simulated ranks and torch's ZeRO the same partition: otherwise simulated tests
    would prove little."""
    for found, want in zip(gloo(runs), simulated(runs), strict=True):
        assert same_bits(found, want)


def test_leaves_are_assigned_by_torchs_rule():
    """Leaves are assigned to ranks by torch's rule, for all short lists of sizes: otherwise a rank could hold more
    than with torch's ZeRO."""
    for length, size in itertools.product(range(6), range(1, 5)):
        for numels in itertools.product((1, 2, 5), repeat=length):
            ranks = assign(numels, size)
            assert partition_of(numels, size) == [[i for i in range(length) if ranks[i] == r] for r in range(size)]


def holds_its_part(mesh: Any, over: Any) -> None:
    """Check that this rank holds one interval of each bucket, or the leaves that torch's rule gives it."""
    flat, leaf = (zero(ADAMW, mesh, way, over=over, bucket=BUCKET).init(START).inner for way in ("flat", "leaf"))
    rank, num = 0, 1
    for axis in (over,) if isinstance(over, str) else over or ("shard",):
        rank, num = rank * mesh.size(axis) + mesh.get_local_rank(axis), num * mesh.size(axis)
    even = 2 * mesh.size()  # 16 bytes for each rank of the mesh
    part = [torch.zeros(sum(-(-n // even) * even // num for n in BUCKETS), dtype=torch.float64)]
    owned = [torch.zeros_like(tree.leaves(START)[i]) for i in partition_of(NUMELS, num)[rank]]
    for held, want in ((flat, part), (leaf, owned)):
        assert all(same_bits(tree.leaves(moment), want) for moment in (held.mu, held.nu))


def test_each_rank_holds_its_part_of_the_state():
    """Each rank holds its part of the state and no more: otherwise ZeRO would not save memory."""
    for replicate, shard, over in PLACES.values():
        simulated(holds_its_part, over, replicate=replicate, shard=shard)


def traffic(mesh: Any, tx: Any, way: tuple[str, str], over: Any = None, how: str = "step") -> Any:
    """The collectives of one update along axes of several ranks: kind, axis, label, bytes."""
    tx = zero(tx, mesh, *way, over=over, bucket=BUCKET)
    state = tx.init(START)
    with fshard.collectives.tally() as records:
        getattr(tx, how)(local(0, mesh.get_rank()), state, START)
    return [(r.kind, r.axis, r.label, r.nbytes) for r in records if mesh.size(r.axis) > 1]


@on_ranks(3, WAYS, HOWS)
def test_what_travels(mesh, way, how):
    """An update sends each bucket or leaf once per direction: otherwise ZeRO would send more than it must."""
    buckets = [("shard", f"part.{i}", 2 * 8 * n) for i, n in enumerate(THIRDS)]
    mine = 8 * sum(EVEN[i] for i in partition_of(NUMELS, 3)[mesh.get_rank()])
    scatters, gathers = ([(kind, *row) for row in buckets] for kind in ("reduce_scatter", "all_gather"))
    if way[0] == "leaf":
        scatters = [("all_to_all", "shard", "gradients", 8 * sum(EVEN) - mine)]
        gathers = [("all_to_all", "shard", "parameters", 2 * mine)]
    assert traffic(mesh, ADAMW, way, None, how) == (scatters if way[1] == "local" else []) + gathers


def test_what_travels_along_two_axes():
    """On two axes parameters are gathered along the state's axes alone: otherwise hybrid ZeRO would use slow links
    more."""
    gathers = {("all_gather", "shard"): 3}
    for way, over, want in (
        (WAYS[0], None, gathers),
        (WAYS[0], BOTH, gathers | {("all_gather", "replicate"): 3}),
        (WAYS[1], None, gathers | {("reduce_scatter", "shard"): 3, ("all_reduce", "replicate"): 3}),
        (WAYS[2], "replicate", {("all_to_all", "replicate"): 1}),
        (WAYS[3], None, {("all_reduce", "replicate"): 1, ("all_to_all", "shard"): 2}),
    ):
        for records in simulated(traffic, ADAMW, way, over, replicate=2, shard=2):
            assert Counter(record[:2] for record in records) == want


@on_ranks(3)
def test_what_else_an_optimizer_sends(mesh):
    """Clipping adds one small sum and Muon two messages: otherwise these optimizers would be slow on a cluster."""
    plain, clip, muon = (Counter(traffic(mesh, TXS[n], WAYS[1])) for n in ("adamw", "clip_by_global_norm", "muon"))
    assert clip - plain == Counter([("all_reduce", "shard", "norm", 2 * 8)])
    # ranks hold 8, 7 and 0 elements of w, which rank 1 orthogonalises, and 0, 14 and 10 of m, which rank 0 does
    there, back = [(8, 24), (14, 8), (10, 0)][mesh.get_rank()]
    assert muon - plain == Counter(("all_to_all", "shard", "muon", 8 * n) for n in (there, back))
    assert plain <= clip & muon


@on_ranks(2, ("reduced", "local"), (True, False))
def test_a_bucket_travels_while_the_next_is_updated(mesh, grads, elementwise):
    """Scatters start first, and each gather before the next bucket's update: otherwise messages and updates would
    not overlap."""
    seen = []

    def update(given: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        seen.append([len(records.select(kind)) for kind in ("reduce_scatter", "all_gather")])
        return tree.map(torch.neg, given), state

    over = "elements" if elementwise else "tree"
    tx = zero(optim.Transform(lambda params: (), update, over=over), mesh, grads=grads, bucket=BUCKET)
    state = tx.init(START)
    with fshard.collectives.tally() as records:
        tx.step(START, state, START)
    assert seen == [[3 * (grads == "local"), i] for i in range(3 if elementwise else 1)]


def units_of(params: Any, **options: Any) -> list[list[int]]:
    """The elements of the leaves of each bucket."""
    plan = zero(optim.sgd(0.1), **options).init(params).parting
    return [[math.prod(s.shape) for s in plan.slots if s.unit == u] for u in range(len(plan.units))]


def test_a_bucket_is_a_number_of_bytes():
    """A bucket is full at so many bytes, as in make_plan and jit: else half precision would get buckets of half the
    bytes. The default cuts float32 at 4 Mi elements; other cuts would give fused kernels different bits."""
    for dtype, numels in ((torch.float64, [4, 4, 4, 1]), (torch.float32, [4, 4, 4, 4]), (torch.bfloat16, [13, 3, 7])):
        for bucket in (32, 64):
            groups, full = [[]], bucket // dtype.itemsize
            for n in numels:
                groups = groups if sum(groups[-1]) < full else [*groups, []]
                groups[-1].append(n)
            params = [torch.ones(n, dtype=dtype) for n in numels]
            assert units_of(params, bucket=bucket) == groups
            assert units_of([*params, torch.arange(9)], bucket=bucket)[: len(groups) - 1] == groups[:-1]
    mixed = [torch.ones(n, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) for n in (8, 8)]
    assert units_of(mixed, bucket=48) == [[8, 8], [8, 8]]  # of 3 bytes an element, on average
    assert units_of(mixed, bucket=1) == [[8]] * 4
    meta = [torch.empty(n, device="meta") for n in ((1 << 22) - 1, 1, (1 << 22) + 1, 5)]
    assert units_of(meta) == [[(1 << 22) - 1, 1], [(1 << 22) + 1], [5]]


@on_ranks(2, TXS, WAYS)
def test_nothing_given_is_changed(mesh, name, way):
    """Inputs keep their bits unless donated, and a skipped step changes nothing: otherwise a user's tensors would be
    overwritten."""
    tx, grads, found_inf = zero(TXS[name], mesh, *way, bucket=BUCKET), given(way, mesh, 4), torch.zeros(())
    params, state = train(tx, START, grads)
    inputs = grads[0], state, params
    before, versions = clone(inputs), [x._version for x in tree.leaves(inputs)]
    for call in (tx.step, tx.update):
        assert same_bits(call(*inputs), call(*inputs))
    assert not same_bits(tx.step(*inputs)[::-1], inputs[1:])
    assert same_bits(inputs, before)
    assert [x._version for x in tree.leaves(inputs)] == versions
    for kw in ({"donate": True}, {"found_inf": found_inf}, {"donate": True, "found_inf": found_inf}):
        assert same_bits(train(tx, clone(START), grads, **kw), (params, state))
    for donate in (False, True):
        bad = tree.map(lambda g: g * torch.inf, grads[0])
        assert same_bits(tx.step(bad, state, params, 1 - found_inf, donate)[::-1], before[1:])


@on_ranks(2)
def test_what_is_given_away(mesh):
    """Donated steps reuse memory, and a state given away is refused: otherwise memory would double, or old values be
    read."""
    tx = zero(ADAMW, mesh, bucket=BUCKET)
    old, state = tx.step(START, tx.init(START), START, donate=True)
    new, again = (tx.step(START, state, old, donate=donate)[0] for donate in (False, True))
    where = [{x.data_ptr() for x in tree.leaves(params)} for params in (START, old, new, again)]
    assert where[1] == where[3]
    assert not (where[0] | where[2]) & where[1]
    later = tx.step(START, state, again, donate=True)[1]
    moments = [[x.data_ptr() for x in tree.leaves((inner.mu, inner.nu))] for inner in (state.inner, later.inner)]
    assert moments[0] == moments[1]
    for part in tree.nodes(state, fshard.Sharded):
        part.give_away()
    for call in (tx.step, tx.update):
        with pytest.raises(fshard.DonatedError, match="was given away"):
            call(START, state, START)


@pytest.mark.parametrize("block", [1, 8, 1 << 17])
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_large_leaves_may_have_gaps_between_them(block, shard):
    """Gaps between large leaves, for any block size, change no bit: otherwise a step would read padding as
    parameters."""
    params = {"a": rand(70_001, seed=1), "b": rand(9, seed=2), "c": rand(2, 66_000, seed=3)}
    want = train(LION, params, [params])[0]
    for found in simulated(lambda mesh: train(zero(LION, mesh, block=block), params, [params])[0], shard=shard):
        assert same_bits(found, want)


@pytest.mark.parametrize("way", WAYS)
def test_axes_of_other_names_are_all_counted_along(way):
    """A mesh without the axis "shard" partitions over all axes: otherwise such users would save no memory or lose
    gradients."""
    names, places = {"model": 2, "data": 2}, []
    for axes, over in ((names, None), (dict(zip(BOTH, names.values(), strict=True)), BOTH)):
        world = fshard.testing.World(axes=axes)
        places.append(world.run(lambda mesh, over=over: trained(mesh, "adamw", way, "step", over)))
        places.append(world.run(lambda mesh, over=over: zero(ADAMW, mesh, *way, over=over).init(START).inner))
    assert same_bits(places[0], places[2])
    assert same_bits(*(tree.leaves(inner) for inner in (places[1], places[3])))


@on_ranks(2, WAYS)
def test_updates_need_no_parameters(mesh, way):
    """Parameters may be left out where the optimizer needs none, and results lie on their device: otherwise valid
    calls would fail."""
    for tx in (optim.sgd(0.1, momentum=0.9), optim.adam(0.1)):
        part = zero(tx, mesh, *way, bucket=BUCKET)
        grads, state = given(way, mesh, 1)[0], part.init(START)
        assert same_bits(part.update(grads, state), part.update(grads, state, START))
    usual, named = zero(ADAMW, mesh), zero(ADAMW, mesh, "flat", "reduced", over="shard", bucket=1 << 24, block=1)
    assert same_bits(usual.update(grads, usual.init(START), START), named.update(grads, named.init(START), START))
    assert same_bits(usual.init(START), named.init(START))
    meta = tree.map(lambda x: x.to("meta"), START)
    alone = zero(ADAMW, None, *way, bucket=BUCKET)
    found = [alone.step(meta, alone.init(meta), meta), alone.update(meta, alone.init(meta), meta)]
    assert {x.device.type for x in tree.leaves([params for params, _ in found])} == {"meta"}


def kinds_of(seed: int) -> dict[str, Tensor]:
    """Leaves of several dtypes, 0-d, strided and without elements; small whole numbers."""
    wide, single, half = torch.float64, torch.float32, torch.bfloat16
    kinds = {
        "w": (wide, 5, 3),
        "h": (half, 9),
        "e": (wide, 0, 3),
        "f": (single, 3, 2),
        "s": (half,),
        "none": (single, 0),
    }
    found = {key: counting(*shape, start=seed, dtype=dtype) for key, (dtype, *shape) in kinds.items()}
    return found | {"f": found["f"].T, "x": found["w"].T[1:] + 1}


@on_ranks(3, WAYS, HOWS, ("lion", "rmsprop-all"))
def test_leaves_of_every_kind(mesh, way, how, name):
    """Every dtype trains as in the optimizer alone, and integer leaves stay: otherwise trees with buffers could not
    be trained."""
    tx, fixed, nothing = TRANSFORMS[name](), {"n": torch.arange(3), "on": torch.tensor(True)}, {"n": None, "on": None}
    rows = [[kinds_of(1 + i + rank) for rank in range(3 if way[1] == "local" else 1)] for i in range(3)]
    mine = [nothing | row[mesh.get_rank() % len(row)] for row in rows]
    params, state = train(zero(tx, mesh, *way, bucket=BUCKET), fixed | kinds_of(0), mine, how)
    want, _ = train(tx, kinds_of(0), [added(row) for row in rows], how)
    assert same_bits(params, fixed | want)
    assert params["n"] is fixed["n"]
    assert not any(key.endswith((".n", ".on")) for key in optim.state.gather_state(state))


def dtypes_sent(mesh: Any, order: tuple[torch.dtype, ...]) -> list[torch.dtype | None]:
    """The dtypes in which gradients are summed over an axis that the state is not partitioned over, in order."""
    tx = zero(optim.sgd(0.1), mesh, "leaf", "local", over="shard")
    params = {str(i): torch.ones(3, dtype=dtype) for i, dtype in enumerate((*order, order[0]))}
    state = tx.init(params)
    with fshard.collectives.tally() as calls:
        tx.step(params, state, params)
    return [call.dtype for call in calls.select("all_reduce", "gradients") if call.axis == "replicate"]


def test_dtypes_are_summed_in_the_order_of_leaves():
    """Gradients of several dtypes are summed in the order of the leaves: in the order of a set, which depends on the
    process, ranks would wait for each other in different collectives."""
    for order in itertools.permutations((torch.float64, torch.float32, torch.bfloat16)):
        for sent in simulated(dtypes_sent, order, replicate=2, shard=1):
            assert sent == [*order]


@on_ranks(2, PARTITIONS, HOWS)
def test_nothing_to_train(mesh, partition, how):
    """A tree of integers, or of leaves without elements, comes back as it is: otherwise such a tree would be an
    error."""
    empty = {"e": rand(0, 3, seed=1)}
    for params, grads in ((empty, empty), ({"n": torch.arange(3)}, {"n": None})):
        assert same_bits(train(zero(ADAMW, mesh, partition), params, [grads], how)[0], params)


@on_ranks(2, WAYS, ("adamw", "lion", "lamb", "muon", "from_torch-Adam"))
def test_a_modules_parameters_are_taken(mesh, way, name):
    """nn.Parameters train with the bits of plain tensors, without a graph: otherwise each step would keep the last
    one's memory."""
    tx, grads, results = zero(TXS[name], mesh, *way, bucket=BUCKET), given(way, mesh), []
    for start in (START, tree.map(lambda x: nn.Parameter(x.clone()), START)):
        results.append([tx.update(grads[0], tx.init(start), start), *train(tx, start, grads)])
        assert not any(x.requires_grad for x in tree.leaves(results))
    assert same_bits(*results)


@on_ranks(2, PARTITIONS)
def test_gradients_may_be_of_another_dtype(mesh, partition):
    """Gradients of another dtype than the parameter are added right: otherwise mixed precision would fail or lose
    bits."""
    params = {key: counting(numel) for key, numel in {"big": 20, "a": 5, "b": 5, "c": 5}.items()}
    grads = {key: x.bfloat16() if key in "ac" else x for key, x in params.items()}
    want, _ = train(LION, params, [tree.map(lambda g: 2 * g.float(), grads)] * 2)
    assert same_bits(train(zero(LION, mesh, partition, "local"), params, [grads] * 2)[0], want)


W, TWICE = rand(3, seed=1), ("shard", "shard")
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero: the tree of parameters is empty": ({"a": {}, "b": None}, {}),
    "leaf 'b.0': expected a tensor, got float": ({"a": W, "b": [1.0]}, {}),
    "zero: leaves 'a' and 'b.0' are the same tensor": ({"a": W, "b": [W]}, {}),
    "zero: leaves on several devices: 'a' on cpu, 'b' on meta. Move": ({"a": W, "b": W.to("meta")}, {}),
    "leaf 'b': expected a dense tensor": ({"a": W, "b": W.to_sparse()}, {}),
    "two leaves have the path 'a.b'": ({"a.b": W, "a": {"b": W + 1}}, {}),
    "zero: expected whole parameters, got sharded ones": (fshard.shard_params(W, fshard.make_plan(W)), {}),
    "expected an optimizer, a pair of functions init and update, got the class Adam. For an": (
        W,
        {"tx": torch.optim.Adam},
    ),
    "zero: partition='rows': expected 'flat' or 'leaf'": (W, {"partition": "rows"}),
    "zero: grads='mean': expected 'reduced' or 'local'": (W, {"grads": "mean"}),
    "zero: over='x': the mesh has no axis 'x', it has 'replicate', 'shard'": (W, {"over": "x"}),
    "over=('shard', 'shard') must name each axis once": (W, {"over": TWICE}),
}


@on_ranks(2, PARTITIONS, REFUSED)
def test_what_is_refused(mesh, partition, words):
    """A tree or argument that ZeRO cannot take is an error with the leaf's path; without it training would be wrong
    or fail later."""
    params, kw = REFUSED[words]
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        zero(**{"tx": ADAMW, "mesh": mesh, "partition": partition} | kw).init(params)


@on_ranks(2, PARTITIONS, HOWS)
def test_gradients_and_states_that_are_refused(mesh, partition, how):
    """Gradients and states that do not fit are errors that say why; without them a step would mix leaves or moments."""
    tx, lion, others = zero(ADAMW, mesh, partition), zero(LION, mesh, partition), {"flat": "leaf", "leaf": "flat"}
    state, w, v, own = tx.init(START), START["w"], START["v"], "expected the state of its own init"
    for grads, held, params, words in (
        ({**START, "w": w.T}, state, START, "zero: gradients: leaf 'w': expected a tensor [5, 3], got one [3, 5]"),
        ({**START, "v": None}, state, START, "zero: gradients: leaf 'v': expected a tensor [7], got None"),
        ({**START, "w": w.to_sparse()}, state, START, "leaf 'w' is sparse: make it dense with .to_dense()"),
        ({"w": w}, state, START, "zero: the gradients are not of the tree the state was made for"),
        (START, state, {**START, "v": v[:6]}, "zero: parameters: leaf 'v': expected a tensor [7], got one [6]"),
        (START, zero(ADAMW, mesh, others[partition]).init(START), START, f"zero: {own}, of this partition, got Z"),
        (START, ADAMW.init(START), START, f"zero: {own}, of this partition, got AdamState"),
        (START, lion.init(START), START, f"optim.adamw: {own} (AdamState), got LionState"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            getattr(tx, how)(grads, held, params)


@on_ranks(3, PARTITIONS, ("x", "v", "s"))
def test_trees_that_differ_between_ranks(mesh, partition, leaf):
    """Ranks with different trees all get an error that names the leaf; without it collectives would mix leaves, or
    hang."""
    odd = {"x": rand(2, seed=1), "v": rand(6, seed=1), "s": rand(seed=1).float()}
    words = rf"differs between ranks: rank 0 has .*; rank 2 has leaf '{leaf}' .*Build the same tree"
    with pytest.raises(fshard.MismatchError, match=words):
        zero(ADAMW, mesh, partition).init(START | ({leaf: odd[leaf]} if mesh.get_rank() == 2 else {}))


@on_ranks(3)
def test_uneven_batches_train_as_all_that_there_are(mesh):
    """A rank without data takes part at weight 0 and the mean is that of the rest: otherwise uneven data would hang
    or bias a run."""
    w, tx, like, rank, weights = rand(3, seed=7), optim.sgd(0.1), rand(4, 3, seed=8), mesh.get_rank(), []
    state = fshard.init_state(fshard.shard_params({"w": w}, fshard.make_plan({"w": w}, mesh)), tx)
    step = fshard.train_step(lambda p, x, on: fshard.Mean(on * (x @ p["w"]).square().sum(), on * len(x)), tx)
    batches = [[rand(2 + i + r, 3, seed=10 * r + i) for i in range(n)] for r, n in enumerate((3, 1, 0))]
    with fshard.collectives.tally() as records:
        for i, (batch, weight) in enumerate(fshard.collectives.join_batches(iter(batches[rank]), mesh, like)):
            assert same_bits(batch, (batches[0][i], *batches[1], like)[rank])
            state, metrics = step(state, batch, weight)
            weights.append(float(weight))
            there = torch.cat([x for own in batches for x in own[i : i + 1]])
            slope, mean = torch.func.grad_and_value(lambda w, there=there: (there @ w).square().mean())(w)
            w = w - 0.1 * slope
            alike((fshard.gather_params(state.params), metrics["loss"]), ({"w": w}, mean))
    assert weights == [float(i < len(batches[rank])) for i in range(3)]
    assert [r.nbytes for r in records.select("all_reduce", "batches") if r.axis == "shard"] == [2 * 4] * 4


def test_uneven_batches_end():
    """Uneven batches end everywhere, and a rank without any batch needs `like`: otherwise ranks would wait for a
    batch forever."""
    assert simulated(lambda mesh: list(fshard.collectives.join_batches([], mesh))) == [[], []]
    assert simulated(lambda mesh: list(fshard.collectives.join_batches("ab", mesh))) == [[("a", 1.0), ("b", 1.0)]] * 2
    with pytest.raises(ValueError, match="join_batches: this rank has no batch at all: give one as `like`"):
        simulated(lambda mesh: list(fshard.collectives.join_batches("a"[mesh.get_rank() :], mesh)))


def test_a_rank_that_has_a_batch_reads_nothing():
    """A GPU would be idle between steps: the host would start one only after it has waited for the one before."""
    crossed, seen = list[int](), list[int]()

    def batches():
        for i in range(3):  # into the same memory, as loaders for CUDA graphs do
            seen.append(i)
            yield seen

    with on_accelerator() as apart:
        for batch, _ in fshard.collectives.join_batches(batches(), Mesh()):
            assert batch[-1] == len(crossed)  # not read ahead
            crossed.append(apart.crossed.total())
    assert crossed == [0, 0, 0]
    assert apart.crossed == {("to the host", "accumulate.join_batches"): 1}  # at the end


@pytest.mark.parametrize("world", [None, 1, 2])
def test_a_donated_step_leaves_the_users_tensors(world):
    """A tensor of the user's that fills a bucket alone would be taken for a bucket of an earlier step."""

    def law(mesh: Any) -> None:
        params, tx = {"w": torch.ones(8, 8), "b": torch.ones(3)}, zero(optim.sgd(0.5), mesh, bucket=4 * 64)
        new, state = tx.step(tree.map(torch.ones_like, params), tx.init(params), params, donate=True)
        assert all(x.eq(1).all() for x in params.values())
        again, _ = tx.step(tree.map(torch.ones_like, params), state, new, donate=True)
        assert again["w"].data_ptr() == new["w"].data_ptr()  # what a step made is used again

    if world is None:
        law(None)
    else:
        simulated(law, shard=world)


@pytest.mark.parametrize("shard", [1, 2, 3])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_label_may_have_empty_leaves_alone(partition: str, shard: int) -> None:
    """The rank that owns a leaf without elements would ask for a norm that other ranks do not take part in."""
    params = {"a": rand(4, 3, seed=1), "e": torch.ones(0, 2, dtype=torch.float64), "z": rand(3, seed=2)}

    def clipped(tx: optim.Transform) -> optim.Transform:
        return optim.chain(optim.clip_by_global_norm(0.1), tx)

    def stepped(mesh: Any) -> Any:
        parts = {"x": clipped(optim.sgd(0.1)), "y": clipped(optim.adamw(0.1))}
        tx = optim.by_label(parts, lambda path, leaf: "y" if path == "e" else "x")
        tx = tx if mesh is None else zero(tx, mesh, partition=partition)
        return tx.step(params, tx.init(params), params)[0]

    for new in simulated(stepped, shard=shard):
        alike(new, stepped(None))
