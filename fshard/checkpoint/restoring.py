"""`restore`: each rank reads the elements that it needs, however the saved state was cut."""

from __future__ import annotations

import json
import math
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, mesh_device, rank_in
from ..core import tree
from ..core.arguments import check_flags, is_number
from ..core.differences import Form, equal_values, form_difference, listed, name_differences
from ..core.storage import from_bytes
from ..core.tree import Tree
from ..files.directory import dir_at, finished, folder, index_at, links, no_checkpoint
from ..files.folders import Folder, Reader
from ..files.foreign import legible, require
from ..files.index import CheckpointError, Index, IndexEntry, Piece, read_block
from ..files.other_formats import Checkpoint, format_at, source_at
from ..files.safetensors_file import CHUNK
from ..files.torch_dcp import located
from ..layout.layout import Picks, picks_in, within
from ..layout.pieces import mesh_of
from ..state.names import Rename
from ..state.names import origins as names_by_new
from .contents import Contents, SavedSpan, check_same_call, contents_of, made_like

T = TypeVar("T")
_SEE_SAME = "let all ranks see the same files"


def steps(dir: str | os.PathLike[str], mesh: AnyMesh = None) -> list[int]:
    """Return the steps with a whole checkpoint in the directory `dir`, the earliest first; [] if none.

    With `mesh`, only rank 0 looks, and every rank gets rank 0's result or error; every rank must call this. Pass `mesh`
    in a job of several ranks: on a network file system, ranks may see, and restore, different steps. Links are not
    followed; UserWarning for links named as steps.

    >>> steps("no/such/directory")
    []
    """
    return _seen_by_first(mesh, lambda: _finished(dir_at(dir)))


def _finished(place: Folder) -> list[int]:
    if names := links(place):
        warnings.warn(f"{place}: passed over, because they are symbolic links: {', '.join(names[-8:])}", stacklevel=2)
    return finished(place)


def latest(dir: str | os.PathLike[str], mesh: AnyMesh = None) -> int | None:
    """Return the last step with a whole checkpoint in the directory `dir`; None if there is none.

    `mesh`: as for `steps`.

    >>> latest("no/such/directory") is None
    True
    """
    return max(steps(dir, mesh), default=None)


def _seen_by_first(mesh: AnyMesh, look: Callable[[], T]) -> T:
    """Call `look` on rank 0 alone, because object stores charge for it; return the result (JSON) on every rank."""
    seen = consensus.together(mesh, lambda: "" if rank_in(mesh) else json.dumps(look()), _SEE_SAME, CheckpointError)
    result: T = json.loads(consensus.of_first(seen, mesh))
    return result


@legible()
def restore(
    dir: str | os.PathLike[str],
    like: Tree,
    step: int | None = None,
    rename: Rename | None = None,
    fall_back: bool = False,
    donate: bool = False,
    strict: bool = True,
    mesh: AnyMesh = None,
) -> Tree:
    """Read the checkpoint of a step (None: the last one) into a state like `like`; every rank must call this.

    `like` gives the tree, plan, dtypes and devices; its values are not used, so its tensors may be on meta. Number
    of ranks, mesh, units, strategy and floating dtypes may differ from the saved state's: each rank reads the elements
    that it needs, and compares every block with its checksum.

    - `dir`: may also be a checkpoint of torch.distributed.checkpoint, a Hugging Face directory or a .safetensors file;
      then `step` must be None. Pickles are read as data: nothing is imported or called. `optim.state.torch_names`
      returns the `rename` for torch's names.
    - `rename`: a function from a name in the checkpoint to the name in `like`, or a dict of the changed names; None in
      place of a name leaves a leaf out. To read only the parameters:
      `restore(dir, {"params": params}, rename=lambda name: name if name.startswith("params.") else None)`.
      If several names become one, their values must be equal (torch saves a step for each parameter, and may save
      tied leaves twice).
    - `fall_back=True`: if the checkpoint is damaged, restore the last whole one before it.
    - `donate=True`: give `like` away, and read into its memory, without memory for a second state.
    - `strict=False`: leaves that the checkpoint lacks (a new head) keep the values of `like`; its other names are not
      read. Rank 0 lists both in a UserWarning. No common name is an error.
    - `mesh`: the ranks that restore together, for a state without sharded leaves.

    If one rank has an error, all ranks raise, and nothing is restored. CheckpointError names the file and the leaf.
    ValueError lists all differing names, shapes and dtypes. Dual: `save`.
    """
    mesh = mesh_of(like) if mesh is None else mesh

    def checked() -> tuple[Folder, Contents]:
        check_flags(fall_back=fall_back, donate=donate, strict=strict)
        place = dir_at(dir)
        if step is not None:
            folder(place, step)  # raises if `step` is no step's number, or its folder is a link
        return place, contents_of(like, "restore", mesh)

    place, wanted = consensus.together(mesh, checked)
    check_same_call(wanted, "restore", dir=place, step=step, fall_back=fall_back, donate=donate, strict=strict)
    path = str(place)
    if kind := _seen_by_first(mesh, lambda: format_at(path, place)):
        consensus.together(mesh, lambda: _check_one(place, kind, step, fall_back))
        readers = [partial(source_at, path, place, kind)]
    else:
        candidates = _seen_by_first(mesh, lambda: _candidates(place, step, fall_back))
        if not candidates:
            raise CheckpointError(no_checkpoint(place, step))
        readers = [partial(_of_step, place, number) for number in candidates]
    for read in readers:
        try:
            source, origins = _matched(read, wanted, rename, strict)
            like, donate = _into(like, source.index, origins, wanted, donate), True
            _read_state(source, origins, like, wanted)
            if wanted.rank == 0:
                _tell_names(source, origins, wanted)
                if rename is None:
                    _tell_threads(source, like)
            return like
        except CheckpointError:  # other errors are differences from `like`: try no earlier step
            if read is readers[-1]:
                raise
    raise AssertionError("unreachable")


def _check_one(place: Folder, kind: str, step: int | None, fall_back: bool) -> None:
    if step is not None or fall_back:
        raise ValueError(
            f"restore: step={step}, fall_back={fall_back}: expected None and False, because {place} has one checkpoint "
            f"of {kind}, and none of steps"
        )


def _candidates(place: Folder, step: int | None, fall_back: bool) -> list[int]:
    if step is not None and not fall_back:
        return [step]
    numbers = [number for number in reversed(_finished(place)) if step is None or number <= step]
    return numbers if fall_back else numbers[:1]


def _of_step(place: Folder, step: int) -> Checkpoint:
    index, text = index_at(place, step)
    return Checkpoint(f"step {step} in {place}", folder(place, step), index, text.decode(errors="replace"))


def _matched(
    read: Callable[[], Checkpoint], wanted: Contents, rename: Rename | None, strict: bool
) -> tuple[Checkpoint, dict[str, list[str]]]:
    source = consensus.together(wanted.mesh, read, _SEE_SAME, CheckpointError)
    what = f"restore: the index of {source.what}"
    consensus.check_same(wanted.mesh, source.text, what, "Let all ranks see the same files")
    origins = consensus.together(wanted.mesh, lambda: _origins(source, wanted, rename, strict))
    pairs = "\n".join(f"{of_name} as {name!r}" for name, of_name in sorted(origins.items()))
    consensus.check_same(wanted.mesh, pairs, "restore: rename", "Give all ranks the same function")
    return source, origins


def _into(like: Tree, index: Index, origins: Mapping[str, Sequence[str]], wanted: Contents, donate: bool) -> Tree:
    """Return a state like `like`: the checkpoint's plain values, and tensors to read into, from `like` if donated."""

    def value(path: str, node: Tree) -> Tree:
        if path not in origins:
            return node
        key = index.key(origins[path][0], wanted.rank)
        if key in index.values:
            return index.values[key]
        # a number in `like`, saved as a 0-d tensor
        return torch.zeros((), dtype=index.leaves[key].dtype, device=mesh_device(wanted.mesh))

    return made_like(like, wanted.mesh, donate, value)


def _read_state(source: Checkpoint, origins: Mapping[str, Sequence[str]], into: Tree, old: Contents) -> None:
    contents, index = contents_of(into, "restore", old.mesh), source.index
    reads, checks = list[PieceRead](), list[PieceRead]()
    before = {(part.name, part.begin): part.elements for part in old.parts}
    for part in contents.parts:
        if part.name not in origins:
            part.elements.copy_(before[part.name, part.begin])
            continue
        first, *others = (index.key(origin, contents.rank) for origin in origins[part.name])
        if first in index.values:
            part.elements.fill_(float(index.values[first]))
            continue
        reads += reads_of(part, index.leaves[first])
        for other in others:
            checks += reads_of(part, index.leaves[other], _ambiguous(first, other))
    consensus.together(contents.mesh, lambda: _read_all(source, reads), _SEE_SAME, CheckpointError)
    consensus.together(contents.mesh, lambda: _read_all(source, checks), _SEE_SAME, CheckpointError)


def _tell_names(source: Checkpoint, origins: Mapping[str, Sequence[str]], wanted: Contents) -> None:
    names = {*wanted.forms, *wanted.values}
    unlike = {"kept as in `like`": names - origins.keys(), "not read": origins.keys() - names}
    if told := [f"{len(some)} {what}: {listed(sorted(some))}" for what, some in unlike.items() if some]:
        told += _shared_counts(names, origins, wanted)
        warnings.warn(f"restore(strict=False) of {source.what}: {'; '.join(told)}", stacklevel=3)


def _shared_counts(names: Collection[str], origins: Container[str], wanted: Contents) -> list[str]:
    """Name the first restored number of an optimizer, its count, in whose state leaves begin."""
    begun = [name for name in names if name not in origins]
    for name, form in wanted.forms.items():
        above = name.rpartition(".")[0]
        if name in origins and form.shape == () and above and any(x.startswith(f"{above}.") for x in begun):
            remedy = "for a count of their own use by_label and optim.state.extend"
            return [
                f"new leaves share the restored {name!r}, as if they had made its steps (bias correction): {remedy}"
            ]
    return []


def _tell_threads(source: Checkpoint, state: Tree) -> None:
    """Warn if a state on CPUs was saved with another number of threads."""
    devices = {x.device.type for x in tree.leaves(state) if isinstance(x, Tensor)}
    saved, now = source.index.threads, torch.get_num_threads()
    if saved not in (0, now) and devices == {"cpu"}:
        warnings.warn(
            f"restore: {source.what} was saved with {saved} thread(s), and torch uses {now} now. On CPUs the last bits "
            "of sums depend on the number, so a run that goes on gives others than with the number before, also with "
            f"reduction='tree'. For the same bits call torch.set_num_threads({saved}) first.",
            stacklevel=3,
        )


def _origins(source: Checkpoint, wanted: Contents, rename: Rename | None, strict: bool) -> dict[str, list[str]]:
    index = source.index
    origins = names_by_new(index.names, rename, index.left_out)
    for alias, name in wanted.aliases.items():
        if alias in origins:
            origins.setdefault(name, []).extend(origins.pop(alias))
    names = [*wanted.forms, *wanted.values]
    differences = [*name_differences([[name] for name in names], origins, "`like`")]
    if not strict and not origins.keys().isdisjoint(names):
        no_values = (part.name for part in wanted.parts if part.name not in origins and part.elements.is_meta)
        differences = [f"{name!r}: the checkpoint lacks it, and the one of `like` is on meta" for name in no_values]
    for name, of_name in origins.items():
        if name in wanted.forms or name in wanted.values:
            for origin in of_name:
                differences += _differences(name, origin, index, wanted)
            first, *others = of_name  # compare numbers and strings here, tensors when read
            unlike = [other for other in others if index.values.get(first) != index.values.get(other)]
            differences += [f"{name!r}: {_ambiguous(first, other)}" for other in unlike]
    lacking = [name for name in names if name not in origins and strict]
    left_out = names_by_new(index.left_out, rename, index.names)
    differences += [f"{name!r}: {index.left_out[left_out[name][0]]}" for name in lacking if name in left_out]
    require(not differences, f"restore: the checkpoint of {source.what} differs from `like`: {'; '.join(differences)}")
    return origins


def _ambiguous(first: str, other: str) -> str:
    return f"{first!r} and {other!r} are both called so, and differ"


def _differences(name: str, origin: str, index: Index, wanted: Contents) -> Iterator[str]:
    if origin in index.by_rank and index.ranks != wanted.ranks:
        yield (
            f"{name!r}: it differs between the {index.ranks} ranks that saved it, and there are {wanted.ranks} now: "
            "leave it out"
        )
        return
    key = index.key(origin, wanted.rank)
    form, value = wanted.forms.get(name), index.values.get(key)
    if form is not None and form.shape == () and form.dtype == torch.bool and isinstance(value, bool):
        return
    if form is not None and form.shape == () and form.dtype.is_floating_point and is_number(value):
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if is_finite and abs(value) > torch.finfo(form.dtype).max:
            yield f"{name!r}: expected a number that {form.dtype} can hold, got {value}"
        return
    if key in index.leaves and index.leaves[key].shape == ():
        number = wanted.values.get(name)
        if is_number(number) or (isinstance(number, bool) and index.leaves[key].dtype == torch.bool):
            return
    if (key in index.values) != (name in wanted.values):
        kinds = ("a tensor", "a number or a string")
        yield f"{name!r}: expected {kinds[name in wanted.values]}, got {kinds[key in index.values]}"
    elif key in index.values:
        # a numpy.float64 is a float, and an enumeration's member may be an int
        expected = next(kind for kind in (bool, int, float, str) if isinstance(wanted.values[name], kind))
        got = type(index.values[key])
        if expected is not got and (expected, got) != (float, int):
            yield f"{name!r}: expected {expected.__name__}, got {got.__name__}"
    else:
        entry = index.leaves[key]
        if difference := form_difference(name, wanted.forms[name], Form(entry.shape, entry.dtype)):
            yield difference


class PieceRead(NamedTuple):
    """Elements [begin, begin + numel) of a piece, to read into `out`, or to compare with `out`."""

    name: str  # of the leaf
    piece: Piece
    dtype: torch.dtype  # in the file
    begin: int
    numel: int
    out: Tensor  # (numel,); with `picks`, all elements of the span
    unlike: str  # error if elements differ from `out`; "": read them
    picks: Picks = None


def reads_of(part: SavedSpan, entry: IndexEntry, unlike: str = "") -> Iterator[PieceRead]:
    out = part.elements.view(-1)
    if part.order != entry.order:
        yield from _in_order(part, entry, unlike)
        return
    end = part.begin + len(out)
    first = bisect_right(entry.pieces, part.begin, key=lambda piece: piece.end)
    for piece in islice(entry.pieces, first, None):
        if piece.begin >= end:
            break
        low, high = max(part.begin, piece.begin), min(end, piece.end)
        into = out[low - part.begin : high - part.begin]
        yield PieceRead(part.name, piece, entry.dtype, low - piece.begin, high - low, into, unlike)


def _in_order(part: SavedSpan, entry: IndexEntry, unlike: str) -> Iterator[PieceRead]:
    out = part.elements.view(-1)
    picks = picks_in(entry.order, entry.shape, part.order, part.begin, len(out))
    for piece in entry.pieces:
        if picked := within(picks, piece.begin, piece.end):
            numbers, places = picked  # numbers count from the piece's beginning
            begin, end = int(numbers[0]), int(numbers[-1]) + 1
            of_piece = numbers - begin, places
            yield PieceRead(part.name, piece, entry.dtype, begin, end - begin, out, unlike, of_piece)


def _read_all(source: Checkpoint, reads: Sequence[PieceRead]) -> None:
    place, sizes = source.place, source.index.files
    pieces = located(place, [read.piece for read in reads])
    reads = [read._replace(piece=piece) for read, piece in zip(reads, pieces, strict=True)]
    ordered = sorted(reads, key=lambda read: (read.piece.file, read.piece.offset, read.begin))
    buffer = bytearray(CHUNK)  # one for all blocks: new memory is slow at the first touch
    for name, of_file in groupby(ordered, lambda read: read.piece.file):
        first, *others = of_file
        try:
            with place.open(name) as file:
                if file.size != sizes.get(name, file.size):  # indexes of other formats have no sizes
                    why = "cut off" if file.size < sizes[name] else "too long"
                    raise CheckpointError(
                        f"{place}/{name}: expected {sizes[name]:,} bytes, got {file.size:,}: it is {why}, or another "
                        f"file. It has leaf {first.name!r}"
                    )
                for read in (first, *others):
                    _read_piece(file, read, f"{place}/{name}", buffer)
        except OSError as error:
            raise CheckpointError(f"{place}/{name}: {error}. It has leaf {first.name!r}") from error


def _read_piece(file: Reader, read: PieceRead, where: str, buffer: bytearray) -> None:
    piece, size = read.piece, read.dtype.itemsize
    first, last, end = read.begin * size, (read.begin + read.numel) * size, piece.numel * size  # bytes of the piece
    # blocks with a checksum are read whole
    begin, end = (first // CHUNK * CHUNK, end) if piece.checksums else (first, last)
    for start in range(begin, last, CHUNK):
        view = memoryview(buffer)[: min(CHUNK, end - start)]
        low, high = max(first, start), min(last, start + len(view))
        picked = within(read.picks, (low - first) // size, (high - first) // size)
        if picked is None:
            continue
        numbers, places = picked
        expected = piece.checksums[start // CHUNK] if piece.checksums else None
        if not read_block(file, piece.offset + start, view, expected):
            raise CheckpointError(
                f"{where}: leaf {read.name!r}: the {len(view):,} bytes from byte {piece.offset + start:,} on are not "
                "those that were saved. "
                + ("Restore an earlier step, or pass fall_back=True" if piece.checksums else "The file is cut off")
            )
        data = torch.frombuffer(view, dtype=torch.uint8)
        values = from_bytes(data[low - start : high - start], read.dtype)[numbers]
        if not read.unlike:
            read.out[places] = values if read.picks is None else values.to(read.out)
        elif not equal_values(read.out[places], values.to(read.out)):
            raise CheckpointError(f"{where}: leaf {read.name!r}: {read.unlike}")
