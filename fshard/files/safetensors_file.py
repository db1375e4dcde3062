"""The safetensors format: 8 bytes with the length of a header, the header in JSON, then the data of all tensors.

The library safetensors reads whole rows of a tensor, and needs all tensors in memory to write a file. This module
reads intervals of elements, and writes one leaf at a time.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase, FileIO
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from ..core.storage import as_bytes, from_bytes
from .folders import LocalReader, Reader, read_bytes
from .foreign import open_file, parsed, require

_LONGEST_HEADER = 100_000_000  # bytes; the library's own limit
CHUNK = 1 << 22  # bytes read, written and checked at a time
METADATA = "__metadata__"  # a name that no tensor has
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,  # only in fshard's indexes: files have pairs of F64 (`stored`)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a file: `start` is its offset in bytes, from the data's beginning (`laid_out`) or the file's."""

    name: str
    kind: str  # the format's name of the dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    file: Path

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in torch; None if torch lacks it."""
        return DTYPES.get(self.kind)

    def __str__(self) -> str:
        return f"{self.name!r} {self.kind}{list(self.shape)} at {self.start} in {self.file.name}"


def stored(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype in a file: pairs of float64 for complex128, which the format lacks."""
    return ((*shape, 2), torch.float64) if dtype == torch.complex128 else (shape, dtype)


def laid_out(leaves: Iterable[tuple[str, tuple[int, ...], torch.dtype]], file: Path) -> list[FileEntry]:
    entries, start = [], 0
    for name, shape, dtype in sorted(leaves, key=lambda leaf: -leaf[2].itemsize):
        entries.append(FileEntry(name, NAMES[dtype], shape, start, math.prod(shape) * dtype.itemsize, file))
        start += entries[-1].num_bytes
    return entries


def check_fits(
    function: str, names: Iterable[str], dtypes: Iterable[tuple[str, torch.dtype]], lacks: Sequence[torch.dtype] = ()
) -> None:
    """ValueError for names and dtypes unfit for the format, or dtypes in `lacks`."""
    if twice := [name for name, number in Counter(names).items() if number > 1 or name == METADATA]:
        raise ValueError(f"{function}: names that come twice, or mean something else: {', '.join(map(repr, twice))}")
    dtypes = [*dtypes]
    if odd := [name for name, _ in dtypes if name.encode(errors="ignore").decode() != name]:
        raise ValueError(f"{function}: names that are no text: {', '.join(map(repr, odd))}. Rename the leaves")
    if lacking := [f"{name!r} is {dtype}" for name, dtype in dtypes if dtype not in NAMES or dtype in lacks]:
        raise ValueError(
            f"{function}: dtypes that safetensors files do not have: {'; '.join(lacking)}. Cast them, or save "
            "torch.view_as_real(x) of a complex x"
        )


def header(entries: Iterable[FileEntry]) -> bytes:
    """Return a file's bytes before the data. Dual: `read_entries`."""
    ends = ((x, [x.start, x.start + x.num_bytes]) for x in entries)
    forms = {x.name: {"dtype": x.kind, "shape": list(x.shape), "data_offsets": offsets} for x, offsets in ends}
    # transformers refuses files without this metadata
    text = json.dumps({METADATA: {"format": "pt"}, **forms}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def read_entries(path: Path) -> dict[str, FileEntry]:
    """Return a file's tensors by name; only the header is read."""
    with open_file(path) as file:
        return read_header(LocalReader(file), path)[0]


def read_header(file: Reader, path: Path) -> tuple[dict[str, FileEntry], dict[str, object]]:
    """Return the tensors and the metadata of a file. ValueError if it is in another format or not whole."""
    first, size = read_bytes(file, 0, 8), file.size
    length = int.from_bytes(first, "little")
    # torch.save writes zip files, once plain pickles: read as a length, their first bytes are absurd
    is_pickle = length > _LONGEST_HEADER and (first[:4] == b"PK\x03\x04" or first[:1] == b"\x80")
    if path.suffix in PICKLES or is_pickle:
        raise ValueError(
            f"{path}: expected a .safetensors file, got a pickle, which may run any code when it is read. "
            "Let the library that wrote it write safetensors"
        )
    wrong = f"not a safetensors file, or cut off: a header of {length:,} bytes in a file of {size:,}"
    require(len(first) == 8 and length <= min(_LONGEST_HEADER, size - 8), f"{path}: {wrong}")
    forms = parsed(read_bytes(file, 8, length), path, "its header")
    metadata = forms.pop(METADATA, {})
    entries = _entries(forms, 8 + length, path)
    _check_data(entries, 8 + length, size - 8 - length, path)
    return {x.name: x for x in entries}, metadata if isinstance(metadata, dict) else {}


def _entries(forms: Mapping[str, object], begin: int, path: Path) -> list[FileEntry]:
    entries = []
    for name, form in forms.items():
        fields = form if isinstance(form, dict) else {}
        kind, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(kind, str) or not are_counts(shape) or not are_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"{path}: {name!r}: expected its dtype, shape and data_offsets, got {str(form)[:200]}")
        entries.append(FileEntry(name, kind, tuple(shape), begin + offsets[0], offsets[1] - offsets[0], path))
    return entries


def are_counts(values: object) -> TypeGuard[list[int]]:
    # few and small numbers: their product takes no time
    return isinstance(values, list) and len(values) <= 64 and all(type(x) is int and 0 <= x < 1 << 63 for x in values)


def _check_data(entries: Iterable[FileEntry], begin: int, size: int, path: Path) -> None:
    """ValueError unless the tensors fill the data from byte `begin` of the file on, one after the other."""
    end = 0
    for x in sorted(entries, key=lambda x: (x.start, x.num_bytes)):
        if x.dtype is not None and x.num_bytes != math.prod(x.shape) * x.dtype.itemsize:
            raise ValueError(
                f"{path}: {x.name!r}: {x.kind}{list(x.shape)} has {math.prod(x.shape) * x.dtype.itemsize:,} bytes, "
                f"and its offsets say {x.num_bytes:,}"
            )
        if (start := x.start - begin) != end:
            raise ValueError(f"{path}: {x.name!r} begins at byte {start:,}, and the tensor before it ends at {end:,}")
        end += x.num_bytes
    if end != size:
        why = "it is cut off, or not whole yet" if end > size else "something was written behind them: copy it anew"
        raise ValueError(f"{path}: its tensors need {end:,} bytes, and it has {size:,}: {why}")


def read_chunks(file: FileIO, path: Path, start: int, num_bytes: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield `num_bytes` bytes as flat tensors in host memory, each valid until the next tensor."""
    reader, buffer, end = LocalReader(file), bytearray(min(num_bytes, CHUNK)), start + num_bytes
    for begin in range(start, end, CHUNK):
        view = memoryview(buffer)[: end - begin]
        require(reader.read_into(begin, view) == len(view), f"{path}: it ended while it was read")
        yield from_bytes(torch.frombuffer(view, dtype=torch.uint8), dtype)


def write_tensor(file: BufferedIOBase, start: int, value: Tensor) -> None:
    file.seek(start)
    buffer = bytearray(min(value.nbytes, CHUNK))
    for part in as_bytes(value).split(CHUNK) if buffer else ():
        file.write(copied_into(buffer, part))


def copied_into(buffer: bytearray, data: Tensor) -> memoryview:
    torch.frombuffer(buffer, dtype=torch.uint8)[: data.numel()].copy_(data)
    return memoryview(buffer)[: data.numel()]
