"""All checks on one GPU or several in a quarter of an hour, what is wanted most first; what is known is measured last.

    make gpu                              # without a GPU, a dry run on the CPU: every part that can run does
    make gpu WHEELS=wheels ARGS="--parts correct,speed --seconds 200 --out results"

Each part is a process of its own with a time limit, so a part that hangs or dies does not stop the others, and a part
that no longer fits is left out. Each row is printed and kept when it is known: a command that is killed has lost none.
The folder has `gpu.md` (the table; RESULTS.md describes the parts), `gpu.jsonl` (the same with figures),
`gpu.log` (what the parts said) and traces. The command fails if a case failed, but not if NCCL refuses to begin with
several ranks on one GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpu_rows import FIRST, ROOT, Row, Rows, read, table

# In this order, with limits in seconds: they are more than SECONDS together, as few parts need theirs.
PARTS = {"ceilings": 25, "correct": 90, "speed": 270, "several": 300, "waits": 40, "graphs": 200, "nccl": 120}
PARTS |= {"systems": 120, "values": 60, "bits": 40, "tests": 45, "late": 60, "collectives": 25}
SECONDS = 840
GPUS = len([*Path("/dev").glob("nvidia[0-9]*")])
SHORTEST = 15  # seconds that a part needs at least
FILES = ("gpu.md", "gpu.jsonl", "gpu.log", "trace_*.json.gz")
NEEDED = ("optree", "typing_extensions", "pytest")


def with_wheels(folder: str | None, into: Path) -> list[str]:
    """Install missing packages from a folder of wheels into `into`. Returns the paths to import them from."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing or not folder:
        return []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", folder]
    subprocess.run([*command, "--target", str(into), *missing], check=True)
    return [str(into)]


def run(part: str, paths: list[str], out: Path, seconds: float) -> None:
    """Run one part for at most so many seconds. A part that ends early, or is ended, is a failed row."""
    path = os.pathsep.join([*paths, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, *FIRST, str(ROOT / "benchmarks" / "gpu_parts.py"), part, str(out), str(seconds)]
    with open(out / "gpu.log", "a") as log:
        log.write(f"--- {part}\n")
        log.flush()
        # a session of its own, so that what a part has started ends with it
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=log, start_new_session=True)
        try:
            code = process.wait(seconds)
            ended = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            ended = f"was ended after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # what it has started, too, when it has ended itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if ended:
        last = (out / "gpu.log").read_text(errors="replace").strip().splitlines()[-1:]
        Rows(part, out).add("the whole part", "failed", f"{ended}: {' '.join(last)}")


def in_order(gpus: int) -> list[str]:
    """All parts; what several GPUs do comes first where there are several: nobody has seen it."""
    return sorted(PARTS, key=lambda part: gpus > 1 and part != "several")


def main() -> None:
    """Run the parts one after the other, print the table, and exit with an error if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(in_order(GPUS)), help="which, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that all parts have together")
    parser.add_argument("--out", default=None, help="a folder for the table, the figures, the log and traces")
    parser.add_argument("--wheels", default=os.environ.get("FSHARD_WHEELS"), help="a folder of wheels to install from")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    until = time.monotonic() + args.seconds
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the part that runs ends, too
        signal.signal(number, lambda *_: sys.exit("ended from outside"))
    with tempfile.TemporaryDirectory() as packages:
        out = Path(args.out or tempfile.mkdtemp())
        out.mkdir(parents=True, exist_ok=True)
        for old in (path for name in FILES for path in out.glob(name)):  # an earlier run's
            old.unlink()
        paths = with_wheels(args.wheels, Path(packages))
        for part in parts:
            seconds = min(PARTS[part], until - time.monotonic())
            if seconds < SHORTEST:
                Rows(part, out).add("the whole part", "skipped", "left out: no time")
                continue
            run(part, paths, out, seconds)
    rows = read(out)
    print(table(rows), f"written to {out}", sep="\n")
    failed = [row for row in rows if row["state"] == "failed" and not _refused(row["case"], rows)]
    sys.exit(f"{len(failed)} case(s) failed" if failed else 0)


def _refused(case: str, rows: Sequence[Row]) -> bool:
    """Whether a case is that of ranks which share a GPU, and NCCL refused them: then no kind of steps has a row."""
    return case.startswith("nccl of ") and not any(row["case"].startswith(f"{case}, ") for row in rows)


if __name__ == "__main__":
    main()
