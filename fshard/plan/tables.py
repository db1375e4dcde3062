"""Tables and numbers of bytes, as people read them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Yield rows of cells as lines, with columns that are as wide as their widest cell; `right` are numbers.

    >>> [*aligned([["w", "8"], ["bias", "16"]], right={1})]
    ['w      8', 'bias  16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(w) if n in right else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def size(nbytes: int) -> str:
    """Return a number of bytes with three or four digits.

    >>> size(96), size(1000), size(1536), size(50 << 30)
    ('96 B', '1000 B', '1.50 KiB', '50.0 GiB')
    """
    unit = min(max(nbytes.bit_length() - 1, 0) // 10, 5)
    number = nbytes / (1 << 10 * unit)
    digits = (unit > 0) * (2 - (number >= 9.995) - (number >= 99.95))
    return f"{number:.{digits}f} {['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit]}"
