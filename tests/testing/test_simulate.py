"""Simulated ranks: order, randomness, errors, and meshes that read like DeviceMesh."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, NARROW, STRATEGIES, lm_batch, lm_params, mean_loss, rand, same_bits
from support.worlds import gloo, simulated

import fshard
from fshard.testing import SimulatedMesh, World, oracle, simulate


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_results_come_in_rank_order(size: int) -> None:
    """Results come in rank order, whichever rank ends first: otherwise a test would compare the wrong ranks."""

    def job(mesh: SimulatedMesh) -> Any:
        for _ in range(mesh.get_rank() + 1):
            fshard.all_reduce(torch.ones(1), mesh, "replicate")
        return None if mesh.get_rank() == 1 else (mesh.get_rank(), mesh)

    results = simulate(job, shard=size)
    assert [None if r == 1 else r for r in range(size)] == [x and x[0] for x in results]


def test_ranks_advance_in_a_fixed_order() -> None:
    """Ranks advance in the same order in every run: otherwise a failing test could not be repeated."""

    def run() -> list[tuple[int, int]]:
        seen = []

        def job(mesh: SimulatedMesh) -> None:
            for turn in range(3):
                seen.append((mesh.get_rank(), turn))
                fshard.all_reduce(torch.ones(1), mesh, "shard")

        simulate(job, shard=3)
        return seen

    first = run()
    assert [rank for rank, _ in first[:3]] == [0, 1, 2]
    assert all(run() == first for _ in range(10))


def draw(mesh: Any) -> list[torch.Tensor]:
    """Random numbers before and after a collective."""
    first = torch.rand(3)
    fshard.all_reduce(first, mesh, "shard")
    return [first, torch.rand(3), torch.randn(2)]


def test_random_numbers_differ_by_rank_and_follow_from_the_seed() -> None:
    """Ranks draw different numbers, which follow from the seed: otherwise a simulated run could not be repeated."""
    torch.manual_seed(5)
    first, again = simulate(draw, shard=3), simulate(draw, shard=3)
    torch.manual_seed(6)
    other = simulate(draw, shard=3)
    flat = [x.tolist() for rank in first for x in rank]
    assert flat == [x.tolist() for rank in again for x in rank]
    assert len({tuple(x) for x in flat}) == len(flat)
    assert all(a != x.tolist() for a, x in zip(flat, [x for rank in other for x in rank], strict=True))

    def alone(mesh: Any) -> list[list[float]]:
        return [torch.rand(3).tolist(), torch.rand(3).tolist(), torch.randn(2).tolist()]

    torch.manual_seed(5)
    assert simulate(alone, shard=3) == [[x.tolist() for x in rank] for rank in first]


def test_a_rank_may_set_its_own_seed() -> None:
    """A seed set on one rank stays on that rank: otherwise simulated ranks would behave unlike processes."""

    def job(mesh: Any) -> list[float]:
        if mesh.get_rank() == 1:
            torch.manual_seed(77)
        fshard.all_reduce(torch.ones(1), mesh, "shard")
        return torch.rand(2).tolist()

    torch.manual_seed(5)
    with_seed = simulate(job, shard=3)
    torch.manual_seed(77)
    assert with_seed[1] == torch.rand(2).tolist()
    assert len({tuple(x) for x in with_seed}) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_state_is_untouched(fails: bool) -> None:
    """A simulation leaves the caller's generator, threads and autograd settings as they were: otherwise tests would
    affect each other."""

    def state() -> Any:
        autograd = (
            torch.autograd.is_multithreading_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        return torch.get_num_threads(), threading.active_count(), autograd

    def job(mesh: Any) -> None:
        torch.rand(10)
        torch.manual_seed(3)
        torch.set_grad_enabled(False)
        fshard.all_reduce(torch.ones(1), mesh, "shard")
        if fails and mesh.get_rank() == 1:
            raise KeyError("stop")

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    before = state()
    try:
        if fails:
            with pytest.raises(KeyError):
                simulate(job, shard=3)
        else:
            simulate(job, shard=3)
        assert torch.equal(torch.rand(3), expected)
        assert state() == before
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("callers", [1, 2, 4])
def test_bits_do_not_depend_on_the_callers_threads(callers: int) -> None:
    """A world and the reference run with as many threads as they are told: otherwise a test would pass on a machine of
    one core, and fail on others, where operators add in another order."""
    w, rows = rand(3, 513, seed=0).float(), rand(28, 3, seed=1).float()

    def loss(w: torch.Tensor, x: torch.Tensor) -> fshard.Mean:
        return fshard.Mean((x @ w).square().sum(), len(x))

    def run(mesh: Any) -> Any:
        state = fshard.init_state(fshard.shard_params(w, fshard.make_plan(w, mesh)), fshard.optim.sgd(0.1))
        state, metrics = fshard.train_step(loss, fshard.optim.sgd(0.1))(state, rows.chunk(2)[mesh.get_rank()])
        return torch.get_num_threads(), (fshard.gather_params(state.params), metrics["loss"])

    def both(threads: int) -> list[Any]:
        plain = oracle(loss, fshard.optim.sgd(0.1), threads=threads)
        after, metrics = plain.step(plain.init(w), [*rows.chunk(2)])
        found = simulate(run, shard=2, threads=threads)
        assert [number for number, _ in found] == [threads] * 2
        return [(after.params, metrics["loss"]), *(result for _, result in found)]

    expected = {threads: both(threads) for threads in (1, 2)}
    torch.set_num_threads(callers)
    try:
        for threads, results in expected.items():
            assert all(same_bits(result, results[0]) for result in [*results, *both(threads)])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("when", ["first", "between", "last"])
def test_an_exception_is_raised_with_a_note_of_its_rank(rank: int, when: str) -> None:
    """An error of a rank is raised with its traceback and rank, and ends all ranks: otherwise a user would not find
    the cause."""
    went_on = []

    def job(mesh: SimulatedMesh) -> None:
        for place in ("first", "between", "last"):
            if mesh.get_rank() == rank and place == when:
                raise ZeroDivisionError("here")
            if place != "last":
                fshard.all_reduce(torch.ones(1), mesh, "shard")
        fshard.all_reduce(torch.ones(1), mesh, "shard")
        went_on.append(mesh.get_rank())

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="here") as caught:
        simulate(job, shard=3)
    assert caught.value.__notes__ == [f"(raised in simulated rank {rank} of 3)"]
    assert "job" in [entry.name for entry in caught.traceback]
    assert went_on == []
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, fshard.MismatchError])
def test_other_exceptions_come_through_too(kind: type[BaseException]) -> None:
    """KeyboardInterrupt, SystemExit and MismatchError of one rank end the simulation: otherwise other ranks would
    wait forever."""

    def job(mesh: SimulatedMesh) -> None:
        if mesh.get_rank() == 1:
            raise kind("stop")
        fshard.all_reduce(torch.ones(1), mesh, "shard")

    with pytest.raises(kind, match="stop"):
        simulate(job, shard=2)


def test_a_run_after_one_that_failed() -> None:
    """A simulation after a failed one is right: otherwise one failing test would break those that follow."""

    def bad(mesh: SimulatedMesh) -> None:
        if mesh.get_rank() == 1:
            fshard.all_gather(torch.ones(1), mesh, "shard")

    for _ in range(3):
        with pytest.raises(fshard.MismatchError):
            simulate(bad, shard=3)
        assert simulate(lambda mesh: fshard.all_reduce(torch.ones(1), mesh, "shard").item(), shard=3) == [3.0] * 3


def forward_derivative(mesh: SimulatedMesh) -> float:
    """jvp of grad and jvp of jvp through collectives, so that ranks meet inside each other's levels."""
    x = torch.tensor(float(mesh.get_rank() + 1), dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (mesh.get_rank() + 1) * fshard.all_reduce(x.sin(), mesh, "shard") ** 2

    inner = torch.func.jvp(torch.func.grad(f), (x,), (torch.ones_like(x),))[1]
    outer = torch.func.jvp(lambda x: torch.func.jvp(f, (x,), (x,))[1], (x,), (torch.ones_like(x),))[1]
    return float(inner + outer)


def test_forward_derivatives_are_right_every_time() -> None:
    """Forward-mode derivatives are right on each rank: otherwise torch's shared levels would mix tangents of several
    ranks."""
    x = torch.arange(1, 5, dtype=torch.float64)
    total = lambda x: 10 * x.sin().sum() ** 2  # noqa: E731
    inner = torch.func.jvp(torch.func.grad(total), (x,), (torch.ones_like(x),))[1]
    f = lambda x: torch.arange(1, 5) * x.sin().sum() ** 2  # noqa: E731
    outer = torch.func.jvp(lambda x: torch.func.jvp(f, (x,), (x,))[1], (x,), (torch.ones_like(x),))[1]
    for _ in range(20):
        assert torch.allclose(torch.tensor(simulate(forward_derivative, shard=4), dtype=torch.float64), inner + outer)


def test_simulations_inside_a_transform_and_one_after_another() -> None:
    """A simulation inside a transform leaves the caller's derivative right: otherwise the ranks' levels would enter
    it."""

    def outer(x: torch.Tensor) -> torch.Tensor:
        simulate(forward_derivative, shard=2)
        return x.sin()

    x = torch.tensor(0.5)
    assert torch.func.grad(outer)(x) == x.cos()
    assert torch.func.jvp(outer, (x,), (torch.ones(()),))[1] == x.cos()


def test_axes_nest() -> None:
    """Sums over one axis, the other and both are right on a 2 x 2 mesh: otherwise hybrid sharding would add up the
    wrong ranks."""

    def job(mesh: SimulatedMesh) -> list[float]:
        x = torch.tensor(10.0 ** mesh.get_rank())
        over = {axis: fshard.all_reduce(x, mesh, axis) for axis in ("replicate", "shard")}
        both = fshard.all_reduce(over["shard"], mesh, "replicate")
        return [over["replicate"].item(), over["shard"].item(), both.item()]

    assert simulate(job, shard=2, replicate=2) == [
        [101.0, 11.0, 1111.0],
        [1010.0, 11.0, 1111.0],
        [101.0, 1100.0, 1111.0],
        [1010.0, 1100.0, 1111.0],
    ]


def test_many_ranks() -> None:
    """64 ranks, and 8 x 8, can be simulated: otherwise large meshes could not be tested without a cluster."""

    def job(mesh: SimulatedMesh) -> tuple[int, float]:
        gathered = fshard.all_gather(torch.tensor([mesh.get_rank()]), mesh, "shard")
        grad = torch.func.grad(lambda x: fshard.all_reduce(x, mesh, "shard") * mesh.get_rank())(torch.tensor(1.0))
        return int(gathered.sum()), grad.item()

    assert simulate(job, shard=64) == [(64 * 63 // 2, 64 * 63 / 2)] * 64
    assert len(simulate(lambda mesh: mesh.get_coordinate(), shard=8, replicate=8)) == 64


def mesh_facts(mesh: Any) -> list[Any]:
    """All that fshard and users ask of a mesh."""
    facts: list[Any] = [mesh.get_rank(), list(mesh.get_coordinate()), tuple(mesh.shape), mesh.ndim, mesh.size()]
    facts += [mesh.mesh_dim_names, mesh.device_type]
    for number, axis in enumerate(mesh.mesh_dim_names):
        facts += [mesh.size(number), mesh.get_local_rank(axis), mesh.get_local_rank(number)]
    return facts


def parts_of(mesh: Any) -> list[Any]:
    """What the meshes of some axes answer, and gradients over each of them."""
    found, whole = mesh_facts(mesh), {"w": torch.arange(5.0)}
    for names in ("shard", "replicate", ("replicate", "shard")):
        part, axis = mesh[names], "replicate" if names == "replicate" else "shard"
        plan = fshard.make_plan(whole, part, params_over=axis, grads_over=axis, state_over=axis)
        shards = fshard.shard_params(whole, plan)
        value, grads = fshard.value_and_grad(lambda p, x: (p["w"] * x).sum())(shards, 3.0 ** mesh.get_rank())
        found.append(
            [mesh_facts(part), shards.tensors[0].tolist(), value.item(), fshard.gather_params(grads)["w"].tolist()]
        )
    return found


def test_a_simulated_mesh_reads_like_a_device_mesh() -> None:
    """A simulated mesh, and `mesh["shard"]` of it, would not run code that is written for a DeviceMesh."""
    assert simulated(parts_of, shard=2, replicate=2) == gloo(parts_of, shard=2, replicate=2)
    for names in ("model", ("shard", "replicate"), ()):
        with pytest.raises(ValueError, match=r"mesh\[.*expected names of axes of \('replicate', 'shard'\), in this"):
            simulate(lambda mesh, names=names: mesh[names], shard=2)


def test_sizes_by_name() -> None:
    """Sizes and ranks are read by axis name, and a wrong name is an error with the axes: otherwise a typo would give
    a wrong rank."""

    def job(mesh: SimulatedMesh) -> list[int]:
        with pytest.raises(ValueError, match="no axis 'model': it has 'replicate', 'shard'"):
            mesh.get_local_rank("model")
        with pytest.raises(ValueError, match="name one of the axes"):
            mesh.get_local_rank()
        return [
            mesh.size("replicate"),
            mesh.size("shard"),
            mesh.get_local_rank("replicate"),
            mesh.get_local_rank("shard"),
        ]

    assert simulate(job, shard=3, replicate=2) == [[2, 3, rank // 3, rank % 3] for rank in range(6)]


@pytest.mark.parametrize(
    "sizes",
    [{"shard": 2, "tensor": 3}, {"tensor": 3, "shard": 2}, {"stage": 1, "replicate": 2, "expert": 2}, {"device_2": 2}],
)
def test_axes_of_any_names(sizes: dict[str, int]) -> None:
    """Axes of other names, in any order, are those of the world, the first slowest: otherwise a rank's neighbours along
    an axis would be others than on the real mesh."""
    expected = World(axes=sizes).run(mesh_facts)
    assert simulate(mesh_facts, **sizes) == expected
    assert simulate(mesh_facts, **sizes, late=True, threads=2, device="cpu") == expected
    assert [facts[5] for facts in expected] == [tuple(sizes)] * len(expected)


@pytest.mark.parametrize("sizes", [{"shard": 0}, {"shard": -1}, {"replicate": 0}])
def test_a_world_has_ranks(sizes: dict[str, int]) -> None:
    """A world of no ranks is an error; without it a test would run nothing and pass."""
    with pytest.raises(ValueError, match="at least 1"):
        simulate(mesh_facts, **sizes)


@pytest.mark.parametrize("num", [2, 3])
def test_a_rank_that_meets_in_the_name_of_another(num: int) -> None:
    """What ranks share, as a cache does, is an error on the rank that takes it: otherwise the world would hang."""
    shared = list[SimulatedMesh]()

    def job(mesh: SimulatedMesh) -> None:
        shared.append(mesh)
        fshard.all_gather(torch.ones(2), mesh, "shard")
        fshard.all_gather(torch.ones(2), shared[0], "shard")

    words = "simulated rank [12] communicates over the mesh of simulated rank 0: a rank's own thread alone"
    with pytest.raises(RuntimeError, match=words):
        simulate(job, shard=num)


def test_a_world_that_has_ended() -> None:
    """What uses a world's mesh after its end is an error that says so, each time: a notebook's cells go on with it."""
    whole = {"w": torch.arange(5.0)}
    shards = simulate(lambda mesh: fshard.shard_params(whole, fshard.make_plan(whole, mesh)), shard=2)
    for _ in range(2):
        for use in (lambda: fshard.gather_params(shards[0]), lambda: fshard.gather_params(shards[1])):
            with pytest.raises(RuntimeError, match=r"all_gather\(.*the simulated world has ended.*World.gather"):
                use()
    with pytest.raises(RuntimeError, match="the simulated world has ended"):
        simulate(lambda mesh: fshard.gather_params(shards[0]), shard=2)


@pytest.mark.parametrize("strategy", [*STRATEGIES])
@pytest.mark.parametrize("late", [False, True])
def test_what_ranks_return_is_joined(strategy: str, late: bool) -> None:
    """`World.gather` gives what `gather_params` gives inside: otherwise what ranks return could not be read."""
    tx = fshard.optim.sgd(0.1, momentum=0.9)

    def job(mesh: SimulatedMesh) -> Any:
        plan = fshard.make_plan(lm_params(), mesh, units=LM_UNITS, **STRATEGIES[strategy])
        state = fshard.init_state(fshard.shard_params(lm_params(), plan), tx)
        state, metrics = fshard.train_step(mean_loss, tx)(state, lm_batch(0, mesh.get_rank()))
        return (state, metrics), fshard.gather_params((state, metrics))

    world = World(shard=2, replicate=1 if strategy in NARROW else 2, late=late)
    results, wholes = zip(*world.run(job), strict=True)
    for _ in range(2):
        assert same_bits(world.gather(results), wholes[0])


def test_what_cannot_be_joined() -> None:
    """Other results than those of all ranks of such a world are an error: a part would be taken for the whole."""
    world, whole = World(shard=2), {"w": torch.arange(5.0)}
    shards = [world.run(lambda mesh: fshard.shard_params(whole, fshard.make_plan(whole, mesh))) for _ in range(2)]
    with pytest.raises(ValueError, match=r"World.gather: results=.*: expected a list of what 2 ranks returned"):
        world.gather(shards[0][:1])
    for results in ([1, 2], [fshard.shard_params(whole, fshard.make_plan(whole))] * 2):
        with pytest.raises(TypeError, match=r"World.gather: results: expected a Sharded of ranks over axes.*nothing"):
            world.gather(results)
    with pytest.raises(TypeError, match=r"got over axes \{'replicate': 1, 'shard': 2\}"):
        World(axes={"data": 2}).gather(shards[0])
    with pytest.raises(RuntimeError, match=r"the world still runs: call fshard.gather_params in it"):
        world.run(lambda mesh: world.gather([fshard.shard_params(whole, fshard.make_plan(whole, mesh))] * 2))


RETURNED: dict[str, Callable[[fshard.Sharded], Any]] = {
    "parameters": lambda params: params,
    "state": lambda params: fshard.init_state(params, fshard.optim.sgd(0.1, momentum=0.9)).opt_state,
    "gradients": lambda params: [1, {"grads": fshard.value_and_grad(lambda p: p["w"].sum())(params)[1]}],
    "labels": lambda params: fshard.optim.by_label({"a": fshard.optim.adamw(0.1)}, {"**": "a"}).init(params),
}


@pytest.mark.parametrize("form", RETURNED)
@pytest.mark.parametrize("order", ["of another run", "reversed", "one twice"])
def test_results_of_several_runs_are_not_joined(form: str, order: str) -> None:
    """Results that are not of one run, in rank order, are an error that says so: it named `World.gather` itself."""
    world, whole = World(shard=2), {"w": torch.arange(5.0)}

    def job(mesh: SimulatedMesh) -> Any:
        return RETURNED[form](fshard.shard_params(whole, fshard.make_plan(whole, mesh)))

    (first, second), (_, other) = world.run(job), world.run(job)
    got = {"of another run": [first, other], "reversed": [second, first], "one twice": [first, first]}[order]
    with pytest.raises(ValueError, match=r"World.gather: results\[.\]: expected what rank . returned.* in its order"):
        world.gather(got)


def test_unreduced_gradients_are_not_joined() -> None:
    """Gradients of each rank alone are an error: rank 0's would be taken for the sum."""
    world, whole = World(shard=2), {"w": torch.arange(5.0)}

    def job(mesh: SimulatedMesh) -> Any:
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh))
        return params, fshard.value_and_grad(lambda p: p["w"].sum(), reduce=False)(params)

    with pytest.raises(TypeError, match=r"World.gather: results\[0\]: expected reduced gradients.*reduce_grads"):
        world.gather(world.run(job))


def test_a_tally_around_a_simulation_has_all_ranks() -> None:
    """A tally inside a rank counts that rank's collectives, one around the simulation all: otherwise traffic would
    be miscounted."""

    def job(mesh: SimulatedMesh) -> int:
        fshard.all_gather(torch.ones(2), mesh, "shard")
        with fshard.collectives.tally() as mine:
            fshard.all_reduce(torch.ones(2), mesh, "shard")
        fshard.all_gather(torch.ones(2), mesh, "shard")
        return len(mine)

    with fshard.collectives.tally() as records:
        assert simulate(job, shard=3) == [1] * 3
    assert [r.kind for r in records] == ["all_gather"] * 6
    assert records.nbytes("all_gather") == 6 * 2 * 8


def test_modes_of_torch_are_each_ranks_own() -> None:
    """`no_grad` on one rank stays on that rank: otherwise other ranks would lose their gradients."""

    def job(mesh: SimulatedMesh) -> bool:
        with torch.set_grad_enabled(mesh.get_rank() == 0):
            fshard.all_reduce(torch.ones(1), mesh, "shard")
            return torch.is_grad_enabled()

    assert simulate(job, shard=3) == [True, False, False]
    assert torch.is_grad_enabled()


def test_backward_runs_on_the_ranks_own_thread() -> None:
    """Each rank's backward runs on its own thread: otherwise ranks would wait for each other in autograd's single
    thread."""

    class Where(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            found.append(threading.get_ident())
            return grad

    found: list[int] = []

    def job(mesh: SimulatedMesh) -> int:
        assert not torch.autograd.is_multithreading_enabled()  # on CUDA it is this that decides
        x = torch.ones(1, requires_grad=True)
        fshard.all_reduce(Where.apply(x), mesh, "shard").sum().backward()
        return threading.get_ident()

    assert sorted(simulate(job, shard=3)) == sorted(found)


@dataclass
class OwnMesh:
    """A user's mesh after the protocol. A dataclass that is not frozen has an `==` and no hash."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def own_state(mesh: Any) -> tuple[Any, Any]:
    """A state and its parameters on this mesh."""
    params = {"w": rand(5, seed=1), "b": rand(3, seed=2)}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["w"]))
    return fshard.init_state(sharded, fshard.optim.adamw(0.1), fshard.DynamicLossScale(4.0)), params


def own_loss(p: Any, x: Any) -> Any:
    """A loss of both units."""
    return (p["w"].square().sum() + p["b"].sum()) * x.mean()


def own_step(mesh: Any, jit: bool) -> Any:
    """One step with clipping and a loss scale, and the norms of its parameters."""
    state, _ = own_state(mesh)
    step = fshard.train_step(own_loss, fshard.optim.adamw(0.1), clip_norm=1.0)
    new, metrics = (fshard.jit(step, backend="eager") if jit else step)(state, torch.ones(2))
    exact = fshard.optim.global_norm((new.params, torch.ones(2)), exact=True)
    return fshard.gather_params(new.params), metrics, exact


def own_zero(mesh: Any, partition: str) -> Any:
    """A step of ZeRO, and its state whole."""
    _, params = own_state(mesh)
    tx = fshard.zero(fshard.optim.lamb(0.1), mesh, partition, "local")
    new, state = tx.step(params, tx.init(params), params)
    return new, fshard.optim.state.gather_state(state)


def own_lbfgs(mesh: Any) -> Any:
    """Two steps of L-BFGS, which take dot products of several trees."""
    params, tx = own_state(mesh)[0].params, fshard.optim.lbfgs(0.1)
    state = tx.init(params)
    for _ in range(2):
        params, state = tx.step(fshard.value_and_grad(own_loss)(params, torch.ones(2))[1], state, params)
    return fshard.gather_params(params)


OWN: dict[str, Callable[[Any], Any]] = {
    "step": lambda mesh: own_step(mesh, False),
    "jit": lambda mesh: own_step(mesh, True),
    "zero flat": lambda mesh: own_zero(mesh, "flat"),
    "zero leaf": lambda mesh: own_zero(mesh, "leaf"),
    "lbfgs": own_lbfgs,
    "check": lambda mesh: fshard.check(own_step, mesh)(mesh, False),
    "hvp": lambda mesh: fshard.gather_params(
        fshard.hvp(own_loss)(own_state(mesh)[0].params, own_state(mesh)[0].params, torch.ones(2))
    ),
    "argument": lambda mesh: fshard.jit(lambda x, m: fshard.all_gather(x, m, "shard"), backend="eager")(
        rand(2, seed=1), mesh
    ),
    "state": lambda mesh: fshard.optim.state.gather_state(own_state(mesh)[0].opt_state, 1),
}


@pytest.mark.parametrize("name", OWN)
def test_a_mesh_class_needs_no_hash(name):
    """A user's mesh is told from others by identity alone: otherwise a plain dataclass would fail in the first step."""
    with pytest.raises(TypeError, match="unhashable"):
        hash(OwnMesh(None))
    want = simulate(OWN[name], shard=2)
    assert same_bits(simulate(lambda mesh: OWN[name](OwnMesh(mesh)), shard=2), want)
