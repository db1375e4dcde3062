"""Sharded parameters made from a function, from a module on meta, or from a state dict, and back to one."""

import inspect
import re
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.memory import Live
from support.models import NARROW, STRATEGIES, WORLDS, same_bits
from support.modules import BLOCKS, Tied, tied
from support.worlds import gloo, simulated
from torch import Tensor, nn

import fshard
from fshard.core import tree
from fshard.core.differences import name_differences
from fshard.module import functionalize
from fshard.state.names import renamed

SHAPES = {"a": {"w": (3, 5), "b": (5,)}, "c": [(7,), ()]}


def like(device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
    """A tree with uneven shapes and an integer leaf."""
    made = tree.map_tops(lambda s: torch.zeros(s, dtype=dtype, device=device), lambda x: isinstance(x, tuple), SHAPES)
    return {**made, "n": torch.zeros(2, dtype=torch.int64, device=device)}


def drawn(path: str, form: Tensor) -> Tensor:
    """Random numbers; integers by the path."""
    if not form.is_floating_point():
        return torch.full(form.shape, len(path))
    return torch.randn(form.shape, dtype=form.dtype)


def made(mesh: Any, plan: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """What all ranks have together of drawn parameters."""
    return fshard.state_dict(fshard.init_params(fshard.make_plan(like(), mesh, units=["a"], **plan), drawn, seed))


# --- from a function ---


@pytest.mark.parametrize(
    ("world", "strategy"), [(world, name) for world in WORLDS for name in (STRATEGIES if world == "2x2" else NARROW)]
)
def test_parameters_do_not_depend_on_the_ranks(world, strategy):
    """A model would start elsewhere on another number of ranks, with the same seed."""
    replicate, shard = WORLDS[world]
    (one,) = simulated(made, {}, shard=1)
    for whole in simulated(made, STRATEGIES[strategy], shard=shard, replicate=replicate):
        assert same_bits(whole, one)


def test_seeds_and_paths_draw_other_numbers():
    """Two leaves of one shape would start equal, or two seeds alike; torch's generator would be used up."""
    before = torch.get_rng_state()

    def values(mesh: Any) -> list[Tensor]:
        plan = fshard.make_plan({name: torch.empty(4, device="meta") for name in "ab"}, mesh, units=["a"])
        trees = [fshard.state_dict(fshard.init_params(plan, drawn, seed)) for seed in (0, 1)]
        return [x for whole in trees for x in whole.values()]

    for found in (values(None), *simulated(values, shard=2)):
        assert len({x for leaf in found for x in leaf.tolist()}) == 16
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_leaves_have_the_values_that_fn_gives(strategy):
    """An element would be another one's, zero, or that of another leaf."""

    def numbered(path: str, form: Tensor) -> Tensor:
        first = 100 * [*expected].index(path)
        return torch.arange(first, first + form.numel()).reshape(form.shape)

    def run(mesh: Any) -> dict[str, Tensor]:
        plan = fshard.make_plan(like(), mesh, units=["a"], **STRATEGIES[strategy])
        return fshard.state_dict(fshard.init_params(plan, numbered))

    forms = like()
    expected = dict(zip(tree.paths(forms), tree.leaves(forms), strict=True))
    expected = {path: numbered(path, form).to(form.dtype) for path, form in expected.items()}
    for found in simulated(run, shard=2, replicate=2):
        assert same_bits(found, expected)


def test_no_rank_holds_more_than_a_unit():
    """The whole model would be in memory while it starts."""
    alive, most = 0, 0

    class Counted(Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counted(path: str, form: Tensor) -> Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return torch.ones(form.shape).as_subclass(Counted)

    params = {"blocks": [{"w": torch.empty(4, device="meta")} for _ in range(5)]}
    fshard.init_params(fshard.make_plan(params, units=["blocks.*"]), counted)
    assert most <= 2  # the last one of a unit lives until the next is made


class Deep(nn.Module):
    """Blocks of one size, and an embedding of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(12)])


def peak_of(mesh: Any, how: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes: the peak while parameters are made, a rank's share, the largest unit."""
    with torch.device("meta"):
        apply, params, _ = functionalize(Deep())
    plan = fshard.make_plan(params, mesh, units=apply.units("blocks.*"), **options)
    with Live() as live:
        sharded = apply.init(plan) if how == "init" else fshard.init_params(plan, drawn)
    share = sum(row.nbytes for row in sharded.tensors)
    unit = max(sum(unit.lengths) for unit in plan.units) * 4
    return live.peak, share, unit


@pytest.mark.parametrize("how", ["init", "init_params"])
@pytest.mark.parametrize(("world", "strategy"), [("1", "full"), ("4", "full"), ("4", "ddp"), ("2x2", "full")])
def test_the_peak_is_a_ranks_share_and_one_unit(world, strategy, how):
    """A model that fits in the memory of all ranks could not be started on them."""
    replicate, shard = WORLDS[world]
    for peak, share, unit in simulated(peak_of, how, STRATEGIES[strategy], shard=shard, replicate=replicate):
        assert share + unit // 2 <= peak <= share + unit + 1024  # no more than a few numbers besides


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda path, form: torch.zeros(9), "leaf 'a.w': expected a tensor [3, 5] with values, fn returned cpu [9]"),
        (lambda path, form: form, "leaf 'a.w': expected a tensor [3, 5] with values, fn returned meta [3, 5]"),
        (lambda path, form: 1.0, "leaf 'a.w': expected a tensor [3, 5] with values, fn returned 1.0"),
        (lambda path, form: torch.zeros(form.shape), "leaf 'n': expected torch.int64, fn returned torch.float32"),
    ],
)
def test_what_fn_returns_is_checked(fn, words):
    """A value of another shape would be broadcast, or cut."""
    with pytest.raises(ValueError, match=re.escape(words)):
        fshard.init_params(fshard.make_plan(like()), fn)


def test_wrong_arguments_of_init_params():
    """Arguments in the wrong order would fail without saying so."""
    with pytest.raises(TypeError, match="The order is init_params"):
        fshard.init_params(drawn, fshard.make_plan(like()))
    with pytest.raises(TypeError, match="init_params: fn"):
        fshard.init_params(fshard.make_plan(like()), nn.Linear(1, 1))
    with pytest.raises(ValueError, match="init_params: seed"):
        fshard.init_params(fshard.make_plan(like()), drawn, -1)


# --- from a module on meta ---


class Started(nn.Module):
    """Blocks of every kind whose modules initialize themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([make() for name, make in BLOCKS.items() if name not in ("parametrized", "listed")])


def started(mesh: Any) -> dict[str, Tensor]:
    """Parameters of a module on meta, whole again."""
    with torch.device("meta"):
        apply, params, _ = functionalize(Started())
    return fshard.state_dict(apply.init(fshard.make_plan(params, mesh, units=apply.units("blocks.*")), seed=5))


def test_a_module_on_meta_starts_as_its_library_starts_it():
    """Weights would be drawn from another distribution, biases not be zero, or the numbers depend on the ranks."""
    one, *others = [*simulated(started, shard=1), *simulated(started, shard=3), *gloo(started)]
    for other in others:
        assert same_bits(other, one)
    torch.manual_seed(0)
    samples = [dict(Started().named_parameters()) for _ in range(20)]
    for name, x in one.items():
        if name in samples[0]:
            usual = torch.stack([sample[name].detach() for sample in samples])
            assert usual.min() - 0.5 * usual.std() <= x.min(), name
            assert x.max() <= usual.max() + 0.5 * usual.std(), name
            assert (x.std() == 0) == (usual.std() == 0), name


def test_buffers_of_a_module_on_meta():
    """A running variance would be zero, or stay on meta."""
    with torch.device("meta"):
        module = nn.Sequential(nn.BatchNorm1d(3))
    apply, _, _ = functionalize(module)
    buffers = apply.init_buffers()
    assert same_bits(tree.leaves(buffers), [torch.zeros(3), torch.ones(3), torch.tensor(0)])


def test_a_parameter_that_nothing_sets_is_an_error():
    """A parameter would start with what was in memory."""
    with torch.device("meta"):
        apply, params, _ = functionalize(Tied(BLOCKS["plain"]))
    with pytest.raises(ValueError, match=re.escape("reset_parameters of '' (Tied) sets 'scale'")):
        apply.init(fshard.make_plan(params))


def test_modules_around_a_submodule_have_the_last_word():
    """A parent's initialization, as of torch's attention, would be undone by its child's."""
    with torch.device("meta"):
        apply, params, _ = functionalize(nn.Sequential(nn.MultiheadAttention(4, 2)))
    assert not fshard.state_dict(apply.init(fshard.make_plan(params)))["0.out_proj.bias"].any()


# --- to and from a state dict ---


def round_trip(mesh: Any, plan: dict[str, Any], rank: int | None = None) -> Any:
    """A module's parameters, to shards, to a state dict, to other shards and back."""
    module = tied("attention")
    apply, params, _ = functionalize(module)
    first = fshard.shard_params(params, fshard.make_plan(params, mesh, units=apply.units("blocks.*"), **plan))
    saved = fshard.state_dict(first, rank)
    second = fshard.init_params(fshard.make_plan(params, mesh, units=["embed"]), lambda path, x: torch.zeros(x.shape))
    loaded = fshard.load_state_dict(second, fshard.state_dict(first))
    assert not any(x.any() for x in second.tensors), "x is not changed"
    return (
        saved,
        fshard.state_dict(loaded),
        {name: x.detach() for name, x in module.named_parameters(remove_duplicate=False)},
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_module_comes_back_to_the_bit(strategy):
    """A model that was trained would not be the one that is saved, or tied names would be missing."""
    replicate = 2 if strategy.startswith("wide") else 1
    for saved, loaded, expected in simulated(round_trip, STRATEGIES[strategy], shard=3, replicate=replicate):
        assert same_bits(saved, expected)
        assert same_bits(loaded, expected)
        assert saved["head.weight"] is saved["embed.weight"]
        tied("attention").load_state_dict(saved)


def test_one_rank_alone_receives_a_state_dict():
    """Every rank would hold the whole model in host memory."""
    for results in (simulated(round_trip, {}, 1, shard=3), gloo(round_trip, {}, 1)):
        for rank, (saved, _, expected) in enumerate(results):
            assert same_bits(saved, expected if rank == 1 else {})


def test_a_state_dict_is_cast_and_read_name_by_name():
    """A file in bfloat16 would be refused; a mapping that reads lazily would be read whole."""
    params = fshard.init_params(fshard.make_plan(like()), drawn)
    saved = fshard.state_dict(params)
    half = {name: x.bfloat16() if x.is_floating_point() else x for name, x in saved.items()}
    loaded = fshard.state_dict(fshard.load_state_dict(params, half))
    assert same_bits(loaded, {name: x.to(saved[name].dtype) for name, x in half.items()})


def test_all_differences_are_listed_at_once():
    """Names would be found wrong one at a time, or a leaf be left out without a word."""
    params = fshard.init_params(fshard.make_plan(like()), drawn)
    saved = fshard.state_dict(params)
    wrong = {**saved, "a.w": torch.zeros(2), "n": torch.zeros(2), "z": torch.zeros(1), "c.0": [1]}
    del wrong["a.b"]
    with pytest.raises(ValueError, match="load_state_dict") as failure:
        fshard.load_state_dict(params, wrong)
    for words in (
        "it lacks 1 names: 'a.b'",
        "it has 1 names that the plan has not: 'z'",
        "'a.w': expected a tensor [3, 5], got one [2]",
        "'n': expected torch.int64, got torch.float32",
        "'c.0': expected a tensor [7], got [1]",
    ):
        assert words in str(failure.value)


def test_a_mapping_is_read_a_unit_at_a_time():
    """All tensors of a file that is read when it is asked for would be in memory together."""
    params = fshard.init_params(fshard.make_plan(like(), units=["*"]), drawn)
    values, alive, most = fshard.state_dict(params), list[weakref.ref](), list[int]()

    class Reading(UserDict):
        def __getitem__(self, name: str) -> torch.Tensor:
            value = self.data[name].clone()
            alive.append(weakref.ref(value))
            most.append(sum(x() is not None for x in alive))
            return value

    for strict in (True, False):
        assert same_bits(fshard.state_dict(fshard.load_state_dict(params, Reading(values), strict=strict)), values)
    assert max(most) <= 3 < len(values)


WRAPPED = {
    "DistributedDataParallel": "name.removeprefix('module.')",
    "torch.compile": "name.replace('_orig_mod.', '')",
    "a block of torch.compile": "name.replace('_orig_mod.', '')",
    "torch.compile of DistributedDataParallel": "name.replace('_orig_mod.', '').removeprefix('module.')",
    "a checkpointed block": "name.replace('_checkpoint_wrapped_module.', '')",
    "a model inside another": "name.removeprefix('tower.model.')",
    "a part of the model": "'blocks.0.' + name",
}


def wrapped_name(wrapper: str, name: str) -> str:
    """The name of a leaf as a wrapper of torch writes it."""
    return {
        "DistributedDataParallel": "module." + name,
        "torch.compile": "_orig_mod." + name,
        "a block of torch.compile": name.replace("0.", "0._orig_mod."),
        "torch.compile of DistributedDataParallel": "_orig_mod.module." + name,
        "a checkpointed block": name.replace("0.", "0._checkpoint_wrapped_module."),
        "a model inside another": "tower.model." + name,
        "a part of the model": name.removeprefix("blocks.0."),
    }[wrapper]


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_the_error_says_how_to_rename(wrapper):
    """A user would have to find out which wrapper the names come from; or the remedy would be wrong."""
    names = ["blocks.0.linear.weight", "blocks.0.linear.bias"]
    given = [wrapped_name(wrapper, name) for name in names]
    differences = " ".join(name_differences([[name] for name in names], given))
    assert differences.endswith(f". Pass rename=lambda name: {WRAPPED[wrapper]}")
    assert [*renamed(given, eval(f"lambda name: {WRAPPED[wrapper]}"))] == names


def test_the_names_that_torch_writes():
    """The names that the errors know would not be those that torch's wrappers write."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel, _common_utils

    names = {"weight", "bias"}
    compiled, checkpointed = torch.compile(nn.Linear(1, 1)), nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    assert {*compiled.state_dict()} == {"_orig_mod." + name for name in names}
    assert {*dict(checkpointed.named_parameters())} == {"0._checkpoint_wrapped_module." + name for name in names}
    assert f"{_common_utils.FSDP_WRAPPED_MODULE}." == "_fsdp_wrapped_module."
    assert '"_flat_param"' in inspect.getsource(inspect.getmodule(FullyShardedDataParallel))


def test_names_that_nothing_renames():
    """A remedy would be given that does not help."""
    flat = " ".join(name_differences([["a.w"]], ["a._flat_param"]))
    assert "let FSDP1 write FULL_STATE_DICT or SHARDED_STATE_DICT" in flat
    (wrapped,) = name_differences([["a._checkpoint_wrapped_module.w"], ["b"]], ["b"])
    assert wrapped.endswith("make plans of the module before it is wrapped")
    missing, unknown = name_differences([["a.w"], ["b"]], ["c.v", "b"])
    assert missing.endswith("'a.w'")
    assert unknown.endswith("'c.v'")


def test_what_rename_returns_is_checked():
    """One of two values of a leaf would be lost, or a typing error be a name."""
    names = ["module.w", "w"]
    assert renamed(names) == {"module.w": "module.w", "w": "w"}
    assert renamed(names, {"module.w": None}) == {"w": "w"}
    assert renamed(names, {"module.w": "v"}) == {"v": "module.w", "w": "w"}
    with pytest.raises(ValueError, match=r"rename: 'module.w' and 'w' are both called 'w': leave one out"):
        renamed(names, lambda name: name.removeprefix("module."))
    with pytest.raises(TypeError, match=r"rename: of 'module.w': expected a name, or None to leave it out, got 1"):
        renamed(names, lambda name: 1)
    with pytest.raises(TypeError, match=r"rename='module.': expected a dict, or fn"):
        renamed(names, "module.")


def test_a_dict_of_names_that_are_not_there_is_an_error(tmp_path):
    """A name with a typo would be ignored: the leaf is not renamed, or not left out."""
    module = nn.Linear(2, 3)
    apply, params, buffers = functionalize(module)
    x = fshard.shard_params(params, fshard.make_plan(params))
    fshard.checkpoint.save(tmp_path, params, 1)
    fshard.checkpoint.save_safetensors(tmp_path / "hf", x)
    words = "rename: it has 1 names that are not there: 'biass'; there are '(bias|weight)', '"
    for rename in ({"biass": None}, {"biass": "bias", "bias": "bias"}):
        for read in (
            lambda rename: fshard.load_state_dict(x, dict(sorted(params.items())), rename),
            lambda rename: fshard.load_state_dict(x, dict(sorted(params.items())), rename, strict=False),
            lambda rename: apply.load_state_dict(x, buffers, dict(sorted(params.items())), rename),
            lambda rename: fshard.checkpoint.load_safetensors(tmp_path / "hf", x.plan, rename),
            lambda rename: fshard.checkpoint.restore(tmp_path, params, rename=rename),
        ):
            with pytest.raises(ValueError, match=words):
                read(rename)


def test_tied_names_that_differ_are_an_error():
    """One of two values of a tied leaf would be lost."""
    _, params, _ = functionalize(tied("plain"))
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    saved = fshard.state_dict(sharded)
    for names in (["embed.weight"], ["head.weight"]):
        left = {name: x for name, x in saved.items() if name not in names}
        assert same_bits(fshard.state_dict(fshard.load_state_dict(sharded, left)), saved)
    with pytest.raises(ValueError, match=r"'head.weight' and 'embed.weight' are tied, but differ"):
        fshard.load_state_dict(sharded, {**saved, "head.weight": saved["head.weight"] + 1})


def from_one_rank(mesh: Any, plan: dict[str, Any], src: int) -> Any:
    """A state dict that one rank has, in the shards of all ranks, whole again."""
    saved = {name: drawn(name, x) for name, x in fshard.state_dict(Params.make(mesh, {})).items()}
    given = {f"module.{name}": x for name, x in saved.items()} if mesh.get_rank() == src else {}
    loaded = fshard.load_state_dict(Params.make(mesh, plan), given, lambda name: name.removeprefix("module."), src=src)
    return fshard.state_dict(loaded), saved


class Params:
    """Parameters of zeros."""

    @staticmethod
    def make(mesh: Any, plan: dict[str, Any]) -> fshard.Sharded:
        """On a plan of the tree above."""
        plan = fshard.make_plan(like(), mesh, units=["a"], **plan)
        return fshard.init_params(plan, lambda path, form: torch.zeros(form.shape, dtype=form.dtype))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_dict_of_one_rank(strategy):
    """Every rank would need the whole model in host memory; or another rank's values would be taken."""
    replicate = 2 if strategy.startswith("wide") else 1
    for src in range(2 * replicate):
        results = simulated(from_one_rank, STRATEGIES[strategy], src, shard=2, replicate=replicate)
        assert all(same_bits(loaded, results[src][1]) for loaded, _ in results)


def in_parts(mesh: Any, plan: dict[str, Any], src: int | None) -> None:
    """Load each leaf alone, and all leaves but one, over other values; names that are unknown besides."""
    old = fshard.init_params(fshard.make_plan(like(), mesh, units=["a"], **plan), drawn)
    before = fshard.state_dict(old)
    new = {name: x + 1 for name, x in before.items()}
    is_source = src is None or mesh.get_rank() == src
    for name in new:
        for part in ({name: new[name]}, {other: x for other, x in new.items() if other != name}):
            given = {f"m.{other}": x for other, x in {**part, "unknown": torch.ones(1)}.items()} if is_source else {}
            loaded = fshard.load_state_dict(old, given, lambda x: x.removeprefix("m."), src, strict=False)
            assert same_bits(fshard.state_dict(loaded), before | part)
    assert same_bits(fshard.state_dict(fshard.load_state_dict(old, {}, src=src, strict=False)), before)
    assert same_bits(fshard.state_dict(old), before), "x is not changed"


@pytest.mark.parametrize("src", [None, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_part_of_a_state_dict(strategy, src):
    """Leaves that a mapping lacks would be zeros, or those beside them in a shard overwritten."""
    simulated(in_parts, STRATEGIES[strategy], src, shard=2, replicate=2 if strategy.startswith("wide") else 1)


def test_a_part_of_a_modules_state_dict():
    """A buffer or a tied leaf that is not in the mapping would be lost."""
    module = Kept()
    apply, params, buffers = functionalize(module)
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    saved = apply.state_dict(sharded, buffers)
    for name in saved:
        tied_names = {"linear.bias", "other.bias"} if name.endswith("bias") else {name}
        given = {name: saved[name] + 1, "unknown": torch.ones(1)}
        loaded, new = apply.load_state_dict(sharded, buffers, given, strict=False)
        expected = {other: x + (other in tied_names) for other, x in saved.items()}
        assert same_bits(apply.state_dict(loaded, new), expected)


def other_parts(mesh: Any) -> str:
    """The error of ranks that pass other parts."""
    params = Params.make(mesh, {})
    saved = fshard.state_dict(params)
    name = ["a.w", "a.b"][mesh.get_rank()]
    with pytest.raises(fshard.MismatchError) as failure:
        fshard.load_state_dict(params, {name: saved[name]}, strict=False)
    return str(failure.value)


def test_what_is_wrong_in_a_part_of_a_state_dict():
    """A prefix that is wrong would load nothing without a word; ranks with other parts give leaves half of each."""
    params = fshard.init_params(fshard.make_plan(like()), drawn)
    saved = fshard.state_dict(params)
    with pytest.raises(ValueError, match=r"it lacks \d names: .*; it has \d names that the plan has not.*removeprefix"):
        fshard.load_state_dict(params, {f"model.{name}": x for name, x in saved.items()}, strict=False)
    with pytest.raises(ValueError, match=r"load_state_dict: 'a.w': expected a tensor \[3, 5\], got one \[2\]"):
        fshard.load_state_dict(params, {"a.w": torch.ones(2)}, strict=False)
    with pytest.raises(TypeError, match="strict=1: expected True or False"):
        fshard.load_state_dict(params, saved, strict=1)
    assert all("'a.b' is not there" in text or "'a.w' is not there" in text for text in simulated(other_parts))


def failing(mesh: Any, src: int | None) -> str:
    """The error of a load for which rank 1 lacks a name."""
    params = Params.make(mesh, {})
    given = fshard.state_dict(params)
    if mesh.get_rank() == 1:
        del given["a.w"]
    with pytest.raises((ValueError, fshard.MismatchError)) as failure:
        fshard.load_state_dict(params, given, src=src)
    return str(failure.value)


@pytest.mark.parametrize("src", [None, 1])
def test_an_error_of_one_rank_is_raised_on_all(src):
    """The others would wait for that rank until a timeout, or go on without it."""
    sentence = "load_state_dict: it lacks 1 names: 'a.w'"
    first, second = simulated(failing, src)
    assert second == sentence
    assert first == f"rank 1: ValueError: {sentence}. This rank has no such error: give all ranks the same arguments"


def test_tensors_that_are_not_values_are_errors():
    """A tensor without values, or not dense, would fail somewhere below without its name."""
    params = fshard.init_params(fshard.make_plan(like()), drawn)
    saved = fshard.state_dict(params)
    with pytest.raises(ValueError, match=r"'a.w': expected a tensor with values, got one on meta"):
        fshard.load_state_dict(params, {**saved, "a.w": saved["a.w"].to("meta")})
    with pytest.raises(ValueError, match=r"'a.w': expected a dense tensor, got torch.sparse_coo: call to_dense\(\)"):
        fshard.load_state_dict(params, {**saved, "a.w": saved["a.w"].to_sparse()})


def test_tied_names_may_hold_nan_and_other_dtypes():
    """A run that diverged could not be read, as NaN is not equal to itself, nor names in different dtypes."""
    _, params, _ = functionalize(tied("plain"))
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    saved = fshard.state_dict(sharded)
    saved["embed.weight"][0] = torch.nan
    copied = {**saved, "head.weight": saved["head.weight"].clone()}
    assert same_bits(fshard.state_dict(fshard.load_state_dict(sharded, copied)), saved)
    copied["embed.weight"] = copied["embed.weight"].half()
    copied["head.weight"] = copied["embed.weight"].double()
    assert fshard.load_state_dict(sharded, copied)
    copied["head.weight"][0] = 1.0
    with pytest.raises(ValueError, match=r"'head.weight' and 'embed.weight' are tied, but differ"):
        fshard.load_state_dict(sharded, copied)


def test_dtensors_need_a_device_mesh():
    """A user would get an error of torch's, about process groups."""

    def law(mesh: Any) -> None:
        words = r"dtensors=True: expected a plan on a DeviceMesh .*Without dtensors=True the tensors are whole"
        params = Params.make(mesh, {})
        with pytest.raises(ValueError, match=f"^state_dict: {words}"):
            fshard.state_dict(params, dtensors=True)
        state = fshard.optim.sgd(0.1, 0.9).init(params.trainable)
        with pytest.raises(ValueError, match=f"^state_dict: {words}"):
            fshard.optim.state.state_dict(state, params, dtensors=True)
        with pytest.raises(ValueError, match="rank=0: expected None with dtensors=True"):
            fshard.state_dict(params, rank=0, dtensors=True)
        with pytest.raises(ValueError, match="rank=0: expected None with dtensors=True"):
            fshard.optim.state.state_dict(state, params, rank=0, dtensors=True)

    law(None)
    law(fshard.AbstractMesh(shard=2))
    simulated(law)


# --- a module's own state dict ---


class Kept(nn.Module):
    """Buffers of which one is not saved, and names that a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.other = nn.Linear(2, 3)
        self.other.bias = self.linear.bias
        self.linear.register_state_dict_post_hook(renaming)
        self.linear.register_load_state_dict_pre_hook(renaming_back)


def renaming(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """`w` in place of `weight`."""
    state[prefix + "w"] = state.pop(prefix + "weight")


def renaming_back(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """`weight` in place of `w`, if it is there."""
    state |= {prefix + "weight": state.pop(prefix + "w")} if prefix + "w" in state else {}


MODULES: dict[str, Any] = {**{name: lambda name=name: tied(name) for name in BLOCKS}, "kept": Kept}


def module_round_trip(mesh: Any, name: str, plan: dict[str, Any]) -> None:
    """A module, shards, a module's state dict, another module, and other shards."""
    module, other, third = (MODULES[name]() for _ in range(3))
    for number, x in enumerate([*module.parameters(), *module.buffers()]):
        nn.init.constant_(x, number + 0.1) if x.is_floating_point() else x.data.fill_(number)
    apply, params, buffers = functionalize(module)
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=apply.units(nn.Linear), **plan))
    saved = apply.state_dict(sharded, buffers)
    assert same_bits(saved, dict(module.state_dict()))
    other.load_state_dict(saved)
    assert same_bits(dict(other.state_dict()), dict(module.state_dict()))

    _, zeros, old = functionalize(third)
    empty = fshard.init_params(fshard.make_plan(zeros, mesh), lambda path, form: torch.zeros(form.shape))
    wrapped = {f"_orig_mod.{key}": x for key, x in module.state_dict().items()}
    loaded, new = apply.load_state_dict(empty, old, wrapped, lambda key: key.removeprefix("_orig_mod."))
    assert same_bits(fshard.state_dict(loaded), fshard.state_dict(sharded))
    assert same_bits(apply.state_dict(loaded, new), dict(module.state_dict()))
    assert not any(x.any() for x in empty.tensors), "params is not changed"
    assert same_bits(old, functionalize(MODULES[name]())[2]), "buffers are not changed"
    if name == "kept":
        assert new["table"] is old["table"]


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_own_state_dict(name):
    """Buffers and tied parameters would be missing or other values, or names not those that the module reads."""
    simulated(module_round_trip, name, {}, shard=3)
    module_round_trip(None, name, {})


def test_a_modules_state_dict_shares_no_memory():
    """A step, or a write to a buffer, would change a state dict that was taken before it, or the other way round."""
    apply, params, buffers = functionalize(Kept())
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    storages = {x.untyped_storage().data_ptr() for x in [*tree.leaves(buffers), *sharded.tensors]}
    for x in apply.state_dict(sharded, buffers).values():
        assert x.untyped_storage().data_ptr() not in storages
        assert not x.requires_grad


class OldScale(nn.Linear):
    """A layer whose older files hold half of its weight, under another name."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(self.doubled)

    def doubled(self, module: Any, state: Any, prefix: str, *rest: Any) -> None:
        """Change the name and the value."""
        if f"{prefix}half" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}half") * 2
        if f"{prefix}nothing" in state:
            rest[-1].append("nothing is no weight")


@pytest.mark.parametrize("src", [None, 0])
def test_hooks_change_what_is_loaded(src):
    """A hook that changes values would be skipped: half of the weight would be loaded."""
    module = nn.Sequential(OldScale())
    saved = {"model.0.half": torch.ones(2, 2), "model.0.bias": torch.zeros(2)}

    def load(mesh: Any, saved: Any) -> Any:
        apply, params, buffers = functionalize(module)
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        given = saved if src is None or mesh.get_rank() == src else {}
        loaded, _ = apply.load_state_dict(sharded, buffers, given, lambda name: name.removeprefix("model."), src)
        return fshard.gather_params(loaded)["0"]["weight"]

    for weight in simulated(lambda mesh: load(mesh, saved)):
        assert torch.equal(weight, torch.full((2, 2), 2.0))
    assert "model.0.half" in saved
    with pytest.raises(ValueError, match="a hook of the module reports: nothing is no weight"):
        simulated(lambda mesh: load(mesh, saved | {"model.0.nothing": torch.ones(1)}))


def from_rank_0(mesh: Any, loads: bool) -> None:
    """Parameters and buffers of a module that differs on every rank become those of rank 0."""

    def module_of(rank: int) -> nn.Module:
        module = nn.Sequential(Kept(), nn.BatchNorm1d(3))
        module[0].register_buffer("mask", torch.tensor([True, False]))
        for number, x in enumerate([*module.parameters(), *module.buffers()]):
            x.data.fill_((number + rank) % 2 if x.dtype == torch.bool else 10 * rank + number)
        return module

    module = module_of(mesh.get_rank())
    apply, params, buffers = functionalize(module)
    plan = fshard.make_plan(params, mesh)
    sharded = fshard.shard_params(params, plan, src=None if loads else 0)
    if loads:
        saved = dict(module.state_dict()) if mesh.get_rank() == 0 else {}
        sharded, buffers = apply.load_state_dict(sharded, buffers, saved, src=0)
    else:
        for axis in ("shard", "replicate"):
            buffers = fshard.broadcast(buffers, mesh, axis)
    expected = module_of(0)
    assert same_bits(apply.state_dict(sharded, buffers), dict(expected.state_dict()))
    if not loads:  # also those that the module does not save
        assert same_bits(buffers, functionalize(expected)[2])


@pytest.mark.parametrize("loads", [False, True])
def test_one_rank_gives_its_module_to_all(loads):
    """Buffers would stay those of each rank: the running statistics of a batch norm, or a mask."""
    simulated(from_rank_0, loads, shard=2, replicate=2)


def test_what_a_modules_state_dict_lacks():
    """A buffer would keep its old value without a word; or the parameters alone take a module's dict without a word."""
    module = Kept()
    apply, params, buffers = functionalize(module)
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    saved = dict(module.state_dict())
    del saved["count"]
    with pytest.raises(ValueError, match="load_state_dict: it lacks 1 names: 'count'"):
        apply.load_state_dict(sharded, buffers, saved)
    with pytest.raises(ValueError, match="'count': expected a tensor"):
        apply.load_state_dict(sharded, buffers, {**saved, "count": torch.zeros(2), "more": torch.zeros(1)})
    batch_norm = nn.BatchNorm1d(2)
    _, params, _ = functionalize(batch_norm)
    with pytest.raises(ValueError, match=r"'running_mean', .*functionalize\(module\)'s apply.load_state_dict"):
        fshard.load_state_dict(fshard.shard_params(params, fshard.make_plan(params)), batch_norm.state_dict())


def test_wrong_arguments_of_state_dicts():
    """A subtree or a plain tree would be saved under names that nothing finds."""
    params = fshard.init_params(fshard.make_plan(like(), units=["a"]), drawn)
    with pytest.raises(TypeError, match="state_dict: x=an object of type dict: expected a Sharded"):
        fshard.state_dict(like())
    with pytest.raises(
        ValueError, match="load_state_dict: expected the parameters of a whole plan, got a subtree of 2"
    ):
        fshard.load_state_dict(params["a"], {})
    with pytest.raises(ValueError, match="state_dict: expected a tree, got one leaf, without a name"):
        fshard.state_dict(params["a"]["w"])
    with pytest.raises(TypeError, match="load_state_dict: mapping"):
        fshard.load_state_dict(params, params)


class Library(nn.Module):
    """A model of a library that initializes submodules by one method, as nanoGPT: all but its norms."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std, self.linear, self.norm = std, nn.Linear(40, 40), nn.LayerNorm(40)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.std)
            nn.init.zeros_(module.bias)


def test_a_model_inside_a_model_is_initialized_by_itself():
    """A tower would get the distribution of the model around it, or a library's model inside a user's torch's."""

    class Around(Library):
        def __init__(self) -> None:
            super().__init__(3.0)
            self.tower = Library(0.5)

    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Library(2.0)

    expected = {"linear": 3.0, "tower.linear": 0.5, "model.linear": 2.0}
    for make in (Around, Users):
        with torch.device("meta"):
            apply, params, _ = functionalize(make())
        whole = fshard.state_dict(apply.init(fshard.make_plan(params)))
        for path, std in expected.items():
            if f"{path}.weight" in whole:
                assert whole[f"{path}.weight"].std().item() == pytest.approx(std, rel=0.1), path
                assert whole[f"{path.replace('linear', 'norm')}.weight"].eq(1).all(), "by itself"


def _small(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        nn.init.normal_(part.weight, std=0.001)


def _small_data(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        part.weight.data.normal_(0, 0.001)


def _zeroed(module: Any) -> None:
    with torch.no_grad():
        module.head.weight.zero_()


# what a constructor does after it has made a child
WRITTEN: dict[str, Any] = {
    "zero_": _zeroed,
    "self.apply(fn)": lambda module: module.apply(_small),
    "constant_": lambda module: nn.init.constant_(module.head.weight, 0.3),
    "a slice": lambda module: nn.init.normal_(module.head.weight[1:], std=9.0),
    ".data": lambda module: module.apply(_small_data),
    "another parameter": lambda module: setattr(module.head, "weight", nn.Parameter(torch.ones(4, 6))),
    "loaded": lambda module: module.load_state_dict({"head.weight": torch.ones(4, 6)}, strict=False),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_constructor_writes_to_a_child_is_an_error(name):
    """A head would start with other values than its constructor gives it, and with pretrained ones lost."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4)
            WRITTEN[name](self)

    apply, params, _ = functionalize(Written())
    words = r"init: the module has set 'head.weight' after 'head' \(Linear\) .* shard its own values with shard_params"
    with pytest.raises(ValueError, match=words):
        apply.init(fshard.make_plan(params))


class NanoGPT(nn.Module):
    """nanoGPT's constructor: weights are tied, then `_init_weights` is applied, which meets the tied one twice."""

    def __init__(self, finish: Callable[[Any], object], inside: bool = False) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.wte.weight = self.head.weight
        self.inner = NanoGPT(lambda inner: inner.apply(inner._init_weights), False) if inside else nn.Linear(4, 6)
        finish(self)

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)


def _applied(module: Any) -> None:
    module.apply(module._init_weights)


# a constructor that initializes parameters more than once, as init does
TWICE: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: NanoGPT(_applied),
    "inner and outer": lambda: NanoGPT(_applied, True),
    "applied twice": lambda: NanoGPT(lambda module: [_applied(module), _applied(module)]),
    "reset": lambda: NanoGPT(lambda module: [module.inner.reset_parameters(), _applied(module)]),
    "loaded": lambda: NanoGPT(lambda module: [_applied(module), module.load_state_dict(module.state_dict())]),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", TWICE)
def test_parameters_that_a_constructor_initializes_again_are_no_errors(name, device):
    """nanoGPT, and most models with tied weights, could not start on meta."""
    torch.manual_seed(0)
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, where values are loaded to meta
        module = TWICE[name]()
    apply, params, _ = functionalize(module)
    values = tree.leaves(fshard.gather_params(apply.init(fshard.make_plan(params))))
    assert all(0.01 < x.std() < 0.03 for x in values if x.dim() == 2)


class Again(nn.Linear):
    """Initializes itself twice, as many classes do whose parent calls `reset_parameters`."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.reset_parameters()


ALONE: list[Callable[[], nn.Module]] = [
    *(lambda num=num: nn.Linear(1, num) for num in (1, 2, 4, 9)),
    lambda: nn.Linear(64, 64),
    lambda: Again(3, 5),
    lambda: nn.Conv2d(2, 4, 3),
    lambda: nn.Embedding(2, 2, padding_idx=0),
    lambda: nn.EmbeddingBag(9, 4),
    lambda: nn.Sequential(nn.BatchNorm1d(6), nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.PReLU(4)),
    lambda: nn.LSTM(3, 4, 2, proj_size=2),
    lambda: nn.Bilinear(2, 3, 4),
    lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    lambda: nn.Transformer(8, 2, 2, 1, 16, batch_first=True),
    lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 30, [5, 10]),
    lambda: nn.Linear(3, 5).bfloat16(),
    lambda: nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4), nn.Embedding(0, 8)),  # torch initializes no elements
]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # torch's
@pytest.mark.parametrize("make", ALONE)
def test_modules_that_initialize_themselves_are_no_errors(make):
    """By chance a few elements are small, and a class may initialize itself twice: no reason to refuse a module."""
    for seed in range(4):
        torch.manual_seed(seed)
        for device in ("cpu", "meta") if seed == 0 else ("cpu",):
            with torch.device(device):
                module = make()
            apply, params, _ = functionalize(module)
            apply.init(fshard.make_plan(params), seed=seed)


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.complex64), torch.arange(2), torch.tensor([True, False])])
def test_values_that_no_initialization_sets_are_errors_in_every_dtype(value):
    """A mask, positions or complex frequencies would be zeros."""
    module = nn.Linear(1, 1)
    module.register_buffer("kept", value)
    module.frozen = nn.Parameter(value, requires_grad=False)
    apply, params, _ = functionalize(module.to("meta"))
    with pytest.raises(ValueError, match=r"sets 'kept'"):
        apply.init_buffers()
    with pytest.raises(ValueError, match=r"sets 'frozen'"):
        apply.init(fshard.make_plan(params))


def test_a_plan_of_other_parameters_is_an_error():
    """A leaf of another model would be looked for."""
    apply, _, _ = functionalize(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="Linear: init: a plan of other parameters: it lacks"):
        apply.init(fshard.make_plan({"w": torch.zeros(1)}))
