"""Random numbers along the axes of a mesh: equal where batches are, and `fshard.random.per` where parts differ."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.steps import QUIET
from support.worlds import gloo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.random import per
from fshard.testing import World

pytestmark = pytest.mark.filterwarnings(QUIET)


def once(p: Any, x: Tensor, mesh: Any, axis: str) -> list[Tensor]:
    """Numbers drawn before, in, and after a block, and in a second one."""
    before = torch.rand(3)
    with per(mesh, axis):
        inside = torch.rand(3)
    with per(mesh, axis):
        again = F.dropout(torch.ones(64), 0.5)
    return [before, inside, again, torch.rand(3)]


def nested(p: Any, x: Tensor, mesh: Any, axis: str) -> list[Tensor]:
    """Blocks inside of each other, and what follows the inner one."""
    before = torch.rand(3)
    with per(mesh, axis):
        with per(mesh, axis):
            inner = torch.rand(3)
        inside = torch.rand(3)
    return [before, inner, inside, torch.rand(3)]


def recomputed(p: Any, x: Tensor, mesh: Any, axis: str) -> list[Tensor]:
    """A block in an activation checkpoint, which runs again in the backward."""

    def masked(w: Tensor) -> Tensor:
        with per(mesh, axis):
            return F.dropout(torch.tanh(w * torch.ones(64)), 0.5)

    return [torch.rand(3), checkpoint(masked, p["w"].sum(), use_reentrant=False), torch.rand(3)]


def scanned(p: Any, x: Tensor, mesh: Any, axis: str) -> list[Tensor]:
    """A block in the body of a scan."""

    def body(carry: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
        with per(mesh, axis):
            mask = torch.rand(3)
        return carry * layer.sum() + torch.rand(3), mask

    carry, masks = fshard.scan(body, torch.rand(3), p["layers"])
    return [torch.rand(3), masks[0] * 1, masks[1] * 1, torch.rand(3), carry[:0]]


LOSSES = {"once": once, "nested": nested, "recomputed": recomputed, "scanned": scanned}
DIFFER = {"once": (1, 2), "nested": (1, 2), "recomputed": (1,), "scanned": (1, 2)}  # numbers of what ranks draw apart


def drawn(
    mesh: Any, name: str, graph: bool = False, axis: str = "tensor", data: str = "shard"
) -> tuple[list[Tensor], Any]:
    """What a step draws on one rank, and its new parameters."""
    whole, tx = {"layers": [torch.ones(3), torch.full((3,), 2.0)], "w": torch.linspace(0.1, 0.4, 4)}, optim.sgd(0.1)
    plan = fshard.make_plan(whole, mesh, units=["layers.*"], data=data)
    state = fshard.init_state(fshard.shard_params(whole, plan), tx, seed=5)

    def loss(p: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        results = LOSSES[name](p, x, mesh, axis)
        total = sum((y.sum() for y in results), p["w"].square().sum())
        return total, results

    step = fshard.train_step(loss, tx, has_aux=True)
    state, metrics = (fshard.jit(step, backend="eager") if graph else step)(state, torch.ones(2))
    return metrics["aux"], fshard.gather_params(state.params)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_draw_apart_in_a_block_alone(name: str, graph: bool) -> None:
    """A mask that is equal on all parts of a sequence, or one that differs on equal activations, is another model."""
    results = [x for x, _ in World(axes={"shard": 2, "tensor": 2}).run(drawn, name, graph)]
    for i, numbers in enumerate(zip(*results, strict=True)):
        a, b, c, d = (x.tolist() for x in numbers)
        assert not a or (a != c and b != d), f"{i}: batches differ along shard"
        assert (a == b, c == d) == (i not in DIFFER[name],) * 2, f"{i}: along tensor"
    inside = [results[0][i].tolist() for i in DIFFER[name]]
    assert all(x != y for n, x in enumerate(inside) for y in inside[:n]), "two blocks drew the same"


@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_draws_what_the_code_draws(name: str) -> None:
    """A jitted step would train with other masks."""
    world = World(axes={"shard": 1, "tensor": 2})
    for eager, graph in zip(world.run(drawn, name), world.run(drawn, name, True), strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-6, atol=0)
        assert all(map(torch.equal, graph[0][:1], eager[0][:1]))


def test_the_backward_of_a_checkpoint_has_the_masks_of_its_forward() -> None:
    """A second forward with another mask would give the gradient of another loss."""
    (results, params), *_ = World(axes={"shard": 1, "tensor": 2}).run(drawn, "recomputed")
    others = World(axes={"shard": 1, "tensor": 2}).run(drawn, "recomputed")[1][0]
    w = torch.linspace(0.1, 0.4, 4, requires_grad=True)
    masks = torch.stack([results[1], others[1]]) != 0
    # the mean over two ranks, as of a plain scalar; 2 = 1 / (1 - 0.5)
    loss = (torch.tanh(w.sum()) * 2 * masks).sum() / 2 + w.square().sum()
    (expected,) = torch.autograd.grad(loss, w)
    torch.testing.assert_close((torch.linspace(0.1, 0.4, 4) - params["w"]) / 0.1, expected)


def test_an_axis_of_one_rank_changes_nothing() -> None:
    """A program on one device would be another one than the plain."""

    def numbers(mesh: Any, is_plain: bool) -> list[float]:
        torch.manual_seed(3)
        if is_plain:
            return torch.rand(4).tolist()
        with per(mesh, "tensor"):
            head = torch.rand(2)
        return [*head.tolist(), *torch.rand(2).tolist()]

    assert numbers(None, False) == numbers(None, True)
    assert World(axes={"tensor": 1}).run(numbers, False) == [numbers(None, True)]
    with pytest.raises(ValueError, match="no axis 'tensr'"):
        World(axes={"tensor": 2}).run(lambda mesh: per(mesh, "tensr").__enter__())


def test_it_is_a_decorator_on_any_number_of_ranks() -> None:
    """A module that is tested on ranks would fail on one device."""

    def drawn(mesh: Any) -> float:
        torch.manual_seed(3)
        return per(mesh, "tensor")(lambda: torch.rand(()).item())()

    assert drawn(None) == World(axes={"tensor": 1}).run(drawn)[0]
    assert len({*World(axes={"tensor": 3}).run(drawn)}) == 3


def test_processes_draw_what_simulated_ranks_draw() -> None:
    """What is simulated would not be what runs."""

    names = ("once", False, "shard", "replicate")
    for real, simulated in zip(gloo(drawn, *names, replicate=2), World(2, 2).run(drawn, *names), strict=True):
        assert all(map(torch.equal, fshard.tree.leaves(real), fshard.tree.leaves(simulated)))
