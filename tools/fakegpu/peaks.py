"""What systems of `make gpu` allocate and reserve in their full size: `make fakegpu ARGS=peaks`.

Torch's allocator is its own and no kernel runs, so the numbers are a GPU's. A number that is not in `peaks.json` is an
error; `ARGS="peaks --update"` writes the file instead. Names choose systems: `peaks fshard FSDP2`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

EXPECTED = Path(__file__).with_name("peaks.json")
SYSTEMS = ("fshard", "fshard, in backward", "fshard, jit", "FSDP2", "unsharded")
SIZE = (2048, 12, 16, 8, 1024)  # gpu_speed.LARGE where there is a GPU
STEPS = 3


def measured(name: str) -> None:
    """Print what the last of some steps of a system allocates and reserves, in GiB, and end the process."""
    import gpu_speed
    import torch
    from gpu_parts import one_rank

    torch.backends.cuda.enable_cudnn_sdp(False)
    gpu_speed.BACKEND = "inductor"
    run = gpu_speed.SYSTEMS[name](one_rank(), SIZE)
    for _ in range(STEPS):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    print(json.dumps([round(stats[f"{kind}_bytes.all.peak"] / 2**30, 2) for kind in ("allocated", "reserved")]))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Measure systems, each in a process of its own, and exit with an error if one needs other memory than expected."""
    words = sys.argv[1:]
    if words[:1] == ["--alone"]:
        measured(words[1])
    expected, wrong = json.loads(EXPECTED.read_text()), 0
    for name in [word for word in words if word != "--update"] or SYSTEMS:
        done = subprocess.run([sys.executable, __file__, "--alone", name], stdout=subprocess.PIPE, check=True)
        got = json.loads(done.stdout)
        is_right = got == expected.get(name)
        wrong += not is_right
        print(
            f"{name}: {got} GiB allocated and reserved" + f", expected {expected.get(name)}" * (not is_right),
            flush=True,
        )
        expected[name] = got
    if "--update" in words:
        lines = (f" {json.dumps(name)}: {json.dumps(peaks)}" for name, peaks in expected.items())
        EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif wrong:
        sys.exit(f"{wrong} other peaks: write them with --update")


if __name__ == "__main__":
    main()
