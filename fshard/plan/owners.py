"""A picture of who owns a plan's parts: for each unit, the ranks with each shard of its flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Any, NamedTuple

Holders = tuple[tuple[int, ...], ...]  # the ranks with each shard

_COLOURS = ("#8ecae6", "#ffd166", "#a8d5a2", "#f4a6a0", "#c9b6e4", "#f9b572", "#8fd3c8", "#e3b3d1")
_ALL = "#d9dee3"  # a buffer that all ranks have
_LINES = 15  # most lines of units in a table
_NAMES, _BAR, _GAP, _ROW = 272, 208, 20, 42  # widths and a height in the picture


class Share(NamedTuple):
    """The ranks with each shard of a buffer, and the bytes of one shard."""

    holders: Holders
    nbytes: int


class TableLine(NamedTuple):
    """A line for equal units and one kind: totals of leaves, and the holders of each share.

    `brief` tells `kind` from the plan's other kinds.
    """

    unit: str
    num_units: int
    kind: str
    brief: str
    regather: str
    leaves: int
    elements: int
    nbytes: int
    shares: Mapping[str, Share]

    @property
    def label(self) -> str:
        return f"{self.unit} x {self.num_units}" if self.num_units > 1 else self.unit


@dataclass(frozen=True)
class Picture:
    """Text with a picture: `print` shows the text, a notebook both, `.svg()` returns the picture.

    `rows` has the numbers of the picture.
    """

    text: str
    rows: Sequence[Any]
    svg: Callable[[], str]

    def __repr__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>\n{self.svg()}"


def picture(title: Sequence[str], shares: Mapping[str, str], rows: Sequence[TableLine]) -> Picture:
    """Return a picture; `shares`: names and descriptions of columns."""
    return Picture("\n".join([*title, *table([*shares], rows)]), rows, lambda: _svg(title, shares, rows))


def span(first: str, last: str) -> str:
    """Name equal units by the first and the last.

    >>> span("model.layers.0", "model.layers.31"), span("head", "head")
    ('model.layers.0 ... 31', 'head')
    """
    parts, start = last.split("."), 0
    while first.split(".")[:start] == parts[:start] and start <= len(parts):
        start += 1
    return f"{first} ... {'.'.join(parts[start - 1 :])}" if first != last else first


def shortened(name: str, width: int) -> str:
    """Return a name in at most `width` characters, its middle left out.

    >>> shortened("model.layers.0.mlp", 11)
    'mode...mlp'
    """
    end = (width - 3) // 2
    return name if len(name) <= width else f"{name[: width - 3 - end]}...{name[len(name) - end :]}"


def table(columns: Sequence[str], rows: Sequence[TableLine]) -> list[str]:
    """Return lines for a screen of 80 x 24 characters: units beyond `_LINES` share the last line."""
    regather = len({row.regather for row in rows}) > 1
    title = ["unit", "bytes", *columns, *["regather"] * regather]
    shown = rows if len(rows) <= _LINES else rows[: _LINES - 1]
    names = [(row.label, row.brief) for row in shown]
    cells = [[*_sizes(columns, [row]), *[row.regather] * regather] for row in shown]
    if rest := rows[len(shown) :]:
        names.append((f"{sum(row.num_units for row in rest)} more", ""))
        cells.append([*_sizes(columns, rest), *[""] * regather])
    if len(rows) > 1:
        names.append(("total", ""))
        cells.append([*_sizes(columns, rows), *[""] * regather])
    width = 80 - sum(2 + max(map(len, column)) for column in zip(title[1:], *cells, strict=True))
    first = [f"{shortened(name, width - len(brief) - 1)} {brief}".strip() for name, brief in names]
    lines = [title, *([name, *row] for name, row in zip(first, cells, strict=True))]
    return list(tabulate(lines, right=range(1, len(columns) + 2)))


def _sizes(columns: Sequence[str], rows: Sequence[TableLine]) -> list[str]:
    of_rank = [[row.shares[name].nbytes for row in rows if name in row.shares] for name in columns]
    return [size(sum(row.nbytes for row in rows)), *(size(sum(sizes)) if sizes else "-" for sizes in of_rank)]


def _svg(title: Sequence[str], shares: Mapping[str, str], rows: Sequence[TableLine]) -> str:
    width, top = _NAMES + len(shares) * (_BAR + _GAP) + _GAP, 60 + 14 * len(title)
    height = top + len(rows) * _ROW + 30
    shapes = [f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>', _text(_GAP, 24, title[0], bold=True)]
    shapes += [_text(_GAP, y, line, small=True) for y, line in zip(range(40, top, 14), title[1:], strict=False)]
    for column, (name, said) in enumerate(shares.items()):
        x = _NAMES + column * (_BAR + _GAP)
        total = size(sum(row.shares[name].nbytes for row in rows if name in row.shares))
        shapes += [_text(x, top - 24, name, bold=True)]
        shapes.append(_text(x, top - 10, shortened(f"{said}: {total} a rank", 37), small=True))
        for y, row in zip(range(top, height, _ROW), rows, strict=False):
            shapes += _bar(x, y, row.shares.get(name))
    for y, row in zip(range(top, height, _ROW), rows, strict=False):
        said = f"leaves {row.leaves:,}, {size(row.nbytes)}, {row.brief or row.kind}"
        shapes += [_text(_GAP, y + 14, shortened(row.label, 33)), _text(_GAP, y + 27, shortened(said, 40), small=True)]
    said = "A bar is a flat buffer of a unit, with the ranks that hold each interval."
    shapes.append(_text(_GAP, height - 14, said, small=True))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f"font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\">\n"
        + "\n".join(shapes)
        + "\n</svg>"
    )


def _bar(x: int, y: int, share: Share | None) -> list[str]:
    if share is None:
        return [_text(x, y + 14, "none", small=True)]
    num = len(share.holders)
    # shards under two pixels are drawn as one
    parts = share.holders if num <= _BAR // 2 else (tuple(sorted(chain(*share.holders))),)
    shapes, width = list[str](), _BAR / len(parts)
    for number, ranks in enumerate(parts):
        colour = _COLOURS[number % len(_COLOURS)] if num > 1 else _ALL
        said, left = " ".join(map(str, ranks)), x + number * width
        if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
            said = f"{ranks[0]} to {ranks[-1]}"
        shapes.append(
            f'<rect x="{left:.2f}" y="{y + 2}" width="{width - min(1, width / 4):.2f}" height="16" fill="{colour}">'
            f"<title>rank {said}</title></rect>"
        )
        if len(said) * 6.2 + 4 < width:
            shapes.append(_text(left + width / 2, y + 14, said, small=True, anchor="middle"))
    said = f"{size(share.nbytes)} a rank" + f", 1/{num}" * (num > 1)
    if len(shapes) < 2 * len(parts):  # a shard lacks room for its ranks
        said += f", {sum(map(len, parts))} ranks"
    return [*shapes, _text(x, y + 29, said, small=True)]


def _text(x: float, y: float, text: str, bold: bool = False, small: bool = False, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{10 if small else 12}" fill="{"#59636e" if small else "#1f2328"}" '
        f'font-weight="{"bold" if bold else "normal"}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def tabulate(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Yield rows of cells as lines, with columns as wide as their widest cell. Columns in `right` are numbers.

    >>> [*tabulate([["w", "8"], ["bias", "16"]], right={1})]
    ['w      8', 'bias  16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{'>' if n in right else '<'}{widths[n]}}" for n, cell in enumerate(row))
        yield "  ".join(cells).rstrip()


def size(nbytes: int) -> str:
    """Return a number of bytes as text, with three or four digits.

    >>> size(96), size(1000), size(1536), size(50 << 30)
    ('96 B', '1000 B', '1.50 KiB', '50.0 GiB')
    """
    unit = min(max(nbytes.bit_length() - 1, 0) // 10, 5)
    number = nbytes / (1 << 10 * unit)
    digits = (unit > 0) * (2 - (number >= 9.995) - (number >= 99.95))
    return f"{number:.{digits}f} {['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}"
