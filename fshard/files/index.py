"""The index of a checkpoint: leaves, files with their elements, and checksums.

An index is JSON:

    {"checksum": 2596996162, "format": "fshard", "version": 1, "step": 100, "ranks": 2, "threads": 1,
     "plans": ["5f0c..."],
     "files": {"9a41-rank-00000.safetensors": 4096, ...},
     "leaves": {"params.w": {"shape": [4, 8], "dtype": "F32",
                             "pieces": [["9a41-rank-00000.safetensors", 136, 0, 16, [3735928559]], ...]}},
     "values": {"extra.epoch": 3, "extra.position@0": 7, "extra.position@1": 9},
     "by_rank": ["extra.position"]}

- A piece, [file, offset of its first byte, begin, number of elements, `checksum` of each `CHUNK` bytes], has the
  elements [begin, begin + number) of the flattened leaf.
- "order", [dim] or [dim, blocks, parts]: the leaf's elements are counted as in Note [Order of a split leaf] in
  `layout.py`. "version" is then 3, so older versions of fshard refuse the index. Version 2 gave an order even to whole
  leaves of optimizer state, though these are row-major.
- "by_rank": leaves or values that differ between ranks: each rank has an entry, name@rank.
- "threads": torch's number of threads when the state was saved.
- "checksum": the CRC-32 of the text without this field.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .folders import Reader
from .foreign import MOST_ITEMS, parsed, require
from .safetensors_file import CHUNK, DTYPES, NAMES

VERSIONS = (1, 2, 3)  # that are read; a save writes 1 if all leaves are row-major, else 3
_FILE = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{,200}\.safetensors")
_SEAL = re.compile(rb'\{"checksum": ([0-9]{1,10}), ')

_COLUMNS = 8191  # a prime: words of swapped sectors or pages change columns

Json = Any  # Python's types cannot describe JSON


class CheckpointError(ValueError):
    """A checkpoint is missing, not whole, or not the expected one; or a save failed. Nothing was restored."""


@dataclass(frozen=True)
class Piece:
    """Elements [begin, begin + numel) of a flattened leaf in a file, with a checksum of each `CHUNK` bytes."""

    file: str
    offset: int  # bytes from the beginning of the file
    begin: int
    numel: int
    checksums: tuple[int, ...]  # () for files of other libraries

    @property
    def end(self) -> int:
        return self.begin + self.numel


@dataclass(frozen=True)
class IndexEntry:
    """A leaf: shape, dtype, and pieces in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()
    order: tuple[int, ...] = ()  # of its elements, as in `Split.order`; (): row-major

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint: leaves and other values by name, and the size of every file in bytes."""

    step: int
    ranks: int
    plans: tuple[str, ...]  # fingerprints of the parameters' plans
    files: Mapping[str, int]
    leaves: Mapping[str, IndexEntry]
    values: Mapping[str, Json]
    by_rank: frozenset[str] = frozenset()  # names with an entry for each rank
    left_out: Mapping[str, str] = field(default_factory=dict)  # unreadable contents of other formats, with reasons
    threads: int = 0  # 0: unknown

    @property
    def names(self) -> list[str]:
        keys = {rank_key(name, rank) for name in self.by_rank for rank in range(self.ranks)}
        return [*(key for key in (*self.leaves, *self.values) if key not in keys), *sorted(self.by_rank)]

    def key(self, name: str, rank: int) -> str:
        return rank_key(name, rank) if name in self.by_rank else name

    def to_json(self) -> bytes:
        leaves = {
            name: {"shape": [*x.shape], "dtype": NAMES[x.dtype], "pieces": [piece_to_json(piece) for piece in x.pieces]}
            | ({"order": x.order} if x.order else {})
            for name, x in self.leaves.items()
        }
        version = VERSIONS[-1 if any(x.order for x in self.leaves.values()) else 0]
        head = {"format": "fshard", "version": version, "step": self.step, "ranks": self.ranks, "threads": self.threads}
        rest = {"leaves": leaves, "values": dict(self.values), "by_rank": sorted(self.by_rank)}
        return sealed({**head, "plans": self.plans, "files": dict(self.files), **rest})


def sealed(raw: Mapping[str, Json]) -> bytes:
    """Return JSON with its checksum as the first field.

    >>> sealed({"step": 100})
    b'{"checksum": 629794549, "step": 100}'
    """
    text = json.dumps(raw).encode()
    return b'{"checksum": %d, ' % zlib.crc32(text) + text[1:]


def piece_to_json(piece: Piece) -> Json:
    return [piece.file, piece.offset, piece.begin, piece.numel, piece.checksums]


def read_index(text: bytes, where: str) -> Index:
    """Read the text of an index. CheckpointError, beginning with `where`, for another text."""
    try:
        raw = parsed(text, "the text")
        head = (_field(raw, "format", str), _field(raw, "version", int))
        is_known = head in [("fshard", version) for version in VERSIONS]
        require(is_known, f"expected format 'fshard' and version 1, 2 or 3, got {head}")
        seal = _SEAL.match(text)
        is_sealed = seal and int(seal[1]) == zlib.crc32(memoryview(text)[seal.end() :], zlib.crc32(b"{"))
        require(is_sealed, "it was changed or damaged: its checksum is that of another text")
        return _index(raw)
    except ValueError as error:
        raise CheckpointError(f"{where}: not an index of a checkpoint: {str(error)[:1000]}") from None


def _index(raw: Json) -> Index:
    step, ranks = _count(_field(raw, "step", int)), _count(_field(raw, "ranks", int))
    require(ranks, "ranks: expected at least 1")
    plans, by_rank = _strings(raw, "plans"), _strings(raw, "by_rank")
    files = {_file_name(name): _count(size) for name, size in _field(raw, "files", dict).items()}
    leaves = {name: _entry(name, entry, files) for name, entry in _field(raw, "leaves", dict).items()}
    if raw["version"] == 2:
        leaves = {name: _of_version_2(name, entry, ranks) for name, entry in leaves.items()}
    values = _field(raw, "values", dict)
    for name, value in values.items():
        require(isinstance(value, bool | int | float | str), f"{name!r}: expected a tensor, a number or a string")
    _check_pieces_apart(leaves)
    _check_names(by_rank, ranks, leaves, values)
    threads = _count(raw.get("threads", 0))  # older checkpoints lack the field
    return Index(step, ranks, tuple(plans), files, leaves, values, frozenset(by_rank), threads=threads)


_JSON_KINDS = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}


def _field(raw: Json, key: str, kind: type) -> Json:
    value = raw.get(key) if isinstance(raw, dict) else None
    if type(value) is not kind:  # for isinstance, True is an int
        raise ValueError(f"{key}: expected {_JSON_KINDS[kind]}, got {reprlib.repr(value)}")
    return value


def _strings(raw: Json, key: str) -> list[str]:
    strings = _field(raw, key, list)
    require(len(strings) <= MOST_ITEMS and all(isinstance(x, str) for x in strings), f"{key}: expected strings")
    return strings


def _entry(name: str, raw: Json, files: Mapping[str, int]) -> IndexEntry:
    try:
        kind = _field(raw, "dtype", str)
        require(kind in DTYPES, f"expected one of the dtypes of safetensors, got {reprlib.repr(kind)}")
        dtype, shape = DTYPES[kind], tuple(map(_count, _field(raw, "shape", list)))
        pieces = map(read_piece, _field(raw, "pieces", list))
        order = _stored_order(raw.get("order", []), shape)
        entry = IndexEntry(shape, dtype, in_order(pieces, _numel(shape), "its pieces"), order)
        for piece in entry.pieces:
            _check_piece(piece, piece.numel * dtype.itemsize, files)
        return entry
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def _of_version_2(name: str, entry: IndexEntry, ranks: int) -> IndexEntry:
    """Drop the order of a whole leaf. ValueError if the pieces fit a split and a whole leaf."""
    if not entry.order or len(entry.pieces) < 2:  # each rank of a split leaf writes a piece
        return replace(entry, order=())
    number, begins = len(entry.pieces), [piece.begin for piece in entry.pieces]
    # a large whole leaf has equal pieces, fewer than there are ranks
    is_even = begins == [entry.numel * n // number for n in range(number)]
    require(
        number == ranks or entry.numel <= 1 << 18 or not is_even,
        f"{name!r}: version 2 does not say in which order {number} equal pieces of a split leaf lie. Restore it on the "
        "mesh that saved it, with the fshard that saved it, and gather the state",
    )
    return entry


def _stored_order(raw: Json, shape: Sequence[int]) -> tuple[int, ...]:
    text = f"order: expected [dim] or [dim, blocks, parts] for shape {shape!r:.100}, got {reprlib.repr(raw)}"
    require(isinstance(raw, list) and len(raw) in (0, 1, 3), text)
    if raw:
        dim, blocks, parts = (*map(_count, raw), 1, 1)[:3]
        require(dim < len(shape) and blocks and 0 < parts <= MOST_ITEMS and shape[dim] % blocks == 0, text)
    return tuple(raw)


def _numel(shape: Sequence[int]) -> int:
    """Return the product of sizes. ValueError from 2**63 on: multiplying a million sizes would take hours."""
    numel = int(0 not in shape)
    for size in shape:
        numel *= size
        if numel >= 2**63:
            raise ValueError(f"no tensor has the shape {reprlib.repr(shape)}")
    return numel


def _check_piece(piece: Piece, num_bytes: int, files: Mapping[str, int]) -> None:
    if piece.file not in files:
        raise ValueError(f"expected one of the files of the index, got {reprlib.repr(piece.file)}")
    if piece.offset + num_bytes > files[piece.file]:
        raise ValueError(f"{num_bytes} bytes from byte {piece.offset} on are beyond the end of {piece.file}")
    if len(piece.checksums) != -(-num_bytes // CHUNK):
        raise ValueError(f"expected a checksum of each {CHUNK} bytes, got {len(piece.checksums)} for {num_bytes} bytes")


def _check_pieces_apart(leaves: Mapping[str, IndexEntry]) -> None:
    """ValueError if two pieces share a byte of a file."""
    pieces = ((piece, entry.dtype.itemsize, name) for name, entry in leaves.items() for piece in entry.pieces)
    spans = sorted((x.file, x.offset, x.offset + x.numel * itemsize, name) for x, itemsize, name in pieces)
    for (file, _, end, name), (other, begin, _, second) in pairwise(spans):
        if file == other and begin < end:
            raise ValueError(f"{second!r} begins at byte {begin} of {file}, and {name!r} ends at byte {end}")


def _check_names(by_rank: Sequence[str], ranks: int, leaves: Mapping[str, Json], values: Mapping[str, Json]) -> None:
    names = [*leaves, *values, *by_rank]
    if twice := next((name for name, number in Counter(names).items() if number > 1), None):
        raise ValueError(f"{twice!r} comes twice")
    for name in by_rank:
        if not any(all(rank_key(name, rank) in of_kind for rank in range(ranks)) for of_kind in (leaves, values)):
            raise ValueError(f"{name!r}: expected an entry for each of {ranks} ranks")


def in_order(pieces: Iterable[Piece], numel: int, name: str) -> tuple[Piece, ...]:
    """Sort pieces by beginning. ValueError unless each of the leaf's `numel` elements is in exactly one piece."""
    ordered, end = tuple(sorted(pieces, key=lambda piece: piece.begin)), 0
    for piece in ordered:
        if piece.begin != end or not piece.numel:
            raise ValueError(f"{name}: expected elements from {end} on, got {piece.numel} from {piece.begin} on")
        end = piece.end
    require(end == numel, f"{name}: expected {numel} elements, got {end}")
    return ordered


def read_piece(raw: Json) -> Piece:
    is_piece = isinstance(raw, list) and len(raw) == 5 and isinstance(raw[0], str) and isinstance(raw[4], list)
    if not is_piece:
        raise ValueError(f"expected [file, offset, begin, number of elements, checksums], got {reprlib.repr(raw)}")
    file, offset, begin, numel, checksums = raw
    return Piece(file, _count(offset), _count(begin), _count(numel), tuple(map(_count, checksums)))


def _file_name(name: str) -> str:
    # a separator may lead out of the folder; the next save deletes listed files, so `index.json` is refused
    if not _FILE.fullmatch(name):
        raise ValueError(f"expected the name of a safetensors file beside the index, got {reprlib.repr(name)}")
    return name


def _count(number: Json) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"expected a number of at least 0, got {reprlib.repr(number)}")
    return number


def rank_key(name: str, rank: int) -> str:
    """Return the key of one rank's entry.

    >>> rank_key("extra.position", 1)
    'extra.position@1'
    """
    return f"{name}@{rank}"


def checksum(data: Tensor, columns: int = _COLUMNS) -> int:
    """Return the CRC-32 of column sums of 64-bit words, and of the bytes left over.

    It is as fast as reading memory. For `block` (bytes), with numpy:

        end = len(block) // 65528 * 65528
        sums = np.frombuffer(block[:end], "<i8").reshape(-1, 8191).sum(0)
        zlib.crc32(block[end:], zlib.crc32(sums.tobytes()) if end else 0)

    `data`: flat uint8, on any device; only sums and bytes left over go to the host. If words move by a multiple of
    `columns`, the checksum does not change.

    >>> checksum(torch.tensor([49, 50, 51], dtype=torch.uint8)) == zlib.crc32(b"123")
    True
    """
    if data.storage_offset() % 8:  # words must be aligned
        data = data.clone()
    end = len(data) // (8 * columns) * 8 * columns
    sums = data[:end].view(torch.int64).view(-1, columns).sum(0)  # (columns,), modulo 2^64
    return zlib.crc32(_bytes(data[end:]), zlib.crc32(_bytes(sums.view(torch.uint8))) if end else 0)


def read_block(file: Reader, offset: int, view: memoryview, expected: int | None) -> bool:
    """Fill `view` from byte `offset` on. False for a short file, or a checksum other than `expected` (None: any)."""
    if file.read_into(offset, view) != len(view):
        return False
    return expected is None or checksum(torch.frombuffer(view, dtype=torch.uint8)) == expected


def _bytes(x: Tensor) -> bytearray:
    memory = bytearray(len(x))
    if memory:  # torch.frombuffer refuses empty memory
        torch.frombuffer(memory, dtype=torch.uint8).copy_(x)
    return memory
