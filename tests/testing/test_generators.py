"""Random states of simulated ranks: python's, numpy's and torch's, one of each for every rank."""

import random
from typing import Any

import numpy as np
import pytest
import torch

import fshard
from fshard.testing import World

DRAWS = {
    "python": lambda n: [random.getrandbits(32) for _ in range(n)],
    "python gauss": lambda n: [random.gauss() for _ in range(n)],
    "numpy": lambda n: [int(np.random.randint(2**31)) for _ in range(n)],
    "numpy gauss": lambda n: np.random.randn(n).tolist(),
    "torch": lambda n: torch.rand(n).tolist(),
}
SEEDS = {"python": random.seed, "numpy": np.random.seed, "torch": torch.manual_seed}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_states_are_each_ranks_own(kind: str) -> None:
    """A collective between two draws would change what a simulated rank draws."""
    lengths = [0, 1, 3, 310, 311, 622, 1, 2]

    def job(mesh: Any, between: bool) -> list[float]:
        drawn = []
        for n in lengths:
            drawn += DRAWS[kind](n)
            if between:
                fshard.all_reduce(torch.ones(1), mesh, "shard")
        return drawn

    seed = SEEDS[kind.split()[0]]
    seed(5)
    apart, mixed = World(3).run(job, False), World(3).run(job, True)
    assert apart == mixed
    assert len({tuple(drawn) for drawn in apart}) == 3
    seed(6)
    assert all(a != b for a, b in zip(World(3).run(job, False), apart, strict=True))
    DRAWS[kind](1)
    seed(5)
    assert World(3).run(job, True) == apart


@pytest.mark.parametrize("fails", [False, True])
def test_random_states_are_put_back(fails: bool) -> None:
    """A simulation would leave the caller's generators in another state, above all after an error."""

    def job(mesh: Any) -> None:
        for kind, draw in DRAWS.items():
            draw(3)
            SEEDS[kind.split()[0]](mesh.get_rank())
        fshard.all_reduce(torch.ones(1), mesh, "shard")
        if fails:
            raise KeyError("stop")

    def drawn() -> list[Any]:
        return [draw(3) for draw in DRAWS.values()]

    runs = []
    for simulated in (False, True):
        for seed in SEEDS.values():
            seed(5)
        for draw in DRAWS.values():
            draw(1)
        if simulated and fails:
            with pytest.raises(KeyError):
                World(2).run(job)
        elif simulated:
            World(2).run(job)
        runs.append(drawn())
    assert runs[0] == runs[1]


def test_a_rank_that_puts_its_state_back() -> None:
    """A rank that restores its own generator would draw other numbers than the first time."""
    kept = {"python": (random.getstate, random.setstate), "numpy": (np.random.get_state, np.random.set_state)}

    def job(mesh: Any) -> list[bool]:
        same = []
        for kind, (get, put) in kept.items():
            state, first = get(), DRAWS[kind](2)
            for _ in range(2):
                fshard.all_reduce(torch.ones(1), mesh, "shard")
                put(state)
            fshard.all_reduce(torch.ones(1), mesh, "shard")
            same.append(DRAWS[kind](2) == first)
        return same

    assert World(2).run(job) == [[True, True]] * 2


def test_a_rank_that_seeds_python_and_numpy() -> None:
    """A seed set on one simulated rank would reach the others."""

    def job(mesh: Any) -> list[Any]:
        if mesh.get_rank() == 1:
            random.seed(77)
            np.random.seed(77)
        fshard.all_reduce(torch.ones(1), mesh, "shard")
        return [random.random(), np.random.rand()]

    found = World(3).run(job)
    random.seed(77)
    np.random.seed(77)
    assert found[1] == [random.random(), np.random.rand()]
    assert len({x for rank in found for x in rank}) == 6


@pytest.mark.cuda
def test_random_states_on_a_gpu() -> None:
    """On a GPU ranks would share one generator, or sums would differ."""

    def job(mesh: Any, between: bool) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += torch.rand(2, device="cuda").tolist()
            if between:
                assert fshard.all_reduce(torch.ones(1, device="cuda"), mesh, "shard").item() == 3
        return drawn

    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    apart = World(3, device="cuda").run(job, False)
    assert apart == World(3, device="cuda").run(job, True)
    assert len({x for drawn in apart for x in drawn}) == 18
    assert torch.equal(torch.cuda.get_rng_state(), before)
