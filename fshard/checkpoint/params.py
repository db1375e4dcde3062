"""Load sharded parameters from safetensors files (each rank reads only its shards), and save them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import rank_in
from ..core import tree
from ..core.arguments import check_path, check_whole, expect, shown
from ..core.differences import Form, Wanted, differences, unreadable
from ..core.storage import as_bytes
from ..core.tree import Tree
from ..files.foreign import legible, open_file
from ..files.hugging_face import LeafInFile, entries_at, finish, new_files, put_in_file, remove_partial
from ..files.index import IndexEntry, Piece
from ..files.safetensors_file import FileEntry, check_fits, read_chunks
from ..layout.layout import within
from ..layout.row import Row
from ..plan.plan import Plan, Slot, check_plain
from ..sharding.sharded import Sharded, empty_params, leaves_of_unit
from ..state.dtensors import is_sharded, sharding
from ..state.names import Rename, renamed
from ..state.params import check_named, expect_sharded, rows_in_order
from .contents import Contents, add_parts
from .restoring import PieceRead, reads_of


@legible()
def load_safetensors(path: str | os.PathLike[str], plan: Plan, rename: Rename | None = None) -> Sharded:
    """Make sharded parameters from a .safetensors file, or from a directory as Hugging Face writes it.

    - `path`: a file, or a directory with model.safetensors, or with model.safetensors.index.json and its files.
      Each rank reads all headers, but only the data of its own shards.
    - `plan`: values move to `plan.device`, and are cast between floating dtypes. The files may have a tied leaf under
      one of its names or under all.
    - `rename`: a function from a name in the file to the name in the plan, or a dict of the changed names; None instead
      of a name leaves the tensor out.

    If one rank has an error, all ranks raise. ValueError lists every difference (missing or unknown names, shapes,
    dtypes, unequal tied leaves), or tells the fault of a file. FileNotFoundError if files are missing; MismatchError
    if ranks see different files. Pickles (.bin, .pt) are refused. Dual: `save_safetensors`.

    >>> import tempfile, fshard
    >>> params = fshard.shard_params({"w": torch.ones(2)}, fshard.make_plan({"w": torch.ones(2)}))
    >>> with tempfile.TemporaryDirectory() as dir:
    ...     fshard.checkpoint.save_safetensors(dir, params)
    ...     loaded = fshard.checkpoint.load_safetensors(dir, params.plan)
    >>> fshard.gather_params(loaded)
    {'w': tensor([1., 1.])}
    """
    expect("load_safetensors: plan", plan, isinstance(plan, Plan), "what fshard.make_plan gives")
    mesh, sharded = plan.live_mesh(), empty_params(plan, plan.device)
    wanted = sharded.view.wanted()
    there, given = consensus.together(mesh, lambda: _entries_needed(path, wanted.values(), rename), _GIVE_SAME_FILES)
    lines = "\n".join(map(str, there.values()))
    consensus.check_same(mesh, lines, f"load_safetensors: {path}", _GIVE_SAME_FILES)
    entries = {leaf.names[0]: [given[name] for name in leaf.names if name in given] for leaf in wanted.values()}
    reads = sorted(_reads(sharded, entries), key=lambda x: (x.unlike != "", x.piece.file, x.piece.offset, x.begin))
    consensus.together(mesh, lambda: _read_pieces(reads), _GIVE_SAME_FILES)
    return sharded


_GIVE_SAME_FILES = "give all ranks the same files"
_FILE_OR_DIRECTORY = "the path of a file or directory"


def _entries_needed(
    path: str | os.PathLike[str], wanted: Iterable[Wanted], rename: Rename | None
) -> tuple[dict[str, FileEntry], dict[str, FileEntry]]:
    """Return all tensors by their names in the files, and the renamed ones by their names in the plan."""
    folder = check_path("load_safetensors: path", path, _FILE_OR_DIRECTORY)
    there = entries_at(folder)
    given = {name: there[origin] for name, origin in renamed(there, rename).items()}
    forms = {name: Form(x.shape, x.dtype) if x.dtype else f"{x.kind}, no dtype of torch" for name, x in given.items()}
    if errors := [*differences(wanted, forms)]:
        raise ValueError(f"load_safetensors: {folder}: " + "; ".join(errors))
    return there, given


def _reads(into: Sharded, entries: Mapping[str, Sequence[FileEntry]]) -> Iterator[PieceRead]:
    """Yield reads of this rank's elements. Of a tied leaf, the first name is read, other names are compared."""
    contents = Contents(into.mesh)
    add_parts(contents, "", into)
    for part in contents.parts:
        first = entries[part.name][0]
        for x in entries[part.name]:
            assert x.dtype is not None  # `_entries_needed` refuses None
            whole = IndexEntry(x.shape, x.dtype, (Piece(str(x.file), x.start, 0, math.prod(x.shape), ()),))
            yield from reads_of(part, whole, f"{x.name!r} and {first.name!r} are tied, but differ" * (x is not first))


def _read_pieces(reads: Sequence[PieceRead]) -> None:
    for name, of_file in groupby(reads, lambda read: read.piece.file):
        with open_file(name) as file:
            for read in of_file:
                done, size = 0, read.dtype.itemsize
                start = read.piece.offset + read.begin * size
                for values in read_chunks(file, Path(name), start, read.numel * size, read.dtype):
                    picked, done = within(read.picks, done, done + len(values)), done + len(values)
                    if picked is None:
                        continue
                    values, out = values[picked[0]].to(read.out.dtype), read.out[picked[1]]
                    if not read.unlike:
                        read.out[picked[1]] = values.to(out.device)
                    elif not torch.equal(as_bytes(out.cpu()), as_bytes(values)):
                        raise ValueError(f"{name}: {read.unlike}")


def save_safetensors(
    dir: str | os.PathLike[str], params: Sharded, buffers: Tree = None, max_bytes: int = 5_000_000_000
) -> None:
    """Write `params` to model.safetensors in the directory `dir`, for transformers' `from_pretrained`.

    - `buffers`: whole tensors by name (as `apply.persistent` returns), or a tree of tensors, written as well.
    - `max_bytes`: if the data is larger, write several files and model.safetensors.index.json.

    A tied leaf is written once, under the first of its names. Ranks gather one unit at a time, and rank 0 writes the
    unit. Every rank must call this; if one rank has an error, all ranks raise. New files replace an earlier save's
    files when all are whole: after an error, or if the process is killed before, the earlier files are there.

    OSError if rank 0 cannot write (a full disk). ValueError for one leaf, duplicate names, dtypes unknown to the
    format, and buffers without values. Dual: `load_safetensors`.
    """
    expect_sharded("save_safetensors: params", params)
    mesh = params.mesh
    is_writer = rank_in(mesh) == 0
    folder, groups, beside = consensus.together(mesh, lambda: _checked(dir, params, buffers, max_bytes))

    def finished() -> None:
        if failure is not None:
            raise failure
        if is_writer:
            for name, value in beside:
                # a lazy view (conj, neg) has other bits in memory than its values
                put_in_file(entries[name], value.resolve_conj().resolve_neg().contiguous())
            finish(folder, entries)

    try:
        entries = consensus.together(mesh, lambda: new_files(folder, groups) if is_writer else {})
        failure = _put_units(params, entries)
        consensus.together(mesh, finished)
    finally:
        if is_writer:
            remove_partial(folder)


def _checked(
    dir: str | os.PathLike[str], params: Sharded, buffers: Tree, max_bytes: int
) -> tuple[Path, list[list[LeafInFile]], list[tuple[str, Tensor]]]:
    check_named("save_safetensors", params)
    check_whole("save_safetensors: max_bytes", max_bytes, what="a number of bytes")
    folder, beside = check_path("save_safetensors: dir", dir, _FILE_OR_DIRECTORY), _buffers(buffers)
    names, kinds = _first_names(params), zip(params.view.kinds, params.tensors, strict=True)
    dtype_of = {kind: x.dtype for kind, x in kinds}
    slots = (slot for row in rows_in_order(params) for slot in row.leaves if slot in names)
    leaves = [(names[slot], slot.shape, dtype_of[slot.kind]) for slot in slots]
    leaves += [(name, tuple(x.shape), x.dtype) for name, x in beside]
    dtypes = ((name, dtype) for name, _, dtype in leaves)
    check_fits("save_safetensors", (name for name, _, _ in leaves), dtypes, [torch.complex128])
    return folder, _groups(leaves, max_bytes), beside


def _buffers(buffers: Tree) -> list[tuple[str, Tensor]]:
    """Return a list: two buffers may have one name: {"a": {"b": x}, "a.b": y}."""
    check_plain("save_safetensors: buffers", buffers)
    named = tree.paths_to(buffers, Tensor)
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"save_safetensors: buffers: {name!r}: expected a tensor, got {shown(x)}")
        if is_sharded(x):
            raise ValueError(f"save_safetensors: buffers: {name!r}: expected a whole tensor, got {sharding(x)}")
        if reason := unreadable(name, x):
            raise ValueError(f"save_safetensors: buffers: {reason}")
    return named


def _put_units(params: Sharded, entries: Mapping[str, FileEntry]) -> Exception | None:
    """Gather unit after unit; with `entries` (on rank 0), write each. Return the first error.

    After an error the gathers go on, because other ranks wait in them.
    """
    failure, entry_of = None, {slot: entries[name] for slot, name in _first_names(params).items()} if entries else {}
    for row in rows_in_order(params):
        failure = _put_unit(params, row, {} if failure else entry_of) or failure
    return failure


def _put_unit(params: Sharded, row: Row[Slot], entry_of: Mapping[Slot, FileEntry]) -> Exception | None:
    with torch.no_grad():
        values = leaves_of_unit(params, row.unit, row.kind)
    try:
        for slot, value in values.items():
            if slot in entry_of:
                put_in_file(entry_of[slot], value)
    except Exception as error:
        return error
    return None


def _first_names(params: Sharded) -> dict[Slot, str]:
    return {slot: name for name, slot in reversed(params.view.by_name().items())}


def _groups(leaves: Sequence[LeafInFile], max_bytes: int) -> list[list[LeafInFile]]:
    """Cut the leaves into files of at most `max_bytes`; a larger leaf is a file of its own."""
    groups: list[list[LeafInFile]] = [[]]
    filled = 0
    for name, shape, dtype in leaves:
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, shape, dtype))
        filled += num_bytes
    return groups
