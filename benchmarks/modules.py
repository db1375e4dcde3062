"""Compare a module as a function (`functionalize`) with FSDP2, torch's functional_call, and the module itself.

    make bench-modules

The module is GPT-2 of transformers. On two gloo ranks with one thread each the systems run in turn: the processor time
of a forward and backward, divided by that of functional_call of the module with its own parameters. Then the peak
memory of a forward and backward, and of a step of AdamW, each in two new processes.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import memory
import torch
import torch.distributed as dist
from timing import in_turn, leave, on_two_ranks, ratio
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel

import fshard
from fshard.comm.mesh import AnyMesh
from fshard.module import functionalize

Pass = Callable[[Tensor], Tensor]
LR = 1e-4

# width, layers, heads, words; rows x tokens in a batch
MODELS = {
    "434 MB, 4 x 256": (768, 12, 12, 30000, 4, 256),
    "434 MB, 2 x 128": (768, 12, 12, 30000, 2, 128),
    "434 MB, 1 x 64": (768, 12, 12, 30000, 1, 64),
    "20 MB, 2 x 64": (256, 6, 8, 1000, 2, 64),
    "1 MB, 2 x 16": (32, 12, 4, 1000, 2, 16),
    "tiny": (16, 2, 2, 50, 1, 8),
}


def model_of(name: str) -> GPT2LMHeadModel:
    """GPT-2 with random weights and no dropout."""
    width, layers, heads, words, _, _ = MODELS[name]
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": words, "n_positions": 512}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0))


def batch_of(name: str, rank: int) -> Tensor:
    """The tokens of a rank."""
    *_, words, rows, length = MODELS[name]
    return torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(rank))


def plain(name: str, mesh: AnyMesh, step: bool) -> Pass:
    """The module, which is not sharded."""
    return _of_module(model_of(name), step)


def fsdp2(name: str, mesh: Any, step: bool) -> Pass:
    """FSDP2; each block is a unit, and so is the root."""
    model = model_of(name)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return _of_module(fully_shard(model, mesh=mesh), step)


def _of_module(model: Any, step: bool) -> Pass:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True) if step else None

    def run(batch: Tensor) -> Tensor:
        loss = model(batch, labels=batch).loss
        loss.backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()
        return loss.detach()

    return run


def called(name: str, mesh: AnyMesh, step: bool) -> Pass:
    """torch's functional_call of the module with its own parameters, which are not sharded."""
    model = model_of(name)
    params = dict(model.named_parameters())

    def run(batch: Tensor) -> Tensor:
        loss = functional_call(model, params, (batch,), {"labels": batch}).loss
        torch.autograd.grad(loss, list(params.values()))
        return loss.detach()

    return run


def applied(name: str, mesh: AnyMesh, step: bool) -> Pass:
    """`apply` of the module's own parameters, which are not sharded."""
    apply, params, buffers = functionalize(model_of(name))
    tensors = list(dict.fromkeys(fshard.tree.leaves(params)))

    def run(batch: Tensor) -> Tensor:
        loss = apply(params, buffers, batch, labels=batch)[0].loss
        torch.autograd.grad(loss, tensors)
        return loss.detach()

    return run


def sharded(name: str, mesh: AnyMesh, step: bool) -> Pass:
    """`apply` of parameters sharded over the ranks; each block is a unit."""
    apply, params, buffers = functionalize(model_of(name))
    plan = fshard.make_plan(params, mesh, units=apply.units("transformer.h.*"))

    def loss(params: Any, batch: Tensor) -> Tensor:
        return apply(params, buffers, batch, labels=batch)[0].loss

    return _of_loss(loss, fshard.shard_params(params, plan), step)


def alone(name: str, mesh: AnyMesh, step: bool) -> Pass:
    """`apply` of parameters sharded over one rank."""
    return sharded(name, None, step)


def gathered(name: str, mesh: AnyMesh, step: bool) -> Pass:
    """functional_call with all parameters gathered from shards; the module has its own as well."""
    model = model_of(name)
    params = dict(model.named_parameters())
    plan = fshard.make_plan(params, mesh)

    def loss(params: Any, batch: Tensor) -> Tensor:
        return functional_call(model, fshard.gather_params(params), (batch,), {"labels": batch}).loss

    return _of_loss(loss, fshard.shard_params(params, plan), step)


def _of_loss(loss: Callable[..., Tensor], params: fshard.Sharded, step: bool) -> Pass:
    if not step:
        grads = fshard.value_and_grad(loss)
        return lambda batch: grads(params, batch)[0]
    tx = fshard.optim.adamw(LR)
    state, train = fshard.init_state(params, tx), fshard.train_step(loss, tx, donate=True)

    def run(batch: Tensor) -> Tensor:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"]

    return run


UNSHARDED = {"plain": plain, "functional_call": called, "apply": applied, "apply, one rank": alone}
SHARDED = {"apply, two ranks": sharded, "FSDP2": fsdp2, "functional_call, gathered": gathered}
ALL: dict[str, Callable[[str, AnyMesh, bool], Pass]] = {**UNSHARDED, **SHARDED}


def peak(name: str, system: str, mesh: AnyMesh, step: bool) -> tuple[int, int]:
    """Bytes at the peak of three passes or steps, less those before the model is built, and less those after."""
    bare = memory.resident()
    run, batch = ALL[system](name, mesh, step), batch_of(name, dist.get_rank())
    gc.collect()
    built = memory.resident()
    memory.reset_peak()
    for _ in range(3):
        run(batch)
    most = memory.peak()
    return most - bare, most - built


def show_times(name: str, mesh: AnyMesh, rounds: int) -> None:
    """Measure all systems on one model; rank 0 prints processor times and ratios."""
    batch = batch_of(name, dist.get_rank())
    runs = {system: partial(make(name, mesh, False), batch) for system, make in ALL.items()}
    losses = torch.stack([run() for system, run in runs.items() if system in UNSHARDED])
    torch.testing.assert_close(losses, losses[:1].expand(len(losses)))
    times = in_turn(runs, rounds, warmup=1, clock=time.process_time)
    if dist.get_rank() == 0:
        print(f"{name} tokens, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
        for system in times:
            r, ms = ratio(times, system, "functional_call"), 1e3 * statistics.median(times[system])
            print(f"  {system}: {r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f}), {ms:.1f} ms", flush=True)


def show_peaks(name: str) -> None:
    """Measure the memory of the sharded systems on one model, and print it in MB."""
    for kind, step in (("forward and backward", []), ("step of AdamW", ["--step"])):
        rows = {s: on_two_ranks(__file__, "--model", name, "--peak", s, *step, capture=True) for s in SHARDED}
        for system, row in rows.items():
            parts = zip(row.split(), rows["FSDP2"].split(), strict=True)
            over = [f"{int(x) / 1e6:.0f} MB ({int(x) / int(y):.3f} of FSDP2)" for x, y in parts]
            print(f"  {kind}, {system}: {over[0]} over nothing, {over[1]} over the model", flush=True)


def on_a_rank(args: argparse.Namespace) -> None:
    """Measure the model of the arguments; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, (name,) = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)), args.model
    if args.peak:
        peaks = torch.tensor(peak(name, args.peak, mesh, args.step))
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(*peaks.tolist())
    else:
        show_times(name, mesh, args.rounds)
    leave()


def main() -> None:
    """Start two ranks for the times of each model, and two new ranks for the memory of each system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all but the tiny one")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", choices=list(SHARDED), help="only one system's memory, on a rank under torchrun")
    parser.add_argument("--step", action="store_true", help="with --peak: of a step of AdamW")
    args = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(args)
        return
    for name in args.model or [name for name in MODELS if name != "tiny"]:
        on_two_ranks(__file__, "--model", name, "--rounds", str(args.rounds))
        if not args.no_memory:
            show_peaks(name)


if __name__ == "__main__":
    main()
