"""The recipes of docs/recipes.md that need several ranks, or memory of two kinds, do what the page says."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import Live
from support.worlds import simulated
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import fshard
from fshard import optim, tree
from fshard.testing import World, assert_trees_equal, simulate

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def recipe(title: str, mesh: Any = None) -> dict[str, Any]:
    """What the first block of the page defines, and the blocks of a section; functions in it are on the mesh."""
    first, *sections = re.split(r"(?m)^## ", PAGE.read_text())
    (section,) = (text for text in sections if text.startswith(f"{title}\n"))
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", first + section, re.MULTILINE | re.DOTALL):
        exec(compile(block, "recipes.md", "exec"), scope)
    scope["mesh"] = mesh
    return scope


def batch_of(*seeds: int) -> dict[str, Tensor]:
    """Rows that differ by seed, one seed after the other."""
    made = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = torch.cat([torch.randn(4, 8, generator=generator) for generator in made])
    return {"x": x, "y": torch.cat([torch.randint(3, (4,), generator=generator) for generator in made])}


def gradients_with_saved_inputs(mesh: Any) -> tuple[list[int], list[tuple[int, ...]]]:
    """How many gathers a plain loss and that of the recipe have, and the shapes of what goes to the host."""
    page, shapes, gathers = recipe("Activations in host memory", mesh), list[tuple[int, ...]](), list[int]()

    def to_host() -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x.clone(), lambda x: x)

    def in_host_memory(params: Any, batch: Any) -> Tensor:
        return page["loss_in_host_memory"](params, batch, to_host)

    params, results = page["sharded"](page["new_params"](), units=["blocks.*"]), list[Any]()
    for loss in (page["class_loss"], in_host_memory):
        with fshard.collectives.tally() as records:
            results.append(fshard.value_and_grad(loss)(params, batch_of(mesh.get_rank())))
        gathers.append(len(records.select("all_gather")))
    assert_trees_equal(results[1], results[0])
    return gathers, shapes


def test_activations_in_host_memory_change_no_gradient():
    """Parameters would go to the host too, a unit would not be gathered again, or a gradient would be wrong."""
    for gathers, shapes in simulated(gradients_with_saved_inputs):
        # two blocks and what is after them; a block whose input needs a gradient again, or both that run again
        assert gathers == [4, 5]
        assert shapes == [(4, 8)] * 2, "the input of each block, and no parameter"


@pytest.mark.parametrize("name", ["sliced_score", "mean_flow", "gradients_of_samples"])
def test_derivatives_of_a_deep_net_take_less_memory(name: str) -> None:
    """A function that runs again would change a gradient, or keep activations all the same."""
    page = recipe("Derivatives of a deep net in bounded memory")
    x, v = torch.randn(2, 2048, 8, generator=torch.Generator().manual_seed(0))
    results, peaks = list[Any](), list[int]()
    for call in (lambda fn: fn, fshard.remat):

        def run(call: Any = call) -> Any:
            if name == "gradients_of_samples":
                return page[name](page["deep_params"], x.view(4, -1, 8), call)
            batch = x if name == "sliced_score" else {"x": x, "v": v}
            value, grads = fshard.value_and_grad(lambda p, b: page[name](p, b, call))(page["on_ranks"], batch)
            return value, fshard.gather_params(grads)

        with Live() as live:
            results.append(run())
        peaks.append(live.peak)
    for a, b in zip(*map(tree.leaves, results), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-5 * float(b.detach().abs().max()))
    assert peaks[1] < peaks[0] / 4, peaks


STEPS, ROUNDS = 2, 2


def local_sgd(mesh: Any, start: Any) -> Any:
    """The common parameters after some rounds of DiLoCo; each rank has other data."""
    page, rank = recipe("Local SGD and DiLoCo", mesh), mesh.get_rank()
    data = [batch_of(10 * i + rank) for i in range(STEPS * ROUNDS)]
    return fshard.gather_params(page["rounds"](start, page["class_loss"], optim.adamw(1e-2), data, STEPS))


def plain_local_sgd(loss: Any, start: Any) -> Any:
    """The same with torch's optimizers on one device: two replicas, each with the rows of two ranks."""
    common, spec = tree.flatten(start)
    outer_params = [torch.nn.Parameter(x.clone()) for x in common]
    outer = torch.optim.SGD(outer_params, 0.7, momentum=0.9, nesterov=True)
    replicas = [[torch.nn.Parameter(x.clone()) for x in common] for _ in range(2)]
    optimizers = [torch.optim.AdamW(params, 1e-2) for params in replicas]
    for i in range(STEPS * ROUNDS):
        for number, (params, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            rows = batch_of(10 * i + 2 * number, 10 * i + 2 * number + 1)
            grads = torch.autograd.grad(loss(tree.unflatten(spec, params), rows), params)
            for x, grad in zip(params, grads, strict=True):
                x.grad = grad
            optimizer.step()
        if (i + 1) % STEPS == 0:
            for x, *others in zip(outer_params, *replicas, strict=True):
                x.grad = x.detach() - sum(other.detach() for other in others) / 2
            outer.step()
            with torch.no_grad():
                for params in replicas:
                    for x, value in zip(params, outer_params, strict=True):
                        x.copy_(value)
    return tree.unflatten(spec, [x.detach() for x in outer_params])


def test_local_sgd_is_that_of_a_plain_loop():
    """Replicas would communicate in inner steps, or average otherwise than a loop written down for one device."""
    page = recipe("Local SGD and DiLoCo")
    start = page["new_params"]()
    world = World(replicate=2, shard=2)
    expected = plain_local_sgd(page["class_loss"], start)
    for result in world.run(local_sgd, start):
        torch.testing.assert_close(result, expected)
    between = [call.kind for call in world.log if call.axis == "replicate"]
    assert between == ["all_reduce"] * ROUNDS * 2, "one in each outer step, between the first ranks and the second ones"


@pytest.mark.parametrize("policy", [None, "storage=bf16"])
def test_weights_arrive_at_another_mesh(policy):
    """Generators would have other values than the trainers, or hold more than their part."""
    page = recipe("Weights for another mesh")
    whole = page["new_params"]()

    def on_a_rank(mesh: Any) -> Any:
        part = mesh["shard"]
        if mesh.get_local_rank("role") == 0:
            plan = fshard.make_plan(whole, part, units=["blocks.*"])
            return page["send"](fshard.shard_params(whole, plan), mesh)
        shapes = tree.map(lambda x: x.to("meta"), whole)
        received = page["receive"](fshard.make_plan(shapes, part, units=["**.w"], policy=policy), mesh)
        return fshard.gather_params(received), sum(x.numel() for x in tree.leaves(received))

    expected = tree.map(lambda x: x.to(torch.bfloat16 if policy else torch.float32), whole)
    for values, held in World(axes={"role": 2, "shard": 2}).run(on_a_rank)[2:]:
        assert_trees_equal(values, expected)
        assert held <= sum(x.numel() for x in tree.leaves(whole)) / 2 + 8


def test_the_noise_scale_is_right_in_the_mean():
    """Over all ways to halve a batch, the mean would not be the covariance and the gradient of its rows."""
    page = recipe("Gradient noise scale")
    params, batch, count = page["new_params"](), batch_of(0), 4

    def rows(*numbers: int) -> dict[str, Tensor]:
        return tree.map(lambda x: x[list(numbers)], batch)

    grads = [tree.leaves(torch.func.grad(page["class_loss"])(params, rows(i))) for i in range(count)]
    flat = torch.stack([torch.cat([x.flatten() for x in row]) for row in grads]).double()
    mean = flat.mean(0)
    noise = (flat - mean).square().sum() / (count - 1)

    def on_a_rank(mesh: Any) -> Tensor:
        page["mesh"], estimates = mesh, list[Tensor]()
        sharded = page["sharded"](params, units=["blocks.*"])
        for first in combinations(range(count), 2):
            order = [*first, *(i for i in range(count) if i not in first)]
            mine = [rows(order[i + mesh.get_rank()]) for i in (0, 2)]
            estimates.append(torch.stack(page["noise_scale"](page["class_loss"], sharded, mine, rows=2)))
        return torch.stack(estimates).double().mean(0)

    expected = torch.stack([noise, mean.square().sum() - noise / count])
    for result in simulate(on_a_rank, shard=2):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)
