"""Every state of a directory that a save goes through: what a process that is killed there leaves behind.

All writes are without a buffer, so a killed process leaves the files as they are at that moment.
"""

import os
import random
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fshard.files import folders


def seen(root: Path) -> list[tuple[str, int, int]]:
    """What is in a directory: paths, inodes and sizes."""
    return sorted((str(path), path.lstat().st_ino, path.lstat().st_size) for path in root.rglob("*"))


@contextmanager
def traced(at_line: Callable[[], None]) -> Iterator[None]:
    """Call a function before every line, and at every return, of the code that changes files."""

    def local(frame: Any, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            at_line()
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename == folders.__file__ else None)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def each_moment(root: Path, look: Callable[[], None]) -> Iterator[list[int]]:
    """Call `look` whenever the directory has changed; how often, in the end."""
    last, count = [seen(root)], [0]

    def at_line() -> None:
        now = seen(root)
        if now != last[0]:
            last[0] = now
            count[0] += 1
            look()

    with traced(at_line):
        yield count


class Disk:
    """What a disk has of a directory for certain: bytes of files and names in folders, as at their last flush."""

    def __init__(self, root: Path):
        self._root, self._bytes, self._names = root, dict[int, bytes](), dict[int, dict[str, os.stat_result]]()
        self._open = ExitStack()  # an inode that is open is no other file's
        self._flush = os.fsync
        self.flushes = 0

    def __enter__(self) -> "Disk":
        self._open.enter_context(mock.patch.object(os, "fsync", self._flushed))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _flushed(self, number: int) -> None:
        self._flush(number)
        self.flushes += 1
        path, status = Path(os.readlink(f"/proc/self/fd/{number}")), os.fstat(number)
        self._open.callback(os.close, os.dup(number))
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {x.name: x.lstat() for x in path.iterdir()}
        else:
            self._bytes[status.st_ino] = path.read_bytes()

    def after_loss_of_power(self, into: Path, names_reached_it: bool) -> None:
        """Write what the disk has to a directory; names that were not flushed reach the disk, or none does."""
        shutil.rmtree(into, ignore_errors=True)
        self._copy(self._root, self._root.lstat(), into, names_reached_it)

    def _copy(self, path: Path, status: os.stat_result, into: Path, names_reached_it: bool) -> None:
        if not stat.S_ISDIR(status.st_mode):
            into.write_bytes(self._bytes.get(status.st_ino, b""))
            return
        into.mkdir()
        present = {x.name: x.lstat() for x in path.iterdir()} if names_reached_it and path.exists() else None
        for name, child in (self._names.get(status.st_ino, {}) if present is None else present).items():
            self._copy(path / name, child, into / name, names_reached_it)


def interleaved(seed: int, calls: list[Callable[[], None]], look: Callable[[], None]) -> list[BaseException | None]:
    """Run functions at once, of which one goes on at a time, drawn at every line that may change files.

    `look` is called before every such line. Returns the error of each.
    """
    draw, errors = random.Random(seed), list[BaseException | None]([None] * len(calls))
    chance = draw.choice([0.02, 0.1, 0.3])
    running, turns = [*range(len(calls))], [threading.Semaphore(0) for _ in calls]

    def pass_on(number: int) -> None:
        following = draw.choice(running) if running else number
        if following != number:
            turns[following].release()
            turns[number].acquire()

    def main(number: int) -> None:
        def at_line() -> None:
            look()
            if draw.random() < chance:
                pass_on(number)

        turns[number].acquire()
        try:
            with traced(at_line):
                calls[number]()
        except Exception as error:
            errors[number] = error
        running.remove(number)
        if running:
            turns[draw.choice(running)].release()

    threads = [threading.Thread(target=main, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    turns[draw.choice(running)].release()
    for thread in threads:
        thread.join()
    return errors
