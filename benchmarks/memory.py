"""The resident memory of this process (Linux)."""

from __future__ import annotations

import gc
from pathlib import Path


def resident(key: str = "VmRSS") -> int:
    """Bytes of an entry of /proc/self/status: "VmRSS" is resident now, "VmHWM" at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def peak() -> int:
    """Bytes that were resident at the peak. Memory that processes share counts in parts: half if two have mapped it."""
    rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return resident("VmHWM") - resident("RssShmem") + int(rollup["Pss_Shmem"].split()[0]) * 1024


def reset_peak() -> None:
    """Set the peak to what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
