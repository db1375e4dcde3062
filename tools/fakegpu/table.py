"""Every kind of step on GPUs that are not there: `make fakegpu`, or `python tools/fakegpu/table.py [RUN ...]`.

Runs are the first or the last rank of a mesh, a reduction, and eager or a graph (steps.py has the words): `8-fast`,
`2x4-exact-graph`, `8-exact-last`. Two are under way at once. It fails if a step raises, if there is a race, if a step
needs a fifth more memory than estimated, or if a count of a step is not the one in `expected.json`; then it prints
those that differ. `--update` writes them instead. `--page` prints them as a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from counts import BESIDE, COLUMNS, counts_of
from races import judged, lines
from run import environment

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"
FEW = "full,donate,zero1,ddp,bf16,int8,muon"  # kinds of the runs that differ least from others
GRAPHS = f"{FEW},once,together,scaled,dropout"  # a graph takes seconds
RUNS = {
    "8-fast": "",
    "2x4-fast-last": "",
    "2x4-exact": "",
    "8-exact-last": "",
    "1-fast": "",
    "8-fast-graph": GRAPHS,
    "2x4-exact-graph-last": FEW,
    "8-fast-registered": FEW,
}
AT_ONCE, SECONDS = 2, 1800  # of a run, at most
SAY = 20  # seconds between the lines of a run that is under way


class Case(NamedTuple):
    """What the log of one kind of step says."""

    races: Counter[str]
    counts: dict[str, int]  # of the last step, by column
    peak: int  # bytes of torch's allocator
    estimate: int


class Result(NamedTuple):
    """The kinds of a run by name, what failed in it, as lines, and how long it took."""

    cases: dict[str, Case]
    failed: list[str]
    seconds: float


def ran(run: str, chosen: str, folder: Path) -> Result:
    """Run the kinds of one run in a process of its own; what fails is printed at once."""
    more = {"FAKEGPU_MULTICAST": "1"} if "registered" in run else {}
    log, errors, begin, failed = folder / f"{run}.log", folder / f"{run}.err", time.monotonic(), list[str]()
    command = [sys.executable, str(HERE / "steps.py"), run, *filter(None, [chosen])]
    env = environment(FAKEGPU_ALONE="1", FAKEGPU_LOG=str(log), FAKEGPU_POISON="1", NCCL_CHECK_POINTERS="1", **more)
    with errors.open("w") as file, subprocess.Popen(command, env=env, stdout=-1, stderr=file, text=True) as process:
        late = Timer(SECONDS, process.kill)
        late.start()
        failed += followed(run, process)
        late.cancel()
    if process.returncode:
        failed.append(f"{run}: ended with {process.returncode}: {errors.read_text().strip()[-2000:]}")
        print(failed[-1], flush=True)
    return Result(cases_of(log) if log.exists() else {}, failed, time.monotonic() - begin)


def followed(run: str, process: subprocess.Popen[str]) -> list[str]:
    """Read what a run says until it ends: now and then how far it is, and what failed, which is returned."""
    said, failed = time.monotonic(), list[str]()
    for done, line in enumerate(process.stdout or (), 1):
        if not line.startswith("ran "):
            failed.append(f"{run} {line.strip()}")
            print(failed[-1], flush=True)
        elif time.monotonic() - said > SAY:
            said = time.monotonic()
            print(f"  {run}: {done} kinds, the last one {line.strip().removeprefix('ran ')}", flush=True)
    return failed


def cases_of(log: Path) -> dict[str, Case]:
    """The cases of a log that came to their end, by name."""
    found, counts, name, cases = judged(log), counts_of(log), "", dict[str, Case]()
    for line in lines(log):
        name = line.says.get("name", name) if line.word == "case" else name
        if line.word == "peak":
            counts[name].update(beside(found[name].counted))
            of = {column: counts[name][column] for column in COLUMNS + BESIDE if counts[name][column]}
            cases[name] = Case(found[name].races, of, line.number("bytes"), line.number("estimate"))
    return cases


def beside(collectives: Mapping[str, int]) -> dict[str, int]:
    """How many gathers, and sums, were under way while the computation went on."""
    gathers = collectives.get("all_gather", 0)
    return dict(zip(BESIDE, (gathers, sum(collectives.values()) - gathers), strict=True))


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
            found.append(f"{run} {name}: {differing(numbers(case), expected.get(name))}")
    return found


def differing(got: dict[str, int], expected: dict[str, int] | None) -> str:
    """The numbers that are not as expected."""
    if expected is None:
        return "expected.json has no such case: write it with --update"
    names = [name for name in {**expected, **got} if expected.get(name, 0) != got.get(name, 0)]
    return ", ".join(f"{expected.get(name, 0)} {name} expected, got {got.get(name, 0)}" for name in names)


def page(results: dict[str, dict[str, Case]]) -> str:
    """A table for reading: for each kind and run what a step calls, and what is not 0."""
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


Numbers = dict[str, dict[str, int]]  # of the cases of a run, by name


def written(new: dict[str, Numbers], old: dict[str, Numbers]) -> str:
    """The text of expected.json: one line for each kind."""
    runs = []
    for run in (run for run in RUNS if run in new or run in old):
        cases = new.get(run) or old[run]
        inside = ",\n".join(f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in cases.items())
        runs.append(f" {json.dumps(run)}: {{\n{inside}\n }}")
    return "{\n" + ",\n".join(runs) + "\n}\n"


def checked(run: str, args: argparse.Namespace, folder: Path, expected: Numbers) -> Result:
    """Run, and compare with what is expected unless that is to be written; what is wrong is printed."""
    result = ran(run, args.kinds or RUNS.get(run, ""), folder)
    bad = wrong(run, result.cases, {name: numbers(x) for name, x in result.cases.items()} if args.update else expected)
    end = f"{run}: {len(result.cases)} kinds of steps in {result.seconds:.0f} s, {len(bad + result.failed)} wrong"
    print(end, *bad, sep="\n", flush=True)
    return result._replace(failed=result.failed + bad)


def main() -> None:
    """Run what the arguments name, and exit with an error if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=[*RUNS], help="which runs; all of them if none is named")
    parser.add_argument("--kinds", default="", help="which kinds, separated by commas")
    parser.add_argument("--update", action="store_true", help="write the counts to expected.json")
    parser.add_argument("--page", action="store_true", help="print the table")
    args = parser.parse_args()
    folder, old = Path(tempfile.mkdtemp()), json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda run: checked(run, args, folder, old.get(run, {})), args.runs)
        results = dict(zip(args.runs, found, strict=True))
    if args.update:
        new = {run: {name: numbers(case) for name, case in x.cases.items()} for run, x in results.items()}
        few = {run: {**old.get(run, {}), **cases} for run, cases in new.items()}
        EXPECTED.write_text(written(few if args.kinds else new, old))
    if args.page:
        print(page({run: x.cases for run, x in results.items()}))
    print(f"logs are in {folder}")
    bad = sum(len(x.failed) for x in results.values())
    sys.exit(f"{bad} wrong" if bad else 0)


if __name__ == "__main__":
    main()
