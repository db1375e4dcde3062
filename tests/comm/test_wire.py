"""Wires: what arrives of what was sent, in how many bytes, and what a step makes of it."""

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, STRATEGIES, WORLDS, lm_batch, lm_params, mean_loss, padding, rand, same_bits
from support.wires import ROWS, WIRES, codecs
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import MismatchError, gather_params, optim
from fshard.core import tree
from fshard.wire import Float8, Identity, Int8, pack, unpack

over_wires = pytest.mark.parametrize("name", WIRES)
PAGE = Path(__file__).parents[2] / "docs" / "precision.md"


def test_every_wire_is_registered():
    """A new wire would be tested by nothing, could not be imported, or would be in no page."""
    known = {type(row.wire) for row in ROWS.values()}
    for name, cls in codecs().items():
        assert cls in known, f"{name}: add a row with its bytes and its error bound to ROWS of tests/support/wires.py"
        assert f"`{name}(" in PAGE.read_text(), f"{name}: add a row to the table of wires in docs/precision.md"
    found = [x for x in vars(fshard.wire).values() if isinstance(x, type) and x.__module__ == fshard.wire.__name__]
    for cls in found:
        encodes = hasattr(cls, "encode") and cls is not fshard.wire.Wire
        assert not encodes or cls in codecs().values(), f"{cls.__name__}: name it in __all__ of fshard/wire.py"


@over_wires
def test_a_wire_is_a_value(name):
    """Ranks compare plans by the fields of their wires: equal plans would differ, or a plan would change later."""
    wire = WIRES[name]
    assert dataclasses.is_dataclass(wire), f"{type(wire).__name__}: make it a frozen dataclass"
    assert dataclasses.replace(wire) == wire
    assert hash(dataclasses.replace(wire)) == hash(wire)
    with pytest.raises(dataclasses.FrozenInstanceError):
        wire.other = True


@over_wires
@pytest.mark.parametrize("sizes", [[1], [40], [3, 0, 37], [16, 16], [5, 1, 1, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_what_arrives(name, sizes, scale):
    """What arrives would be off by more than the bound, a message have another size, or the shard would change."""
    row, x = ROWS[name], rand(sum(sizes), seed=1, dtype=torch.float32) * scale
    wire, kept = row.wire, x.clone()
    data = wire.encode(x, sizes)
    assert data.dim() == 1
    assert data.nbytes == row.nbytes(sizes) == wire.encode(torch.zeros_like(x), sizes).nbytes
    got = wire.decode(data, sizes)
    assert got.shape == x.shape
    assert ((got.float() - x).abs() <= row.bound(x, sizes) + 1e-6 * x.abs()).all()
    assert same_bits(x, kept)
    assert not wire.decode(wire.encode(torch.zeros_like(x), sizes), sizes).any()


@over_wires
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_arrives_as_such(name, bad):
    """An overflow would be lost on the way, and a step with it would not be skipped."""
    row = ROWS[name]
    for sizes in ([10, 30], [10, 600]):
        x = rand(sum(sizes), seed=1, dtype=torch.float32)
        x[7] = bad
        finite = row.wire.decode(row.wire.encode(x, sizes), sizes).isfinite()
        assert not finite.all()
        assert sum(sizes) < 100 or finite[-10:].all()


def test_leaves_have_scales_of_their_own():
    """A small leaf beside a large one would arrive as zeros: a norm's scale beside an embedding, say."""
    x = torch.cat([rand(8, seed=1) * 1e5, rand(8, seed=2) * 1e-5]).float()
    alone, together = ((Float8().decode(Float8().encode(x, s), s) - x)[8:].abs().max() for s in ([8, 8], [16]))
    assert alone < 1e-6 < together


def test_packing():
    """A wire of the user's, made with `pack`, would not get back what it packed."""
    xs = [torch.tensor([1], dtype=torch.int8), rand(3, seed=1), torch.tensor([True]), rand(2, seed=2).bfloat16()]
    held = [(x.dtype, x.numel()) for x in xs]
    assert pack(*xs).numel() == 16 + 32 + 16 + 16
    assert all(same_bits(a, b) for a, b in zip(unpack(pack(*xs), *held), xs, strict=True))


def laid_out(mesh: Any, strategy: str, **kw: Any) -> fshard.Sharded:
    """The language model in float32, sharded."""
    params = lm_params(torch.float32)
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, **STRATEGIES[strategy], **kw)
    return fshard.shard_params(params, plan)


def gathers(mesh: Any, name: str, strategy: str) -> None:
    """What a loss sees of gathered leaves, and what has travelled."""
    sharded, wire = laid_out(mesh, strategy, param_wire=WIRES[name]), WIRES[name]
    plan, flat = sharded.plan, laid_out(None, strategy, param_wire=None)
    with fshard.collectives.tally() as records:
        seen = fshard.evaluate(lambda p, _: (p["embed"].sum(), gather_params(p)), has_aux=True)(sharded, 0)[1]
    whole = gather_params(sharded)
    want, sent = {}, []
    for (unit, kind), row in plan.rows.items():
        axes, name_ = sharded.view.axes(kind), plan.units[unit].name
        buffer = torch.zeros(plan.units[unit].lengths[kind])
        leaves = dict(zip(tree.leaf_paths(plan.spec), tree.leaves(whole), strict=True))
        for slot in row.leaves:
            buffer[slot.start : slot.start + slot.numel] = leaves[slot.path].reshape(-1)
        num = plan.num_ranks(axes)
        held = [row.lengths(part, num) for part in range(num)]
        parts = list(zip(buffer.chunk(num), held, strict=True))
        assert all(sum(own) == len(x) for x, own in parts)
        if axes:
            buffer = torch.cat([wire.decode(wire.encode(x, own), own).float() for x, own in parts])
            sent.append(sum(r.nbytes for r in records.select("all_gather", name_)))
        want |= {s.path: buffer[s.start : s.start + s.numel].view(s.shape) for s in row.leaves}
    by_path = dict(zip(tree.leaf_paths(plan.spec), tree.leaves(seen), strict=True))
    assert all(same_bits(by_path[path], x) for path, x in want.items())
    assert same_bits(whole, gather_params(flat))


@over_wires
@pytest.mark.parametrize("world", WORLDS)
def test_a_loss_sees_what_arrived(name, world):
    """A loss would see parameters not as they were decoded, or a checkpoint would have them rounded."""
    replicate, shard = WORLDS[world]
    for strategy in ("full", "keep"):
        simulated(gathers, name, strategy, replicate=replicate, shard=shard)


def reduces(mesh: Any, name: str, strategy: str) -> tuple[Any, Any, Any]:
    """Gradients through a wire, zero in their padding, and every rank's own."""
    sharded, rank = laid_out(mesh, strategy, grad_wire=WIRES[name]), mesh.get_rank()
    grads = fshard.value_and_grad(mean_loss)(sharded, lm_batch(0, rank))[1]
    local = fshard.value_and_grad(mean_loss, reduce=False)(sharded, lm_batch(0, rank))[1].local
    assert not any(pad.any() for pad in padding(grads))
    again = fshard.reduce_grads(fshard.value_and_grad(mean_loss, reduce=False)(sharded, lm_batch(0, rank))[1])
    assert same_bits(gather_params(grads), gather_params(again))
    plan, num = sharded.plan, mesh.size()
    held = {place: [row.lengths(part, num) for part in range(num)] for place, row in plan.rows.items()}
    flat = {key: local.shard(*key).clone() for key in held}
    return flat, held, {key: gathered_flat(grads, *key) for key in held}


def in_full(mesh: Any, strategy: str) -> None:
    """Wires that lose nothing change no bit, in float64."""
    params, found = lm_params(), []
    for wire in (None, Identity()):
        kw = {"param_wire": wire, "grad_wire": wire, **STRATEGIES[strategy]}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS, **kw))
        found.append(gather_params(fshard.value_and_grad(mean_loss)(sharded, lm_batch(0, mesh.get_rank()))[1]))
    assert same_bits(*found)


@pytest.mark.parametrize("world", WORLDS)
def test_what_travels_in_full_is_as_without_a_wire(world):
    """A wire that loses nothing would change gradients: in the order of sums, over one axis or two."""
    replicate, shard = WORLDS[world]
    for strategy in ("full", "wide", "ddp") if replicate == 1 else ("full", "wide"):
        simulated(in_full, strategy, replicate=replicate, shard=shard)


def gathered_flat(x: fshard.Sharded, unit: int, kind: int) -> Tensor:
    """A unit's flat buffer of a whole tree; NaN where it is padding."""
    leaves = dict(zip(tree.leaf_paths(x.plan.spec), tree.leaves(gather_params(x)), strict=True))
    flat = x.tensors[0].new_full((x.plan.units[unit].lengths[kind],), torch.nan)
    for slot in x.plan.rows[unit, kind].leaves:
        flat[slot.start : slot.start + slot.numel] = leaves[slot.path].reshape(-1)
    return flat


@over_wires
@pytest.mark.parametrize("strategy", ["full", "zero2", "ddp"])
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_gradients_are_sums_of_what_arrived(name, strategy, shard):
    """Gradients would not be the sums, in rank order, of what was decoded, or ranks would drift apart."""
    runs, wire = simulated(reduces, name, strategy, shard=shard), WIRES[name]
    for key, held in runs[0][1].items():
        each = []
        for flat, _, _ in runs:
            parts = [wire.decode(wire.encode(x, own), own) for x, own in zip(flat[key].chunk(shard), held, strict=True)]
            each.append(torch.cat(parts).float())
        total = sum(each[1:], each[0])
        for _, _, whole in runs:
            assert same_bits(whole[key], torch.where(whole[key].isnan(), torch.nan, total))


MIXED = "compute=bf16; blocks.*.scale: compute=f32; blocks.*.w: storage=f64,compute=bf16"


def mixed(mesh: Any, together: bool, name: str, strategy: str) -> tuple[Any, list[str], int]:
    """Parameters after two steps of a model of three dtypes, the units gathered, and the bytes."""
    kw = {"policy": MIXED, "param_wire": WIRES.get(name), "together": together, "whole": ["tail", "blocks.*.b"]}
    sharded, tx = laid_out(mesh, strategy, **kw), optim.sgd(0.1)
    state, step = fshard.init_state(sharded, tx), fshard.train_step(mean_loss, tx)
    with fshard.collectives.tally() as records:
        for i in range(2):
            state, _ = step(state, lm_batch(i, mesh.get_rank()))
    sent = [r for r in records.select("all_gather") if r.axis == "shard"]
    return gather_params(state.params), [r.label for r in sent], sum(r.nbytes for r in sent)


@pytest.mark.parametrize("name", ["none", "int8"])
@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 3), (2, 2)])
def test_dtypes_travel_together(name, replicate, shard):
    """With `together=True` parameters would have other bits, or a unit take more than one message."""
    for strategy in ("full", "keep", "wide"):
        runs = [
            simulated(mixed, together, name, strategy, replicate=replicate, shard=shard) for together in (False, True)
        ]
        for (params, apart, nbytes), (same, labels, more) in zip(*runs, strict=True):
            assert same_bits(params, same)
            assert (len(labels) < len(apart)) == (shard > 1)  # one rank sends nothing
            assert set(labels) == set(apart)
            assert nbytes <= more <= nbytes + 16 * len(apart) * shard


ONE_RANK_MORE = [{"replicate": 1, "shard": 3}, {"shard": 3, "replicate": 1}]
OVERS: dict[str, tuple[Any, Any]] = {  # what parameters, gradients and state are cut over, without and with the axis
    "ddp": ((), ()),
    "full": ("shard", "shard"),
    "outer": ("shard", ("replicate", "shard")),
    "inner": ("shard", ("shard", "replicate")),
}
TRAVELS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "wires": {"param_wire": WIRES["int8"], "grad_wire": WIRES["int8"]},
    "together": {"param_wire": WIRES["float8"], "together": True, "policy": MIXED},
}


def one_axis(mesh: Any, over: Any, how: str) -> Any:
    """Parameters after two steps, and what has travelled along the axes of several ranks."""
    cuts = dict.fromkeys(("params_over", "grads_over", "state_over"), over)
    plan = fshard.make_plan(lm_params(torch.float32), mesh, units=LM_UNITS, **cuts, **TRAVELS[how])
    tx = optim.adamw(0.1)
    state = fshard.init_state(fshard.shard_params(lm_params(torch.float32), plan), tx)
    step = fshard.train_step(mean_loss, tx)
    with fshard.collectives.tally() as records:
        for i in range(2):
            state, metrics = step(state, lm_batch(i, mesh.get_rank()))
    units = {unit.name for unit in plan.units}
    idle = [r for r in records.select("all_reduce") if mesh.size(r.axis) == 1 and r.label in units]
    # what is gathered ahead and not asked for goes no further than its first stage
    asked = [r for r in records if (r.kind, r.label) != ("all_gather", "unused")]
    sent = [(r.kind, r.label, r.nbytes) for r in asked if mesh.size(r.axis) > 1]
    return (gather_params(state.params), metrics), sent, idle


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("how", TRAVELS)
def test_an_axis_of_one_rank_changes_nothing(over, how):
    """A run on a mesh with an axis of one rank would give other bits, or send more, than one without the axis."""
    alone, beside = OVERS[over]
    want = fshard.testing.World(axes={"shard": 3}).run(one_axis, alone, how)
    for axes in ONE_RANK_MORE:
        found = fshard.testing.World(axes=axes).run(one_axis, beside, how)
        for (got, sent, idle), (expected, records, _) in zip(found, want, strict=True):
            assert same_bits(got, expected)
            assert Counter(sent) == Counter(records)  # what follows a stage may come later
            assert not idle or how != "as it is" or not beside


def trained(mesh: Any, wires: tuple[str, str], num_steps: int = 3, scale: Any = None, **kw: Any) -> Any:
    """Losses and parameters of some steps of adamw."""
    param_wire, grad_wire = (WIRES.get(name) for name in wires)
    sharded, tx = laid_out(mesh, "full", param_wire=param_wire, grad_wire=kw.pop("wire", grad_wire)), optim.adamw(0.02)
    state, losses = fshard.init_state(sharded, tx, scale), []
    step = fshard.train_step(mean_loss, tx, **kw)
    for i in range(num_steps):
        state, metrics = step(state, lm_batch(i % 5, mesh.get_rank()))
        losses.append(metrics["loss"].item())
    return losses, gather_params(state.params)


def test_processes_give_the_same_bits():
    """Training with wires in simulated ranks would not be what processes do."""
    for wires in (("int8", "float8"), ("cast", "int8")):
        args = wires, 3
        assert same_bits(gloo(trained, *args, shard=2), simulated(trained, *args, shard=2))


def test_a_model_trains_as_well():
    """With shards in 8 bits a model would end with a loss more than 1% from float32's."""
    ends = [sum(simulated(trained, (name, "none"), 60, shard=2)[0][0][-5:]) for name in ("none", "int8")]
    assert abs(ends[1] / ends[0] - 1) < 0.01
    assert ends[0] < 0.9 * sum(simulated(trained, ("none", "none"), 5, shard=2)[0][0])


def test_8_bits_are_a_quarter_of_the_bytes():
    """Shards in 8 bits would save less than promised: more than 0.27 of float32's bytes."""

    def sent(mesh: Any, wire: Any) -> int:
        params = {"w": rand(300, 70, seed=1, dtype=torch.float32)}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, param_wire=wire))
        with fshard.collectives.tally() as records:
            fshard.evaluate(lambda p: p["w"].sum())(sharded)
        return records.nbytes("all_gather")

    full, small = (simulated(sent, wire, shard=3)[0] for wire in (None, Int8()))
    assert small <= 0.27 * full


@dataclass(frozen=True)
class Half:
    """A wire that forgets half of what it gets."""

    def encode(self, x: Tensor, sizes: Any) -> Tensor:
        return x

    def decode(self, data: Tensor, sizes: Any) -> Tensor:
        return data[::2]


def test_errors():
    """A wrong wire would train wrongly in silence: one that changes sizes, is not kept, or differs between ranks."""
    for kw in ({"param_wire": Half()}, {"grad_wire": Half()}):
        with pytest.raises(ValueError, match=re.escape("Half(): decode gave")):
            simulated(trained_with, kw)
    with pytest.raises(MismatchError, match=re.escape("grad_wire=Int8(block=8")):
        gloo(planned_otherwise)
    with pytest.raises(ValueError, match="Int8: block=0"):
        Int8(0)


def planned_otherwise(mesh: Any) -> None:
    """A plan of which ranks say different things."""
    laid_out(mesh, "full", grad_wire=Int8(8 + 8 * mesh.get_rank()))


def trained_with(mesh: Any, kw: Any) -> None:
    """A step with these wires."""
    sharded, tx = laid_out(mesh, "full", **kw), optim.sgd(0.1)
    fshard.train_step(mean_loss, tx)(fshard.init_state(sharded, tx), lm_batch(0, mesh.get_rank()))


@pytest.mark.parametrize("plan", ["full", "zero1", "ddp"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)])
def test_gradients_go_along_axes_of_several_ranks(ranks, plan):
    """A rank would send gradients to itself along an axis of one rank, after a sum along another axis."""

    def sent(mesh: Any) -> set[int]:
        made = fshard.make_plan(lm_params(), mesh, units=LM_UNITS, grad_wire=Int8(16), **STRATEGIES[plan])
        sharded = fshard.shard_params(lm_params(), made)
        with fshard.collectives.tally() as records:
            fshard.value_and_grad(mean_loss)(sharded, lm_batch(0, mesh.get_rank()))
        return {x.nbytes for x in records if x.kind == "all_reduce" and x.label != "loss"}

    replicate, shard = ranks
    assert all(0 not in sizes for sizes in simulated(sent, shard=shard, replicate=replicate))


@pytest.mark.parametrize("block", [1, 4, 256])
def test_numbers_near_zero_keep_their_signs(block):
    """Parameters and gradients near zero would arrive with the other sign: a subnormal scale overflows the codes."""
    x = torch.tensor([2.66e-43, -2.66e-43, 1e-44, 0.0, -1e-41])
    decoded = Int8(block).decode(Int8(block).encode(x, [5]), [5])
    assert (decoded * 1e30 * x.sign() >= 0).all()


@dataclass(frozen=True)
class Clamped:
    """A wire that sends elements as they are, and limits them where they arrive, in place."""

    def encode(self, x, sizes):
        """The same tensor."""
        return x

    def decode(self, data, sizes):
        """Limited to [-1, 1]."""
        return data.clamp_(-1, 1)


@pytest.mark.parametrize("shard", [1, 2])
def test_a_wire_may_decode_in_place(shard):
    """On one rank what arrives is what was sent, and a loss would change the parameters."""

    def law(mesh):
        params = {"w": torch.tensor([3.0, -2.0, 0.5, 4.0])}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, param_wire=Clamped()))
        value, _ = fshard.value_and_grad(lambda p: p["w"].sum())(sharded)
        assert value == 1.5
        assert fshard.gather_params(sharded)["w"].tolist() == params["w"].tolist()

    simulated(law, shard=shard)


def test_a_grad_wire_with_nothing_left_to_sum():
    """`reduce_once` over all axes leaves nothing to sum in a micro-batch: the longest of no axes would be asked for."""

    def law(mesh):
        params, tx = {"w": torch.arange(6.0)}, fshard.optim.sgd(0.1)
        plan = fshard.make_plan(params, mesh, grad_wire=Int8(), **STRATEGIES["ddp"])
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        step = fshard.train_step(lambda p, x: (p["w"] * x).sum(), tx, accumulate=2, reduce_once="shard")
        state, _ = step(state, torch.ones(2, 1) + mesh.get_rank())
        return fshard.gather_params(state.params)["w"]

    for new in fshard.testing.World(axes={"shard": 2}).run(law):  # `simulated` has an axis `replicate`, too
        torch.testing.assert_close(new, torch.arange(6.0) - 0.15)
