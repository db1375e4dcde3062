"""Losses that gather sharded parameters are closed under torch.func: compared with one device and with torch."""

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.closed import (
    MORE,
    PROGRAMS,
    Loss,
    dot,
    double_backward,
    forward_over_reverse,
    grad,
    jvp,
    loss,
    net,
    params,
    per_sample,
    randn,
    reverse_over_reverse,
    several_tangents,
)
from support.worlds import gloo, simulated
from torch import func, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fshard
from fshard import tree

DOCS = Path(__file__).parents[2] / "docs" / "closed.md"


def batch(rank: int) -> torch.Tensor:
    """Input rows that differ on every rank."""
    return randn(2, 6, seed=100 + rank)


# --- the programs: (f, p, x, v) with a loss f(p, x) and a tangent v ---


BATCHED = {per_sample, several_tangents}


def expected(program: Callable[..., Any], num_ranks: int) -> list[Any]:
    """The result on one device: the derivative of the sum of all ranks' losses; for `jvp`, of each rank's loss."""
    p, v = params(), params(seed=10)
    rows = [batch(rank) for rank in range(num_ranks)]
    if program is jvp:
        return [jvp(loss, p, x, v) for x in rows]
    # all ranks' i-th rows make one sample: (rows, ranks, features)
    x = torch.stack(rows, 1) if program is per_sample else torch.cat(rows)
    return [program(loss, p, x, v)] * num_ranks


# --- fshard ---

PLANS: dict[str, dict[str, Any]] = {
    "shard": {},
    "()": {"params_over": (), "grads_over": (), "state_over": ()},
    "a whole leaf": {"whole": ["b"]},
}
HYBRID_PLANS = {**PLANS, "both": dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard"))}


def sharded_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The same loss of sharded parameters: it gathers them first."""
    return loss(fshard.gather_params(p), x)


def on_shards(mesh: Any, plans: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """The results of every program under every plan, gathered."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's first use of jvp warns
    found = {}
    for key, chosen in plans.items():
        plan = fshard.make_plan(params(), mesh, units=["w1", "w2"], **chosen)
        p, v = (fshard.shard_params(whole, plan) for whole in (params(), params(seed=10)))
        for name, program in MORE.items():
            out = program(sharded_loss, p, batch(mesh.get_rank()), v)
            gather = func.vmap(fshard.gather_params) if program in BATCHED else fshard.gather_params
            found[key, name] = tree.map(torch.Tensor.detach, gather(out))
    return found


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[Any]]:
    """The results on three simulated ranks, and on 2 x 2."""
    return {
        "simulated": simulated(on_shards, PLANS, shard=3),
        "2 x 2": simulated(on_shards, HYBRID_PLANS, shard=2, replicate=2),
    }


def near(actual: Any, wanted: Any, scales: tuple[float, ...] = (1.0,)) -> bool:
    """Whether `actual` is `scale * wanted` for one scale of `scales`, to 1e-12 of the largest element."""
    a, b = tree.leaves(actual), tree.leaves(wanted)
    if [x.shape for x in a] != [x.shape for x in b]:
        return False
    return any(
        all((x - scale * y).abs().max() <= 1e-12 * max(1.0, float(y.abs().max())) for x, y in zip(a, b, strict=True))
        for scale in scales
    )


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("key", ["simulated", "2 x 2"])
def test_derivatives_of_sharded_losses_are_those_of_the_sum(key: str, name: str, worlds: dict[str, list[Any]]) -> None:
    """Derivatives of a sharded loss are those of one device with all data: otherwise they would be silently wrong."""
    ranks = worlds[key]
    for found, wanted in zip(ranks, expected(MORE[name], len(ranks)), strict=True):
        for plan in HYBRID_PLANS if key == "2 x 2" else PLANS:
            assert near(found[plan, name], wanted), plan


def test_processes_have_the_bits_of_the_simulation(worlds: dict[str, list[Any]]) -> None:
    """Gloo processes give the bits of simulated ranks: otherwise a simulation would say nothing about a real job."""
    processes = gloo(on_shards, PLANS, shard=3)
    for a, b in zip(tree.leaves(worlds["simulated"]), tree.leaves(processes), strict=True):
        assert torch.equal(a, b)


def test_the_comparison_can_fail() -> None:
    """Programs and ranks have different results: otherwise the tests above would pass with wrong derivatives."""
    assert not near(expected(grad, 1)[0], expected(grad, 3)[0])
    assert not near(expected(jvp, 3)[0], expected(jvp, 3)[1])
    assert not near(expected(grad, 3)[0], expected(forward_over_reverse, 3)[0])
    assert near(expected(reverse_over_reverse, 3)[0], expected(forward_over_reverse, 3)[0])


# --- the reference: the same programs with torch's own libraries ---


class Net(nn.Module):
    """`net` as an nn.Module."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in params().items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return net(self._parameters, x)


def by_backward(module: nn.Module, f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """Double backward for a module that returns its gradients in `.grad` only."""
    module(x).square().sum().backward(create_graph=True)
    first = [t.grad for t in p.values()]
    for t in p.values():
        t.grad = None
    dot(first, v).backward()
    return {name: t.grad for name, t in p.items()}


def of_module(module: nn.Module, tangent: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
    """A wrapped module as a loss, its parameters, a tangent, and the programs that need another form."""
    p = dict(module.named_parameters())
    v = dict(zip(p, map(tangent, params(seed=10).values()), strict=True))
    f = lambda p, x: func.functional_call(module, p, (x,)).square().sum()  # noqa: E731
    return f, p, v, {double_backward: partial(by_backward, module)}


def with_fsdp2(mesh: Any) -> tuple[Any, ...]:
    """The loss with torch.distributed.fsdp.fully_shard."""
    module = Net()
    fully_shard(module, mesh=mesh)
    return of_module(module, lambda t: distribute_tensor(t, mesh, [Shard(0)]))


def with_fsdp1(mesh: Any) -> tuple[Any, ...]:
    """The loss with torch.distributed.fsdp.FullyShardedDataParallel."""
    module = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    return of_module(module, lambda t: t)


def with_ddp(mesh: Any) -> tuple[Any, ...]:
    """The loss with torch.nn.parallel.DistributedDataParallel."""
    return of_module(DistributedDataParallel(Net()), lambda t: t)


def with_dtensor(mesh: Any) -> tuple[Any, ...]:
    """The loss of parameters that are DTensors sharded along dim 0, and of data sharded by rank."""
    p, v = ({k: distribute_tensor(t, mesh, [Shard(0)]) for k, t in whole.items()} for whole in (params(), params(10)))
    return loss, p, v, {}


def with_functional(mesh: Any) -> tuple[Any, ...]:
    """The loss of parameters that are split by hand and gathered by torch's functional collectives."""
    group, rank, size = mesh.get_group(), mesh.get_rank(), mesh.size()
    p, v = ({k: t.chunk(size)[rank].contiguous() for k, t in whole.items()} for whole in (params(), params(10)))

    def gather(shard: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_gather_tensor_autograd(shard, 0, group))

    return lambda p, x: loss({k: gather(t) for k, t in p.items()}, x), p, v, {}


def with_fshard(mesh: Any) -> tuple[Any, ...]:
    """The loss with this library."""
    plan = fshard.make_plan(params(), mesh, units=["w1", "w2"])
    p, v = (fshard.shard_params(whole, plan) for whole in (params(), params(seed=10)))
    return sharded_loss, p, v, {}


SYSTEMS = {
    "fshard": with_fshard,
    "DTensor": with_dtensor,
    "functional collectives": with_functional,
    "FSDP2": with_fsdp2,
    "FSDP1": with_fsdp1,
    "DDP": with_ddp,
}


def whole(x: Any, mesh: Any, system: str, batched: bool) -> Any:
    """Convert a result to plain tensors that are not sharded."""
    if system == "fshard":
        return (func.vmap(fshard.gather_params) if batched else fshard.gather_params)(x)
    if system == "functional collectives" and isinstance(x, dict):
        dim = 1 if batched else 0
        return {k: functional.all_gather_tensor(t.detach(), dim, mesh.get_group()) for k, t in x.items()}
    return tree.map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, x)


def cell(mesh: Any, system: str, name: str) -> str:
    """Run one program with one system: whether this rank gets the right result, a wrong result or an error."""
    program, wanted = PROGRAMS[name], expected(PROGRAMS[name], mesh.size())
    f, p, v, special = SYSTEMS[system](mesh)
    try:
        x = batch(mesh.get_rank())
        x = DTensor.from_local(x, mesh, [Shard(0)]) if system == "DTensor" else x
        out = special.get(program, program)(f, p, x, v)
        out = whole(out, mesh, system, program in BATCHED)
    except Exception:
        return "error"
    # for a reference, a mean over ranks is right too, and for `jvp` the sum over ranks
    answers = [wanted[mesh.get_rank()], torch.stack(wanted).sum()] if program is jvp else wanted[:1]
    return "right" if any(near(out, answer, (1.0, 1 / mesh.size())) for answer in answers) else "wrong, silently"


def cells(mesh: Any) -> dict[tuple[str, str], str]:
    """The results of all programs with all systems; of the ranks, the worst result."""
    warnings.simplefilter("ignore")
    found = {}
    for system in SYSTEMS:
        for name in PROGRAMS:
            heard = [""] * mesh.size()
            dist.all_gather_object(heard, cell(mesh, system, name))
            found[system, name] = max(heard, key=["right", "error", "wrong, silently"].index)
    return found


def table(found: dict[tuple[str, str], str]) -> str:
    """The results as the Markdown table of docs/closed.md."""
    rows = [["", *SYSTEMS], ["---"] * (len(SYSTEMS) + 1)]
    rows += [[name, *(found[system, name] for system in SYSTEMS)] for name in PROGRAMS]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_table_of_the_docs_is_what_happens() -> None:
    """Programs behave as the table of docs/closed.md says: otherwise users would choose a library by wrong facts.
    To update the table, paste what this test prints between the two markers."""
    found = gloo(cells, shard=2)[0]
    text = DOCS.read_text()
    between = re.search(r"<!-- table: begin -->\n(.*)<!-- table: end -->", text, re.S)
    assert between is not None
    print(f"\n{table(found)}")
    assert between[1] == table(found)
    assert {found["fshard", name] for name in PROGRAMS} == {"right"}
    others = [found[system, name] for system in SYSTEMS for name in PROGRAMS if system != "fshard"]
    assert others.count("right") < len(others) / 4
    assert all(found[system, name] != "right" for system in ("FSDP1", "FSDP2") for name in PROGRAMS)


def test_the_examples_of_the_docs_run() -> None:
    """The examples of docs/closed.md print what the page says: otherwise a reader would copy code that fails."""
    text, names = DOCS.read_text(), {"__name__": "docs"}
    blocks = re.findall(r"```python\n(.*?)```(?:\n\nprints\n\n```\n(.*?)```)?", text, re.S)
    assert blocks
    for code, output in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(DOCS), "exec"), names)
        assert printed.getvalue() == output


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
def test_an_eager_gradient_inside_a_transform_is_an_error(transform: str) -> None:
    """`value_and_grad` inside torch.func is an error: otherwise its derivative would be zero, or mixed over a batch."""

    def job(mesh: Any) -> Any:
        whole = {"w": torch.ones(3)}
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh))

        def value(p: Any, x: torch.Tensor) -> torch.Tensor:
            return fshard.value_and_grad(lambda q, x: (q["w"] * x).sum())(p, x)[0]

        if transform == "jvp":
            return func.jvp(lambda p: value(p, torch.ones(3)), (params,), (params,))
        if transform == "grad":
            return func.grad(value)(params, torch.ones(3))
        return func.vmap(value, (None, 0))(params, torch.ones(2, 3))

    with pytest.raises(TypeError, match=r"cannot run inside torch.func.*gather_params"):
        simulated(job, shard=2)


def along(mesh: Any, over: tuple[str, ...], share: bool) -> Any:
    """The gradient of <gradient, v>, by torch.func and by autograd; with `share`, v is divided by the ranks."""
    plan = fshard.make_plan(params(), mesh, units=["w1", "w2"], **dict.fromkeys(OVER, over))
    p, v = (fshard.shard_params(whole, plan) for whole in (params(), params(seed=10)))
    x = batch(0 if mesh is None else mesh.get_rank())
    copies = (1 if mesh is None else mesh.size()) if share else 1
    v = tree.map(lambda t: t / copies, v)
    found = [
        fshard.gather_params(program(sharded_loss, p, x, v)) for program in (reverse_over_reverse, double_backward)
    ]
    return tree.map(torch.Tensor.detach, found)


OVER = ("params_over", "grads_over", "state_over")


@pytest.mark.parametrize("over", [(), ("shard",)])
@pytest.mark.parametrize("shape", [None, (1, 2), (1, 3), (2, 2)])
def test_an_inner_product_with_a_gradient_is_one_output(shape: tuple[int, int] | None, over: tuple[str, ...]) -> None:
    """The gradient of <gradient, v> is H v on any mesh: otherwise it would be multiplied by the number of ranks."""
    ranks = 1 if shape is None else shape[0] * shape[1]
    for share in (False, True):
        job = partial(along, over=over, share=share)
        found = [job(None)] if shape is None else simulated(job, replicate=shape[0], shard=shape[1])
        wanted = expected(reverse_over_reverse, ranks)[0]
        scale = 1 / ranks if share else 1.0
        assert all(near(one, wanted, (scale,)) for rank in found for one in rank)
