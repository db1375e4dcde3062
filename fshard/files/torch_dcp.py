"""Checkpoints of torch.distributed.checkpoint, read as data: `.metadata`, and the items of its files.

Note [A checkpoint of torch]
    `.metadata` is a pickle: shape and dtype of each tensor, the boxes of the tensor that ranks wrote (chunks), and the
    item of each chunk: a file, an offset, a length. An item is a zip file from `torch.save`: a pickle, and the elements
    as in memory. A chunk's elements are runs of the flattened tensor (`boxes.py`). All pickles are read as data
    (`inert_pickle.py`). Names and shapes come from `.metadata` alone; a rank opens the items of chunks that it needs.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from ..core.arguments import shown
from .boxes import MOST_RUNS, check_box, num_runs, runs_of
from .directory import read_all
from .folders import Folder, is_file_name
from .foreign import require
from .index import CheckpointError, Index, IndexEntry, Json, Piece, in_order
from .inert_pickle import PERSISTENT, PickleRecord, Plain, read_pickle
from .safetensors_file import NAMES
from .zip_item import ZipItem

METADATA_FILE = ".metadata"
_MOST_VALUES = 1 << 18  # numbers and strings of all items, together
_MOST_DIMS = 64  # of a tensor, as in torch
_DEEPEST = 32  # levels of lists within lists
_LONGEST_FQN = 4096  # characters of a name

_OURS = "torch.distributed.checkpoint.metadata."
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
_STORAGE_DTYPES = {f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()}
_DTYPE_OF = {str(dtype): dtype for dtype in NAMES}  # "torch.float32"
READABLE = {*_STORAGES.values(), *NAMES}  # dtypes
# names in torch's pickles; private names are a part of the format
_OF_METADATA = {
    *(f"{_OURS}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"{_OURS}{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *(f"{_OURS}{name}" for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    *(f"pathlib.{module}{kind}Path" for module in ("", "_local.") for kind in ("Posix", "Windows")),
    *_DTYPE_OF,
}
OF_TENSOR = {
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",  # for dtypes without a storage class
    "torch.storage.UntypedStorage",
    "collections.OrderedDict",
    PERSISTENT,
    *_STORAGE_DTYPES,
    *_DTYPE_OF,
}


@dataclass(frozen=True)
class ChunkRun(Piece):
    """A run of elements of a chunk: `offset` and `length` are of the chunk's item, in bytes."""

    leaf: str
    dtype: torch.dtype
    length: int
    sizes: tuple[int, ...]  # of the chunk
    first: int  # elements of the chunk before the run


def index_of_dcp(place: Folder) -> tuple[Index, bytes]:
    """Return the index of a checkpoint of torch, with `ChunkRun`s as pieces, and the bytes of `.metadata`.

    torch pickles each object that is no tensor. Numbers and strings in such an object become values, named by
    path; other objects are left out.
    """
    where = f"{place}/{METADATA_FILE}"
    try:
        text = read_all(place, METADATA_FILE)
    except OSError as error:
        raise CheckpointError(f"{where}: {error}") from error
    with _naming_damage(where):
        fields = _record_fields(read_pickle(text, _OF_METADATA), f"{_OURS}Metadata")
        items = _items(fields.get("storage_data"))
        leaves, others = _leaves(fields["state_dict_metadata"], items)
    values, left_out = dict[str, Json](), dict[str, str]()
    for name in others:
        try:
            values |= _flat_values(name, _pickled_value(place, *items[name, None]), _MOST_VALUES - len(values))
        except CheckpointError as error:
            left_out[name] = str(error)
    return Index(0, 0, (), {}, leaves, values, left_out=left_out), text


@contextmanager
def _naming_damage(where: str) -> Iterator[None]:
    """Turn errors of damaged data into CheckpointErrors, beginning with `where`."""
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: it lacks {str(error)[:200]}") from None
    except (ValueError, TypeError, OSError, struct.error, OverflowError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _record_fields(record: Plain, name: str) -> dict[str, Plain]:
    require(type(record) is PickleRecord and record.name == name, f"expected {name}, got {_kind(record)}")
    return _expect(record.state, dict, name)


def _expect(x: Plain, kind: type, name: str) -> Plain:
    require(isinstance(x, kind), f"{name}: expected {kind.__name__}, got {_kind(x)}")
    return x


def _kind(x: Plain) -> str:
    if type(x) is PickleRecord:
        return x.name
    # the text of nested lists and tuples may be of exponential length
    return f"an object of type {type(x).__name__}" if isinstance(x, list | tuple | dict) else shown(x)[:80]


def _counts(x: Plain, name: str) -> tuple[int, ...]:
    if type(x) is PickleRecord and x.name == "torch.Size" and x.args is not None and len(x.args) == 1:
        x = x.args[0]
    counts = tuple(_expect(x, tuple, name))
    is_plain = len(counts) <= _MOST_DIMS and all(type(n) is int and n >= 0 for n in counts)
    require(is_plain, f"{name}: expected up to {_MOST_DIMS} numbers of at least 0")
    return counts


_Item = tuple[str, int, int]  # file, offset and length of an item, in bytes
_Items = dict[tuple[str, tuple[int, ...] | None], _Item]  # by name and offsets of a chunk; None for objects


def _items(storage_data: Plain) -> _Items:
    items, by_file = _Items(), dict[str, list[tuple[int, int]]]()
    for key, info in _expect(storage_data, dict, "storage_data").items():
        index = _record_fields(key, f"{_OURS}MetadataIndex")
        name = _expect(index["fqn"], str, "a name")
        fields = _record_fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
        file = _expect(fields["relative_path"], str, f"{name!r}: relative_path")
        require(is_file_name(file), f"expected the name of a file beside {METADATA_FILE}, got {file[:80]!r}")
        offset, length = _counts((fields["offset"], fields["length"]), f"{name!r}: offset and length")
        if fields.get("transform_descriptors"):
            raise ValueError(f"{name!r}: its bytes were transformed when they were written, as by compression")
        offsets = index.get("offset")
        items[name, None if offsets is None else _counts(offsets, name)] = file, offset, length
        by_file.setdefault(file, []).append((offset, offset + length))
    for file, intervals in by_file.items():
        for (_, end), (begin, _) in pairwise(sorted(intervals)):
            require(end <= begin, f"items of {file} overlap: one ends at byte {end:,}, the next begins at {begin:,}")
    return items


def _leaves(forms: Plain, items: _Items) -> tuple[dict[str, IndexEntry], list[str]]:
    leaves, others, left = dict[str, IndexEntry](), list[str](), MOST_RUNS
    for name, form in _expect(forms, dict, "state_dict_metadata").items():
        if _expect(form, PickleRecord, f"{name!r}").name == f"{_OURS}BytesStorageMetadata":
            require((name, None) in items, f"{name!r}: no file has it")
            others.append(name)
            continue
        fields = _record_fields(form, f"{_OURS}TensorStorageMetadata")
        shape, dtype = _counts(fields["size"], f"{name!r}: size"), _dtype_of_record(name, fields["properties"])
        runs = list[ChunkRun]()
        for chunk in _expect(fields["chunks"], list, f"{name!r}: chunks"):
            box = _record_fields(chunk, f"{_OURS}ChunkStorageMetadata")
            offsets, sizes = (_counts(box[key], f"{name!r}: {key}") for key in ("offsets", "sizes"))
            if not math.prod(sizes):
                continue  # the chunk of a rank without elements
            check_box(name, shape, offsets, sizes)
            require((name, offsets) in items, f"{name!r}: no file has the chunk at {offsets}")
            left -= num_runs(shape, sizes)
            require(left >= 0, f"{name!r}: its chunks are cut so that there are more than {MOST_RUNS:,} runs")
            file, offset, length = items[name, offsets]
            for first, begin, numel in runs_of(shape, offsets, sizes):
                runs.append(ChunkRun(file, offset, begin, numel, (), name, dtype, length, sizes, first))
        leaves[name] = IndexEntry(shape, dtype, in_order(runs, math.prod(shape), repr(name)))
    return leaves, others


def _dtype_of_record(name: str, properties: Plain) -> torch.dtype:
    record = _expect(properties, PickleRecord, f"{name!r}: properties")
    state = _expect(record.state, tuple, f"{name!r}: properties")
    require(record.name == f"{_OURS}TensorProperties" and len(state) >= 5, f"{name!r}: properties of another form")
    dtype = _expect(state[0], PickleRecord, f"{name!r}: dtype")
    require(dtype.name in _DTYPE_OF, f"{name!r}: expected one of the dtypes of safetensors, got {dtype.name}")
    return _DTYPE_OF[dtype.name]


def located(place: Folder, pieces: Sequence[Piece]) -> list[Piece]:
    """Open the items; replace each `ChunkRun` by a piece with the offset of its elements."""
    items = {(piece.file, piece.offset): piece for piece in pieces if isinstance(piece, ChunkRun)}
    starts = dict[tuple[str, int], int]()
    for file, of_file in groupby(sorted(items), key=lambda item: item[0]):
        first, *others = of_file
        with _naming_damage(f"{place}/{file}: leaf {items[first].leaf!r}"), place.open(file) as reader:
            for item in (first, *others):
                run = items[item]
                with _naming_damage(f"{place}/{file}: leaf {run.leaf!r}"):
                    starts[item] = _first_byte(ZipItem(reader, run.offset, run.length), run)

    def at(run: ChunkRun) -> Piece:
        start = starts[run.file, run.offset] + run.first * run.dtype.itemsize
        return Piece(run.file, start, run.begin, run.numel, ())

    return [at(piece) if isinstance(piece, ChunkRun) else piece for piece in pieces]


def _first_byte(item: ZipItem, run: ChunkRun) -> int:
    key, dtype, first, sizes, strides = stored_tensor(read_pickle(item.read("data.pkl"), OF_TENSOR))
    require((dtype, sizes) == (run.dtype, run.sizes), f"expected {run.dtype} {[*run.sizes]}, got {dtype} {[*sizes]}")
    order = item.read("byteorder") if item.has("byteorder") else b"little"
    require(order == b"little", f"expected little-endian numbers, got {str(order)[:40]}")
    expected = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    is_plain = all(size == 1 or a == b for size, a, b in zip(sizes, expected, strides, strict=True))
    require(is_plain, f"a chunk {[*sizes]} with strides {[*strides]}: expected {expected}; save x.contiguous()")
    start, num_bytes = item.data(f"data/{key}")
    needed = (first + math.prod(sizes)) * dtype.itemsize
    require(needed <= num_bytes, f"expected {needed:,} bytes, got {num_bytes:,}")
    return start + first * dtype.itemsize


def stored_tensor(record: Plain) -> tuple[str, torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's storage key, dtype, first element in the storage, sizes and strides.

    `record`: of a pickle read with the names `OF_TENSOR`.
    """
    require(type(record) is PickleRecord and record.args is not None, f"expected a tensor, got {_kind(record)}")
    args, is_typed = record.args, record.name == "torch._utils._rebuild_tensor_v2"
    require(is_typed or record.name == "torch._utils._rebuild_tensor_v3", f"expected a tensor, got {record.name}")
    fewest = 6 if is_typed else 7
    require(len(args) >= fewest and not any(args[fewest:]), "a tensor that is conjugated, or has attributes")
    require(type(args[0]) is PickleRecord and args[0].name == PERSISTENT, "a tensor without a storage")
    storage = _expect(args[0].args[0], tuple, "a storage")
    kind, key = _expect(storage[1], PickleRecord, "a storage").name, _expect(storage[2], str, "the key of a storage")
    dtype = _STORAGE_DTYPES.get(kind) if is_typed else _DTYPE_OF.get(_expect(args[6], PickleRecord, "the dtype").name)
    require(dtype is not None, f"a storage of another kind: {kind}")
    assert dtype is not None
    (first,) = _counts((args[1],), "the first element")
    sizes, strides = _counts(args[2], "the shape"), _counts(args[3], "the strides")
    require(len(sizes) == len(strides), "a tensor with strides of other dimensions")
    return key, dtype, first, sizes, strides


def _pickled_value(place: Folder, file: str, offset: int, length: int) -> Plain:
    with _naming_damage(f"{place}/{file}: the item at byte {offset:,}"), place.open(file) as reader:
        return read_pickle(ZipItem(reader, offset, length).read("data.pkl"), set())


def _flat_values(name: str, value: Plain, most: int) -> dict[str, Json]:
    """Return numbers and strings by dotted name. CheckpointError for other objects, or a list that refers to itself."""
    values, waiting, steps = dict[str, Json](), [(name, value, 0)], 0
    while waiting:
        path, x, depth = waiting.pop()
        steps += 1
        # a list may be in many lists, and in itself
        if steps > most or depth > _DEEPEST or len(path) > _LONGEST_FQN:
            raise CheckpointError(f"{name[:80]!r} has too many numbers, lists within lists, or too long names")
        if type(x) in (list, tuple):
            waiting += [(f"{path}.{number}", part, depth + 1) for number, part in enumerate(x)]
        elif isinstance(x, dict):
            waiting += [(f"{path}.{key}", part, depth + 1) for key, part in x.items()]
        elif isinstance(x, bool | int | float | str):
            values[path] = x
        else:
            raise CheckpointError(f"{path!r} is {_kind(x)}, neither a number nor a string")
    return values
