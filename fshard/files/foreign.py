"""Read files that anyone may have written: regular files, JSON in bounded memory, errors with printable quotes."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Any

MOST_BYTES = 1 << 27  # bytes of one text
MOST_MEMORY = 1 << 30  # bytes of the objects of one text or pickle
MOST_OPERATIONS = 1 << 24  # of a pickle: torch's `.metadata` has 70 for a chunk, and reaches MOST_MEMORY first
MOST_ITEMS = 400_000  # leaves, tensors, values or files of one text
_LONGEST_ERROR = 10_000  # characters of an error
# bytes of memory, at most, for each such character of JSON (measured by `test_foreign.py`)
_MEMORY = {b",": 64, b":": 200, b"[": 96, b"{": 160}


def open_file(path: str | os.PathLike[str], follow: bool = True) -> FileIO:
    """Open a regular file for reading; without `follow`, no link. OSError for other files: a pipe would block."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "expected a regular file", os.fspath(path))
    return FileIO(path, opener=lambda *_: number)  # errors of reads name the path


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in OSErrors: Python names none if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else the error has only a text
            error.filename = error.filename or os.fspath(path)
        raise


def read_text(path: str | os.PathLike[str]) -> bytes:
    with open_file(path) as file, naming(path):
        size = os.fstat(file.fileno()).st_size
        check_size(size, path)
        return file.read(size)


def require(condition: object, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def check_size(size: int, where: object) -> None:
    require(size <= MOST_BYTES, f"{where}: expected at most {MOST_BYTES:,} bytes, got {size:,}")


def parsed(text: bytes, where: object, what: str = "it") -> dict[str, Any]:
    """Return a JSON object. ValueError for other text, duplicate names, and too many values.

    >>> parsed(b'{"a": [1, 2]}', "x.json")
    {'a': [1, 2]}
    """

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        require(len(values) <= MOST_ITEMS, f"{len(values):,} names in one object: expected at most {MOST_ITEMS:,}")
        require(len(values) == len(pairs), "a name comes twice")
        return values

    check_size(len(text), where)
    if (memory := _memory_of_text(text)) > MOST_MEMORY:
        raise ValueError(f"{where}: {what} may take {memory:,} bytes of memory: expected at most {MOST_MEMORY:,}")
    try:
        value = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {what} is not a JSON object, but a {type(value).__name__}")
    return value


def _memory_of_text(text: bytes) -> int:
    """Return the most bytes that a JSON text's objects may take."""
    # one wide character makes all characters of a string take 4 bytes
    per_byte = 3 if text.isascii() and b"\\u" not in text else 9
    return per_byte * len(text) + sum(number * text.count(kind) for kind, number in _MEMORY.items())


def printable(text: object, longest: int = 200) -> str:
    r"""Return a text of one line, at most `longest` characters, without characters that control a terminal.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    text = str(text)
    cut = text if len(text) <= longest else text[:longest] + "..."
    if cut.isprintable():
        return cut
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in cut)


@contextmanager
def legible() -> Iterator[None]:
    r"""Make the texts of ValueErrors raised inside printable and bounded.

    >>> with legible():
    ...     raise ValueError("a dtype \x1b[2J")
    Traceback (most recent call last):
    ValueError: a dtype \x1b[2J
    """
    try:
        yield
    except ValueError as error:
        cause: BaseException | None = error  # tracebacks show the causes' texts, too
        while cause is not None:
            if isinstance(cause, ValueError):
                cause.args = (printable(cause, _LONGEST_ERROR),)
            cause = cause.__cause__ or cause.__context__
        raise
