"""A graph's memory and collectives by node, as tables and as a chart of matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..compiler.lowered import Lowered
from ..graph.inspect import Flight, flights
from ..graph.memory import Footprint
from ..plan.owners import Picture, shortened, size, span, tabulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PURPOSES = {
    "parameters": "#4c78a8",
    "optimizer": "#9ecae9",
    "arguments": "#bab0ac",
    "gathered": "#f58518",
    "gradients": "#e45756",
    "activations": "#54a24b",
    "results": "#b279a2",
}
_KIND_COLOURS = {"all_gather": "#f58518", "reduce_scatter": "#e45756", "all_reduce": "#54a24b"}
_OTHER_COLOUR = "#72609d"  # colour of other kinds
_LINES, _LABELS = 10, 30  # most lines of a table, and most names of units in a chart


def chart(lowered: Lowered) -> Picture:
    """Return the picture of a lowered function; its rows are the collectives."""
    memory, sent = lowered.memory(), flights(lowered.graph)
    return Picture("\n".join(_chart_tables(memory, sent)), sent, lambda: _chart_svg(memory, sent))


def _chart_tables(memory: Footprint, sent: Sequence[Flight]) -> list[str]:
    """Return tables: the peak by purpose, and collectives, grouped if units differ only in numbers."""
    by = sorted(memory.by.items(), key=lambda item: -item[1])
    head = f"{len(memory.nodes):,} nodes; the peak of memory is {size(memory.peak)}, at {memory.at}:"
    lines = [head, *tabulate([[purpose, size(nbytes)] for purpose, nbytes in by], right={1})]
    alike = dict[tuple[str, str, str], list[Flight]]()
    for flight in sent:
        alike.setdefault((flight.kind, re.sub(r"\d+", "0", flight.unit), flight.axis), []).append(flight)
    groups = [*alike.values()]
    rows = [_row(group[0].kind, group[0].axis, group) for group in groups[:_LINES]]
    if rest := [flight for group in groups[_LINES:] for flight in group]:
        rows.append(_row("others", "", rest))
    title = ["collective", "unit", "axis", "number", "sent", "in flight"]
    table = ["", *tabulate([title, *rows], right={3, 4}), "in flight: nodes from start to wait"]
    return [*lines, *table] if sent else lines


def _row(kind: str, axis: str, group: Sequence[Flight]) -> list[str]:
    nodes, units = {flight.wait - flight.start for flight in group}, list(dict.fromkeys(x.unit for x in group))
    unit = brief(units[0], 24) if len(units) == 1 else shortened(span(units[0], units[-1]), 24)
    far = f"{min(nodes)} to {max(nodes)}" if len(nodes) > 1 else str(*nodes)
    return [kind, unit if axis else "", axis, str(len(group)), size(sum(flight.bytes for flight in group)), far]


def brief(unit: str, width: int) -> str:
    """Return the name of one or several joined units in at most `width` characters.

    >>> brief("embed+layers.0+layers.1+layers.2", 28)
    'embed and 3 more'
    """
    first, *others = unit.split("+")
    return shortened(f"{first} and {len(others)} more" if others and len(unit) > width else unit, width)


def _chart_svg(memory: Footprint, sent: Sequence[Flight]) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "fshard"}):  # equal figures give equal text
        figure(memory, sent).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def figure(memory: Footprint, sent: Sequence[Flight]) -> Figure:
    """Return the chart: memory by purpose above; below, a bar for each collective in the row of its unit."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("show: the chart of a graph needs matplotlib: pip install matplotlib") from error
    units = list(dict.fromkeys(flight.unit or "(no label)" for flight in sent))
    heights = [2.6, *([0.5 + 0.19 * min(len(units), _LABELS)] if units else [])]
    result = Figure(figsize=(10, sum(heights) + 1.1), layout="constrained", facecolor="white")
    above, *below = result.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_memory(above, memory)
    for axes in below:  # no axes if there are no collectives
        _timeline(axes, sent, units)
    result.axes[-1].set_xlabel("node of the graph, in the order of execution")
    return result


def _draw_memory(axes: Axes, memory: Footprint) -> None:
    # without purposes too small to see
    used = [x for x in _PURPOSES if max(row.get(x, 0) for row in memory.bytes) > memory.peak / 500]
    *_, unit = size(memory.peak).split()
    scale = 1 << 10 * ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    layers = [[row.get(purpose, 0) / scale for row in memory.bytes] for purpose in used]
    numbers, at = range(len(memory.nodes)), memory.nodes.index(memory.at)
    for area in axes.stackplot(numbers, layers, labels=used, colors=[_PURPOSES[x] for x in used], step="post"):
        area.set(edgecolor="face", linewidth=0.5)  # shows a peak of one node among thousands
    axes.plot([at], [memory.peak / scale], "k.")
    axes.set_title(f"memory: {size(memory.peak)} at node {at:,}, {memory.at}", fontsize=10, loc="left")
    axes.set(ylabel=unit, xlim=(0, max(len(numbers) - 1, 1)), ylim=(0, 1.08 * memory.peak / scale or 1))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _timeline(axes: Axes, sent: Sequence[Flight], units: Sequence[str]) -> None:
    for kind in dict.fromkeys(flight.kind for flight in sent):
        of_kind = [flight for flight in sent if flight.kind == kind]
        axes.barh(
            [units.index(flight.unit or "(no label)") for flight in of_kind],
            [flight.wait - flight.start for flight in of_kind],
            left=[flight.start for flight in of_kind],
            color=(colour := _KIND_COLOURS.get(kind, _OTHER_COLOUR)),
            edgecolor=colour,  # shows short bars
            linewidth=0.8,
            label=kind,
        )
    each = -(-len(units) // _LABELS) or 1
    axes.set_yticks(range(0, len(units), each), [brief(name, 28) for name in units[::each]], fontsize=8)
    axes.set_ylim(len(units) - 0.4, -0.6)
    axes.set_title("collectives: from the node that starts one to the node that waits for it", fontsize=10, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
