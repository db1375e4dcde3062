"""The directory of a run's checkpoints: its steps, and their deletion.

Note [A checkpoint is its index]
    1. DIR/step-000000000100 has a file of each rank, and `index.json`, which names the files. Without an index a folder
       is no checkpoint.
    2. A save writes files under names that no other save uses, and flushes them. When every rank is done, rank 0
       puts the index in place. If processes are killed at any time, the step has its earlier checkpoint or the new one.
    3. Then the files of the replaced index are deleted. If two saves of one step run at once, the step has the
       checkpoint of the last to finish. Leftovers of a killed save are deleted with the step's checkpoint.
"""

from __future__ import annotations

import os
import re

from ..core.arguments import check_path, check_whole
from .folders import Folder, folder_of, read_bytes
from .foreign import check_size
from .index import CheckpointError, Index, read_index

INDEX = "index.json"
LAST_STEP = 10**12
_STEP = re.compile(r"step-([0-9]{12})")


def dir_at(directory: str | os.PathLike[str]) -> Folder:
    check_path("dir", directory, "the path of a directory")
    return folder_of(directory)


def folder(place: Folder, step: int) -> Folder:
    check_whole("step", step, 0, LAST_STEP, "the number of a step")
    return place.inside(f"step-{step:012}")


def delete(dir: str | os.PathLike[str], step: int) -> None:
    """Delete the checkpoint of a step in the directory `dir`. CheckpointError if there is none.

    The index is deleted first, so a partly deleted checkpoint does not count. Call this in one process.

    >>> import tempfile, fshard
    >>> with tempfile.TemporaryDirectory() as dir:
    ...     _ = fshard.checkpoint.save(dir, {"epoch": 3}, step=100)
    ...     fshard.checkpoint.delete(dir, 100)
    ...     fshard.checkpoint.steps(dir)
    []
    """
    place = dir_at(dir)
    if not folder(place, step).has(INDEX):
        raise CheckpointError(no_checkpoint(place, step))
    remove(place, step)


def remove(place: Folder, step: int) -> None:
    there = folder(place, step)
    there.remove(INDEX)
    for name in there.names():
        there.remove(name)
    there.remove(INDEX)  # if another job's save put an index: that save's files are lost
    there.remove_folder()


def prune(place: Folder, step: int, keep_last: int, keep_every: int | None) -> None:
    """Delete checkpoints up to `step`, except the last `keep_last` whole ones and multiples of `keep_every`."""
    # later checkpoints stay: the run may have gone back to an earlier one
    earlier = [number for number in numbers(place, folders=True) if number <= step]
    kept = {number for number in finished(place) if number <= step}
    kept = {*sorted(kept)[-keep_last:], *(number for number in kept if keep_every and number % keep_every == 0)}
    for number in earlier:
        if number not in kept:
            remove(place, number)


def finished(place: Folder) -> list[int]:
    return [number for number in numbers(place, folders=True) if folder(place, number).has(INDEX)]


def numbers(place: Folder, folders: bool = False) -> list[int]:
    """Return the steps with an entry in `place`, whole or not; with `folders`, only a folder counts."""
    return sorted(int(name.group(1)) for name in map(_STEP.fullmatch, place.names(folders)) if name)


def links(place: Folder) -> list[str]:
    return [name for name in place.links() if _STEP.fullmatch(name)]


def index_at(place: Folder, step: int) -> tuple[Index, bytes]:
    there = folder(place, step)
    try:
        text = read_all(there, INDEX)
    except FileNotFoundError:
        raise CheckpointError(no_checkpoint(place, step)) from None
    except OSError as error:
        raise CheckpointError(f"{there}/{INDEX}: {error}") from error
    index = read_index(text, f"{there}/{INDEX}")
    if index.step != step:
        raise CheckpointError(f"{there}/{INDEX}: expected the index of step {step}, got that of step {index.step}")
    return index, text


def read_all(place: Folder, name: str) -> bytes:
    with place.open(name) as file:
        try:
            check_size(file.size, f"{place}/{name}")
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        return read_bytes(file, 0, file.size)


def no_checkpoint(place: Folder, step: int | None) -> str:
    there = ", ".join(map(str, finished(place)[-8:])) or "none"
    return f"{place}: no checkpoint{'' if step is None else f' of step {step}'}; the last ones are: {there}"
