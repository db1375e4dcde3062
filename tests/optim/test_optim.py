"""Laws that hold for every transformation of the registry, over plain and over sharded trees."""

import copy
import functools
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.utils._pytree as pytree
from support.models import STRATEGIES, TREES, WORLDS, padding, rand, same_bits
from support.optimizers import KERNELS, ROWS, TRANSFORMS, VALUES, hyperparams, makers, returns_transform
from support.worlds import simulated
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fshard
from fshard import Sharded, gather_params, optim
from fshard.core import tree
from fshard.core.arguments import check_hyperparams
from fshard.layout.pieces import Parts, clear_padding_
from fshard.optim import adam_8bit, apply_updates, matrix, quasi_newton
from fshard.update import base, kernels, optimizers

Place = Callable[[Any], Any]
over_all = pytest.mark.parametrize("name", TRANSFORMS)

# They make an object of torch.optim's class in every update, which dynamo does not trace.
UNCOMPILED = {name for name in TRANSFORMS if name.startswith("from_torch")}
TAKE_TENSORS = {name: make for name, make in makers().items() if hyperparams(make)}


INTERNAL = {"as_transform", "checked", "clip_by"}  # they take or make a transformation for others


def row_of(name: str, field: str) -> str:
    """What to write where a law does not hold for a transformation, or hold for another reason."""
    return f"{name}: if it must be so, write {field} in its row of ROWS in tests/support/optimizers.py"


def tree_of(seed: int, *dtypes: torch.dtype) -> Any:
    """Matrices, vectors, a scalar, in float64 or in some dtypes in turn."""
    shapes = {"w": (5, 3), "blocks": [{"w": (3, 5), "b": (5,)}, {"w": (2, 3, 2), "b": (1,)}], "s": (), "tail": (7,)}
    leaves, spec = pytree.tree_flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    dtypes = dtypes or (torch.float64,)
    zeros = [torch.zeros(shape, dtype=dtypes[i % len(dtypes)]) for i, shape in enumerate(leaves)]
    return like(pytree.tree_unflatten(zeros, spec), seed)


def odd_tree(name: str, seed: int) -> Any:
    """Leaves that are not contiguous, 0-d or without elements."""
    leaves = {"t": rand(4, 3, seed=seed).T, "v": rand(9, seed=seed + 1)[::2], "s": rand(seed=seed + 2)}
    # torch.optim.Adafactor divides by the number of elements
    return leaves if name == "from_torch-Adafactor" else leaves | {"e": rand(0, 2, seed=0)}


def like(x: Any, seed: int) -> Any:
    """A tree of the same shapes and dtypes, of normal numbers."""
    leaves, spec = tree.flatten(x)
    return tree.unflatten(spec, [_normal(leaf, seed + i) for i, leaf in enumerate(leaves)])


def _normal(leaf: Tensor, seed: int) -> Tensor:
    """Normal numbers of a tensor's shape and dtype."""
    real = rand(*leaf.shape, seed=seed)
    return (torch.complex(real, rand(*leaf.shape, seed=-seed)) if leaf.is_complex() else real).to(leaf.dtype)


def by_update(tx: Any, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """One update, applied."""
    updates, state = tx.update(grads, state, params, **extra)
    return apply_updates(params, updates), state


def by_step(tx: Any, grads: Any, state: Any, params: Any, **kw: Any) -> tuple[Any, Any]:
    """The same, in one."""
    return tx.step(grads, state, params, **kw)


def train(run: Any, tx: Any, params: Any, grads: list[Any], **kw: Any) -> tuple[Any, Any]:
    """Parameters and state after some updates."""
    state = tx.init(params)
    for g in grads:
        params, state = run(tx, g, state, params, **kw)
    return params, state


def start(name: str, place: Place, *dtypes: torch.dtype) -> tuple[Any, Any, list[Any]]:
    """A transformation, parameters and three gradients."""
    params, *grads = (place(tree_of(100 * i, *dtypes)) for i in range(4))
    return TRANSFORMS[name](), params, grads


def plain(x: Any) -> Any:
    """A tree as it is."""
    return x


def sharder(name: str, mesh: Any, **strategy: Any) -> Place:
    """What cuts trees over a mesh, in three units, as a transformation wants them."""
    block = ROWS[name].block

    def place(x: Any) -> Any:
        return fshard.shard_params(x, fshard.make_plan(x, mesh, units=["blocks.*"], block=block, **strategy))

    return place


def everywhere(name: str, law: Callable[[Place], Any], *sizes: int) -> None:
    """A law for plain trees, and for sharded ones on 2 and 3 ranks, or on other numbers of them."""
    law(plain)
    for size in sizes or (2, 3):
        simulated(lambda mesh: law(sharder(name, mesh)), shard=size)


def signature(x: Any) -> Any:
    """Structure, dtypes and shapes."""
    leaves, spec = tree.flatten(x)
    return spec, [(leaf.dtype, leaf.shape) for leaf in leaves]


def close(a: Any, b: Any) -> None:
    """Two trees are equal to 1e-12, relative."""
    torch.testing.assert_close(tree.leaves(a), tree.leaves(b), rtol=1e-12, atol=1e-14)


def clone(x: Any) -> Any:
    """A tree with tensors of its own."""
    return tree.map(torch.clone, x)


def refusal(call: Callable[[], Any], *errors: type[Exception]) -> str | None:
    """The sentence of the error that a call raises, or None."""
    try:
        call()
    except errors as error:
        return str(error)
    return None


def keeps(name: str, params: Any, grads: Any) -> None:
    """Updates, parameters and state after an update are as they were before, by update and by step."""
    tx = TRANSFORMS[name]()
    state = tx.init(params)
    assert signature(tx.update(grads, state, params)[0]) == signature(params)
    for run in (by_update, by_step):
        assert signature(run(tx, grads, state, params)) == signature((params, state))


def test_every_transformation_is_registered():
    """A new optimizer would be tested by nothing, or could not be imported."""
    rows = {name.split("-")[0] for name in ROWS} | {"chain", "identity"}  # these are tested as parts of others
    for name in makers():
        assert name in rows, f"optim.{name}: add a row to ROWS of tests/support/optimizers.py"
    for module in (base, optimizers, matrix, adam_8bit, quasi_newton):
        for name, value in vars(module).items():
            public = returns_transform(value) and value.__module__ == module.__name__ and not name.startswith("_")
            if public and name not in INTERNAL:
                assert name in optim.__all__, f"{module.__name__}.{name}: name it in fshard/optim/__init__.py"


def test_a_hyperparameter_without_a_range_is_an_error():
    """A misspelt or new hyper-parameter would be checked against a range that is not its own."""
    sentence = (
        "optim.nova: b3=0.5: no range is known for a hyper-parameter b3: give it one in RANGES, core/arguments.py"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        check_hyperparams("nova", 0.1, b1=0.9, b3=0.5)


@over_all
def test_dtypes_are_kept(name):
    """Training in bfloat16 would go on in float32 after a step, or a complex leaf lose its imaginary part."""

    real, f32, bf16, c64 = ROWS[name].real, torch.float32, torch.bfloat16, torch.complex64
    leaf = tree_of(1, c64)["w"]
    error = refusal(lambda: keeps(name, leaf, leaf), ValueError, RuntimeError)
    assert real == (error is not None), f"{row_of(name, 'real=True, or not')}; with a complex leaf: {error}"
    ours = r"^optim\.\w+: .*complex" if not name.startswith("from_torch") else "complex"  # ours names the leaf
    assert not real or re.search(ours, error), error

    def law(place: Place) -> None:
        for dtypes in ([f32], [bf16], [torch.float64], [f32, bf16], *([] if real else [[f32, c64]])):
            keeps(name, place(tree_of(1, *dtypes)), place(tree_of(2, *dtypes)))

    everywhere(name, law, 2)


@over_all
def test_structures_are_kept(name):
    """A user whose parameters are dataclasses, named tuples or one tensor would get another tree back from a step."""
    for kind in ("leaf", "scalar", "order", "nested", "tuples", "named", "classes", "ordered", "nothing"):
        params = TREES[kind]()
        keeps(name, params, like(params, 1))


@over_all
def test_padding_stays_zero(name):
    """Padding would get numbers, and norms, checkpoints in flat form and the next gradients with it."""

    def law(mesh: Any) -> int:
        tx, params, grads = start(name, sharder(name, mesh), torch.float64, torch.float32)
        nodes = tree.nodes([train(run, tx, params, grads) for run in (by_update, by_step)], Parts)
        parts = [x for node in nodes if isinstance(node, Sharded) for x in padding(node)]
        assert not any(x.count_nonzero() for x in parts)
        assert same_bits([clear_padding_(clone(node)) for node in nodes], nodes)
        return sum(len(x) for x in parts)

    for size in (2, 3):
        assert sum(simulated(law, shard=size)) > 0


@over_all
def test_the_number_of_ranks_makes_no_difference(name):
    """Training on another number of ranks would give other parameters; elementwise, other bits."""

    def law(place: Place) -> list[list[Tensor]]:
        tx, params, (*grads, _) = start(name, place)
        results = [train(run, tx, params, grads) for run in (by_update, by_step)]
        return [tree.leaves(tree.map_tops(gather_params, Parts, result)) for result in results]

    expected, elementwise = law(plain), TRANSFORMS[name]().elementwise
    for strategy, world in (*(("full", world) for world in WORLDS), ("wide", "2x2")):
        replicate, shard = WORLDS[world]
        cut = functools.partial(sharder, name, **STRATEGIES[strategy])
        for got in simulated(lambda mesh, cut=cut: law(cut(mesh)), replicate=replicate, shard=shard):
            close(got, expected)
            assert same_bits(got[0], expected[0]) or not elementwise, f"{name} is not elementwise, as it says"
            assert same_bits(got[1], expected[1]) or not elementwise or name in KERNELS, row_of(name, "kernel=True")


def compiled_once(tx: Any, leaves: str = "w", states: Callable[[int, Any], Any] = lambda i, state: state) -> list[Any]:
    """Three updates, compiled in one graph, that are as those not compiled; `states` changes the states before each."""
    torch._dynamo.reset()
    params = {leaf: rand(*((3, 2) if leaf == "w" else ()), seed=1) for leaf in leaves}
    counter = torch._dynamo.testing.CompileCounter()
    update = torch.compile(tx.update, backend=counter, fullgraph=True)
    state, found = tx.init(params), []
    expected = state
    for i in range(3):
        grads, state, expected = like(params, 10 * i), states(i, state), states(i, expected)
        updates, state = update(grads, state, params)
        eager, expected = tx.update(grads, expected, params)
        close((updates, state), (eager, expected))
        assert signature((updates, state)) == signature((eager, expected))
        found.append(updates)
    assert counter.frame_count == 1
    return found


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in UNCOMPILED])
def test_an_update_compiles_once(name):
    """A compiled training loop would compile again at later updates, or in pieces."""
    compiled_once(TRANSFORMS[name](), "ws" if name in ("adamw", "by_label") else "w")


@pytest.mark.parametrize("make", [optim.sgd, optim.adamw])
def test_a_changed_rate_does_not_compile_again(make):
    """Changing the rate between steps would compile again, or would be ignored."""
    tx = optim.with_hyperparams(make, lr=0.1, weight_decay=0.1)

    def changed(i: int, state: Any) -> Any:
        rate = torch.tensor(0.1 * (1 + i), dtype=torch.float64)
        return state._replace(hyperparams={**state.hyperparams, "lr": rate})

    for i, (one, other) in enumerate(zip(compiled_once(tx, "s", changed), compiled_once(tx, "s"), strict=True)):
        torch.testing.assert_close(one, tree.map(lambda u, i=i: (1 + i) * u, other))


@over_all
def test_a_state_survives_a_round_trip(name):
    """A checkpoint or a copy of a state would lose a field, and training go on differently from it."""

    def filled(x: Tensor) -> Tensor:
        return _normal(x, x.numel()).abs() + 0.1 if x.is_floating_point() else torch.full_like(x, 7)

    def law(place: Place) -> None:
        tx, params, (grads, *_) = start(name, place, torch.float32)
        state = tree.map(filled, tx.init(params))
        others = [tree.unflatten(*reversed(tree.flatten(state))), pytree.tree_unflatten(*pytree.tree_flatten(state))]
        others += [copy.deepcopy(state), *([pickle.loads(pickle.dumps(state))] if place is plain else [])]
        for other in others:
            assert same_bits(other, state)
            assert type(other) is type(state)
            assert same_bits(tx.step(grads, other, params), tx.step(grads, state, params))

    everywhere(name, law)


@over_all
def test_unknown_arguments_are_taken(name):
    """An optimizer could not be chained with a user's own that takes more arguments."""
    tx, params, (grads, *_) = start(name, plain)
    state = tx.init(params)
    for run in (by_update, by_step):
        assert same_bits(run(tx, grads, state, params, value=1.0, foo=None), run(tx, grads, state, params))


@over_all
def test_nothing_given_is_changed(name):
    """A step would write to the caller's tensors without `donate`, or give another result when repeated."""

    def law(place: Place) -> None:
        tx, params, (first, grads, _) = start(name, place)
        params, state = tx.step(first, tx.init(params), params)
        inputs = (grads, state, params)
        before, versions = clone(inputs), [x._version for x in tree.leaves(inputs)]
        for run in (by_update, by_step):
            one, other = (run(tx, *inputs) for _ in range(2))
            assert same_bits(one, other)
            assert not same_bits(one[0], params)
            assert same_bits(inputs, before)
            assert [x._version for x in tree.leaves(inputs)] == versions

    everywhere(name, law)


def steps_alike(name: str, params: Any, grads: list[Any]) -> None:
    """A step is an update, applied; with found_inf 0, or with what it may overwrite, too; with found_inf 1 nothing."""
    tx = TRANSFORMS[name]()
    expected = train(by_update, tx, params, grads)
    for found_inf in (None, torch.zeros(())):
        kept = train(by_step, tx, params, grads, found_inf=found_inf)
        close(kept, expected)
        assert same_bits(train(by_step, tx, clone(params), grads, found_inf=found_inf, donate=True), kept)
        close(train(by_step, tx, params, clone(grads), found_inf=found_inf, own_grads=True), kept)
    old = tree.map(lambda x: torch.where(x < 0, -0.0, x), kept[::-1])  # padding stays 0
    bad = tree.map(lambda g: torch.where(g > 0, g, torch.inf * g), grads[0])
    for donate in (False, True):
        new = tx.step(bad, *clone(old), found_inf=torch.ones(()), donate=donate)
        assert same_bits(new, old[::-1])


@over_all
def test_a_step_is_an_update_and_its_application(name):
    """The fused kernel would train otherwise than the formula, or a skipped step would change the state."""
    params, *grads = (odd_tree(name, 100 * i) for i in range(4))
    steps_alike(name, params, grads)
    everywhere(name, lambda place: steps_alike(name, *start(name, place)[1:]))


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if not ROWS[name].any_state])
def test_the_state_of_another_optimizer_is_refused(name):
    """A checkpoint of another optimizer would be trained on in silence."""
    tx, params, (grads, *_) = start(name, plain)
    for other in ("adamw", "rmsprop-all", "adafactor", "masked", "by_label"):
        state = TRANSFORMS[other]().init(params)
        if tree.flatten(state)[1] != tree.flatten(tx.init(params))[1]:
            for run in (by_update, by_step):
                error = refusal(lambda run=run, state=state: run(tx, grads, state, params), ValueError)
                assert error is not None, f"{row_of(name, 'any_state=True')}; it took the state of {other}"
                assert re.search(r"^(optim\.)?\w+: .*\bstates?\b", error)


def test_the_state_of_other_settings_is_refused():
    """A state made without momentum would be trained on with momentum, or the reverse."""
    params, settings = rand(3, seed=1), [optim.sgd(0.1), optim.sgd(0.1, momentum=0.9)]
    for tx, other, word in zip(settings, settings[::-1], ("with", "without"), strict=True):
        for run in (by_update, by_step):
            with pytest.raises(ValueError, match=f"optim.sgd: the state was made {word} 'momentum'"):
                run(tx, params, other.init(params), params)


@functools.cache
def reads_params(name: str) -> bool:
    """Whether the second update of a transformation depends on the parameters it is given."""
    tx, params, (first, second, _) = start(name, plain)
    params, state = by_update(tx, first, tx.init(params), params)
    others = tree.map(lambda x: 1.5 * x + 1, params)
    return not same_bits(*(tx.update(second, state, p)[0] for p in (params, others)))


@over_all
def test_gradients_of_another_structure_are_refused(name):
    """Gradients would be applied to the wrong leaves."""
    tx, params, (grads, *_) = start(name, plain)
    missing, renamed = {k: grads[k] for k in ("w", "s")}, {k.replace("tail", "end"): g for k, g in grads.items()}
    for wrong in (missing, renamed, list(grads.values())):
        for run in (by_step, *([by_update] if reads_params(name) else [])):
            with pytest.raises(ValueError, match=r"differ|mismatch|structure|[Ee]xpected"):
                run(tx, wrong, tx.init(params), params)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_gradient_of_another_shape_is_refused(name):
    """A kernel of torch's would read beyond the memory of a gradient."""
    tx, params, (grads, *_) = start(name, plain)
    for leaf, shape in (("w", (3,)), ("w", (1,)), ("w", (15,)), ("tail", (3,))):
        with pytest.raises(ValueError, match=f"'{leaf}'"):
            tx.step({**grads, leaf: rand(*shape, seed=1)}, tx.init(params), params)


@over_all
def test_parameters_are_asked_for_where_they_are_read(name):
    """An update without the parameters it reads would be wrong, or fail without a sentence that says so."""
    tx, params, (grads, *_) = start(name, plain)
    state = tx.init(params)
    error = refusal(lambda: tx.update(grads, state), ValueError)
    if not reads_params(name):
        assert error is None, (
            f"{name} reads no parameters and must not ask for them (reads_params=False of a Rule): {error}"
        )
        assert same_bits(tx.update(grads, state), tx.update(grads, state, params))
        return
    asks = ROWS[name].asks or name.split("-")[0]
    assert error is not None, (
        f"{name} reads the parameters and must say so: Needs(params=True), or Rule(reads_params=True)"
    )
    assert f"optim.{asks}: its update needs the parameters" in error, row_of(name, "asks=...")


@pytest.mark.parametrize("make", [optim.adam, optim.adamw, optim.adagrad, optim.lion])
def test_without_decay_no_parameters_are_needed(make):
    """A user who updates without parameters, and without weight decay, would be asked for them."""
    tx, (_, params, (grads, *_)) = make(0.1, weight_decay=0), start("sgd", plain)
    assert same_bits(tx.update(grads, tx.init(params)), tx.update(grads, tx.init(params), params))


def values_of(name: str) -> dict[str, float]:
    """Values of the hyper-parameters that may be tensors."""
    for key in hyperparams(TAKE_TENSORS[name]):
        assert key in VALUES, f"optim.{name}: give {key!r} a value in VALUES of tests/support/optimizers.py"
    return {key: VALUES[key] for key in hyperparams(TAKE_TENSORS[name])}


@pytest.mark.parametrize("name", TAKE_TENSORS)
def test_hyperparameters_are_checked(name):
    """A wrong hyper-parameter would fail in the first step, or never, and not where the optimizer is made."""
    for key in values_of(name):
        with pytest.raises(TypeError, match=f"^optim.{name}: {key}='x': expected a number"):
            TAKE_TENSORS[name](**values_of(name) | {key: "x"})


@pytest.mark.parametrize("name", TAKE_TENSORS)
def test_hyperparameters_may_be_tensors(name):
    """A hyper-parameter as a tensor would train otherwise than as a number, or change a dtype."""
    make, numbers = TAKE_TENSORS[name], values_of(name)
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
    params, *grads = (tree_of(100 * i) for i in range(4))
    for run in (by_update, by_step):
        expected = train(run, make(**numbers), params, grads)
        close(train(run, make(**tensors), params, grads), expected)
        close(train(run, optim.with_hyperparams(make, **numbers), params, grads)[0], expected[0])
        single = tree_of(1, torch.float32)
        assert signature(train(run, make(**tensors), single, [single])[0]) == signature(single)


@pytest.mark.parametrize("make", [optim.sgd, optim.adamw, optim.lamb, optim.adafactor, optim.muon])
def test_rates_of_every_kind(make):
    """A rate from a schedule or a tensor would train otherwise than the same number."""
    tensor = torch.tensor(0.1, dtype=torch.float64)
    rates = [0.1, tensor, lambda count: tensor, lambda count: 0.1 if count < 9 else 0.0]
    params, *grads = (tree_of(100 * i) for i in range(4))
    for run in (by_update, by_step):
        first, *others = (train(run, make(rate), params, grads) for rate in rates)
        for other in others:
            close(other, first)


def falling(count: Any) -> Any:
    """A rate that no float32 holds."""
    return 0.1 * 0.9 ** (count + 1) / 3


@pytest.mark.parametrize("name", [name for name in TAKE_TENSORS if "lr" in values_of(name)])
def test_a_schedule_counts_in_float64(name):
    """A user's schedule would give float64 parameters a rate of 24 bits."""
    params, *grads = (tree_of(100 * i) for i in range(4))

    def last(rate):
        p, state = params, TAKE_TENSORS[name](**values_of(name) | {"lr": falling(0)}).init(params)
        for i, g in enumerate(grads):
            p, state = TAKE_TENSORS[name](**values_of(name) | {"lr": rate(i)}).step(g, state, p)
        return p

    torch.testing.assert_close(last(lambda i: falling), last(falling), rtol=4e-15, atol=1e-15)


def test_a_rate_on_an_accelerator_is_not_rounded():
    """torch's fused kernels read the bytes of a float32 there: float64 parameters would get a rate of 24 bits."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, rate = (torch.zeros(shape, dtype=torch.float64, device="cuda") for shape in ((3,), ()))
        for tensors, lr, fused in (([x], rate, False), ([x.float()], rate, True), ([x], 0.1, True)):
            assert kernels.can_fuse(kernels.adam_, tensors, lr) == fused


def test_optax_is_an_error_that_says_how():
    """A pair of optax would fail in JAX, in the first step."""
    pair = fshard.optim.Transform(lambda params: (), lambda grads, state, params=None: (grads, state))
    of_optax = SimpleNamespace(init=pair.init, update=lambda updates, state, params=None: (updates, state))
    of_optax.update.__module__ = "optax._src.base"
    with pytest.raises(TypeError, match=r"of optax, whose functions take arrays of JAX: use the one of that name in"):
        fshard.train_step(lambda params, batch: batch, of_optax)


@pytest.mark.parametrize("tx", [optim.identity(), optim.scale(-0.5)], ids=["identity", "scale"])
def test_what_changes_no_structure_takes_sparse_gradients(tx):
    """A chain that begins with one would refuse what `sgd` alone takes."""
    sparse = torch.sparse_coo_tensor([[0, 4]], rand(2, 3, seed=1), (5, 3), check_invariants=True)
    got, dense = (tx.update({"w": x}, tx.init({"w": x}))[0]["w"] for x in (sparse, sparse.to_dense()))
    assert got.is_sparse
    assert torch.equal(got.to_dense(), dense)


@over_all
def test_a_sparse_gradient_is_taken_or_refused(name):
    """A sparse embedding's gradient would be applied wrongly, or fail with an error that does not say which leaf."""
    tx, params, (grads, *_) = start(name, plain)
    sparse = torch.sparse_coo_tensor([[0, 4]], rand(2, 3, seed=1), (5, 3), check_invariants=True)
    state = tx.init(params)
    for run in (by_update, by_step):
        refusal, got = None, None
        try:
            got = run(tx, {**grads, "w": sparse}, state, params)
        except ValueError as error:
            refusal = str(error)
        if refusal is None or name == "sgd":
            close(got, run(tx, {**grads, "w": sparse.to_dense()}, state, params))
        else:
            assert "'w' is sparse" in refusal


def test_nesterov_needs_momentum():
    """nesterov=True without momentum would be ignored in silence."""
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        optim.sgd(0.1, nesterov=True)


def clipped(mesh: Any, over: Any) -> Any:
    """Parameters after a step that clips leaves, by a transformation of its own and by one of a label."""
    whole, found = {"w": rand(5, 3, seed=1), "b": rand(7, seed=2)}, []
    tx = optim.chain(optim.clip_by_leaf_norm(0.1), optim.sgd(0.1))
    for each in (tx, optim.by_label({"all": tx}, lambda path, leaf: "all")):
        state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh, **over)), each)
        step = fshard.train_step(lambda p, x: (p["w"] * x).sum() + p["b"].square().sum(), each)
        found.append(gather_params(step(state, torch.tensor(mesh.get_rank() + 1.0))[0].params))
    return found


@pytest.mark.parametrize("shard", [1, 3])
def test_gradients_that_are_views_are_clipped(shard):
    """Gradients that are views into rows would stay unclipped: those of a label, or where only the state is cut."""
    runs = [simulated(clipped, STRATEGIES[name], shard=shard)[0] for name in ("full", "zero1")]
    assert all(same_bits(run, runs[0][0]) for both in runs for run in both)
    assert not same_bits(runs[0][0], {"w": rand(5, 3, seed=1), "b": rand(7, seed=2)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["sgd", "sgd-all", "adam", "adamw"])
def test_long_rows_are_updated_as_the_reference_says(name, dtype):
    """A fused kernel would be wrong in whole vectors or in what is left over, in a half-precision dtype."""
    tx, one = TRANSFORMS[name](), rand(67, seed=1, dtype=dtype)
    other, first, second = one, tx.init(one), tx.init(one)
    for i in range(3):
        g = rand(67, seed=2 + i, dtype=dtype) + 2  # far enough from zero for float16
        one, first = tx.step(g, first, one)
        updates, second = tx.update(g, second, other)
        other = apply_updates(other, updates)
    assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * other.abs().max()
