"""The index of a checkpoint: which leaves it has, in which files their elements lie, and their checksums.

An index is JSON that anyone can read:

    {"format": "fshard", "version": 1, "step": 100, "ranks": 2, "plans": ["5f0c..."],
     "files": {"9a41-rank-00000.safetensors": 4096, ...},
     "leaves": {"params.w": {"shape": [4, 8], "dtype": "F32",
                             "pieces": [["9a41-rank-00000.safetensors", 136, 0, 16, [3735928559]], ...]}},
     "values": {"extra.epoch": 3, "extra.position@0": 7, "extra.position@1": 9},
     "by_rank": ["extra.position"]}

A piece is [file, offset of its first byte, begin, number of elements, CRC-32 of each `CHUNK` bytes]: elements [begin,
begin + number) of the flattened leaf. A leaf or value of which ranks have others, such as the position of each rank in
its data, is one of `by_rank`, and has an entry for each rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .safetensors_file import CHUNK, DTYPES, NAMES

VERSION = 1
MAX_BYTES = 1 << 28  # of an index: a longer one is refused before it is read

Json = Any  # Python's types cannot say more of JSON


class CheckpointError(ValueError):
    """A checkpoint is missing, not whole, or not what was asked for; or a save failed. Nothing was restored."""


@dataclass(frozen=True)
class Piece:
    """Elements [begin, begin + numel) of a flattened leaf: where they lie, and a checksum of each `CHUNK` bytes."""

    file: str
    offset: int  # bytes from the beginning of the file
    begin: int
    numel: int
    checksums: tuple[int, ...]  # () if there are none, as in formats of others

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.begin + self.numel


@dataclass(frozen=True)
class Entry:
    """A leaf: its shape, its dtype, and the pieces that make it up, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """What a checkpoint has: leaves and other values by name, and the size of every file in bytes."""

    step: int
    ranks: int
    plans: tuple[str, ...]  # fingerprints of the plans of the parameters
    files: Mapping[str, int]
    leaves: Mapping[str, Entry]
    values: Mapping[str, Json]
    by_rank: frozenset[str] = frozenset()  # names of which each rank has its own entry

    @property
    def names(self) -> list[str]:
        """The names of all leaves and values, without ranks."""
        keys = {rank_key(name, rank) for name in self.by_rank for rank in range(self.ranks)}
        return [*(key for key in (*self.leaves, *self.values) if key not in keys), *sorted(self.by_rank)]

    def key(self, name: str, rank: int) -> str:
        """Return the key in `leaves` or `values` of what a rank has under a name."""
        return rank_key(name, rank) if name in self.by_rank else name

    def to_json(self) -> bytes:
        """Return the text of the index. Dual: `read_index`."""
        leaves = {
            name: {"shape": [*x.shape], "dtype": NAMES[x.dtype], "pieces": [piece_to_json(piece) for piece in x.pieces]}
            for name, x in self.leaves.items()
        }
        head = {"format": "fshard", "version": VERSION, "step": self.step, "ranks": self.ranks, "plans": self.plans}
        rest = {"leaves": leaves, "values": dict(self.values), "by_rank": sorted(self.by_rank)}
        return json.dumps({**head, "files": dict(self.files), **rest}).encode()


def piece_to_json(piece: Piece) -> Json:
    """Return a piece as a list. Dual: `read_piece`."""
    return [piece.file, piece.offset, piece.begin, piece.numel, piece.checksums]


def read_index(text: bytes, where: str) -> Index:
    """Return the index that a text is. CheckpointError, which begins with `where`, for any other text."""
    try:
        raw = json.loads(text)
        _require(raw["format"] == "fshard", f"expected the format 'fshard', got {raw['format']!r}")
        _require(raw["version"] == VERSION, f"expected version {VERSION}, got {raw['version']!r}")
        files = {_file_name(name): _count(size) for name, size in raw["files"].items()}
        leaves = {name: _entry(name, entry, files) for name, entry in raw["leaves"].items()}
        plans = tuple(map(str, raw["plans"]))
        step, ranks, values = _count(raw["step"]), _count(raw["ranks"]), _values(raw["values"])
        return Index(step, ranks, plans, files, leaves, values, _by_rank(raw["by_rank"], ranks, leaves, values))
    except KeyError as error:
        raise CheckpointError(f"{where}: not an index of a checkpoint: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not an index of a checkpoint: {error}") from None


def _entry(name: str, raw: Json, files: Mapping[str, int]) -> Entry:
    dtype = DTYPES.get(raw["dtype"])
    _require(dtype is not None, f"{name!r}: expected one of the dtypes of safetensors, got {raw['dtype']!r}")
    assert dtype is not None
    shape = tuple(map(_count, raw["shape"]))
    entry = Entry(shape, dtype, in_order(map(read_piece, raw["pieces"]), math.prod(shape), repr(name)))
    for piece in entry.pieces:
        num_bytes = piece.numel * dtype.itemsize
        _require(piece.file in files, f"{name!r}: expected one of the files of the index, got {piece.file!r}")
        _require(
            piece.offset + num_bytes <= files[piece.file],
            f"{name!r}: {num_bytes} bytes from byte {piece.offset} on are beyond the end of {piece.file}",
        )
        _require(len(piece.checksums) == -(-num_bytes // CHUNK), f"{name!r}: expected a checksum of each {CHUNK} bytes")
    return entry


def in_order(pieces: Iterable[Piece], numel: int, name: str) -> tuple[Piece, ...]:
    """Return pieces by where they begin. ValueError unless they make up a leaf of `numel` elements, each once."""
    ordered, end = tuple(sorted(pieces, key=lambda piece: piece.begin)), 0
    for piece in ordered:
        _require(piece.begin == end and piece.numel, f"{name}: expected elements from {end} on, got {piece.begin}")
        end = piece.end
    _require(end == numel, f"{name}: its pieces have {end} elements, its shape {numel}")
    return ordered


def read_piece(raw: Json) -> Piece:
    """Return the piece that a list is. ValueError for another list."""
    file, offset, begin, numel, checksums = raw
    return Piece(file, _count(offset), _count(begin), _count(numel), tuple(map(_count, checksums)))


def _values(raw: Json) -> dict[str, Json]:
    for name, value in raw.items():
        _require(isinstance(value, bool | int | float | str), f"{name!r}: expected a number or a string")
    return dict(raw)


def _by_rank(raw: Json, ranks: int, *entries: Mapping[str, object]) -> frozenset[str]:
    for name in raw:
        _require(
            any(all(rank_key(name, rank) in of_kind for rank in range(ranks)) for of_kind in entries),
            f"{name!r}: expected an entry for each of {ranks} ranks",
        )
    return frozenset(raw)


def _file_name(name: str) -> str:
    # a file beside the index: a name with a separator may lead elsewhere
    is_plain = name not in ("", ".", "..") and not {*name} & {"/", "\\", ":", "\0"}
    _require(is_plain, f"expected the name of a file beside the index, got {name!r}")
    return name


def _count(number: Json) -> int:
    _require(type(number) is int and 0 <= number < 2**63, f"expected a number of at least 0, got {str(number)[:80]!r}")
    return number


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def rank_key(name: str, rank: int) -> str:
    """Return the key of the entry of one rank.

    >>> rank_key("extra.position", 1)
    'extra.position@1'
    """
    return f"{name}@{rank}"
