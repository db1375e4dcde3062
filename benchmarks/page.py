"""Write tables from `docs/benchmarks.json`: two of `docs/benchmarks.md`, with its picture, and those of `RESULTS.md`.

python benchmarks/page.py
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import results
from models import DESCRIPTIONS, MODELS
from systems import SYSTEMS

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS, PAGE, PICTURE = DOCS / "benchmarks.json", DOCS / "benchmarks.md", DOCS / "benchmarks.png"
REST = Path(__file__).resolve().parent / "RESULTS.md"  # the tables that the page has no room for
BEGIN = "<!-- begin: written by benchmarks/page.py from benchmarks.json -->"
END = "<!-- end -->"


# the rows of step times on the page; RESULTS.md has all
ROWS = {
    "fshard / fsdp2",
    "fshard / fsdp1",
    "fshard / local",
    "fshard-whole / ddp",
    "fshard-zero1 / ddp-zero",
    "fshard-jit / fsdp2-compiled",
    "fshard-jit / simple-compiled",
    "fshard-jit / jax",
}


def _listed(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- `{name}`: {what}" for name, what in items)


def section(entries: Mapping[str, results.Entry]) -> str:
    """The text between the marks of the page: ratios of step times, peak memory, models and systems."""
    systems = [
        (name, system.what)
        for name, system in SYSTEMS.items()
        if any(name in e.get("times", {}) for e in entries.values())
    ]
    title, columns, rows = results.ratios(entries)
    rows = [[name, *(re.sub(r" to (?=\d)", "-", cell) for cell in cells)] for name, *cells in rows if name in ROWS]
    ratios = f"{title}; below 1 the first system is faster; in parentheses the middle 80% of paired rounds"
    _, systems_of, peaks = results.memory(entries)  # ratios alone, but for FSDP2
    peaks = [[name, *(re.sub(r".*\((.*)\)", r"\1", cell) for cell in cells)] for name, *cells in peaks]
    memory = "Peak memory divided by FSDP2's, which is in MB", systems_of, peaks
    tables = [results.markdown(table) for table in ((ratios, columns, rows), memory)]
    models = _listed((name, DESCRIPTIONS[name]) for name in entries)
    return "\n\n".join([*tables, "Models:", models, "Systems:", _listed(systems)])


def rest(entries: Mapping[str, results.Entry]) -> str:
    """The text between the marks of `RESULTS.md`: all tables, and how each model was measured."""
    parts = [results.markdown(table) for table in results.tables(entries)]
    for where in dict.fromkeys(map(_where, entries.values())):
        measured = [(name, _how(entry)) for name, entry in entries.items() if _where(entry) == where]
        parts += [f"Measured {where}:", _listed(measured)]
    left_out = [(name, model, why) for name, s in SYSTEMS.items() if not s.extra for model, why in s.without.items()]
    parts.append(_listed((f"{name}` on `{model}", f"not measured, {why}") for name, model, why in left_out))
    return "\n\n".join(parts)


def _where(entry: results.Entry) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return f"on {entry['date']}, {entry['machine']}, {versions}"


def _how(entry: results.Entry) -> str:
    return f"`{entry['command']}`, {entry['rounds']} rounds, a load of {entry['load']:.1f} before it began"


def with_section(page: str, text: str, begin: str = BEGIN) -> str:
    """A page with `text` between its marks. ValueError if it does not have them once each."""
    if page.count(begin) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs the lines {begin!r} and {END!r}, once each")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


# what the picture shows, a colour for each family; all systems are in the tables
SHOWN = {"ddp": "#8c96a1", "fsdp2": "#545d68", "jax": "#3f8f5f", "fshard": "#f0a04b", "fshard-jit": "#c65d00"}


def picture(entries: Mapping[str, results.Entry], path: Path) -> None:
    """Draw step times and peak memory of some systems as ratios to FSDP2: a group of bars for each model."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    fields = {"Time of a step": "times", "Peak memory": "alone"}
    figure, axes = pyplot.subplots(len(fields), 1, figsize=(12, 7.5), constrained_layout=True)
    for ax, (title, field) in zip(axes, fields.items(), strict=True):
        for i, (system, colour) in enumerate(SHOWN.items()):
            heights = [_relative(entry.get(field, {}), system) for entry in entries.values()]
            pairs = [(at, height) for at, height in enumerate(heights) if height is not None]
            places = [at + (i - (len(SHOWN) - 1) / 2) * 0.17 for at, _ in pairs]
            bars = ax.bar(places, [height for _, height in pairs], 0.16, color=colour, label=system)
            ax.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
        ax.axhline(1.0, color="#c8ccd0", linewidth=0.6, zorder=0)
        ax.set_xticks(range(len(entries)), list(entries))
        ax.set_title(f"{title}, divided by that of FSDP2: lower is better", loc="left", fontsize=11)
        ax.set_xlim(-0.5, len(entries) - 0.5)
        ax.margins(y=0.1)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="upper right", ncols=len(SHOWN), frameon=False)
    figure.suptitle("Two ranks on the same two cores; docs/benchmarks.md says what models and systems are", fontsize=12)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _relative(of: Mapping[str, object], system: str) -> float | None:
    """A system's median time, or its peak, divided by FSDP2's; None if one of them was not measured."""

    def number(value: object) -> float:
        return statistics.median(value) if isinstance(value, list) else value["peak"]  # type: ignore[index]

    return number(of[system]) / number(of["fsdp2"]) if {system, "fsdp2"} <= of.keys() else None


def update() -> None:
    """Write both sections and the picture."""
    entries = {model: entry for model, entry in results.load(RESULTS).items() if model in MODELS}
    PAGE.write_text(with_section(PAGE.read_text(), section(entries)))
    REST.write_text(with_section(REST.read_text(), rest(entries)))
    picture(entries, PICTURE)


if __name__ == "__main__":
    update()
