"""Start a model of 20 GB from `meta` on 8 simulated ranks, one after the other, and measure the peak of memory.

    make bench-initial ARGS="--layers 62 --width 2560"

The model is GPT-2 of transformers in float32. No rank needs more than its share and the largest unit; the figure is the
growth of the peak of resident memory over what the process holds before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time

import torch
from memory import reset_peak, resident
from transformers import GPT2Config, GPT2LMHeadModel

import fshard
from fshard.comm.mesh import AnyMesh
from fshard.testing import simulate

_MMAP_THRESHOLD = -3  # the number of malloc.h


def on_a_rank(mesh: AnyMesh, layers: int, width: int) -> tuple[int, int, int, float]:
    """Bytes of the whole model, of a rank's share and of the largest unit, and the processor time of a rank in s."""
    with torch.device("meta"):
        module = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64))
    apply, params, _ = fshard.module.functionalize(module)
    plan = fshard.make_plan(params, mesh, units=apply.units("transformer.h.*"))
    start = time.thread_time()
    sharded = apply.init(plan)
    seconds = time.thread_time() - start
    whole = 4 * sum(slot.numel for slot in plan.slots)
    return whole, sum(row.nbytes for row in sharded.tensors), 4 * max(sum(u.lengths) for u in plan.units), seconds


def main() -> None:
    """Make the model on every rank in turn, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # freed blocks are returned at once
    # a small model first: what is loaded and cached at the first use is not of this model
    simulate(lambda mesh: on_a_rank(mesh, 1, 64), shard=2)
    gc.collect()
    before = resident("VmRSS")
    reset_peak()
    ranks = simulate(lambda mesh: on_a_rank(mesh, args.layers, args.width), shard=args.ranks)
    peak, (whole, share, unit, _) = resident("VmHWM") - before, ranks[0]
    print(
        f"model {whole / 1e9:.2f} GB, share {share / 1e9:.3f} GB, largest unit {unit / 1e9:.3f} GB, "
        f"peak {peak / 1e9:.3f} GB = {peak / (share + unit):.3f} of both, "
        f"{min(r[3] for r in ranks):.0f} to {max(r[3] for r in ranks):.0f} s of processor time for a rank"
    )


if __name__ == "__main__":
    main()
