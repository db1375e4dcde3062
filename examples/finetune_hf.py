"""Fine-tune GPT-2 of transformers, sharded over two ranks: a base model of Python's help texts learns Python's source.

    torchrun --nproc-per-node=2 examples/finetune_hf.py                           # two processes
    python examples/finetune_hf.py --simulate --model runs/finetune_hf/base       # two simulated ranks: the same bits

Without `--model DIRECTORY` the base is trained first. Tokens are bytes. Needs `pip install -e ".[examples,models]"`.
"""

import argparse
import email
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from rich.progress import track
from torch.distributed.device_mesh import init_device_mesh

import fshard

HELP = "\n".join(topics.values()).encode()
SOURCE = b"\n".join(path.read_bytes() for path in sorted(Path(email.__file__).parent.glob("*.py")))
WORDS = {"vocab_size": 256, "n_positions": 64, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
CONFIG = hf.GPT2Config(**WORDS, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1)


def fit(params: fshard.Sharded, apply: Any, text: bytes, mesh: Any, args: Any, name: str) -> fshard.Sharded:
    """The parameters after training on a text. Rank 0 also writes them to a directory, as transformers reads it."""

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return apply(params, {}, input_ids=tokens, labels=tokens)[0].loss

    tx, data, rank = fshard.optim.adamw(3e-3), torch.tensor(list(text)), mesh.get_rank()
    step = fshard.train_step(loss, tx, clip_norm=1.0, reduction=fshard.reduction.TreeSums(slices=2), donate=True)
    state, losses = fshard.init_state(params, tx, seed=1), list[float]()  # the seed is that of dropout
    generator = torch.Generator().manual_seed(0)  # the same on all ranks, each of which takes its rows
    for _ in track(range(args.steps), name, disable=rank > 0):
        rows = torch.randint(len(data) - 64, (16, 1), generator=generator) + torch.arange(64)
        state, metrics = step(state, data[rows].chunk(mesh.size())[rank])
        losses.append(metrics["loss"].item())
    whole, module = fshard.state_dict(state.params, rank=0), hf.GPT2LMHeadModel(CONFIG).eval()
    if rank == 0:
        module.load_state_dict(whole)
        module.save_pretrained(args.out / name)
        line = module.generate(torch.tensor([list(b"The ")]), max_length=60, do_sample=True, temperature=0.6)[0]
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, and it writes {bytes(line.tolist())!r}")
    return state.params


def run(mesh: Any, args: Any) -> None:
    torch.set_num_threads(1)  # as torchrun does: the number changes the order of sums inside an operator
    hf.logging.set_verbosity_error()  # it would remark that the kind of loss is the default
    hf.logging.disable_progress_bar()  # of files it writes
    with torch.device("meta"):
        module = hf.GPT2LMHeadModel(CONFIG).train()
    module.activation_checkpointing_enable({"use_reentrant": False})
    apply, shapes, _ = fshard.module.functionalize(module)
    plan = fshard.make_plan(shapes, mesh)
    load = fshard.checkpoint.load_safetensors
    base = load(args.model, plan) if args.model else fit(apply.init(plan), apply, HELP, mesh, args, "base")
    fit(base, apply, SOURCE, mesh, args, "tuned")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune GPT-2, sharded over two ranks.")
    parser.add_argument("--simulate", action="store_true", help="two simulated ranks, in this process")
    parser.add_argument("--model", type=Path, help="a base model that an earlier run wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_hf"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    if args.simulate:
        fshard.testing.simulate(lambda mesh: run(mesh, args), shard=2)
    else:
        dist.init_process_group("gloo")
        run(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)), args)
        dist.destroy_process_group()
