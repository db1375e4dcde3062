"""All checks on GPUs that are not there: `make fakegpu`, or `python tools/fakegpu/check.py [PART ...]`.

Needs a CUDA build of torch, gcc, and no GPU. The parts are `detectors` (each is seen to fire), `processes` (several,
with values between them), `table` (kinds of steps; its arguments follow it: `table 8-fast --update`) and `compiled`
(what Inductor makes of a step).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from run import environment

HERE = Path(__file__).resolve().parent
PARTS = ("detectors", "processes", "table", "compiled")
# without the repository's conftest.py, which needs packages that the CUDA environment does not have
PYTEST = [
    "-m",
    "pytest",
    "-q",
    "-c",
    "/dev/null",
    f"--rootdir={HERE}",
    f"--confcutdir={HERE}",
    "-p",
    "no:cacheprovider",
]


def ran(part: str, arguments: list[str]) -> bool:
    """Run a part in a process of its own. Returns whether all is right."""
    with tempfile.TemporaryDirectory() as folder:
        alone = environment(FAKEGPU_ALONE="1", FAKEGPU_LOG=f"{folder}/log")
        poisoned = {**alone, "FAKEGPU_POISON": "1"}
        commands = {
            "detectors": ([*PYTEST, "-W", "error", f"{HERE}/test_detectors.py"], poisoned),
            "processes": ([*PYTEST, f"{HERE}/test_processes.py"], None),
            "table": ([f"{HERE}/table.py", *arguments], None),
            "compiled": ([*PYTEST, "-W", "error", f"{HERE}/test_compiled.py", *arguments], alone),
        }
        command, env = commands[part]
        print(f"--- {part}", flush=True)
        return subprocess.run([sys.executable, *command], env=env, cwd=HERE, check=False).returncode == 0


def main() -> None:
    """Run the parts that the arguments name, or all, and exit with an error if one fails."""
    words = sys.argv[1:]
    parts = [words[0]] if words and words[0] in PARTS else PARTS
    arguments = words[1:] if words and words[0] in PARTS else words
    failed = [part for part in parts if not ran(part, arguments)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
