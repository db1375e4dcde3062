"""Describe a directory of checkpoints line by line, for people and programs: `fshard inspect`.

Unprintable characters in names are escaped: anyone may have written the files.
"""

from __future__ import annotations

import errno
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..files.directory import INDEX, folder, index_at, numbers
from ..files.folders import Folder
from ..files.foreign import printable
from ..files.index import CheckpointError, Index, IndexEntry, Piece, read_block
from ..files.other_formats import header_of
from ..files.safetensors_file import CHUNK, NAMES, stored
from ..plan.owners import tabulate

_RANK = re.compile(r"-rank-(\d{1,9})(-\d+)?\.safetensors")
_DAMAGED = "damaged"
# error numbers of opening links, pipes, folders, sockets and impossible names
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.ENAMETOOLONG)
_LEVELS = 16  # of the printed tree; the rest of a deeper name is one level


class TextLine(NamedTuple):
    """A line to print. `is_fault`: the line reports damage or a difference. `data`: the line for `--json`."""

    text: str
    is_fault: bool = False
    data: Mapping[str, object] | None = None


def number(value: object) -> object:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def overview(place: Folder) -> Iterator[TextLine]:
    """Yield a table of the steps, with sizes, and the bytes left over by killed saves."""
    steps = numbers(place)
    if not steps:
        raise CheckpointError(f"{place}: there is no checkpoint, nor a part of one")
    names = ("step", "leaves", "bytes", "ranks", "files", "left_over", "note")
    yield from _table(names, [_summary(place, step) for step in steps])


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[TextLine]:
    """Yield a table. The last cell of a row is a note; a note of damage begins with `_DAMAGED`."""
    titles = [*(name.replace("_", " ") for name in names[:-1]), ""]
    right = [n for n, name in enumerate(names) if name not in ("file", "note")]
    cells = [[f"{x:,}" if isinstance(x, int) else "" if x is None else printable(x, 2000) for x in row] for row in rows]
    title, *texts = tabulate([titles, *cells], right)
    yield TextLine(title)
    for text, row in zip(texts, rows, strict=True):
        yield TextLine(text, str(row[-1]).startswith(_DAMAGED), dict(zip(names, row, strict=True)))


def _summary(place: Folder, step: int) -> list[int | str | None]:
    try:
        there = folder(place, step)
        index = index_at(place, step)[0] if there.has(INDEX) else None
        left_over = sum(size or 0 for size in _left_over(there, index.files if index else {}).values())
    except (CheckpointError, OSError) as error:
        return [step, None, None, None, None, None, printable(f"{_DAMAGED}: {error}", 2000)]
    if index is None:
        return [step, None, None, None, None, left_over, "not whole: it has no index"]
    size = sum(entry.num_bytes for entry in index.leaves.values())
    return [step, len(index.leaves), size, index.ranks, len(index.files), left_over, ""]


def _left_over(there: Folder, files: Mapping[str, int]) -> dict[str, int | None]:
    """Return the sizes of files not in the index; None for anything but a regular file."""
    return {name: _size(there, name) for name in there.names() if name != INDEX and name not in files}


def _size(there: Folder, name: str) -> int | None:
    """Return a file's size; None without a regular file. OSError if a store does not answer."""
    try:
        with there.open(name) as file:
            return file.size
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None


def step_lines(place: Folder, step: int) -> Iterator[TextLine]:
    """Yield the leaves as a tree, then numbers and strings, files, and leftovers of killed saves."""
    index, there = index_at(place, step)[0], folder(place, step)
    title = f"{place}: step {index.step:,}, saved by {index.ranks:,} rank(s)"
    yield TextLine(title, False, {"step": index.step, "ranks": index.ranks})
    # show a plan once: parameters and optimizer state have the same
    yield from (TextLine(f"plan {printable(x)}", False, {"plan": x}) for x in dict.fromkeys(index.plans) if x)
    yield from contents_lines(index)
    yield TextLine("")
    yield from _file_lines(there, index)


def contents_lines(index: Index) -> Iterator[TextLine]:
    yield TextLine("")
    rows, leaves = zip((["leaf", "shape", "dtype", "bytes", "checksum", "on"], None), *_tree(index), strict=True)
    yield from (TextLine(text, False, leaf) for text, leaf in zip(tabulate(rows, right={3}), leaves, strict=True))
    for key, values in (("value", index.values), ("not_readable", index.left_out)):
        if values:
            yield TextLine("")
            cells = [[printable(name), printable(repr(value))] for name, value in values.items()]
            said = [None, *({"name": name, key: number(value)} for name, value in values.items())]
            lines = tabulate([[key.replace("_", " "), ""], *cells])
            yield from (TextLine(text, False, data) for text, data in zip(lines, said, strict=True))


def _tree(index: Index) -> Iterator[tuple[list[str], dict[str, object] | None]]:
    paths = {name: tuple(name.split(".", _LEVELS)) for name in index.leaves}
    sizes = Counter[tuple[str, ...]]()
    for name, path in paths.items():
        for depth in range(1, len(path)):
            sizes[path[:depth]] += index.leaves[name].num_bytes
    before: tuple[str, ...] = ()
    for name, path in paths.items():
        shared = next((n for n, (a, b) in enumerate(zip(path[:-1], before, strict=False)) if a != b), len(before))
        for depth in range(min(shared, len(path) - 1), len(path) - 1):
            yield ["  " * depth + printable(path[depth]), "", "", f"{sizes[path[: depth + 1]]:,}", "", ""], None
        entry = index.leaves[name]
        label, size = "  " * (len(path) - 1) + printable(path[-1]), f"{entry.num_bytes:,}"
        seals = (_digest(entry), _holders(entry)) if index.files else ("", "")  # other formats lack checksums and ranks
        data = {"name": name, "shape": [*entry.shape], "dtype": NAMES[entry.dtype], "bytes": entry.num_bytes}
        data |= {"checksum": seals[0] or None, "on": _writers(entry)}
        yield [label, printable([*entry.shape]), NAMES[entry.dtype], size, *seals], data
        before = path[:-1]


def _digest(entry: IndexEntry) -> str:
    """Return the checksum of a leaf of one block, else the CRC-32 of its pieces' beginnings and checksums."""
    blocks = [(piece.begin, piece.checksums) for piece in entry.pieces]
    if len(blocks) == 1 and len(blocks[0][1]) == 1:
        return f"{blocks[0][1][0]:08x}"
    return f"{zlib.crc32(repr(blocks).encode()):08x}" if all(piece.checksums for piece in entry.pieces) else ""


def _writers(entry: IndexEntry) -> list[int] | None:
    """Return the ranks that wrote a leaf; None if the name of a file has no rank."""
    matches = [_RANK.search(piece.file) for piece in entry.pieces]
    return sorted({int(match[1]) for match in matches if match}) if all(matches) else None


def _holders(entry: IndexEntry) -> str:
    """Return text such as "ranks 0-2, 5"; if ranks are unknown, the number of files."""
    ranks = _writers(entry)
    if ranks is None:
        return f"{len({piece.file for piece in entry.pieces}):,} files"
    # among consecutive ranks, rank minus index is constant
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}" if ranks else ""


def _file_lines(there: Folder, index: Index) -> Iterator[TextLine]:
    pieces = Counter(piece.file for entry in index.leaves.values() for piece in entry.pieces)
    sizes = {name: _size(there, name) for name in index.files}
    rows = [[name, size, pieces[name], _fault(sizes[name], size)] for name, size in index.files.items()]
    yield from _table(("file", "bytes", "pieces", "note"), rows)
    if left_over := _left_over(there, index.files):
        yield TextLine("")
        yield TextLine("left over by saves that were killed, or are under way:")
        cells = [[printable(name), "no file" if size is None else f"{size:,}"] for name, size in left_over.items()]
        said = [{"file": name, "bytes": size, "pieces": 0, "note": "left over"} for name, size in left_over.items()]
        yield from (TextLine(text, False, data) for text, data in zip(tabulate(cells, right={1}), said, strict=True))


def _fault(size: int | None, expected: int) -> str:
    if size is None:
        return f"{_DAMAGED}: it is not there"
    return "" if size == expected else f"{_DAMAGED}: it has {size:,} bytes"


def verify(place: Folder, step: int) -> Iterator[TextLine]:
    """Read all data of a checkpoint. Yield each fault, or, without faults, the number of bytes."""
    try:
        index, there = index_at(place, step)[0], folder(place, step)
    except (CheckpointError, OSError) as error:
        fault = printable(error, 2000)
        data = {"step": step, "file": None, "fault": fault, "intact": False}
        yield TextLine(f"step {step:,}: {fault}", True, data)
        return
    pieces = [(name, entry, piece) for name, entry in index.leaves.items() for piece in entry.pieces]
    pieces.sort(key=lambda of_leaf: (of_leaf[2].file, of_leaf[2].offset))
    is_whole = True
    unchecked = sum(piece.numel * entry.dtype.itemsize for _, entry, piece in pieces if not piece.checksums)
    for file, of_file in groupby(pieces, lambda of_leaf: of_leaf[2].file):
        for fault in _file_faults(there, file, index.files[file], [*of_file]):
            is_whole = False
            data = {"step": step, "file": file, "fault": fault, "intact": False}
            yield TextLine(f"step {step:,}: {there}/{printable(file)}: {fault}", True, data)
    size = sum(entry.num_bytes for entry in index.leaves.values()) - unchecked
    if is_whole:
        without = f", {unchecked:,} bytes have no checksum" if unchecked else ""
        text = f"step {step:,}: {size:,} bytes of {len(index.leaves):,} leaves are as they were saved{without}"
        data = {"step": step, "bytes": size, "leaves": len(index.leaves), "unchecked": unchecked, "intact": True}
        yield TextLine(text, False, data)


def _file_faults(there: Folder, name: str, size: int, pieces: Sequence[tuple[str, IndexEntry, Piece]]) -> Iterator[str]:
    buffer = bytearray(CHUNK)
    try:
        with there.open(name) as file:
            if file.size != size:
                yield f"expected {size:,} bytes, got {file.size:,}"
            else:
                yield from _header_faults(there, name, pieces)
            for leaf, entry, piece in pieces:
                end = piece.numel * entry.dtype.itemsize
                for start, expected in zip(range(0, end, CHUNK), piece.checksums, strict=False):
                    view = memoryview(buffer)[: min(CHUNK, end - start)]
                    if not read_block(file, piece.offset + start, view, expected):
                        where = f"the {len(view):,} bytes from byte {piece.offset + start:,} on"
                        yield f"leaf {printable(leaf)!r}: {where} are not those that were saved"
    except (OSError, ValueError) as error:
        yield f"{printable(error, 2000)}. It has leaf {printable(pieces[0][0])!r}"


def _header_faults(there: Folder, name: str, pieces: Sequence[tuple[str, IndexEntry, Piece]]) -> Iterator[str]:
    """Yield leaves with another name, dtype, shape or offset in the file's header, for other programs."""
    said = {(x.name.rstrip("'"), x.dtype, x.shape, x.start) for x in header_of(there, name)[0].values()}
    for leaf, entry, x in pieces:
        is_whole = x.numel == entry.numel and not entry.order
        piece = f"{leaf}[{x.begin}:{x.end}]", (x.numel,)  # version 2 could name whole leaves so
        titles = (piece, (leaf, entry.shape)) if is_whole else (piece,)
        if said.isdisjoint((title.rstrip("'"), *stored(shape, entry.dtype)[::-1], x.offset) for title, shape in titles):
            yield f"leaf {printable(leaf)!r}: the file's header has another name, dtype, shape or place for it"
