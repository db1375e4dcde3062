"""Run a Python program on GPUs that are not there: `python tools/fakegpu/run.py [NAME=VALUE ...] PROGRAM [ARG ...]`.

Needs a CUDA build of torch and gcc. The names that the stub reads in the environment:

| name | |
|---|---|
| `FAKEGPU_LOG` | a file for the log: launches, copies, events, waits, collectives (races.py and counts.py read it) |
| `FAKEGPU_ALONE=1` | this process is one rank of as many as it likes; collectives get from all others what it sends |
| `FAKEGPU_POISON=1` | memory is full of NaN when it is given out, and to send a number that nobody wrote is an error |
| `FAKEGPU_MULTICAST=1` | NVLink can add up, so ProcessGroupNCCL registers its memory |
| `FAKEGPU_WAIT` | seconds that a rank waits for another one before it is an error; 20 |
| `NCCL_CHECK_POINTERS=1` | as NCCL's: what is sent and received must be memory of the device |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stub.build import built

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def environment(**more: str) -> dict[str, str]:
    """The environment in which a Python process sees eight GPUs, with `more` set in it."""
    folder = str(built())
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {
        "LD_PRELOAD": f"{folder}/libfakegpu.so",
        "LD_LIBRARY_PATH": folder,  # for libcuda.so.1
        "LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # its thread would end a process that waits
        "CUDA_MODULE_LOADING": "LAZY",
    }
    return {**os.environ, **ours, **more}


def main() -> None:
    """Replace this process by the program."""
    words = sys.argv[1:]
    settings: Mapping[str, str] = {}
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        settings = {**settings, name: value}
    os.execve(sys.executable, [sys.executable, *words], environment(**settings))


if __name__ == "__main__":
    main()
