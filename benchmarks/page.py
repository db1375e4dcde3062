"""Write the tables and the picture of `docs/benchmarks.md` from `docs/benchmarks.json`.

python benchmarks/page.py
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import results
from models import DESCRIPTIONS, MODELS
from systems import SYSTEMS

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS, PAGE, PICTURE = DOCS / "benchmarks.json", DOCS / "benchmarks.md", DOCS / "benchmarks.png"
BEGIN = "<!-- begin: written by benchmarks/page.py from benchmarks.json -->"
END = "<!-- end -->"


def _listed(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- `{name}`: {what}" for name, what in items)


def section(entries: Mapping[str, results.Entry]) -> str:
    """The text between the marks."""
    systems = [
        (name, system.what)
        for name, system in SYSTEMS.items()
        if any(name in e.get("times", {}) for e in entries.values())
    ]
    parts = ["Models:", _listed((name, DESCRIPTIONS[name]) for name in entries), "Systems:", _listed(systems)]
    for table in results.tables(entries):
        parts.append(results.markdown(table))
    parts += ["How each model was measured:", _listed((name, _how(entry)) for name, entry in entries.items())]
    left_out = [(name, model, why) for name, s in SYSTEMS.items() if not s.extra for model, why in s.without.items()]
    parts.append(_listed((f"{name}` on `{model}", f"not measured, {why}") for name, model, why in left_out))
    return "\n\n".join(parts)


def _how(entry: results.Entry) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    when = f"{entry['date']}, a load of {entry['load']:.1f} before it began"
    return f"`{entry['command']}`, {entry['rounds']} rounds, {when}, {entry['machine']}, {versions}"


def with_section(page: str, text: str) -> str:
    """A page with `text` between its marks. ValueError if it does not have them once each."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, once each")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def picture(entries: Mapping[str, results.Entry], path: Path) -> None:
    """Draw step times and peak memory of the systems as ratios to FSDP2: a group of bars for each model."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    fields = {"step time / FSDP2's": "times", "peak memory / FSDP2's": "alone"}
    figure, axes = pyplot.subplots(len(fields), 1, figsize=(10, 7), constrained_layout=True)
    names = [s for s in SYSTEMS if any(s in e.get("times", {}) for e in entries.values())]
    colours = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    for ax, (label, field) in zip(axes, fields.items(), strict=True):
        for i, system in enumerate(names):
            for at, entry in enumerate(entries.values()):
                height = _relative(entry.get(field, {}), system)
                if height is not None:
                    x = at + (i - len(names) / 2) * 0.9 / len(names)
                    ax.bar(x, height, 0.9 / len(names), color=colours[system], label=system)
        ax.axhline(1.0, color="black", linewidth=0.5)
        ax.set_xticks(range(len(entries)), list(entries))
        ax.set_ylabel(label)
        ax.set_yscale("log")
    shown = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown, loc="outside right upper")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _relative(of: Mapping[str, object], system: str) -> float | None:
    """A system's median time, or its peak, divided by FSDP2's; None if one of them was not measured."""

    def number(value: object) -> float:
        return statistics.median(value) if isinstance(value, list) else value["peak"]  # type: ignore[index]

    return number(of[system]) / number(of["fsdp2"]) if {system, "fsdp2"} <= of.keys() else None


def update() -> None:
    """Write the section and the picture."""
    entries = {model: entry for model, entry in results.load(RESULTS).items() if model in MODELS}
    PAGE.write_text(with_section(PAGE.read_text(), section(entries)))
    picture(entries, PICTURE)


if __name__ == "__main__":
    update()
