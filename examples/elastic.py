"""Processes of a run are killed and come, and the run goes on from memory: on three ranks, two, and three again.

    python examples/elastic.py                          # starts the store and three processes, and kills one
    python examples/elastic.py --store HOST:PORT        # one more process of that run, with --address on another host

A row of the data depends on the step and its number alone, so that any number of ranks makes the same steps.
"""

import argparse
import os
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_model import GPT, GPTConfig
from nanogpt_text import Batch, as_tensor, random_windows, read_text

import fshard
from fshard import elastic, optim

STEPS, ROWS, CONTEXT = 20, 12, 32  # the rows are those of all ranks
KILLED_AT, COMES_AT = 8, 14  # steps

torch.manual_seed(0)
apply, PARAMS, _ = fshard.module.functionalize(GPT(GPTConfig(CONTEXT, 256, n_layer=2, n_head=2, n_embd=32)))
TX = optim.adamw(1e-2)
STEP = fshard.train_step(lambda params, batch: loss(params, batch), TX, clip_norm=1.0, donate=True)


def loss(params: Any, batch: Batch) -> fshard.Mean:
    scores, _ = apply(params, {}, batch["tokens"])
    total = F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return fshard.Mean(total, batch["targets"].numel())


def train(mesh: Any, member: elastic.RunMember) -> None:
    """What each rank does in a round."""
    rank, ranks = fshard.rank_and_size(mesh)
    text = as_tensor(read_text(None, CONTEXT, 0)[0])
    new = fshard.init_state(fshard.shard_params(PARAMS, fshard.make_plan(PARAMS, mesh)), TX)
    state, first = member.start(new)
    if rank == 0:
        print(f"round {member.round.number}: {ranks} ranks from step {first}", flush=True)
    for number in range(first, STEPS):
        own = range(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
        state, metrics = STEP(state, random_windows(text, CONTEXT, 0, number, own))
        if (member.round.number, rank, number) == (1, 1, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)
        if (rank, number) == (0, COMES_AT) and ranks == 2:  # the example shall not end before
            member.meeting.store.wait([f"entered/{member.round.number + 1}/1"])
        member.keep(state, number + 1)
    if rank == 0:
        print(f"{STEPS} steps, loss {float(metrics['loss']):.4f}", flush=True)


def join(store: str, address: str) -> None:
    """Be a process of a run until it is over."""
    torch.set_num_threads(1)
    host, port = store.rsplit(":", 1)
    meeting = elastic.Meeting(dist.TCPStore(host, int(port), timeout=timedelta(seconds=60)), address)
    elastic.run(train, meeting, first=3)


def main() -> None:
    """Hold the store, start three processes, and one more when one of them has been killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "--store", f"127.0.0.1:{store.port}"]
    processes = [subprocess.Popen(command) for _ in range(3)]
    while all(process.poll() is None for process in processes):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # until one has ended
    processes.append(subprocess.Popen(command))
    print(f"exit codes: {sorted(process.wait() for process in processes)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", help="address of the store of a run to join")
    parser.add_argument("--address", default="127.0.0.1", help="address of this host, for the other processes")
    given = parser.parse_args()
    join(given.store, given.address) if given.store else main()
