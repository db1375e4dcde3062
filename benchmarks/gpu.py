"""All checks on a GPU, in one command of less than ten minutes: crashes, waits, bits, late collectives, speed.

    make gpu                              # without a GPU, a dry run on the CPU: every part that can run does
    make gpu WHEELS=wheels ARGS="--parts crashes,speed --out results"

Each part is a process of its own with a time limit, so a part that hangs or dies does not stop the others. The command
writes `gpu.json` and `gpu.md` (results as a table; docs/benchmarks.md describes the parts), and exits with an error if
a case failed that is not in `MAY_FAIL`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# time limits in seconds
PARTS = {"tests": 100, "crashes": 60, "reads": 30, "bits": 40, "late": 60, "collectives": 20, "nccl": 95}
PARTS |= {"overlap": 40, "speed": 155}
MAY_FAIL = {"nccl of 2 ranks", "nccl of 4 ranks"}  # NCCL may refuse several ranks on one GPU
NEEDED = ("optree", "typing_extensions", "pytest")
Row = dict[str, Any]


def with_wheels(folder: str | None, into: Path) -> list[str]:
    """Install missing packages from a folder of wheels into `into`. Returns the paths to import them from."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing or not folder:
        return []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", folder]
    subprocess.run([*command, "--target", str(into), *missing], check=True)
    return [str(into)]


def ran(part: str, paths: list[str], out: Path) -> list[Row]:
    """Run one part. Returns its rows, and a failed row if the part ended early or took too long."""
    rows_file = out / f"{part}.json"
    rows_file.unlink(missing_ok=True)  # has the rows of an earlier run
    path = os.pathsep.join([*paths, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_parts.py"), part, str(rows_file)]
    with open(out / f"{part}.log", "w") as log:
        try:
            code = subprocess.run(command, env=environment, cwd=ROOT, stdout=log, stderr=log, timeout=PARTS[part])
            ended = "" if code.returncode == 0 else f"ended with {code.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {PARTS[part]} s"
    rows: list[Row] = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    if ended:
        last = (out / f"{part}.log").read_text().strip().splitlines()[-1:]
        rows.append({"part": part, "case": "the whole part", "state": "failed", "what": f"{ended}: {' '.join(last)}"})
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table: one line counts the right cases of a part, every other case has its own line."""
    lines = ["| part | case | | |", "|---|---|---|---|"]
    for part in PARTS:
        here = [row for row in rows if row["part"] == part]
        good = [row for row in here if row["state"] == "right" and not row["what"]]
        if good:
            lines.append(f"| {part} | {len(good)} cases | right | |")
        for row in (row for row in here if row not in good):
            lines.append(f"| {part} | {row['case']} | {row['state']} | {row['what'].replace('|', '/')[:300]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the parts one after the other, write both files, and exit with an error if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--out", default=None, help="a folder for gpu.json, gpu.md and the parts' logs")
    parser.add_argument("--wheels", default=os.environ.get("FSHARD_WHEELS"), help="a folder of wheels to install from")
    args = parser.parse_args()
    out = Path(args.out or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    paths, rows = with_wheels(args.wheels, out / "packages"), list[Row]()
    for part in args.parts.split(","):
        rows += ran(part, paths, out)
        print(part, *{row["state"] for row in rows if row["part"] == part}, flush=True)
    (out / "gpu.json").write_text(json.dumps(rows, indent=1))
    (out / "gpu.md").write_text(table(rows))
    print(table(rows), f"written to {out}", sep="\n")
    failed = [row for row in rows if row["state"] == "failed" and row["case"] not in MAY_FAIL]
    sys.exit(f"{len(failed)} case(s) failed" if failed else 0)


if __name__ == "__main__":
    main()
