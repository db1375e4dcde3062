"""Optimizer states that torch's sharding libraries wrote are read, and ours by them, over two processes."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.optim as to
from support.models import rand
from support.worlds import gloo
from torch import Tensor, nn
from torch.func import grad
from torch.nn.functional import linear

import fshard
from fshard import optim, tree
from fshard.optim.state import load_state_dict, state_dict

Make = Callable[..., Any]


def net(values: Any = None) -> nn.Module:
    """A small model."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    drawn = {name: rand(*x.shape, seed=len(name) + x.ndim) for name, x in model.state_dict().items()}
    model.load_state_dict(values or drawn)
    return model


def data(i: int, rank: int) -> Tensor:
    """Inputs of a rank."""
    return rand(6, 5, seed=1000 + 2 * i + rank)


def loss(params: Any, i: int) -> Tensor:
    """Of a model's parameters by name, on the batches of both ranks."""
    x = torch.cat([data(i, 0), data(i, 1)])
    hidden = torch.tanh(linear(x, params["0.weight"], params["0.bias"]))
    return linear(hidden, params["2.weight"], params["2.bias"]).square().mean()


def trained(model: nn.Module, optimizer: Any, steps: range) -> None:
    """torch's own steps."""
    for i in steps:
        optimizer.zero_grad()
        model(data(i, dist.get_rank())).square().mean().backward()
        optimizer.step()


def in_library(kind: str, mesh: Any, model: nn.Module) -> tuple[nn.Module, Any, Make, Make]:
    """A model over two processes, its optimizer, what gives its whole state, and what takes one."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    import torch.distributed.checkpoint.state_dict as dcp
    from torch.distributed import fsdp
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType, fully_shard
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if kind == "ZeRO":
        model = nn.parallel.DistributedDataParallel(model)
        zero = ZeroRedundancyOptimizer(model.parameters(), to.AdamW, lr=0.1)
        return (
            model,
            zero,
            lambda: (zero.consolidate_state_dict(), mesh.get_rank() or zero.state_dict())[1],
            zero.load_state_dict,
        )
    cut = kind.endswith("sharded")  # what it saves
    if kind.startswith("FSDP2"):
        fully_shard(model, mesh=mesh)
        options, optimizer = dcp.StateDictOptions(full_state_dict=True), to.AdamW(model.parameters(), 0.1)
        args = model, optimizer
        return (
            *args,
            lambda: dcp.get_optimizer_state_dict(*args, options=None if cut else options),
            lambda x: dcp.set_optimizer_state_dict(*args, x, options=options),
        )
    model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    # with offload_to_cpu, its default, torch 2.13 gives on CPUs one buffer for all: exp_avg has exp_avg_sq's values
    whole = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole)
    optimizer = to.AdamW(model.parameters(), 0.1)

    def sharded() -> Any:
        settings = fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *settings):
            return FSDP.optim_state_dict(model, optimizer)

    return (
        model,
        optimizer,
        lambda: sharded() if cut else FSDP.optim_state_dict(model, optimizer),
        lambda x: optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, x)),
    )


def ours(mesh: Any, how: str, steps: range, start: Any = None, load: Make | None = None) -> tuple[Any, Any, Any]:
    """Whole parameters, the state, and parameters as they lie, after some steps."""
    start, tx, place = start or dict(net().named_parameters()), optim.adamw(0.1, weight_decay=0.01), lambda x: x
    start = {name: x.detach() for name, x in start.items()}
    if how == "sharded":
        plan = fshard.make_plan(start, mesh)
        place = lambda x: fshard.shard_params(x, plan)  # noqa: E731
    else:
        tx = fshard.zero(tx, mesh, how)
    params = place(start)
    state = load(tx.init(params), params) if load else tx.init(params)
    for i in steps:
        whole = fshard.gather_params(params)
        params, state = tx.step(place(grad(loss)(whole, i)), state, params)
    return fshard.gather_params(params), state, params


def there_and_back(mesh: Any, kind: str) -> None:
    """The library goes on with our state, and we go on with its, each as the other alone would."""
    key, mine = ("index", "leaf") if kind == "ZeRO" else ("path", "sharded")
    whole, state, params = ours(mesh, mine, range(3))
    want = ours(mesh, mine, range(5))[0]

    model, optimizer, saved, put = in_library(kind, mesh, net(whole))
    settings = [{k: x for k, x in to.AdamW([torch.ones(1)], 0.1).param_groups[0].items() if k != "params"}]
    put(state_dict(state, params, key, groups=settings))
    trained(model, optimizer, range(3, 5))
    torch.testing.assert_close(values(kind, model), want, rtol=1e-11, atol=1e-11)

    model, optimizer, saved, put = in_library(kind, mesh, net())
    trained(model, optimizer, range(3))
    theirs, found = saved(), values(kind, model)
    kinds = {type(x).__name__ for x in tree.leaves(theirs) if isinstance(x, Tensor) and x.dim()}
    assert kinds in (set(), {{"FSDP1 sharded": "ShardedTensor", "FSDP2 sharded": "DTensor"}.get(kind, "Tensor")})
    src = 0 if kind == "ZeRO" else None
    held = theirs if src is None or mesh.get_rank() == src else {}

    def load(like: Any, params: Any) -> Any:
        return load_state_dict(held, like, params, src=src)

    torch.testing.assert_close(ours(mesh, mine, range(3, 5), found, load)[0], want, rtol=1e-11, atol=1e-11)


def values(kind: str, model: nn.Module) -> dict[str, Tensor]:
    """A model's whole parameters by name."""
    import torch.distributed.checkpoint.state_dict as dcp

    if kind == "ZeRO":
        return {name: x.detach().clone() for name, x in model.module.named_parameters()}
    return dcp.get_model_state_dict(model, options=dcp.StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1", "FSDP1 sharded", "FSDP2 sharded", "ZeRO"])
def test_there_and_back(kind):
    """Optimizer state of FSDP, FSDP2 or ZeroRedundancyOptimizer would lose or swap a tensor on its way in or out."""
    gloo(there_and_back, kind)
