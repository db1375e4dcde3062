"""Checkpoints of other libraries: the format at a path, and the index of its contents."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import add
from pathlib import Path

from .boxes import MOST_RUNS, num_runs, runs_of
from .directory import finished, read_all
from .folders import Folder, folder_of
from .foreign import parsed, require
from .hugging_face import FILE, indexed
from .hugging_face import INDEX as FILES
from .index import CheckpointError, Index, IndexEntry, Piece, in_order
from .safetensors_file import PICKLES, FileEntry, are_counts, read_header
from .torch_dcp import METADATA_FILE, index_of_dcp

DCP, SAFETENSORS = "torch.distributed.checkpoint", "safetensors"
# files of torch's HuggingFaceStorageWriter(save_distributed=True): metadata has each box's offsets in its tensor
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its name in errors, the folder of its files, its index, and a text for ranks to compare."""

    what: str
    place: Folder
    index: Index
    text: str


def format_at(path: str | os.PathLike[str], place: Folder) -> str:
    """Return the format at a path; "" for a directory of `save`, even an empty one."""
    if os.path.isfile(path) and Path(path).suffix in (".safetensors", *PICKLES):
        return SAFETENSORS
    if finished(place):
        return ""
    names = place.names()
    for name, kind in ((METADATA_FILE, DCP), (FILE, SAFETENSORS), (FILES, SAFETENSORS)):
        if place.has(name):
            return kind
        if name in names:
            raise CheckpointError(
                f"{place}/{name}: expected a regular file: a link may lead elsewhere. Those of Hugging Face's cache "
                "are links: load_safetensors follows them, and snapshot_download(..., local_dir=...) writes files"
            )
    if any(map(_SHARD.fullmatch, names)):
        return SAFETENSORS
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        raise CheckpointError(
            f"{place}: no checkpoint; it has {pickles[0]!r}, a pickle, which may run any code when it is read. Let the "
            "library that wrote it write safetensors, or a checkpoint of torch.distributed.checkpoint"
        )
    return ""


def source_at(path: str | os.PathLike[str], place: Folder, kind: str) -> Checkpoint:
    if kind == DCP:
        index, data = index_of_dcp(place)
        return Checkpoint(f"{place}", place, index, hashlib.sha256(data).hexdigest())
    folder = folder_of(Path(path).parent) if os.path.isfile(path) else place
    try:
        index = _index_of_chunks(_chunks_at(Path(path), folder))
    except (OSError, ValueError) as error:  # the errors' texts begin with the path
        raise CheckpointError(str(error)) from error
    lines = [f"{name!r}: {entry}" for name, entry in index.leaves.items()]
    return Checkpoint(f"{place}", folder, index, "\n".join(lines))


_Chunk = tuple[FileEntry, tuple[int, ...] | None]  # a box of a tensor, and its offsets (None: the whole tensor)


def _chunks_at(path: Path, folder: Folder) -> Iterator[_Chunk]:
    def read(name: str) -> dict[str, FileEntry]:
        return header_of(folder, name)[0]

    if os.path.isfile(path):
        yield from ((x, None) for x in read(path.name).values())
    elif folder.has(FILE):
        yield from ((x, None) for x in read(FILE).values())  # transformers reads this file first, too
    elif folder.has(FILES):
        where = f"{folder}/{FILES}"
        yield from ((x, None) for x in indexed(parsed(read_all(folder, FILES), where), where, read).values())
    else:
        for name in filter(_SHARD.fullmatch, folder.names()):
            yield from _chunks(folder, name)


def header_of(folder: Folder, name: str) -> tuple[dict[str, FileEntry], dict[str, object]]:
    with folder.open(name) as file:
        return read_header(file, Path(f"{folder}/{name}"))


def _chunks(folder: Folder, name: str) -> Iterator[_Chunk]:
    """Yield the boxes in a file of torch's HuggingFaceStorageWriter."""
    entries, metadata = header_of(folder, name)
    where = f"{folder}/{name}"
    places = parsed(str(metadata.get(_SHARDING)).encode(), where, _SHARDING)
    for x in entries.values():
        place = places.get(x.name)
        offsets = place.get("saved_offsets") if isinstance(place, dict) else None
        if not are_counts(offsets) or len(offsets) != len(x.shape):
            raise ValueError(f"{where}: {x.name!r}: expected {len(x.shape)} offsets, got {str(offsets)[:80]}")
        yield x, tuple(offsets)


def _index_of_chunks(chunks: Iterable[_Chunk]) -> Index:
    by_name = dict[str, list[_Chunk]]()
    for chunk in chunks:
        by_name.setdefault(chunk[0].name, []).append(chunk)
    leaves, left_out, left = dict[str, IndexEntry](), dict[str, str](), MOST_RUNS
    for name, of_name in by_name.items():
        first = of_name[0][0]
        if first.dtype is None:
            left_out[name] = f"{name!r} is {first.kind}, a dtype that torch has not"
            continue
        boxes = [(x, offsets if offsets is not None else (0,) * len(x.shape)) for x, offsets in of_name]
        if any((x.kind, len(x.shape)) != (first.kind, len(first.shape)) for x, _ in boxes):
            raise ValueError(f"{first.file}: {name!r}: other files have it with another dtype or other dimensions")
        shape = tuple(max(sizes) for sizes in zip(*(map(add, at, x.shape) for x, at in boxes), strict=True))
        left -= sum(num_runs(shape, x.shape) for x, _ in boxes)
        require(left >= 0, f"{first.file}: {name!r}: it is cut so that there are more than {MOST_RUNS:,} runs")
        runs = ((x, *run) for x, offsets in boxes if x.num_bytes for run in runs_of(shape, offsets, x.shape))
        size = first.dtype.itemsize
        pieces = [Piece(x.file.name, x.start + begin * size, at, numel, ()) for x, begin, at, numel in runs]
        leaves[name] = IndexEntry(shape, first.dtype, in_order(pieces, math.prod(shape), f"{first.file}: {name!r}"))
    return Index(0, 0, (), {}, leaves, {}, left_out=left_out)
