"""Planted faults: a bit of one rank that turns in one run, in a copy, in a message or at rest is found and named."""

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from support.steps import GUARDED as PLANS
from support.steps import QUIET
from support.worlds import gloo
from torch import Tensor

import fshard
from fshard import MismatchError, Sharded, optim
from fshard.core import tree
from fshard.testing import Garbage, World

pytestmark = pytest.mark.filterwarnings(QUIET)

EVERY = 3  # step 2 runs twice
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donate": {"donate": True},
    "in backward": {"donate": True, "in_backward": True},
    "accumulate": {"accumulate": 2, "clip_norm": 0.1},
    "jit": {},
}
WORLDS = ({"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2})
KINDS = ("weight", "moment", "metric", "forward", "gradient", "message", "copy", "rest")


class Case(NamedTuple):
    """A fault: of which kind, where, and the number from which its place is drawn."""

    kind: str
    plan: str
    way: str
    axes: dict[str, int]
    rank: int
    run: int  # the first of the step or the second
    seed: int

    @property
    def num(self) -> int:
        """The number of ranks."""
        return torch.Size(self.axes.values()).numel()


def drawn(seed: int) -> Case:
    draw = Random(seed)
    kind, axes = KINDS[seed % len(KINDS)], draw.choice(WORLDS)
    ways = [
        way for way in WAYS if way != "jit" or kind not in ("forward", "gradient", "message")
    ]  # a graph counts none
    plans = [plan for plan in PLANS if kind != "copy" or plan != "full" or "replicate" in axes]
    rank = draw.randrange(torch.Size(axes.values()).numel())
    return Case(kind, draw.choice(plans), draw.choice(ways), axes, rank, draw.choice([0, 1]), seed)


def holders(case: Case, leaf: str) -> list[int]:
    """The ranks that hold the element of a leaf that the case's rank holds."""
    cut = {"full": True, "zero 2": leaf.startswith("opt_state"), "ddp": False, "some whole": not leaf.endswith(".b")}
    shard = case.axes["shard"] if cut[case.plan] else 1
    return [rank for rank in range(case.num) if rank % shard == case.rank % shard]


def whole() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"w": torch.randn(5, 9, generator=draw), "b": torch.randn(37, generator=draw), "c": torch.ones(10, 4)}


class Faulty:
    """A step, of which this rank is disturbed as the case says; what was disturbed is `told`."""

    def __init__(self, case: Case, mesh: Any, records: list[Any]):
        self.case, self.mesh, self.records, self.draw = case, mesh, records, Random(case.seed)
        self.number = self.runs = 0
        self.told = ""
        tx, options = optim.adamw(1e-2), WAYS[case.way]
        params = fshard.shard_params(whole(), fshard.make_plan(whole(), mesh, units=["w", "b"], **PLANS[case.plan]))
        self.state = fshard.init_state(params, tx)
        step: Any = fshard.train_step(self.loss, tx, **options)
        self.step = fshard.jit(step, backend="eager") if case.way == "jit" else step
        self.donate = bool(options.get("donate"))
        self.places: list[int] = []  # the numbers of the collectives of units in the run that is disturbed

    def here(self, kind: str) -> bool:
        """Whether it happens now and here."""
        return self.case.kind == kind and self.mesh.get_rank() == self.case.rank and self.now

    @property
    def now(self) -> bool:
        return self.number == EVERY - 1 and self.runs == self.case.run

    def loss(self, p: Any, x: Tensor) -> fshard.Mean:
        w = p["w"]
        if self.here("forward"):
            w = w + torch.zeros_like(w).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(1e-3))
        y = torch.nn.functional.dropout(torch.tanh(x @ w), 0.3)
        if self.here("gradient"):
            y.register_hook(lambda grad: grad + 1e-3)
        out = y.square().sum() + (p["b"].square().sum() + (p["c"] - 2).square().sum()) * len(x)
        return fshard.Mean(out, len(x))

    def turn(self, at: dict[str, Any], counted: bool = True) -> None:
        """Turn a bit of a leaf of which this rank has elements, and for a copy also another rank."""
        nodes = [(path, x) for path, x in tree.paths_to(at, Sharded) if isinstance(x, Sharded)]
        views = [(f"{path}.{name}", x) for path, node in nodes for name, x in node.local_views().items() if x.numel()]
        least = 2 if self.case.kind == "copy" else 1
        self.told, x = self.draw.choice([view for view in views if len(holders(self.case, view[0])) >= least])
        words = x.view(torch.int32) if counted else torch.from_numpy(x.numpy()).view(torch.int32)
        words[tuple(self.draw.randrange(n) for n in x.shape)] ^= 1 << self.draw.randrange(23)  # a bit of the fraction

    def __call__(self, state: Any, batch: Any) -> Any:
        begin = len(self.records)
        new, metrics = self.step(state, batch)
        if self.here("weight"):
            self.turn({"params": new.params})
        if self.here("moment"):
            self.turn({"opt_state": new.opt_state})
        if self.here("metric"):
            metrics[self.draw.choice(["loss", "grad_norm"])].add_(1e-3)
        if self.now:
            self.places = [
                at for at in range(begin, len(self.records)) if self.records[at].label not in ("loss", "norm")
            ]
        self.runs += 1
        return new, metrics

    def train(self) -> str:
        """Three guarded steps: the error, if any."""
        step = fshard.guard(self, EVERY, at_rest=self.case.kind == "rest")
        for self.number in range(EVERY):
            self.runs = 0
            kind = self.case.kind if self.number == EVERY - 1 and self.case.rank == self.mesh.get_rank() else ""
            if kind in ("copy", "rest"):
                at = {"params": self.state.params, "opt_state": self.state.opt_state}
                self.turn(at, counted=kind == "copy")
            draw = torch.Generator().manual_seed(10 * self.number + self.mesh.get_rank())
            try:
                self.state, _ = step(self.state, torch.randn(4, 5, generator=draw))
            except MismatchError as error:
                return str(error)
        return ""


def train(mesh: Any, case: Case) -> tuple[str, str, list[int]]:
    with fshard.collectives.tally() as records:
        faulty = Faulty(case, mesh, records)
        return faulty.train(), faulty.told, faulty.places


def begins(case: Case, leaf: str) -> str:
    """How every rank's error begins, or the first, of the rank that says what it has seen."""
    rank, ranks = case.rank, holders(case, leaf)
    before = f"guard: the state before step {EVERY - 1}"
    if case.kind == "copy":
        alone = f"rank {rank} has another value than the other {len(ranks) - 1} ranks"
        told = alone if len(ranks) > 2 else f"ranks {ranks[0]}, {ranks[1]} hold copies of it that differ"
        return f"{before}: leaf {leaf!r}: {told}"
    if case.kind == "rest":
        return f"{before}, rank {rank}, leaf "
    at = {"weight": f"rank {rank}, leaf {leaf!r}: two", "moment": f"rank {rank}, leaf {leaf!r}: two"}
    return f"guard: step {EVERY - 1}, {at.get(case.kind, f'rank {rank}, metric' if case.kind == 'metric' else 'rank ')}"


def proved(world: Any, case: Case, faults: Any = ()) -> None:
    """Every rank raises, and says which step, rank and leaf."""
    results = world(case, faults)
    leaf = results[case.rank][1]
    for text, _, _ in results:
        assert begins(case, leaf) in text, (case, text)
        assert case.kind != "rest" or repr(leaf) in text, (case, text)  # of two leaves in one block both are named


def simulated(case: Case, faults: Any = ()) -> Any:
    return World(axes=case.axes, faults=faults).run(train, case)


@pytest.mark.parametrize("seed", range(208))
def test_a_fault_is_found_at_the_next_check(seed: int) -> None:
    """Training would go on with wrong numbers, or the wrong machine would be taken out."""
    case = drawn(seed)
    if case.kind != "message":
        proved(simulated, case)
        return
    quiet = simulated(case)
    assert not any(text for text, _, _ in quiet)
    places = quiet[case.rank][2]
    proved(simulated, case, [Garbage(case.rank, Random(seed).choice(places))])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "message"])
def test_faults_in_processes(kind: str) -> None:
    """The same on gloo: each process raises, none waits."""
    proved(
        lambda case, _: gloo(train, case),
        Case(kind, "ddp" if kind == "copy" else "full", "plain", {"shard": 2}, 1, 1, 0),
    )
