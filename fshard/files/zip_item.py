"""A zip file inside a larger file: the offsets of its members. Nothing is decompressed."""

from __future__ import annotations

import io
import zipfile

from .folders import Reader, read_bytes
from .foreign import require

_MOST_BYTES = 1 << 24  # of the zip's directory (160 for each tensor), or of a member to read


class ZipItem:
    """A zip file of `length` bytes at `offset` of a file, with all members in one folder and not compressed.

    ValueError, zipfile.BadZipFile or struct.error for other bytes, in bounded time and memory.
    """

    def __init__(self, file: Reader, offset: int, length: int):
        if offset + length > file.size:
            raise ValueError(f"bytes {offset:,} to {offset + length:,} are beyond the end of the file, {file.size:,}")
        self._file, self._offset, self._length = file, offset, length
        try:
            self._zip = zipfile.ZipFile(_View(file, offset, length))
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(f"expected a zip file that torch.save wrote: {error}") from error
        self._members = {member.filename.partition("/")[2]: member for member in self._zip.infolist()}

    def has(self, name: str) -> bool:
        return name in self._members

    def check(self) -> None:
        """Read all members. ValueError if one is compressed or damaged, or if members overlap."""
        size = sum(self.data(name)[1] for name in self._members)
        require(size <= self._length, f"{size:,} bytes in a file of {self._length:,}")
        require(not (torn := self._zip.testzip()), f"{torn!r} is not what was written")

    def data(self, name: str) -> tuple[int, int]:
        """Return the offset of a member's bytes in the whole file, and their number."""
        member = self._members.get(name)
        if member is None:
            raise ValueError(f"the zip file lacks {name!r}")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"{name!r} is compressed: expected plain bytes, as torch.save writes them")
        require(not member.flag_bits & 1, f"{name!r} is encrypted")
        head = _read_at(self._file, self._offset + member.header_offset, 30)
        is_member = head[:4] == b"PK\x03\x04"
        require(is_member, f"{name!r}: no member of a zip file begins at byte {member.header_offset:,}")
        # the header's lengths of name and extra field: the directory's may differ
        start = member.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:], "little")
        if start + member.file_size > self._length:
            raise ValueError(f"{name!r}: {member.file_size:,} bytes from byte {start:,} on are beyond the zip file")
        return self._offset + start, member.file_size

    def read(self, name: str) -> bytes:
        start, num_bytes = self.data(name)
        return _read_at(self._file, start, num_bytes)


def _read_at(file: Reader, offset: int, num_bytes: int) -> bytes:
    require(num_bytes <= _MOST_BYTES, f"expected at most {_MOST_BYTES:,} bytes, got {num_bytes:,}")
    try:
        data = read_bytes(file, offset, num_bytes)
    except OSError as error:  # zipfile would take an OSError for the file's end
        raise ValueError(str(error)) from error
    require(len(data) == num_bytes, f"{num_bytes:,} bytes from byte {offset:,} on are beyond the end of the file")
    return data


class _View(io.RawIOBase):
    """A part of a file, as a whole file for zipfile."""

    def __init__(self, file: Reader, offset: int, length: int):
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._length)[whence]
        if base + offset < 0:
            raise zipfile.BadZipFile("it begins before the item")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._position, 0)
        data = _read_at(self._file, self._offset + self._position, left if size < 0 else min(size, left))
        self._position += len(data)
        return data
