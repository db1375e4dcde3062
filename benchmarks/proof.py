"""Nine programs in fshard and in plain torch, and how far apart they end: `make bench-proof` writes docs/proof.md.

A program of `programs/` trains in float64, on batches of 13 rows: of several ranks each has other rows, and not equally
many. Plain torch has all rows. The difference is the largest one of a loss of any step, or of a parameter after the
last step, divided by the largest absolute value of these losses, or of this parameter in plain torch.
"""

from __future__ import annotations

import argparse
import importlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import on_two_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard.testing import simulate

PROGRAMS = {
    "latent_diffusion": "a frozen encoder, a text encoder and a denoiser in one plan; their moving average",
    "grpo_lora": "GRPO of LoRA adapters: samples of the policy, two clipped updates, KL to the base model",
    "vqgan": "an autoencoder with a codebook, and a critic: two states",
    "dlrm": "embedding tables by Adagrad, all else by SGD with momentum",
    "mae_vit": "a masked autoencoder; then its encoder trains on with a new head",
    "flow": "a continuous flow with Hutchinson's estimate of the trace: `jvp` in the loss",
    "ppo": "PPO as one function: rollout, advantages over all ranks, four updates with clipped gradients",
    "fixed_point": "a layer with implicit derivatives; plain torch unrolls the iteration",
    "gauss_newton": "conjugate gradients on sharded parameters; plain torch solves with the whole Jacobian",
}
MESHES: dict[str, dict[str, int]] = {
    "2 ranks": {"shard": 2},
    "3 ranks": {"shard": 3},
    "4 ranks": {"shard": 4},
    "2 x 2": {"replicate": 2, "shard": 2},
}
WAYS = ["one device", *MESHES, "2 gloo processes", "resumed, 2 to 3 ranks"]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "proof.md"
BEGIN = "<!-- begin: written by benchmarks/proof.py -->"

Ending = tuple[Tensor, dict[str, Tensor]]  # the losses of all steps, and the parameters after the last one


def program_of(name: str) -> Any:
    return importlib.import_module(f"programs.{name}")


def rows_of(batch: Any, mesh: Any) -> Any:
    """This rank's rows of a batch."""
    rank, ranks = fshard.rank_and_size(mesh)
    return fshard.tree.map(lambda x: x.tensor_split(ranks)[rank], batch)


def run(name: str, mesh: Any, state: Any, steps: slice) -> tuple[Any, Tensor]:
    """Take some of a program's steps on a rank: the new state, and the losses."""
    program, losses = program_of(name), []
    for batch in program.batches()[steps]:
        state, loss = program.step(state, rows_of(batch, mesh))
        losses.append(loss)
    return state, torch.stack(losses)


def trained(mesh: Any, name: str) -> Ending:
    """Train with fshard on a rank."""
    state, losses = run(name, mesh, program_of(name).start(mesh), slice(None))
    return losses, named(state)


def named(state: Mapping[str, fshard.TrainState | fshard.Sharded]) -> dict[str, Tensor]:
    """Whole parameters of all parts of a state, by name."""
    parts = {part: x.params if isinstance(x, fshard.TrainState) else x for part, x in state.items()}
    return {f"{part}.{path}": x for part, params in parts.items() for path, x in fshard.state_dict(params).items()}


def plain(name: str) -> Ending:
    """Train with plain torch, which has all rows."""
    program = program_of(name)
    losses, parts = program.plain(program.batches())
    params = {f"{part}.{path}": x.detach() for part, tensors in parts.items() for path, x in tensors.items()}
    return torch.stack(losses), params


def resumed(name: str) -> list[Ending]:
    """Endings of three ranks that go on from the checkpoint of two, with the losses of both runs."""
    program = program_of(name)
    half = len(program.batches()) // 2

    def first(mesh: Any) -> Tensor:
        state, losses = run(name, mesh, program.start(mesh), slice(half))
        fshard.checkpoint.save(folder, state, step=half)
        return losses

    def second(mesh: Any) -> Ending:
        state, losses = run(name, mesh, fshard.checkpoint.restore(folder, program.start(mesh)), slice(half, None))
        return torch.cat([before, losses]), named(state)

    with tempfile.TemporaryDirectory() as folder:
        before, _ = simulate(first, shard=2)
        return simulate(second, shard=3)


def endings(name: str, way: str) -> list[Ending]:
    """Endings of all ranks of a program that this process can run: not of processes."""
    if way == "one device":
        return [trained(None, name)]
    if way in MESHES:
        return simulate(lambda mesh: trained(mesh, name), **MESHES[way])
    return resumed(name)


def difference(found: Ending, expected: Ending) -> float:
    """The largest relative difference of two endings: inf if a value is NaN. ValueError for other names or shapes."""
    (losses, params), (plain_losses, plain_params) = found, expected
    tensors, plain_tensors = params | {"losses": losses}, plain_params | {"losses": plain_losses}
    forms = [{(path, *x.shape) for path, x in each.items()} for each in (tensors, plain_tensors)]
    if forms[0] != forms[1]:
        raise ValueError(f"other names or shapes: {sorted(forms[0] ^ forms[1])}")
    worst = torch.stack([(tensors[path] - x).abs().max() / x.abs().max() for path, x in plain_tensors.items()]).max()
    return worst.nan_to_num(math.inf).item()


def by_processes(names: Sequence[str]) -> dict[str, list[Ending]]:
    """Endings of programs on two gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        on_two_ranks(__file__, *names, "--write", folder)
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in names}


def write_endings(names: Sequence[str], folder: Path) -> None:
    """Train all programs as one of the processes of torchrun, and write their endings."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.save({name: trained(mesh, name) for name in names}, folder / str(dist.get_rank()))
    dist.destroy_process_group()


def differences(names: Sequence[str], say: Callable[[str], object]) -> dict[str, dict[str, float]]:
    """The worst difference over all ranks, by program and way."""
    processes, table = by_processes(names), {}
    for name in names:
        expected = plain(name)
        found = {way: processes[name] if way == WAYS[-2] else endings(name, way) for way in WAYS}
        table[name] = {way: max(difference(rank, expected) for rank in ranks) for way, ranks in found.items()}
        say(f"{name}: {max(table[name].values()):.1e}")
    return table


def section(table: Mapping[str, Mapping[str, float]]) -> str:
    """The table as Markdown, with date, machine and command."""
    from suite import machine  # imports JAX

    about, lines = machine(), [f"| program | {' | '.join(WAYS)} |", "|---|" + "---|" * len(WAYS)]
    for name, row in table.items():
        cells = " | ".join(f"{row[way]:.0e}" for way in WAYS)
        lines.append(f"| `{name}`: {PROGRAMS[name]} | {cells} |")
    made = f"Made on {about['date']} by `make bench-proof`: {about['machine']}, torch {about['versions']['torch']}."
    return "\n".join([*lines, "", made])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="programs; all by default, and only then the page is written")
    parser.add_argument("--write", type=Path, help="for processes: the folder for endings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.write:
        return write_endings(args.names, args.write)
    table = differences(args.names or list(PROGRAMS), print)
    print(section(table))
    if not args.names:
        from page import with_section  # imports all models

        PAGE.write_text(with_section(PAGE.read_text(), section(table), BEGIN))
    return None


if __name__ == "__main__":
    main()
