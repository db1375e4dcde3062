"""Every kind of step on GPUs that are not there: `make fakegpu`, or `python tools/fakegpu/table.py [RUN ...]`.

Runs are rank 0 of a mesh, a reduction, and eager or a graph: `8-fast`, `2x4-exact-graph`, `8-fast-registered`. It
fails if a step raises, if there is a race, if a step needs a fifth more memory than estimated, or if a count of a
step is not the one in `expected.json`; then it prints those that differ. `--update` writes them instead. `--page`
prints the table of docs/fakegpu.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from counts import COLUMNS, counts_of
from races import lines, races_of
from run import environment

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"
FEW = "full,donate,zero1,ddp,bf16,int8,muon"  # kinds of the runs that differ least from others
GRAPHS = f"{FEW},once,together,scaled,dropout"  # a graph takes seconds
RUNS = {
    "1-fast": "",
    "8-fast": "",
    "8-exact": "",
    "2x4-fast": "",
    "2x4-exact": "",
    "8-fast-graph": GRAPHS,
    "2x4-exact-graph": FEW,
    "8-fast-registered": FEW,
}
SECONDS = 600


class Case(NamedTuple):
    """What the log of one kind of step says."""

    races: Counter[str]
    counts: dict[str, int]  # of the last step, by column
    peak: int  # bytes of torch's allocator
    estimate: int


def ran(run: str, chosen: str, folder: Path) -> tuple[dict[str, Case], list[str]]:
    """Run the kinds of one run in a process of its own. Returns them by name, and what it printed: what failed."""
    mesh, reduction, *how = run.split("-")
    more = {"FAKEGPU_MULTICAST": "1"} if "registered" in how else {}
    log = folder / f"{run}.log"
    command = [sys.executable, str(HERE / "steps.py"), mesh, reduction, "eager" if "graph" in how else "off"]
    env = environment(FAKEGPU_ALONE="1", FAKEGPU_LOG=str(log), FAKEGPU_POISON="1", NCCL_CHECK_POINTERS="1", **more)
    done = subprocess.run(
        [*command, *filter(None, [chosen])], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    failed = [f"{run} {line}" for line in done.stdout.splitlines()]
    if done.returncode:
        failed.append(f"{run}: ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return cases_of(log), failed


def cases_of(log: Path) -> dict[str, Case]:
    """The cases of a log that came to their end, by name."""
    races, counts, name, cases = races_of(log), counts_of(log), "", dict[str, Case]()
    for line in lines(log):
        name = line.says.get("name", name) if line.word == "case" else name
        if line.word == "peak":
            of = {column: counts[name][column] for column in COLUMNS if counts[name][column]}
            cases[name] = Case(races[name], of, line.number("bytes"), line.number("estimate"))
    return cases


def numbers(case: Case) -> dict[str, int]:
    """What must not change without being noticed."""
    return {**case.counts, "peak KiB": case.peak >> 10}


def wrong(run: str, cases: dict[str, Case], expected: dict[str, dict[str, int]]) -> list[str]:
    """What is wrong with a run, as lines."""
    found = []
    for name, case in cases.items():
        found += [f"{run} {name}: {number} times: {words}" for words, number in case.races.items()]
        if case.peak > 1.2 * case.estimate and not run.startswith("1-"):  # one rank's optimizer works on whole leaves
            found.append(f"{run} {name}: needs {case.peak >> 10} KiB, estimated were {case.estimate >> 10} KiB")
        if numbers(case) != expected.get(name):
            found.append(f"{run} {name}: expected {expected.get(name)}, got {numbers(case)}")
    return found


def page(results: dict[str, dict[str, Case]]) -> str:
    """The table of docs/fakegpu.md: a row for each kind, and in each run what a step calls, and what is not 0."""
    kinds = list(dict.fromkeys(name for cases in results.values() for name in cases))
    rows = [["kind", *results], ["---"] * (1 + len(results))]
    rows += [[name.replace("_", " "), *(cell(cases.get(name)) for cases in results.values())] for name in kinds]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(case: Case | None) -> str:
    """Collectives and messages of a step, its peak, and races, waits and cudaMallocs if there are any."""
    if case is None:
        return ""
    sent = f"{case.counts.get('collectives', 0)}" + (f"+{case.counts['messages']}" if "messages" in case.counts else "")
    odd = {"races": len(case.races), **{c: case.counts.get(c, 0) for c in ("host waits", "cudaMallocs")}}
    words = [f"**{number} {name}**" for name, number in odd.items() if number]
    return ", ".join([f"{sent}; {case.peak / case.estimate:.2f}", *words])


def written(results: dict[str, dict[str, Case]], old: dict[str, dict[str, dict[str, int]]]) -> str:
    """The text of expected.json: one line for each kind."""
    new = {**old, **{run: {name: numbers(case) for name, case in cases.items()} for run, cases in results.items()}}
    runs = []
    for run, cases in new.items():
        inside = ",\n".join(f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in cases.items())
        runs.append(f" {json.dumps(run)}: {{\n{inside}\n }}")
    return "{\n" + ",\n".join(runs) + "\n}\n"


def main() -> None:
    """Run what the arguments name, and exit with an error if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=[*RUNS], help="which runs; all of them if none is named")
    parser.add_argument("--kinds", default="", help="which kinds, separated by commas")
    parser.add_argument("--update", action="store_true", help="write the counts to expected.json")
    parser.add_argument("--page", action="store_true", help="print the table")
    args = parser.parse_args()
    folder, bad, results = Path(tempfile.mkdtemp()), list[str](), dict[str, dict[str, Case]]()
    old = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for run in args.runs:
        begin = time.monotonic()
        results[run], failed = ran(run, args.kinds or RUNS.get(run, ""), folder)
        bad += failed + ([] if args.update else wrong(run, results[run], old.get(run, {})))
        print(f"{run}: {len(results[run])} kinds of steps in {time.monotonic() - begin:.0f} s", flush=True)
    if args.update:
        EXPECTED.write_text(written(results, old))
        bad += [line for run in results for line in wrong(run, results[run], json.loads(EXPECTED.read_text())[run])]
    print(*([page(results)] if args.page else []), *bad, f"logs are in {folder}", sep="\n")
    sys.exit(f"{len(bad)} wrong" if bad else 0)


if __name__ == "__main__":
    main()
