"""Folders of checkpoint files: on a local disk in this file, on remote stores in `remote.py`.

Note [A file is whole or not there]
    `put` makes a file appear as a whole. On a disk, the data goes to a file of another name, which is flushed; then one
    rename gives the file its name, then the folder is flushed. `write` makes no such promise: a written file
    counts once an index names the file.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from ..core.arguments import check_path
from .foreign import naming, open_file
from .remote import RemoteFolder, RemoteReader, remote_folder

_DAY = 86_400  # seconds
_LONGEST_NAME = 255  # characters of a file's name, on any file system
_CANNOT_FLUSH = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)


class LocalFolder:
    """A folder of a local disk. Symbolic links in it are refused: they may lead out of the folder."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path).absolute()  # the working directory may change during a save

    def __str__(self) -> str:
        return str(self._path)

    def inside(self, name: str) -> LocalFolder:
        if (self._path / name).is_symlink():
            raise OSError(errno.ELOOP, "expected a folder, got a symbolic link", str(self._path / name))
        return LocalFolder(self._path / name)

    def names(self, folders: bool = False) -> list[str]:
        """Return sorted names; with `folders`, only of folders, and not of links. [] if this folder is missing."""
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            return sorted(x.name for x in entries if not folders or x.is_dir(follow_symlinks=False))
        return []

    def links(self) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            return sorted(x.name for x in entries if x.is_symlink())
        return []

    def has(self, name: str) -> bool:
        with suppress(FileNotFoundError, NotADirectoryError):
            return stat.S_ISREG((self._path / name).lstat().st_mode)
        return False

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write a new file that outlives a loss of power; make the folder if it is missing."""
        self._write(name, chunks)
        flush(self._path)

    def put(self, name: str, data: bytes) -> None:
        """See Note [A file is whole or not there]."""
        unfinished = f".{name}.{secrets.token_hex(8)}"
        self._write(unfinished, [memoryview(data)], 0o644)
        try:
            os.replace(self._path / unfinished, self._path / name)
        except OSError:  # a folder has the name
            self.remove(unfinished)
            raise
        flush(self._path)

    def sweep(self, name: str) -> None:
        """Delete leftovers of killed `put`s, at least a day old: a younger file may be in use."""
        for path in (self._path / x for x in self.names() if x.startswith(f".{name}.")):
            with suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _DAY:
                    path.unlink()

    def _write(self, name: str, chunks: Iterable[memoryview], mode: int = 0o666) -> None:
        self._make()
        # O_EXCL: never write over an existing file, or through a link
        number = os.open(self._path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(number, "wb", buffering=0) as file, naming(self._path / name):
                for chunk in chunks:
                    _write_chunk(file, chunk)
                os.fsync(number)
        except BaseException:
            self.remove(name)
            raise

    @contextmanager
    def open(self, name: str) -> Iterator[LocalReader]:
        with open_file(self._path / name, follow=False) as file:
            yield LocalReader(file)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError, IsADirectoryError):
            (self._path / name).unlink()

    def remove_folder(self) -> None:
        with suppress(OSError):  # files of another save are in it
            self._path.rmdir()
            flush(self._path.parent)

    def _make(self) -> None:
        if not self._path.is_dir():
            LocalFolder(self._path.parent)._make()  # each new folder must outlive a loss of power
            self._path.mkdir(exist_ok=True)
            flush(self._path.parent)


class LocalReader:
    """A file of a local disk, read by ranges of bytes."""

    def __init__(self, file: FileIO):
        self._file, self.size = file, os.fstat(file.fileno()).st_size

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fill `view`; return the number of bytes read, fewer at the file's end."""
        filled = 0
        while filled < len(view):  # one read may return less than asked for
            with naming(self._file.name):
                count = os.preadv(self._file.fileno(), [view[filled:]], offset + filled)
            if not count:
                break
            filled += count
        return filled

    def check_safe(self) -> None:
        """PermissionError if anyone but root and this user may write to the file."""
        status = os.fstat(self._file.fileno())
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EACCES, f"it belongs to another user, {status.st_uid}", self._file.name)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EACCES, "others may write to it: chmod go-w", self._file.name)


def read_bytes(file: Reader, begin: int, size: int) -> bytes:
    """Return `size` bytes from `begin` on; fewer at the file's end."""
    data = bytearray(min(size, max(file.size - begin, 0)))
    return bytes(data[: file.read_into(begin, memoryview(data))])


# a folder, perhaps missing; errors name it by `str`
Folder: TypeAlias = LocalFolder | RemoteFolder
Reader: TypeAlias = LocalReader | RemoteReader  # an open file


def _write_chunk(file: FileIO, chunk: memoryview) -> None:
    begin, size = file.tell(), len(chunk)
    while chunk:  # one write may take less than all
        chunk = chunk[file.write(chunk) :]
    if hasattr(os, "posix_fadvise"):
        # this makes Linux write the bytes to the disk during the next chunk
        os.posix_fadvise(file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, against a loss of power."""
    number = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(number)
    except OSError as error:
        # some network file systems cannot flush a folder, and write its names at once
        if error.errno not in _CANNOT_FLUSH or not path.is_dir():
            raise
    finally:
        os.close(number)


def is_file_name(name: str) -> bool:
    """True if a foreign name has no separator, and cannot lead out of the folder.

    >>> is_file_name("model.safetensors"), is_file_name("../model.safetensors")
    (True, False)
    """
    return name not in ("", ".", "..") and len(name) <= _LONGEST_NAME and not {*name} & {"/", "\\", ":", "\0"}


def folder_of(directory: str | os.PathLike[str]) -> Folder:
    """Return the folder that a user names: a path, or a URL for fsspec.

    >>> str(folder_of("/runs/1")), str(folder_of("file:///runs/1")), str(folder_of("memory://runs/1"))
    ('/runs/1', '/runs/1', 'memory://runs/1')
    """
    text = os.fsdecode(directory)
    if not isinstance(directory, str) and re.match(r"[a-z][a-z0-9+]+:/", text):
        raise ValueError(f"dir={directory!r}: expected a URL as a string: a path has lost a slash of it")
    scheme, is_url, path = text.partition("://")
    if not is_url:
        return LocalFolder(text)
    is_local = scheme in ("file", "local")
    return LocalFolder(check_path("dir", path, f"a path after {scheme}://")) if is_local else remote_folder(text)
