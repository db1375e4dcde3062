"""Random split programs: loss, gradients, norm, a clipped step and Hessian products are those of the plain program.

A program is a list of instructions. Each takes a value that is equal on the ranks of axis "tensor", cut along a dim, or
a summand on each, and gives another one. On an axis of one rank the same program is the plain model, its oracle.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard
from fshard import optim
from fshard.testing import World

ROWS, WIDTH, WORDS, EXPERTS = 48, 12, 7, 4
EQUAL, ROWS_CUT, WIDTH_CUT, SUMMAND = "equal", "rows cut", "width cut", "summand"


@dataclass(frozen=True)
class Axis:
    """Axis "tensor" as one of its ranks sees it; without a mesh an axis of one rank."""

    mesh: Any = None

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size("tensor")

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank("tensor")

    def add(self, x: Tensor) -> Tensor:
        return fshard.all_reduce(x, self.mesh, "tensor")

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return fshard.all_gather(x, self.mesh, "tensor", dim=dim)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        return fshard.reduce_scatter(x, self.mesh, "tensor", dim=dim)

    def exchange(self, x: Tensor, split: int, join: int) -> Tensor:
        return fshard.all_to_all(x, self.mesh, "tensor", split=split, join=join)

    def part(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.rank]


def _words(p: Any, x: Tensor, at: Axis, tokens: Tensor) -> Tensor:
    """Look words up in the rows of a table that this rank has; zeros for others."""
    first = at.rank * -(-WORDS // at.size)
    mine = tokens - first
    known = (mine >= 0) & (mine < len(p["table"]))
    rows = torch.cat([p["table"], p["table"].new_zeros(1, WIDTH)])
    return (at.rank == 0) * x + rows[torch.where(known, mine, len(p["table"]))]


def _gated(p: Any, x: Tensor, at: Axis, _: Tensor) -> Tensor:
    gate, up = (x @ p["gu"]).chunk(2, -1)
    return at.add((gate.sigmoid() * up) @ p["down"])


def _mlp(p: Any, x: Tensor, at: Axis, _: Tensor) -> Tensor:
    return torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def _routed(p: Any, x: Tensor, at: Axis, tokens: Tensor) -> Tensor:
    """Send each row to the rank that has its expert, which may get none, and what the expert makes of it back."""
    expert = at.part(tokens, 0) % EXPERTS
    most = -(-EXPERTS // at.size)
    order = (expert // most).argsort(stable=True)
    counts = (expert // most).bincount(minlength=at.size)
    sent, received = counts.tolist(), fshard.all_to_all(counts, at.mesh, "tensor").tolist()
    rows, numbers = (fshard.all_to_all(y[order], at.mesh, "tensor", sizes=(sent, received)) for y in (x, expert))
    made = torch.tanh(rows[:, None] @ p["e"][numbers % most])[:, 0]
    return torch.zeros_like(x).index_copy(0, order, fshard.all_to_all(made, at.mesh, "tensor", sizes=(received, sent)))


Leaves = dict[str, tuple[tuple[int, ...], tuple[Any, ...] | None]]  # by name: shape, and how it is split


def odd(draw: random.Random) -> int:
    return draw.choice([3, 5, 8, 12])


# by name: state before, state after, leaves, what is computed
INSTRUCTIONS: dict[str, tuple[str, str, Callable[[int], Leaves], Callable[..., Tensor]]] = {
    "words": (
        EQUAL,
        SUMMAND,
        lambda n: {"table": ((WORDS, WIDTH), ("tensor", 0))},
        _words,
    ),
    "mlp": (
        EQUAL,
        SUMMAND,
        lambda n: {
            "up": ((WIDTH, n), ("tensor", 1)),
            "bias": ((n,), ("tensor", 0)),
            "down": ((n, WIDTH), ("tensor", 0)),
        },
        _mlp,
    ),
    "gated": (
        EQUAL,
        EQUAL,
        lambda n: {"gu": ((WIDTH, 2 * n), ("tensor", 1, 2)), "down": ((n, WIDTH), ("tensor", 0))},
        _gated,
    ),
    "columns": (
        EQUAL,
        WIDTH_CUT,
        lambda n: {"w": ((WIDTH, WIDTH), ("tensor", -1))},
        lambda p, x, at, _: torch.tanh(x @ p["w"]),
    ),
    "heads": (
        EQUAL,
        WIDTH_CUT,
        lambda n: {"q": ((WIDTH, 3, WIDTH), ("tensor", 2))},
        lambda p, x, at, _: torch.einsum("bd,dkh->bkh", x, p["q"]).prod(1),
    ),
    "rows": (
        WIDTH_CUT,
        SUMMAND,
        lambda n: {"w": ((WIDTH, WIDTH), ("tensor", 0))},
        lambda p, x, at, _: x @ p["w"],
    ),
    "a whole matrix": (
        EQUAL,
        EQUAL,
        lambda n: {"w": ((WIDTH, WIDTH), None)},
        lambda p, x, at, _: torch.tanh(x @ p["w"]),
    ),
    "a whole matrix on some rows": (
        ROWS_CUT,
        ROWS_CUT,
        lambda n: {"w": ((WIDTH, WIDTH), None)},
        lambda p, x, at, _: torch.tanh(x @ p["w"]) + x,
    ),
    "a part of a whole scale": (
        WIDTH_CUT,
        WIDTH_CUT,
        lambda n: {"s": ((WIDTH,), None)},
        lambda p, x, at, _: x * at.part(p["s"], 0),
    ),
    "a split scale": (
        WIDTH_CUT,
        WIDTH_CUT,
        lambda n: {"s": ((WIDTH,), ("tensor", 0))},
        lambda p, x, at, _: x * p["s"] + x.sin(),
    ),
    "experts": (
        EQUAL,
        SUMMAND,
        lambda n: {"e": ((n, WIDTH, WIDTH), ("tensor", 0))},
        lambda p, x, at, _: sum((torch.tanh(x @ e) for e in p["e"]), x.new_zeros(x.shape)),
    ),
    "a half of a sum": (SUMMAND, SUMMAND, lambda n: {}, lambda p, x, at, _: 0.5 * x),
    "add": (SUMMAND, EQUAL, lambda n: {}, lambda p, x, at, _: at.add(x)),
    "scatter rows": (SUMMAND, ROWS_CUT, lambda n: {}, lambda p, x, at, _: at.scatter(x, 0)),
    "scatter width": (SUMMAND, WIDTH_CUT, lambda n: {}, lambda p, x, at, _: at.scatter(x, 1)),
    "gather rows": (ROWS_CUT, EQUAL, lambda n: {}, lambda p, x, at, _: at.gather(x, 0)),
    "gather width": (WIDTH_CUT, EQUAL, lambda n: {}, lambda p, x, at, _: at.gather(x, 1)),
    "cut rows": (EQUAL, ROWS_CUT, lambda n: {}, lambda p, x, at, _: at.part(x, 0)),
    "cut width": (EQUAL, WIDTH_CUT, lambda n: {}, lambda p, x, at, _: at.part(x, 1)),
    "exchange": (ROWS_CUT, WIDTH_CUT, lambda n: {}, lambda p, x, at, _: at.exchange(x, 1, 0)),
    "exchange back": (WIDTH_CUT, ROWS_CUT, lambda n: {}, lambda p, x, at, _: at.exchange(x, 0, -1)),
    "the column before": (
        WIDTH_CUT,
        WIDTH_CUT,
        lambda n: {},
        lambda p, x, at, _: x * torch.cat([fshard.shift(x[:, -1:], at.mesh, "tensor"), x[:, :-1]], 1).cos(),
    ),
    "routed": (ROWS_CUT, ROWS_CUT, lambda n: {"e": ((EXPERTS, WIDTH, WIDTH), ("tensor", 0))}, _routed),
}


@dataclass(frozen=True)
class Scaled:
    """An exact wire with a factor for each leaf: what is decoded with the sizes of other leaves is wrong."""

    def encode(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat([part * 2.0**i for i, part in enumerate(x.split(list(sizes)))])

    def decode(self, data: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat([part / 2.0**i for i, part in enumerate(data.split(list(sizes)))])


BOTH = dict.fromkeys(("params_over", "grads_over", "state_over"), ("shard", "tensor"))
EACH = {"data": "shard"}
PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "zero 2": {"params_over": ()},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "over both": BOTH | EACH,
    "over tensor": dict.fromkeys(BOTH, "tensor") | EACH,
    "state over both": {"state_over": ("shard", "tensor")} | EACH,
    "copies that stay": BOTH | EACH | {"regather": "tensor"},
    "together": BOTH | EACH | {"together": True},
    "whole": {"whole": "some"},
    "frozen": {"frozen": "some"},
    "joined": {"bucket": 1 << 20},
    "offload": {"offload": "layers.*"},
    "wires": {"param_wire": Scaled(), "grad_wire": Scaled()},
}
# by name: arguments of `train_step`, which a plan takes in turn with the seeds
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in backward": {"donate": True, "in_backward": True},
    "accumulate": {"accumulate": 4},
    "once": {"accumulate": 2, "reduce_once": True},
    "kept": {"accumulate": 2, "keep_gathered": True, "donate": True},
    "tree": {"reduction": "tree"},
    "fast": {"reduction": "fast"},
    "scaled": {},
    "jit": {},
}
MESHES = ({"shard": 1, "tensor": 2}, {"shard": 2, "tensor": 2}, {"shard": 2, "tensor": 3}, {"tensor": 3, "shard": 1})


@dataclass(frozen=True)
class Program:
    """Instructions with their leaves; some leaves are tied to those of an earlier instruction of the same name."""

    names: tuple[str, ...]
    params: Any
    split: dict[str, tuple[Any, ...]]

    @classmethod
    def drawn(cls, seed: int) -> "Program":
        draw, state, names = random.Random(seed), EQUAL, list[str]()
        while len(names) < 4 or state == SUMMAND:
            name = draw.choice([name for name, (before, *_) in INSTRUCTIONS.items() if before == state])
            names.append(name)
            state = INSTRUCTIONS[name][1]
        generator, layers, split = torch.Generator().manual_seed(seed), list[Any](), dict[str, tuple[Any, ...]]()
        tied = draw.random() < 0.3
        for i, name in enumerate(names):
            if tied and name in names[:i]:
                layers.append(layers[names.index(name)])
                continue
            leaves = INSTRUCTIONS[name][2](odd(draw))
            if leaves and draw.random() < 0.3:  # which no instruction reads
                leaves = {"a spare": ((WIDTH, odd(draw)), ("tensor", 1))} | leaves
            layers.append(
                {
                    key: torch.randn(*shape, generator=generator, dtype=torch.float64) / 3
                    for key, (shape, _) in leaves.items()
                }
            )
            split |= {f"layers.{i}.{key}": how for key, (_, how) in leaves.items() if how}
        embed = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64)
        return cls(tuple(names), {"embed": embed, "layers": layers}, split)

    def plan(self, name: str) -> dict[str, Any]:
        """A plan's arguments, with the paths of some leaves for "some"."""
        some = list(fshard.tree.paths(self.params))[1::2]
        return {key: some if x == "some" else x for key, x in PLANS[name].items() if x != "some" or some}

    def loss(self, at: Axis) -> Callable[[Any, Tensor], fshard.Mean]:
        def fn(p: Any, tokens: Tensor) -> fshard.Mean:
            x = p["embed"][tokens]
            for name, leaves in zip(self.names, p["layers"], strict=True):
                x = INSTRUCTIONS[name][3](leaves, x, at, tokens)
            return fshard.Mean((x.cos() + x).sum(), x.numel())

        return fn


def results(mesh: Any, program: Program, plan: dict[str, Any], ranks: int, way: str) -> Any:
    """What one rank gets of a program: loss, whole gradients, a Hessian product, and two clipped steps."""
    generator, batches = torch.Generator().manual_seed(3), []
    for _ in range(2):
        rows = torch.randint(0, WORDS, (ranks * ROWS,), generator=generator)
        batches.append(rows if ranks == 1 or mesh is None else rows.chunk(ranks)[mesh.get_local_rank("shard")])
    more = {key: x for key, x in plan.items() if key == "frozen"} if mesh is None else plan | {"split": program.split}
    made = fshard.make_plan(program.params, mesh, units=["layers.*"], **more)
    params, loss = fshard.shard_params(program.params, made), program.loss(Axis(mesh))
    value, grads = fshard.value_and_grad(loss)(params, batches[0])
    product = grads if "param_wire" in plan else fshard.hvp(loss)(params, grads, batches[0])
    tx, metrics = optim.adamw(1e-2), []
    state = fshard.init_state(params, tx, fshard.StaticLossScale(64.0) if way == "scaled" else None)
    step = fshard.train_step(loss, tx, clip_norm=0.1, **({} if mesh is None else WAYS[way]))
    step = fshard.jit(step, backend="eager") if way == "jit" and mesh is not None else step
    for batch in batches:
        state, made_of_it = step(state, batch)
        metrics.append((made_of_it["loss"], made_of_it["grad_norm"]))
    trees = [fshard.gather_params(x) for x in (grads, product, state.params)]
    return [value, metrics, *[[y for y in fshard.tree.leaves(x) if y is not None] for x in trees]]


WAYS_OF = {  # a plan in host memory is updated after the backward
    (plan, i): [*WAYS][(i + 4 * n) % len(WAYS) * (plan != "offload")] for n, plan in enumerate(PLANS) for i in range(9)
}
CASES = [
    (seed, name, mesh) for seed in range(int(os.environ.get("FSHARD_SPLITS", "2"))) for name in PLANS for mesh in MESHES
]


@pytest.mark.law
@pytest.mark.parametrize(("seed", "plan", "sizes"), CASES)
def test_a_split_program_is_the_plain_one(seed: int, plan: str, sizes: dict[str, int]) -> None:
    """A sum over an axis of a leaf that is split there, or none of one that is whole, would train another model."""
    program = Program.drawn(seed * len(PLANS) + [*PLANS].index(plan))
    made = program.plan(plan)
    way = WAYS_OF[plan, seed % len(WAYS)]
    if way == "jit" and "routed" in program.names:  # a graph has sizes that depend on values not
        way = "plain"
    expected = results(None, program, made, sizes["shard"], way)
    for got in World(axes=sizes).run(results, program, made, sizes["shard"], way):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


NONE = dict.fromkeys(BOTH, ())


@pytest.mark.parametrize("plan", [NONE, dict.fromkeys(BOTH, "tensor") | {"data": ()}], ids=["whole", "over tensor"])
@pytest.mark.parametrize("seed", range(8))
def test_a_mesh_of_the_axis_alone(seed: int, plan: dict[str, Any]) -> None:
    """Without an axis that leaves are partitioned over, what is summed over the others would be summed over none."""
    program = Program.drawn(100 + seed)
    expected = results(None, program, plan, 1, "plain")
    for got in World(axes={"tensor": 3}).run(results, program, plan, 1, "plain"):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def derivatives(mesh: Any, program: Program, ranks: int, parts: bool) -> Any:
    """Gradient, and Hessian product, by torch.func, of the sum of all ranks' outputs: whole trees."""
    rows = torch.randint(0, WORDS, (ranks * ROWS,), generator=torch.Generator().manual_seed(3))
    rows = rows if mesh is None else rows.chunk(ranks)[mesh.get_local_rank("shard")]
    plan = fshard.make_plan(program.params, mesh, units=["layers.*"], split=program.split)
    params, loss = fshard.shard_params(program.params, plan), program.loss(Axis(mesh if parts else None))
    is_equal = not parts or INSTRUCTIONS[program.names[-1]][1] == EQUAL  # else each rank's total is a summand
    times = mesh.size("tensor") if mesh is not None and is_equal else 1

    def f(x: Any) -> Tensor:
        return loss(fshard.gather_params(x, parts=parts), rows).total / times

    grads, product = torch.func.jvp(torch.func.grad(f), (params,), (params,))
    return [fshard.gather_params(x) for x in (grads, product)]


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_torch_func_outside_of_a_step(seed: int, sizes: dict[str, int], parts: bool) -> None:
    """The sums that a step makes are those of `gather_params`, of parts as of whole leaves."""
    program = Program.drawn(200 + seed)
    expected = derivatives(None, program, sizes["shard"], True)
    for got in World(axes=sizes).run(derivatives, program, sizes["shard"], parts):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
