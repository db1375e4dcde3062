"""`save`: each element of a state is written by one rank, during training if wanted.

Note [The stages of a save]
    1. Ranks compare their states, and every rank finds the pieces to write.
    2. Every rank writes its pieces to a file of its own, flushes the file, and writes a record of the file's pieces.
    3. Rank 0 reads the records of all ranks, and puts the index in place (Note [A checkpoint is its index]).
    With `wait=False`, threads do 2 and 3 from copies in host memory. Threads call no collectives, which would mix with
    the training's: rank 0 waits for the records to appear in the folder.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, Mesh, adapted
from ..core.arguments import check_flags, check_whole
from ..core.tree import Tree
from ..files.directory import dir_at, folder, prune
from ..files.folders import Folder
from ..files.index import CheckpointError
from ..layout.pieces import mesh_of
from .contents import Contents, check_same_call, contents_to_save, differing, own_pieces
from .host_copies import snapshot
from .writing import Writer

_SEEN = 60.0  # seconds that rank 0 waits for written records: network file systems are late
_WRITTEN = 3600.0  # seconds that rank 0 waits in the background for slower ranks
_LET_ALL_WRITE = "see that all ranks can write there"


@dataclass
class _Writing:
    """A save by threads. The mesh keeps it (`_in_flight`): with a reference back, connections would stay open."""

    what: str
    stop: threading.Event
    written: Future[None]  # when this rank's files are written
    finished: Future[None] | None  # when the index is in place; on rank 0 only
    discard: Callable[[], None]  # delete the files of all ranks
    process: int = field(default_factory=os.getpid)
    ended: bool = False

    def end(self, mesh: AnyMesh) -> None:
        """Wait for the save. If one rank has an error, all ranks raise CheckpointError, once."""
        if self.ended or self.process != os.getpid():  # a forked process has no threads: its parent goes on saving
            return
        self.ended = True
        try:
            consensus.together(mesh, partial(self._check, self.written), _LET_ALL_WRITE, CheckpointError)
            consensus.together(mesh, partial(self._check, self.finished), _LET_ALL_WRITE, CheckpointError)
        except BaseException:  # rank 0 waits in vain for the record of a rank that failed or is gone
            self.stop.set()
            if self.finished is not None:
                self.finished.exception()  # wait: no index may appear later
                self.discard()
            raise

    def _check(self, future: Future[None] | None) -> None:
        error = None if future is None else future.exception()
        if error is not None:
            raise CheckpointError(f"{self.what} failed: {type(error).__name__}: {error}") from error


@dataclass
class InFlight:
    """The last save in the background: the next save begins when this has ended."""

    last: _Writing | None = None
    # host copies, reused by the next save: new memory is slow at the first touch
    memory: list[Tensor] = field(default_factory=list)


def _in_flight(mesh: Mesh) -> InFlight:
    return InFlight()


_ALONE = InFlight()  # for states without a mesh


@dataclass(frozen=True)
class Saving:
    """A save under way. Every rank must call `wait()`, which returns when the checkpoint is whole."""

    mesh: AnyMesh
    writing: _Writing | None = field(repr=False)

    def wait(self) -> None:
        """Wait until the checkpoint is whole. If one rank could not save its part, all ranks raise CheckpointError.

        The error is raised once, by `wait` or by the next `save`.
        """
        if self.writing is not None:
            self.writing.end(self.mesh)


def save(
    dir: str | os.PathLike[str],
    state: Tree,
    step: int,
    wait: bool = True,
    keep_last: int | None = None,
    keep_every: int | None = None,
    mesh: AnyMesh = None,
) -> Saving:
    """Save a state as the checkpoint of a step in a directory that all ranks see; every rank must call this.

    A state is a tree of `Sharded`, optimizer states, tensors, numbers and strings, as a `TrainState`. Each rank writes
    its elements. One rank writes elements that several have; if these are many, each writes a share.
    Files are safetensors and an index in JSON. The checkpoint appears as a whole, in place of an earlier one of this
    step, or not at all. If ranks have different values of an unsharded leaf (a rank's position in its data), all values
    are saved.

    - `wait=False`: copy this rank's elements to host memory, and write them during training; the result has
      `wait()`. The next `save` first waits for this one.
    - `keep_last`: after the save, delete checkpoints of steps up to this one, except the last `keep_last` and
      multiples of `keep_every`.
    - `mesh`: the ranks that save together, for a state without sharded leaves. By default a process saves such a state
      alone.

    OSError if a rank cannot write (a full disk); in the background, CheckpointError. TypeError for other kinds of
    leaves, MismatchError if leaves differ between ranks. Dual: `restore`.

    >>> import tempfile, fshard
    >>> with tempfile.TemporaryDirectory() as dir:
    ...     _ = fshard.checkpoint.save(dir, {"w": torch.ones(2), "epoch": 3}, step=100)
    ...     fshard.checkpoint.restore(dir, {"w": torch.zeros(2), "epoch": 0})
    {'w': tensor([1., 1.]), 'epoch': 3}
    """
    mesh = mesh_of(state) if mesh is None else mesh

    def checked() -> tuple[Folder, Contents]:
        _check_save_arguments(wait, keep_last, keep_every)
        folder(place := dir_at(dir), step)  # raises if `step` is no step's number, or its folder is a link
        return place, contents_to_save(state, mesh)

    place, contents = consensus.together(mesh, checked)
    grid = adapted(mesh)
    in_flight = _ALONE if grid is None else grid.once(_in_flight)
    if in_flight.last is not None:
        in_flight.last.end(mesh)
    check_same_call(contents, "save", dir=place, step=step, wait=wait, keep_last=keep_last, keep_every=keep_every)
    by_rank = differing(contents)
    pieces = [*own_pieces(contents, by_rank)]
    # a save in the background must not keep the state in memory
    contents = replace(contents, parts=[])
    writer = Writer(place, step, consensus.of_first(secrets.token_hex(4), mesh), contents, by_rank)
    if not wait:
        copies = snapshot([x for *_, (x,) in pieces], in_flight.memory)
        pieces = [(*piece[:3], parts) for piece, parts in zip(pieces, copies, strict=True)]

    def finish(patience: float, stop: threading.Event) -> None:
        writer.finish(patience, stop)
        if keep_last is not None:
            prune(place, step, keep_last, keep_every)

    is_first, stop = contents.rank == 0, threading.Event()
    try:
        if wait:
            record = consensus.together(mesh, lambda: writer.write(pieces), _LET_ALL_WRITE, CheckpointError)
            consensus.together(mesh, lambda: writer.put(record), _LET_ALL_WRITE, CheckpointError)
            consensus.together(mesh, lambda: finish(_SEEN, stop) if is_first else None, _LET_ALL_WRITE, CheckpointError)
            return Saving(mesh, None)
        written = _in_a_thread(lambda: writer.put(writer.write(pieces)))
        finished = _in_a_thread(lambda: finish(_WRITTEN, stop)) if is_first else None
    except BaseException:
        stop.set()
        if is_first:
            writer.discard()
        raise
    what = f"the save of step {step} in {place}"
    in_flight.last = _Writing(what, stop, written, finished, writer.discard)
    return Saving(mesh, in_flight.last)


def _in_a_thread(task: Callable[[], None]) -> Future[None]:
    """Run a task in a thread. The process does not end before the task."""
    done = Future[None]()

    def run() -> None:
        try:
            task()
        except BaseException as error:  # for the caller that waits
            done.set_exception(error)
        else:
            done.set_result(None)

    # no ThreadPoolExecutor: Python joins its threads before the main thread ends, and `_await` looks for that end
    threading.Thread(target=run, name="fshard.checkpoint").start()
    return done


def _check_save_arguments(wait: bool, keep_last: int | None, keep_every: int | None) -> None:
    check_flags(wait=wait)
    if keep_last is not None:
        check_whole("save: keep_last", keep_last, what="a number of checkpoints")
    if keep_every is not None:
        check_whole("save: keep_every", keep_every, what="a number of steps")
        if keep_last is None:
            raise ValueError(f"save: keep_every={keep_every}: expected keep_last besides: without it all are kept")
