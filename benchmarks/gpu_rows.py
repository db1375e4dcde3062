"""The rows of `make gpu`: each is printed and kept when it is known, and the table is written again."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
FAKE = "libfakegpu" in os.environ.get("LD_PRELOAD", "")  # tools/fakegpu/run.py: operators are the CPU's
FIRST = [str(ROOT / "tools" / "fakegpu" / "recorder.py")] if FAKE else []  # else operators would have no values


class Rows:
    """The rows of one part in a folder: `gpu.jsonl` has a line for each, `gpu.md` all of them as a table."""

    def __init__(self, part: str, out: Path, seconds: float = float("inf")):
        self.part, self.out, self._until = part, out, time.monotonic() + seconds

    def left(self) -> float:
        """The seconds until the part is ended."""
        return self._until - time.monotonic()

    def add(self, case: str, state: str, what: str = "", **more: Any) -> None:
        """Append a row; `state` is "right", "failed", "skipped" or "measured", `more` are figures."""
        row = {"part": self.part, "case": case, "state": state, "what": what, **more}
        with open(self.out / "gpu.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")  # at once: rows of several ranks do not mix
        written(table(read(self.out)), self.out / "gpu.md")
        print(f"{time.strftime('%X')} {state:8} {self.part}: {case}{': ' * bool(what)}{what}", flush=True)

    def attempt(self, case: str, run: Callable[[], object]) -> None:
        """Run a case that appends its rows; an error is a failed row."""
        try:
            run()
        except Exception as failure:
            self.add(case, "failed", sentence(failure))

    def check(self, case: str, run: Callable[[], str | None]) -> None:
        """Run a case and append its row: right if `run` returns nothing, failed with the text or error otherwise."""

        def checked() -> None:
            wrong = run()
            self.add(case, "failed" if wrong else "right", wrong or "")

        self.attempt(case, checked)

    def measure(self, case: str, run: Callable[[], str]) -> None:
        """Run a case and append what it measured, or why it failed."""
        self.attempt(case, lambda: self.add(case, "measured", run()))


def sentence(failure: Exception) -> str:
    """The first line of an error, and the last two places of fshard or of the benchmarks that it came through."""
    ours = [f for f in traceback.extract_tb(failure.__traceback__) if "/fshard/" in f.filename or "gpu_" in f.filename]
    where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in ours[-2:]]
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:300]} {where}"


def read(out: Path) -> list[Row]:
    """The rows of a folder. A line that was cut off is left out."""
    path, rows = out / "gpu.jsonl", list[Row]()
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: one line counts the right cases of a part, every other case has its own line."""
    lines = ["| part | case | | |", "|---|---|---|---|"]
    for part in dict.fromkeys(row["part"] for row in rows):
        here = [row for row in rows if row["part"] == part]
        good = [row for row in here if row["state"] == "right" and not row["what"]]
        if good:
            lines.append(f"| {part} | {len(good)} cases | right | |")
        for row in (row for row in here if row not in good):
            lines.append(f"| {part} | {row['case']} | {row['state']} | {row['what'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def written(text: str, path: Path) -> None:
    """Write a file whole or not at all: a command that is killed leaves the old one."""
    new = path.with_suffix(f".{os.getpid()}")  # several ranks may write at once
    new.write_text(text)
    new.replace(path)
