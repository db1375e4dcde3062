"""A plan without options: units and axes that it finds, strategies by their words, values that depend on neither."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import rand
from support.worlds import gloo, simulated
from torch import Tensor, nn

import fshard
from fshard import AbstractMesh, optim, tree

SHARD = ("shard",)


def w(*shape: int) -> Tensor:
    """A leaf."""
    return torch.zeros(shape)


def layer() -> dict[str, Tensor]:
    """A linear layer."""
    return {"weight": w(3, 3), "bias": w(3)}


def shared() -> list[Any]:
    """Two layers of one weight."""
    weight = w(3, 3)
    return [{"weight": weight}, {"weight": weight}]


def of_module(module: nn.Module) -> Any:
    """The parameters of a module."""
    return fshard.module.functionalize(module)[1]


TREES: dict[str, tuple[Any, list[str]]] = {
    "layers in a list": ({"embed": w(5, 3), "layers": [layer(), layer()], "out": w(3, 5)}, ["layers.0", "layers.1"]),
    "layers in a dict": ({"a": layer(), "b": layer(), "other": [w(3, 3)]}, ["a", "b"]),
    "matrices in a list": ({"layers": [w(3, 3), w(3, 3)]}, ["layers.0", "layers.1"]),
    "matrices in a tuple": ((w(3, 3), w(3, 3)), ["0", "1"]),
    "a list by names": (of_module(nn.ParameterList(w(3, 3) for _ in range(3))), ["0", "1", "2"]),
    "matrices in a dict": ({"q": w(3, 3), "k": w(3, 3)}, []),
    "vectors and scalars": (
        {"scales": [w(3), w(3)], "rates": [w(), w()], "norms": [{"weight": w(3)}, {"weight": w(3)}]},
        [],
    ),
    "the outermost": ({"stages": [{"layers": [layer(), layer()]} for _ in range(2)]}, ["stages.0", "stages.1"]),
    "the inner ones of one": ({"stages": [{"layers": [layer(), layer()]}]}, ["stages.0.layers.0", "stages.0.layers.1"]),
    "two kinds in turn": ([layer(), [w(2, 3)], layer(), [w(2, 3)]], ["0", "1", "2", "3"]),
    "one of another shape": ([layer(), {"weight": w(4, 3), "bias": w(4)}, layer()], ["0", "2"]),
    "one of another dtype": ([layer(), layer(), tree.map(Tensor.double, layer())], ["0", "1"]),
    "one of other names": ([layer(), layer(), {"w": w(3, 3), "bias": w(3)}], ["0", "1"]),
    "one of each": ([layer(), [w(2, 3)], {"v": w(4, 4)}], []),
    "a leaf": (w(3, 3), []),
    "none": ({}, []),
    "empty containers": ({"layers": [{}, {}], "more": [layer(), layer()]}, ["more.0", "more.1"]),
    "on meta": (tree.map(lambda x: x.to("meta"), [layer(), layer()]), ["0", "1"]),
    "tied": (shared(), ["0", "1"]),
    "encoder and decoder": (
        of_module(nn.Transformer(4, 2, 2, 2, 4, batch_first=True)),
        [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in (0, 1)],
    ),
    "no layers": (of_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))), []),
    "sequential": (of_module(nn.Sequential(*[nn.Linear(3, 3) for _ in range(2)], nn.Linear(3, 1))), ["0", "1"]),
}


@pytest.mark.parametrize("name", TREES)
def test_repeated_siblings_are_units(name: str) -> None:
    """A model trained without `units=` would be gathered whole, or in messages of a few bytes."""
    params, expected = TREES[name]
    assert [x.name for x in fshard.make_plan(params).units if not x.name.startswith("(")] == expected
    assert {x.name for x in fshard.make_plan(params, units=[]).units} <= {"(root)"}


def test_the_only_axis_has_any_name() -> None:
    """Else each mesh of torch's tutorials ("dp", "world") needs three arguments."""
    params = [layer(), layer()]
    for sizes, axis in (({"dp": 2}, "dp"), ({"replicate": 2}, "replicate"), ({"shard": 2, "tensor": 2}, "shard")):
        plan = fshard.make_plan(params, AbstractMesh(**sizes))
        assert (plan.params_over, plan.grads_over, plan.state_over) == ((axis,),) * 3
    assert fshard.make_plan(params).params_over == ()
    words = "make_plan: the mesh has axes 'a', 'b': expected one, or an axis 'shard'"
    with pytest.raises(ValueError, match=re.escape(words)):
        fshard.make_plan(params, AbstractMesh(a=2, b=2), params_over="a", grads_over="a")
    fshard.make_plan(params, AbstractMesh(a=2, b=2), params_over="a", grads_over="a", state_over="a")


STRATEGIES: dict[str, tuple[Any, Any, Any]] = {
    "ddp": ((), (), ()),
    "zero1": ((), (), SHARD),
    "zero2": ((), SHARD, SHARD),
    "zero3": (SHARD, SHARD, SHARD),
    "hsdp": (SHARD, SHARD, SHARD),
    "hsdp-all": (SHARD, SHARD, ("shard", "replicate")),
}


@pytest.mark.parametrize("word", STRATEGIES)
def test_a_strategy_is_a_word_for_axes(word: str) -> None:
    """A word that meant other axes would train in other memory than asked for, in silence."""
    params, overs = [layer(), layer()], ("params_over", "grads_over", "state_over")
    named = dict(zip(overs, STRATEGIES[word], strict=True))
    mesh = AbstractMesh(replicate=2, shard=2)
    assert fshard.make_plan(params, mesh, strategy=word) == fshard.make_plan(params, mesh, **named)
    assert fshard.make_plan(params, strategy=word) == fshard.make_plan(params)
    if not word.startswith("hsdp"):
        plan = fshard.make_plan(params, AbstractMesh(dp=3), strategy=word)
        assert [getattr(plan, over) for over in overs] == [("dp",) * len(named[over]) for over in overs]
    for more in ({over: "shard"} for over in overs):
        with pytest.raises(ValueError, match=rf"strategy='{word}': it says {next(iter(more))} already"):
            fshard.make_plan(params, mesh, strategy=word, **more)
    with pytest.raises(ValueError, match="it says regather already"):
        fshard.make_plan(params, mesh, strategy=word, regather=False)


def test_other_words_are_errors() -> None:
    """They list the words, or say which mesh is needed."""
    with pytest.raises(ValueError, match="strategy='zero4': expected one of 'ddp', 'zero1', 'zero2', 'zero3', 'hsdp'"):
        fshard.make_plan([], strategy="zero4")
    for bad in (3, ["ddp"]):
        with pytest.raises(ValueError, match=r"strategy=.*: expected one of 'ddp'"):
            fshard.make_plan([], strategy=bad)  # type: ignore[arg-type]
    for sizes in ({"dp": 2}, {"replicate": 2}, {"a": 2, "shard": 2}):
        for word in ("hsdp", "hsdp-all"):
            with pytest.raises(ValueError, match=f"strategy='{word}': expected a mesh with the axis 'replicate' and"):
                fshard.make_plan([], AbstractMesh(**sizes), strategy=word)
    for word in ("zero1", "zero3"):
        with pytest.raises(ValueError, match="in place of a strategy"):
            fshard.make_plan([], AbstractMesh(a=2, b=2), strategy=word)
    assert fshard.make_plan([], AbstractMesh(a=2, b=2), strategy="ddp").state_over == ()
    assert fshard.make_plan([], AbstractMesh(replicate=2, gpu=2), strategy="hsdp").params_over == ("gpu",)


def test_print_says_that_units_were_found() -> None:
    """A reader would look for the option that chose the units."""
    line, mesh = "Units are repeated siblings, as found without units=.", AbstractMesh(shard=2)
    for name, (params, expected) in TREES.items():
        for units, is_said in ((None, bool(expected)), ([], False), (10, False)):
            made = fshard.make_plan(params, mesh, units=units)
            assert (line in str(made).splitlines()) == is_said, (name, units)
    tied = {"first": shared(), "rest": [layer(), layer()]}
    for how in (
        {},
        {"bucket": 1 << 20},
        {"frozen": "**"},
        {"policy": "storage=bf16"},
        {"units": ["first.*", "rest.*"]},
    ):
        made = fshard.make_plan(tied, mesh, **how)
        assert line in str(pickle.loads(pickle.dumps(made))).splitlines()


def test_print_says_that_one_unit_is_most() -> None:
    """A unit of more than half of the parameters is what a rank's memory must hold."""
    most, mesh = {"layers": [layer(), layer()], "embed": w(100, 3)}, AbstractMesh(shard=2)
    line = "Unit (last) is 90% of the parameters, gathered at once: units= can cut it."
    assert line in str(fshard.make_plan(most, mesh)).splitlines()
    others = [fshard.make_plan(most), fshard.make_plan(most, mesh, strategy="zero2")]
    others += [fshard.make_plan([layer(), layer()], mesh)]
    assert not any("gathered at once" in str(plan) for plan in others)


# --- values depend on neither ---

UNITS: list[Any] = [None, [], "**", "layers.*", ["ends", "layers"], 1, 7, 30, lambda path, x: len(path) % 2 == 0]
MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"shard": 2, "replicate": 2}]
OPTIMIZERS: dict[str, Callable[[], optim.Transform]] = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adam": lambda: optim.adam(1e-2),
}
SHAPES = {"matrix": (3, 3), "vector": (3,), "scalar": (), "empty": (0, 3)}
PARTS = st.recursive(
    st.sampled_from([*SHAPES]),
    lambda part: st.lists(part, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), part, min_size=1),
    max_leaves=5,
)


def model(layer: Any, num: int, ends: Any) -> Any:
    """Layers of one structure, and other leaves: float64, all different."""
    names, spec = tree.flatten({"layers": [layer] * num, "ends": ends})
    return tree.unflatten(spec, [rand(*SHAPES[name], seed=i) for i, name in enumerate(names)])


def folded(params: Any, x: Tensor) -> Tensor:
    """(rows, 3) -> (rows, 3), by each leaf in turn."""
    if isinstance(params, Tensor):
        return x @ params if params.shape == (3, 3) else x + params.sum()
    for part in params if isinstance(params, list) else params.values():
        x = folded(part, x).tanh()
    return x


def loss(params: Any, x: Tensor) -> fshard.Mean:
    """A mean over rows, of which the ranks have different numbers."""
    return fshard.Mean(folded(params["layers"], folded(params["ends"], x)).square().sum(), len(x))


def trained(mesh: Any, params: Any, name: str, units: Any) -> Any:
    """Losses and parameters of three steps."""
    tx, rank = OPTIMIZERS[name](), mesh.get_rank()
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units=units)), tx)
    step, losses = fshard.train_step(loss, tx), []
    for number in range(3):
        state, metrics = step(state, rand(1 + rank % 2, 3, seed=10 * number + rank))
        losses.append(metrics["loss"])
    return fshard.gather_params(state.params), losses


@examples(120)
@given(
    st.builds(model, PARTS, st.integers(1, 3), PARTS),
    st.sampled_from(range(len(UNITS))),
    st.sampled_from(MESHES),
    st.sampled_from(sorted(OPTIMIZERS)),
)
def test_values_do_not_depend_on_units(params: Any, units: int, mesh: dict[str, int], name: str) -> None:
    """Else a plan that finds its units would train another model. A kernel's last bit depends on a leaf's address."""
    expected = simulated(trained, params, name, [], **mesh)
    found = simulated(trained, params, name, UNITS[units], **mesh)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_on_processes_and_against_plain_torch() -> None:
    """A plan without options over gloo: one device's values, for SGD and Adam."""
    params = model({"a": "matrix", "b": ["vector", "matrix"]}, 3, ["matrix", "scalar"])
    for name, plain in {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}.items():
        whole = tree.map(lambda x: x.clone().requires_grad_(), params)
        how: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if name == "sgd" else {"lr": 1e-2}
        optimizer, expected = plain(tree.leaves(whole), **how), []
        for number in range(3):
            rows = torch.cat([rand(1 + rank % 2, 3, seed=10 * number + rank) for rank in range(3)])
            mean = loss(whole, rows)
            value = mean.total / mean.count
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            expected.append(value.detach())
        for found in gloo(trained, params, name, None, shard=3):
            torch.testing.assert_close(found, (tree.map(Tensor.detach, whole), expected), rtol=1e-12, atol=1e-12)
