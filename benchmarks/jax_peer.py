"""The system `jax`: a process of its own, which is told when its turn is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FLAGS = "--xla_force_host_platform_device_count={}"


class JaxPeer:
    """A step of JAX (GSPMD) on all ranks' batches. Rank 0 has the process, which computes while the ranks wait.

    The process makes the same parameters and draws the same batches by itself: `draw` says when, outside of the time
    of a step. A loss is nan on the other ranks.
    """

    def __init__(self, name: str, tiny: bool):
        self.process: Any = None
        if dist.get_rank() == 0:
            flags = FLAGS.format(dist.get_world_size())
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            command = [sys.executable, str(Path(__file__).with_name("jax_process.py")), name, *["--tiny"] * tiny]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.draw()
        dist.barrier()

    def draw(self) -> None:
        """Draw the next batch."""
        if self.process:
            self._ask("draw")

    def __call__(self, batch: object) -> Tensor:
        return torch.tensor(self._ask("step") if self.process else float("nan"))

    def peak(self) -> int:
        """Bytes at the peak of the steps after the first, of one rank's share."""
        return self._ask("peak") // dist.get_world_size() if self.process else 0

    def close(self) -> None:
        """End the process."""
        if self.process:
            self.process.stdin.close()
            self.process.wait()

    def _ask(self, command: str) -> Any:
        print(command, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of jax ended at {command!r} with code {self.process.wait()}")
        return json.loads(answer)
