"""Folders of a remote store, by a URL for fsspec, as "s3://bucket/run".

Note [Objects appear whole]
    An object store has no rename and needs none: an object is there as a whole when its upload ends, or not at all. So
    `put` is one upload. File systems behind a URL, such as sftp, show a file while it grows: to these, `put` writes a
    file of another name and renames the file, as atomically as fsspec's `mv` does. Before every look, fsspec's cached
    listings are dropped, because other processes write to the same store.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .foreign import require

# Note [Objects appear whole]
OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a", "tos"}
# fsspec's errors often have no errno
_ERRNO_OF = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, TimeoutError: errno.ETIMEDOUT}


class RemoteFolder:
    """A folder of a remote store. Forked processes must not use it: its connections belong to one process."""

    def __init__(self, fs: Any, path: str, url: str):
        self._fs, self._path, self._url = fs, path, url
        self._is_store = url.partition("://")[0] in OBJECT_STORES

    def __str__(self) -> str:
        return self._url

    def inside(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._fs, f"{self._path}/{name}", f"{self._url}/{name}")

    def names(self, folders: bool = False) -> list[str]:
        """Return sorted names; with `folders`, only of folders. [] for a missing folder, OSError without the bucket."""
        self._fs.invalidate_cache()
        try:
            with _naming(self._url):
                entries = self._fs.ls(self._path, detail=True)
        except FileNotFoundError as error:
            # the cause of s3fs's error is botocore's
            if "NoSuchBucket" in str(error.__cause__ and error.__cause__.__cause__):
                raise
            return []
        paths = {x["name"].rstrip("/") for x in entries if not folders or x["type"] == "directory"}
        return sorted(path.rpartition("/")[2] for path in paths - {self._path.rstrip("/")})

    def links(self) -> list[str]:
        return []

    def has(self, name: str) -> bool:
        """OSError if the store does not answer: fsspec's isfile would return False."""
        with suppress(FileNotFoundError):
            return self._info(name)["type"] == "file"
        return False

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        path, url = f"{self._path}/{name}", f"{self._url}/{name}"
        with _naming(url):
            if not self._is_store:  # s3fs's makedirs would make a bucket
                self._fs.makedirs(self._path, exist_ok=True)
            file = self._fs.open(path, "wb")
        try:
            for chunk in chunks:
                with _naming(url):
                    file.write(chunk)
            with _naming(url):
                file.close()
        except BaseException:
            with suppress(Exception):
                file.close()  # completes the upload; no index names the file
            with suppress(Exception):
                self.remove(name)
            raise

    def put(self, name: str, data: bytes) -> None:
        if self._is_store:
            with _naming(f"{self._url}/{name}"):
                self._fs.pipe_file(f"{self._path}/{name}", data)
            return
        unfinished = f".{name}.{secrets.token_hex(8)}"
        self.write(unfinished, [memoryview(data)])
        with _naming(f"{self._url}/{name}"):
            self._fs.mv(f"{self._path}/{unfinished}", f"{self._path}/{name}")

    @contextmanager
    def open(self, name: str) -> Iterator[RemoteReader]:
        info = self._info(name)
        if info["type"] != "file":
            raise OSError(errno.EISDIR, "expected a file, got a folder", f"{self._url}/{name}")
        yield RemoteReader(self._fs, f"{self._path}/{name}", f"{self._url}/{name}", info["size"])

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError, IsADirectoryError), _naming(f"{self._url}/{name}"):
            self._fs.rm_file(f"{self._path}/{name}")

    def remove_folder(self) -> None:
        """Remove an empty folder. Object stores have none."""
        if not self._is_store:
            with suppress(Exception):  # files of another save are in it
                self._fs.rmdir(self._path)

    def _info(self, name: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        with _naming(f"{self._url}/{name}"):
            return self._fs.info(f"{self._path}/{name}")


class RemoteReader:
    """A file of a remote store, read by ranges of bytes."""

    def __init__(self, fs: Any, path: str, url: str, size: int):
        self._fs, self._path, self._url, self.size = fs, path, url, size

    def read_into(self, offset: int, view: memoryview) -> int:
        if not view:  # stores have no empty ranges
            return 0
        end = offset + len(view)
        with _naming(self._url):
            # at the end ask for one byte more, to notice that a longer file replaced this
            data = self._fs.cat_file(self._path, start=offset, end=end + (end == self.size))
        if len(data) > len(view):
            raise OSError(errno.ESTALE, "another file took its place while it was read", self._url)
        view[: len(data)] = data
        return len(data)


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Turn a store's errors, of many classes, into an OSError with the file's name."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, url) from error
        number = next((number for kind, number in _ERRNO_OF.items() if isinstance(error, kind)), errno.EIO)
        raise OSError(number, f"{type(error).__name__}: {error}", url) from error


def remote_folder(url: str) -> RemoteFolder:
    """Return a URL's folder. ImportError if a package is missing, ValueError if fsspec cannot open the URL.

    >>> str(remote_folder("memory://runs/1/"))
    'memory://runs/1'
    """
    require("::" not in url, f"dir={url!r}: expected one URL, got a chain: a cache does not show what others write")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"dir={url!r}: URLs need fsspec: pip install fsspec") from error
    shown = re.sub(r"(://[^/@:]*):[^/@]*@", r"\1@", url).rstrip("/")  # no password in messages
    try:
        fs, path = url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"dir={shown!r}: {error}") from error
    except Exception as error:  # each file system raises its own errors
        raise ValueError(f"dir={shown!r}: expected a path, or a URL that fsspec opens: {error}") from error
    require(path.strip("/"), f"dir={url!r}: expected a folder in the store, as in 's3://bucket/run'")
    return RemoteFolder(fs, path.rstrip("/"), shown)
