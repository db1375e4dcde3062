"""The results of `make bench`: what is computed from the measured times, and the tables that show it.

Results are one JSON document: a model's name to its entry, with the fields

- `date`, `command`, `machine`, `versions`, `rounds`, `load`, `minutes`: how and where this model was measured, how busy
  the machine was before, and how long it took;
- `times`: a system to the seconds of its step in each round;
- `alone`: a system to `peak` (bytes) and `first` (seconds of the first step: with empty caches, then in a second
  process with the caches of the first; one number for systems that compile nothing);
- `traffic`: a system to the collectives of its step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from timing import ratio

Entry = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]  # a title, the names of the columns, rows

# what is compared with what; systems that were not measured are left out
PAIRS = [
    ("fshard", "fsdp2"),
    ("fshard", "fsdp1"),
    ("fshard", "simple"),
    ("fshard", "local"),
    ("fshard-whole", "ddp"),
    ("fshard-zero1", "ddp-zero"),
    ("fshard-jit", "fshard"),
    ("fshard-jit", "fsdp2"),
    ("fshard-jit", "fsdp2-compiled"),
    ("fshard-jit", "simple-compiled"),
    ("fshard-jit", "jax"),
    ("fshard-buckets", "fshard"),
    ("fshard-buckets", "fsdp2"),
    ("fshard-tree", "fshard"),
    ("fshard-tree", "fshard-parts"),
    ("local", "fsdp2"),
]


def load(path: Path) -> dict[str, Entry]:
    """The entries of a file, none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write the entries to a file, one line for each system."""
    path.write_text(_compact(entries, depth=3) + "\n")


def _compact(value: Any, depth: int, indent: str = "") -> str:
    if not isinstance(value, Mapping) or depth == 0 or not value:
        return json.dumps(value)
    inner = indent + " "
    rows = [f"{inner}{json.dumps(key)}: {_compact(x, depth - 1, inner)}" for key, x in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def pairs_of(entry: Entry) -> Iterator[tuple[str, str, dict[str, float]]]:
    """The pairs of systems that an entry has the times of, with their ratios."""
    for a, b in PAIRS:
        if {a, b} <= entry.get("times", {}).keys():
            yield a, b, ratio(entry["times"], a, b)


def _spread(r: Mapping[str, float]) -> str:
    return f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})"


def _columns(entries: Mapping[str, Entry], field: str) -> list[str]:
    """The systems that any entry has in a field, each once."""
    return list(dict.fromkeys(system for entry in entries.values() for system in entry.get(field, {})))


def ratios(entries: Mapping[str, Entry]) -> Table:
    """Ratios of median step times, with the range of the middle 80% of paired rounds; models are columns."""
    cells = {name: {(a, b): _spread(r) for a, b, r in pairs_of(entry)} for name, entry in entries.items()}
    rows = [
        [f"{a} / {b}", *(of.get((a, b), "-") for of in cells.values())]
        for a, b in PAIRS
        if any((a, b) in of for of in cells.values())
    ]
    return "Step times", ["ratio", *entries], rows


def medians(entries: Mapping[str, Entry]) -> Table:
    """Milliseconds of a step; they say little on a shared machine, where only ratios can be compared."""
    rows = []
    for system in _columns(entries, "times"):
        times = [entry.get("times", {}).get(system) for entry in entries.values()]
        rows.append([system, *(f"{1e3 * statistics.median(t):.1f}" if t else "-" for t in times)])
    return "Median ms of a step", ["system", *entries], rows


def memory(entries: Mapping[str, Entry]) -> Table:
    """Peak memory in MB, and its ratio to FSDP2's."""

    def cell(peaks: Mapping[str, float], system: str) -> str:
        if system not in peaks:
            return "-"
        over = f" ({peaks[system] / peaks['fsdp2']:.3f})" if "fsdp2" in peaks and system != "fsdp2" else ""
        return f"{peaks[system] / 1e6:,.0f}{over}"

    peaks = [{s: of["peak"] for s, of in entry.get("alone", {}).items()} for entry in entries.values()]
    rows = [[system, *(cell(of, system) for of in peaks)] for system in _columns(entries, "alone")]
    return "Peak memory in MB, in parentheses divided by FSDP2's", ["system", *entries], rows


def first_steps(entries: Mapping[str, Entry]) -> Table:
    """Seconds of the first step of the systems that compile."""
    rows = []
    for system in _columns(entries, "alone"):
        firsts = [entry.get("alone", {}).get(system, {}).get("first", []) for entry in entries.values()]
        if any(len(first) > 1 for first in firsts):
            rows.append([system, *(", then ".join(f"{s:.1f}" for s in first) or "-" for first in firsts)])
    return "Seconds of the first step, with empty caches and then with full ones", ["system", *entries], rows


def traffic(entries: Mapping[str, Entry]) -> Table:
    """Collectives of a step, and MB that a rank of fshard sends."""

    def text(kinds: Mapping[str, Mapping[str, int]]) -> str:
        sizes = {kind: f" ({of['bytes'] / 1e6:.1f} MB)" if "bytes" in of else "" for kind, of in kinds.items()}
        return ", ".join(
            f"{of['count']} {kind.strip('_').replace('_', ' ')}{sizes[kind]}" for kind, of in kinds.items()
        )

    systems = _columns(entries, "traffic")
    rows = [
        [name, *(text(entry.get("traffic", {}).get(s, {})) or "-" for s in systems)] for name, entry in entries.items()
    ]
    return "Collectives of a step", ["model", *systems], rows if systems else []


def tables(entries: Mapping[str, Entry]) -> list[Table]:
    """All tables that have a row."""
    made = [ratios(entries), memory(entries), first_steps(entries), traffic(entries), medians(entries)]
    return [table for table in made if table[2]]


def markdown(table: Table) -> str:
    """A table for a page; the first column is a name, so it keeps to the left."""
    title, columns, rows = table

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return "\n".join([f"{title}:", "", line(columns), f"|{'---|' * len(columns)}", *map(line, rows)])
