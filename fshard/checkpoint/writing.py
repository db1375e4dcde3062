"""The files of one save: this rank's files, and on rank 0 the index. Nothing in this file calls a collective."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..core.differences import Form
from ..files.directory import INDEX, folder, index_at, read_all
from ..files.folders import Folder
from ..files.foreign import parsed
from ..files.index import (
    CheckpointError,
    Index,
    IndexEntry,
    Json,
    Piece,
    checksum,
    in_order,
    piece_to_json,
    rank_key,
    read_index,
    read_piece,
)
from ..files.safetensors_file import CHUNK, copied_into, header, laid_out, stored
from .contents import Contents, Named
from .host_copies import in_host_memory

_PAUSES = 0.01, 1.0  # seconds between looks for records: at first, at most
_AFTER_THE_PROGRAM = 30.0  # seconds to wait for slower ranks when this rank's program has ended


@dataclass(frozen=True)
class RankRecord:
    """A rank's record of its writes: sizes of files, pieces of each leaf, and values that differ between ranks."""

    files: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)

    def to_json(self) -> bytes:
        pieces = {name: [piece_to_json(piece) for piece in of_leaf] for name, of_leaf in self.pieces.items()}
        return json.dumps({"files": self.files, "pieces": pieces, "values": self.values}).encode()


def read_record(text: bytes, where: str) -> RankRecord:
    raw = parsed(text, where)
    pieces = {name: [read_piece(piece) for piece in of_leaf] for name, of_leaf in raw["pieces"].items()}
    return RankRecord(raw["files"], pieces, raw["values"])


@dataclass(frozen=True)
class Writer:
    """One save of one rank. `by_rank`: names with a value for each rank; `token`: begins this save's file names."""

    directory: Folder
    step: int
    token: str
    contents: Contents
    by_rank: set[str]

    def _name(self, rank: int) -> str:
        return f"{self.token}-rank-{rank:05}"

    def write(self, pieces: Sequence[Named]) -> RankRecord:
        if not pieces:
            return RankRecord()
        file, forms = f"{self._name(self.contents.rank)}.safetensors", self.contents.forms
        by_name = _by_name_in_file(pieces, forms, self.contents.orders)
        entries = laid_out((_shaped(name, piece, forms) for name, piece in by_name.items()), Path(file))
        head = header(entries)
        size = sum(entry.num_bytes for entry in entries)
        checksums: dict[str, list[int]] = {entry.name: [] for entry in entries}

        def stream() -> Iterator[memoryview]:
            yield memoryview(head)
            buffer = bytearray(min(size, CHUNK))
            parts = ((entry.name, x) for entry in entries if entry.num_bytes for x in by_name[entry.name][3])
            for name, data in in_host_memory(parts):
                checksums[name].append(checksum(data))
                yield copied_into(buffer, data)

        folder(self.directory, self.step).write(file, stream())
        by_leaf = dict[str, list[Piece]]()
        for entry in entries:
            leaf, begin, end, _ = by_name[entry.name]
            piece = Piece(file, len(head) + entry.start, begin, end - begin, tuple(checksums[entry.name]))
            by_leaf.setdefault(leaf, []).append(piece)
        return RankRecord({file: len(head) + size}, by_leaf)

    def put(self, record: RankRecord) -> None:
        """Write the record to the folder, after `write`."""
        by_rank = {name: x for name, x in self.contents.values.items() if name in self.by_rank}
        values = {rank_key(name, self.contents.rank): x for name, x in by_rank.items()}
        text = RankRecord(record.files, record.pieces, values).to_json()
        folder(self.directory, self.step).put(f"{self._name(self.contents.rank)}.json", text)

    def finish(self, patience: float, stop: threading.Event) -> None:
        """Read the records of all ranks, put the index in place, and delete the files of the replaced index.

        CheckpointError if a record is missing after `patience` seconds or when `stop` is set, or if another job
        deleted files of this save.
        """
        place, names = folder(self.directory, self.step), [f"{self._name(r)}.json" for r in range(self.contents.ranks)]
        _await(place, self.token, names, patience, stop)
        records = [read_record(read_all(place, name), f"{place}/{name}") for name in names]
        index = self._index(records)
        for file, size in index.files.items():
            with place.open(file) as written:
                if written.size != size:
                    raise CheckpointError(f"{place}/{file}: expected {size:,} bytes, got {written.size:,}")
        text, old = index.to_json(), _files_at(self.directory, self.step)
        read_index(text, f"{place}/{INDEX}")  # raises if `restore` would refuse the index, before it is in place
        place.put(INDEX, text)
        # another job may have deleted the files as leftovers of a killed save
        lost = sorted({*index.files} - {*place.names()})
        if lost and place.has(INDEX) and read_all(place, INDEX) == text:  # else a later save has replaced the index
            place.remove(INDEX)
            raise _deleted(place, lost[0])
        for name in (*names, *old):
            place.remove(name)

    def discard(self) -> None:
        """Delete the files of all ranks, unless the index names them. Suppress errors: the caller raises its own.

        Only rank 0 calls this: other ranks do not know if rank 0 still puts the index in place.
        """
        place = folder(self.directory, self.step)
        with suppress(OSError, ValueError):
            in_use = set(index_at(self.directory, self.step)[0].files) if place.has(INDEX) else set()
            for name in place.names():
                if name.startswith(self.token) and name not in in_use:
                    place.remove(name)
            place.remove_folder()

    def _index(self, records: Sequence[RankRecord]) -> Index:
        leaves = dict[str, IndexEntry]()
        for name, form in self.contents.forms.items():
            for key in [rank_key(name, rank) for rank in range(len(records))] if name in self.by_rank else [name]:
                pieces = [piece for record in records for piece in record.pieces.get(key, ())]
                order = self.contents.orders.get(name, ())
                leaves[key] = IndexEntry(form.shape, form.dtype, in_order(pieces, form.numel, repr(key)), order)
        values = {name: x for name, x in self.contents.values.items() if name not in self.by_rank}
        for record in records:
            values |= record.values
        files = {name: size for record in records for name, size in record.files.items()}
        plans, by_rank, threads = (*self.contents.plans,), frozenset(self.by_rank), self.contents.threads
        return Index(self.step, len(records), plans, files, leaves, values, by_rank, threads=threads)


def _form_by_name(leaf: str, forms: dict[str, Form]) -> Form:
    return forms[leaf] if leaf in forms else forms[leaf.rpartition("@")[0]]  # else name@rank (`rank_key`)


def _shaped(name: str, piece: Named, forms: dict[str, Form]) -> tuple[str, tuple[int, ...], torch.dtype]:
    form, numel = _form_by_name(piece[0], forms), piece[2] - piece[1]
    return name, *stored(form.shape if name == piece[0] else (numel,), form.dtype)


def _by_name_in_file(
    pieces: Sequence[Named], forms: dict[str, Form], orders: Mapping[str, tuple[int, ...]]
) -> dict[str, Named]:
    """Name the pieces in the file: a whole, row-major leaf keeps its name."""
    by_name = dict[str, Named]()
    for leaf, begin, end, parts in pieces:
        is_whole = end - begin == _form_by_name(leaf, forms).numel and not orders.get(leaf)
        name = leaf if is_whole else f"{leaf}[{begin}:{end}]"
        while name in by_name or (name in forms and name != leaf):  # a leaf's name may look like a piece's
            name += "'"
        by_name[name] = (leaf, begin, end, parts)
    return by_name


def _deleted(place: Folder, name: str) -> CheckpointError:
    return CheckpointError(f"{place}/{name}: deleted meanwhile: expected one job at a time in a directory")


def _await(place: Folder, token: str, names: Sequence[str], patience: float, stop: threading.Event) -> None:
    """Wait until the folder has `names`. CheckpointError at once if a file of this save is deleted."""
    deadline, (pause, longest) = time.monotonic() + patience, _PAUSES
    program, seen = threading.main_thread(), set[str]()
    while missing := sorted({*names} - (there := {name for name in place.names() if name.startswith(token)})):
        if lost := [name for name in sorted(seen - there) if not place.has(name)]:
            raise _deleted(place, lost[0])
        seen |= there
        if not program.is_alive():  # the main thread ended, perhaps because a rank is gone
            program, deadline = threading.current_thread(), min(deadline, time.monotonic() + _AFTER_THE_PROGRAM)
        pause = min(1.5 * pause, longest)  # object stores charge for each look
        if stop.wait(pause) or time.monotonic() > deadline:
            raise CheckpointError(
                f"{place}/{missing[0]}: the record of a rank is not there after {patience:.0f} seconds. All ranks must "
                "see the same directory, as on a network file system"
            )


def _files_at(directory: Folder, step: int) -> Iterable[str]:
    if folder(directory, step).has(INDEX):
        with suppress(CheckpointError):  # a damaged index
            return index_at(directory, step)[0].files
    return ()
