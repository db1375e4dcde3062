"""Compare loss scaling with torch's, and measure errors of sums in bfloat16: `make bench-precision`.

Two gloo ranks with one thread each run `ShardedGradScaler.unscale_` of a tree of 1000 leaves, and
`DynamicLossScale.unscale` of the same gradients as a `Sharded`, in place, in turn. For both, the tensors that the host
reads in a step are counted. One process plots the error of a sum over 2 to 64 simulated ranks whose addends are sent in
bfloat16, and of a sum that is computed in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from networks import deep
from rich.console import Console
from timing import in_turn, leave, on_two_ranks, ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import tree
from fshard.comm import primitives
from fshard.comm.mesh import AnyMesh
from fshard.core.tree import Tree

Call = Callable[[], object]


class Reads(TorchDispatchMode):
    """A mode that counts in `count` how often the host reads a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> object:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _grads(params: Tree) -> Tree:
    generator = torch.Generator().manual_seed(1)
    return tree.map(lambda x: torch.randn(x.shape, generator=generator), params)


def reference(params: Tree) -> tuple[Call, int]:
    """torch's `unscale_` as a function, and the number of tensors that a step with its scaler reads."""
    leaves = [torch.nn.Parameter(x.clone()) for x in tree.leaves(params)]
    for leaf, grad in zip(leaves, tree.leaves(_grads(params)), strict=True):
        leaf.grad = grad
    optimizer, scaler = torch.optim.SGD(leaves, 0.0), ShardedGradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))

    def unscale() -> None:
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states.clear()  # allows the next call of unscale_

    with Reads() as reads:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return unscale, reads.count


def ours(params: Tree, mesh: DeviceMesh) -> tuple[Call, int]:
    """fshard's `unscale` as a function, and the number of tensors that unscale, select and adjust read."""
    grads = fshard.shard_params(_grads(params), fshard.make_plan(params, mesh))
    scaler = fshard.DynamicLossScale(1.0)
    with Reads() as reads:
        _, found_inf = scaler.unscale(grads, own=True)
        fshard.select(found_inf, grads, grads)
        scaler.adjust(found_inf)
    return lambda: scaler.unscale(grads, own=True), reads.count


def on_a_rank(rounds: int) -> None:
    """Measure times and reads of both; rank 0 prints them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, params = (
        init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)),
        deep(500, 64, 16).init(),
    )
    (theirs, their_reads), (mine, my_reads) = reference(params), ours(params, mesh)
    systems = {"ShardedGradScaler.unscale_": theirs, "unscale": mine}
    # ten calls in each round, because one call takes less time than the barriers around it
    ten = {name: lambda call=call: [call() for _ in range(10)] for name, call in systems.items()}
    times = in_turn(ten, rounds)
    if dist.get_rank() == 0:
        found = ratio(times, "unscale", "ShardedGradScaler.unscale_")
        print(f"unscale / ShardedGradScaler.unscale_: {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
        print(f"reads in a step: ShardedGradScaler {their_reads}, fshard {my_reads}")
    leave()


def errors(num_ranks: int) -> tuple[float, float]:
    """Mean errors for each addend: of a float32 sum of bfloat16 addends, and of a sum in bfloat16.

    The unit is the rounding of an addend of mean size to bfloat16.
    """
    generator = torch.Generator().manual_seed(num_ranks)
    values = torch.randn(num_ranks, 512 * num_ranks, generator=generator) + 1

    def summed(mesh: AnyMesh) -> Tensor:
        ranks = primitives.along(mesh, "shard")
        return primitives.reduce_scatter(values[ranks.rank].bfloat16(), ranks, out=torch.empty(512)).wait()

    exact = values.double().sum(0)
    running = values[0].bfloat16()
    for row in values[1:]:
        running = running + row.bfloat16()
    unit = float(values.abs().mean()) * 2**-9
    ours_ = torch.cat(fshard.testing.simulate(summed, shard=num_ranks)).double()
    return tuple(float((x - exact).abs().mean()) / unit / num_ranks for x in (ours_, running.double()))  # type: ignore[return-value]


def picture(file: Path) -> None:
    """Plot the errors over the number of ranks, and print them. `tools/pictures.py` draws docs/rounding.png so."""
    sizes = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    rows = [errors(size) for size in sizes]
    figure, axes = plt.subplots(figsize=(4.4, 3.2))
    for column, name in enumerate(("bfloat16 on the wire, float32 sum", "sum in bfloat16")):
        axes.plot(sizes, [row[column] for row in rows], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="mean error for each addend")
    axes.set_xticks(sizes, map(str, sizes))
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160, metadata={"Software": None})
    Console().print(*(f"{size} ranks: {a:.3f}, {b:.3f}" for size, (a, b) in zip(sizes, rows, strict=True)), sep="\n")


def main() -> None:
    """Draw the picture, then start two ranks to measure times; on a rank, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--picture", type=Path, default=Path("runs/rounding.png"))
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        on_a_rank(args.rounds)
    else:
        picture(args.picture)
        on_two_ranks(__file__, "--rounds", str(args.rounds))


if __name__ == "__main__":
    main()
