"""Checkpoints that other libraries wrote: which format a path has, and the index of what is there."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from .directory import finished
from .hugging_face import FILE, entries_at
from .hugging_face import INDEX as FILES
from .index import CheckpointError, Entry, Index, Piece
from .places import Place, place_of
from .safetensors_file import PICKLES
from .torch_dcp import METADATA, index_of_dcp

DCP, SAFETENSORS = "torch.distributed.checkpoint", "safetensors"


@dataclass(frozen=True)
class Source:
    """A checkpoint: what errors call it, the folder of its files, its index, and a text that is the same on all ranks.

    The text stands for the index: ranks compare it.
    """

    what: str
    place: Place
    index: Index
    text: str


def format_at(path: str | os.PathLike[str], place: Place) -> str:
    """Return the format of what is at a path; "" for a directory of `save`, which may have no checkpoint yet.

    CheckpointError for pickles.
    """
    if os.path.isfile(path) and Path(path).suffix in (".safetensors", *PICKLES):
        return SAFETENSORS
    if finished(place):
        return ""
    if place.has(METADATA):
        return DCP
    if place.has(FILE) or place.has(FILES):
        return SAFETENSORS
    if pickles := [name for name in place.names() if name.endswith(PICKLES)]:
        raise CheckpointError(
            f"{place}: no checkpoint; it has {pickles[0]}, a pickle, which may run any code when it is read. Let the "
            "library that wrote it write safetensors, or a checkpoint of torch.distributed.checkpoint"
        )
    return ""


def source_at(path: str | os.PathLike[str], place: Place, kind: str) -> Source:
    """Return the checkpoint of a format that is at a path. CheckpointError for one that is damaged."""
    if kind == DCP:
        index, data = index_of_dcp(place)
        return Source(f"{place}", place, index, hashlib.sha256(data).hexdigest())
    index = _index_of_safetensors(Path(path))
    folder = place_of(Path(path).parent) if os.path.isfile(path) else place
    lines = [f"{name!r}: {entry}" for name, entry in index.leaves.items()]
    return Source(f"{place}", folder, index, "\n".join(lines))


def _index_of_safetensors(path: Path) -> Index:
    try:
        entries = entries_at(path)
    except (OSError, ValueError) as error:  # they begin with the path
        raise CheckpointError(str(error)) from error
    leaves, left_out = dict[str, Entry](), dict[str, str]()
    for name, entry in entries.items():
        if entry.dtype is None:
            left_out[name] = f"{name!r} is {entry.kind}, a dtype that torch has not"
            continue
        numel = entry.num_bytes // entry.dtype.itemsize
        pieces = (Piece(entry.file.name, entry.start, 0, numel, ()),) if numel else ()
        leaves[name] = Entry(entry.shape, entry.dtype, pieces)
    return Index(0, 0, (), {}, leaves, {}, left_out=left_out)
