"""All checks on GPUs that are not there: `make fakegpu`, or `python tools/fakegpu/check.py [PART [ARGUMENT ...]]`.

Needs a CUDA build of torch, gcc, and no GPU. `PARTS` are all of them; arguments follow the part that they are for:
`table 8-fast --update`, `processes -k axes`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run import environment

HERE = Path(__file__).resolve().parent
PARTS = {  # what each does, and its time on two free cores
    "detectors": "each detector is seen to fire on a small fault; 10 seconds",
    "draws": "remat on devices draws the same numbers again; 10 seconds",
    "processes": "2 to 4 processes, with values between them; 3 minutes",
    "table": "every kind of step on one rank of several, two runs at a time; 3 minutes",
    "compiled": "what Inductor makes of a step; 2 minutes",
    "peaks": "what systems of `make gpu` allocate and reserve in full size; a minute",
}
# without the repository's conftest.py, which needs packages that the CUDA environment does not have
PYTEST = [
    "-m",
    "pytest",
    "-v",
    "--no-header",
    "-c",
    "/dev/null",
    f"--rootdir={HERE}",
    f"--confcutdir={HERE}",
    "-p",
    "no:cacheprovider",
]


ALONE = ("draws", "one_device")  # the files of the part "draws"


def ran(part: str, arguments: list[str]) -> bool:
    """Run a part in a process of its own. Returns whether all is right."""
    with tempfile.TemporaryDirectory() as folder:
        alone = environment(FAKEGPU_ALONE="1", FAKEGPU_LOG=f"{folder}/log")
        poisoned = {**alone, "FAKEGPU_POISON": "1"}
        commands = {
            "detectors": ([*PYTEST, "-W", "error", f"{HERE}/test_detectors.py", *arguments], poisoned),
            "draws": (
                [*PYTEST, "-W", "error", f"{HERE}/test_draws.py", f"{HERE}/test_one_device.py", *arguments],
                alone,
            ),
            "processes": ([*PYTEST, "-s", f"{HERE}/test_processes.py", *arguments], None),
            "table": ([f"{HERE}/table.py", *arguments], None),
            "compiled": ([*PYTEST, "-W", "error", f"{HERE}/test_compiled.py", *arguments], alone),
            "peaks": ([f"{HERE}/peaks.py", *arguments], environment(FAKEGPU_ALONE="1")),
        }
        command, env = commands[part]
        print(f"--- {part}: {PARTS[part]}", flush=True)
        begin = time.monotonic()
        code = subprocess.run([sys.executable, *command], env=env, cwd=HERE, check=False).returncode
        print(f"--- {part}: {'failed' if code else 'right'}, {time.monotonic() - begin:.0f} s", flush=True)
        return not code


def main() -> None:
    """Run the parts that the arguments name, or all, and exit with an error if one fails."""
    words = sys.argv[1:]
    if words and words[0] not in PARTS:
        sys.exit(f"{words[0]!r} is no part: expected one of {', '.join(PARTS)}")
    failed = [part for part in words[:1] or PARTS if not ran(part, words[1:])]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
