"""Faults that only GPUs would show, put into a copy of fshard: which check finds each?

    python tools/faults.py [--tools COMMIT] [WORD ...]    # all, or those that have a word in their names

A fault is found if what must find it does (`SIGNS`). With `--tools` the checks are those of a commit. A line of the
result has the fault, what finds it, and how often.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SIGNS = {  # of what the checks print
    "freed too early": r"(\d+) times: freed while",
    "race": r"(\d+) times: .* still",
    "not written": "nobody wrote",
    "number": r"expected, got|: expected \{",
    "test": r"^FAILED",
    "error": r"^\S+ .*Error: |ended with",
}


class Fault(NamedTuple):
    """What must find a fault (of `SIGNS`), by which check, and what is replaced in a file of fshard."""

    name: str
    found_by: str
    check: str
    file: str
    old: str
    new: str


TABLE = "tools/fakegpu/table.py 8-fast 2x4-exact --kinds full,int8"
HOST = "tools/fakegpu/table.py 8-fast 2x4-exact --kinds host"
HYBRID = "tools/fakegpu/table.py 2x4-exact 2x4-fast-last --kinds full,bf16,wide,wide bf16"
TREES = "tools/fakegpu/table.py 2x4-fast-last --kinds tree ddp,tree whole"
PYTEST = "-m pytest -c /dev/null --rootdir=tools/fakegpu --confcutdir=tools/fakegpu -p no:cacheprovider "
PROCESSES = f"{PYTEST}tools/fakegpu/test_processes.py -k kinds"
TRAVEL, UNDER_WAY, OFFLOAD = "grad/travel.py", "grad/under_way.py", "plan/ahead.py"
JOIN, CLEAR = "            self._side.join()\n            self._stepped.clear()", "            self._stepped.clear()"
TAKE = "self.join()\n                unit.buffers ="
END = "        self.join()\n\n    def drop"
STEP = "        self.join()\n        0 if self._side is None else {}\n\n    def drop"
NOTHING = "[Pending(None, lambda _: torch.empty(0))]"
FAULTS = [  # in pairs of lines: the name, what must find it and the check; the file, the old text and the new one
    Fault("no wait for sums", "race", TABLE,
          UNDER_WAY, JOIN, CLEAR),
    Fault("a question instead of the wait for sums", "race", TABLE,
          UNDER_WAY, JOIN, JOIN.replace("join", "_stream.query")),
    Fault("no wait for NCCL", "race", TABLE,
          "comm/process_groups.py", "works[0].wait() if self.timeout is None else", "self.timeout and"),
    Fault("reductions under way are dropped", "freed too early", TABLE,
          UNDER_WAY, "self._stepped += older", f"self._stepped += {NOTHING}"),
    Fault("a copy to the host too early", "race", HOST,
          OFFLOAD, "self.ahead():\n            row", "self._module.stream(self._stream):\n            row"),
    Fault("the host reads too early", "race", HOST,
          OFFLOAD, "        self._module.synchronize()", "        pass"),
    Fault("rows that nobody waits for", "race", "tools/fakegpu/table.py 1-fast --kinds host",
          OFFLOAD, "self.join()\n            return x", "return x"),
    Fault("pageable rows", "number", HOST,
          OFFLOAD, "pin_memory=device != HOST", "pin_memory=False"),
    Fault("no wait for updates in the backward", "race", "tools/fakegpu/table.py 8-fast 2x4-exact --kinds in_backward",
          UNDER_WAY, JOIN, CLEAR),
    Fault("int() of a tensor in a step", "error", TABLE,
          UNDER_WAY, END, STEP.format("int(torch.ones((), device=self._side.device))")),
    Fault("torch.tensor() of a number in a step", "error", TABLE,
          UNDER_WAY, END, STEP.format("torch.tensor(0.0, device=self._side.device)")),
    Fault("a number is moved in a step", "error", TABLE,
          UNDER_WAY, END, STEP.format("torch.zeros(()).to(self._side.device)")),
    Fault("event.synchronize() in a step", "number", TABLE,
          UNDER_WAY, END, STEP.format("torch.cuda.current_stream().record_event().synchronize()")),
    Fault("sums on the computation's stream", "number", TABLE,
          UNDER_WAY, "return self._side.ahead()", "return nullcontext()"),
    Fault("buffers are kept to the end", "number", TABLE,
          UNDER_WAY, JOIN, "            self._side.join()"),
    Fault("no wait before a unit's room", "number", TABLE,
          UNDER_WAY, "        if self.stages > 1:\n            return", "        return"),
    Fault("gathers start late", "number", TABLE,
          UNDER_WAY, "        if self.most == 1:", "        return\n        if self.most == 1:"),
    Fault("what is sent is freed too early", "freed too early", TABLE,
          "comm/ranks.py", "self._sent = [x for x in sent", "self._sent = [x for x in ()"),
    Fault("freed too early over the first axis", "freed too early", HYBRID,
          UNDER_WAY, "self._stepped += older", f"self._stepped += {NOTHING}"),
    Fault("no wait between two axes", "number", HYBRID,
          UNDER_WAY, TAKE, TAKE.replace("join()", "_stepped.clear()")),
    Fault("gaps are not zeroed", "not written", TABLE,
          "layout/row.py", "if gaps and not add:", "if False:"),
    Fault("gaps are not zeroed, in processes", "test", PROCESSES,
          "layout/row.py", "if gaps and not add:", "if False:"),
    Fault("a rate in float64", "error", "tools/fakegpu/table.py 8-fast",
          "update/kernels.py", "return lr.float() if", "return lr if"),
    Fault("another order on two communicators", "test", PROCESSES,
          UNDER_WAY, "in enumerate(units):",
          "in sorted(enumerate(units), reverse=self._plan.live_mesh().get_rank() % 2 > 0):"),
    Fault("another size on one rank", "test", PROCESSES,
          TRAVEL, "all_gather(all_gather_input, self", "all_gather(all_gather_input[self._ranks.rank % 2 :], self"),
    Fault("long words of an assertion", "error", "tools/fakegpu/table.py 8-fast --kinds frozen",
          "grad/writes.py", "words.encode()[:254].decode", "(words * 2).encode().decode"),
    Fault("tree sums are freed too early", "freed too early", TREES,
          "comm/reduction.py", "all_gather(part, ranks, label).keeping(part)", "all_gather(part, ranks, label)"),
]  # fmt: skip


def copied(folder: Path, tools: str | None) -> None:
    """A copy of fshard and of the checks, or of those of a commit."""
    for name in ("fshard", "benchmarks", "tools/fakegpu"):
        if tools is None or name != "tools/fakegpu":
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    if tools is not None:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", tools, "tools/fakegpu"], stdout=-1, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    (ROOT / "tools/fakegpu/stub/build").mkdir(exist_ok=True)
    (folder / "tools/fakegpu/stub/build").symlink_to(ROOT / "tools/fakegpu/stub/build")


def found(folder: Path, check: str) -> Counter[str]:
    """What a check prints of a copy, counted by its sign."""
    words, _, kinds = check.partition(" --kinds ")
    command = [sys.executable, *words.split(), *(["--kinds", kinds] if kinds else [])]
    env = {**os.environ, "FAKEGPU_WAIT": "20", "PYTHONPATH": ""}  # seconds until ranks that wait for each other give up
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, env=env, cwd=folder, check=False)
    result = Counter[str]()
    for line in done.stdout.splitlines():
        hit = next(((sign, hit) for sign, words in SIGNS.items() if (hit := re.search(words, line))), None)
        if hit is not None:
            result[hit[0]] += int(hit[1][1]) if hit[1].groups() else 1
    return result


def main() -> None:
    """Put each fault that the arguments name into a copy, and print a row of a table for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of names of faults")
    parser.add_argument("--tools", help="a commit whose checks are used")
    args = parser.parse_args()
    print("| fault | must be found by | found |\n|---|---|---|")
    missed = sum(not tried(fault, args.tools) for fault in FAULTS if all(word in fault.name for word in args.words))
    sys.exit(f"{missed} not found" if missed else 0)


def tried(fault: Fault, tools: str | None) -> bool:
    """Whether a fault is found by what must find it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder, tools)
        file = folder / "fshard" / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            sys.exit(f"{fault.name}: {fault.old!r} is {text.count(fault.old)} times in {fault.file}")
        file.write_text(text.replace(fault.old, fault.new))
        by = found(folder, fault.check)
    words = ", ".join(f"{sign} ({number})" for sign, number in by.items()) or "nothing"
    print(f"| {fault.name} | {fault.found_by} | {words} |", flush=True)
    return fault.found_by in by


if __name__ == "__main__":
    main()
