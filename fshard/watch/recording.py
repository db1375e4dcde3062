"""Record steps on disk: state, batch and result of each rank, so that a step can be replayed elsewhere.

Note [Recorded steps]
    DIR/step-00000012/rank-0/ has three files:

    1. `before.pt`: tensors of state, batch and further arguments.
    2. `after.pt`: tensors of the new state, the metrics, and the values of an observed step.
    3. `about.json`: leaf paths, leaves other than tensors, mesh axes, plan, and two numbers that an operator's bits
       depend on: the number of threads, and the address modulo 64 of each tensor in `before.pt`.

    Every rank renames its folder last, so a folder `rank-N` is complete. Leaves are stored by number, in the order of
    `tree.flatten`; the replaying code gives the tree's structure.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import rank_in
from ..core import tree
from ..core.arguments import check_function, check_path, wrong
from ..core.differences import lacking, unreadable
from ..core.scalars import double
from ..core.storage import DonatedError, from_bytes
from ..core.tree import Tree, flatten, map, unflatten
from ..files.folders import LocalReader
from ..files.foreign import MOST_ITEMS, legible, naming, open_file, parsed, read_text, require
from ..files.inert_pickle import Plain, read_pickle
from ..files.safetensors_file import CHUNK, read_chunks
from ..files.torch_dcp import OF_TENSOR, READABLE, stored_tensor
from ..files.zip_item import ZipItem
from ..sharding.sharded import Sharded
from ..train.step import TrainState
from .compare import form

AnyStep = Callable[..., tuple[Tree, Tree]]  # step(state, batch, *args) -> (state, metrics), or ((state, metrics), seen)
Steps = Collection[int] | Callable[[int], bool] | None
JsonDict: TypeAlias = dict[str, Any]
_FORMAT = 3
_ALIGN = 64  # bytes: new tensors start at multiples of 64
# limits for foreign files
_MOST_RANKS = 1 << 20  # ranks
_MOST_THREADS = 1 << 10
_MOST_AXES = 16
_MOST_EQUAL = 64  # tensors that share memory, as a compiled step's results may
_MOST_SHOWN = 60  # characters of a value in an error


def step_folder(folder: Path, number: int) -> Path:
    return folder / f"step-{number:08d}"


def record(
    step: AnyStep,
    dir: str | Path,
    *,
    steps: Steps = None,
    nonfinite: bool = True,
    keep: int | None = 8,
    donate: bool = False,
) -> AnyStep:
    """Return `step` with recording: chosen steps write their arguments, the new state and the metrics to `dir`.

    - `steps`: the numbers of steps to record, or a predicate of the number `state.step`.
    - `nonfinite`: also record steps with a non-finite loss, or a `found_inf` other than 0, while `dir` has
      fewer than `keep` steps (None: no limit).
    - `donate`: True for a step that donates its state: the state is copied before each step that may be recorded (with
      `nonfinite`, every step).

    The host waits for the device in every step, to read its number and metrics. `fshard replay` runs recorded steps
    again. `record(observed(step), dir)` also writes the values of the observed step, for `fshard compare`.

    TypeError, before the step, for a leaf other than a number, a string, None or a dense tensor of a dtype in files.

    >>> import tempfile
    >>> tx, w = sgd(0.5), torch.ones(2)
    >>> step = record(train_step(lambda w, x: (w * x).sum(), tx), folder := tempfile.mkdtemp(), steps={1})
    >>> state = init_state(shard_of(w), tx)
    >>> for x in (1.0, 2.0):
    ...     state, _ = step(state, torch.tensor([x, x]))
    >>> [path.name for path in Path(folder).iterdir()]
    ['step-00000001']
    """
    check_function("record: step", step, "step(state, batch)")
    if not (steps is None or callable(steps) or (isinstance(steps, Container) and not isinstance(steps, str | bytes))):
        raise TypeError(f"record: {wrong('steps', steps, 'numbers of steps, or a predicate of one')}")
    folder = check_path("record: dir", dir)

    def recorded(state: TrainState, batch: Tree, *args: Tree) -> tuple[object, object]:
        number = int(state.step)
        chosen = steps is not None and (bool(steps(number)) if callable(steps) else number in steps)
        arguments = {"state": state, "batch": batch, "args": args}
        if chosen or nonfinite:
            for what, x in arguments.items():
                _filed(what, x)
        # copied before the step: a step that donates overwrites `state`
        is_copied = donate and (chosen or nonfinite)
        before = map(lambda x: x.clone() if isinstance(x, Tensor) else x, state) if is_copied else state
        result = step(state, batch, *args)
        # an observed step returns ((state, metrics), seen)
        (after, metrics), *seen = result if isinstance(result[0], tuple) else (result,)
        if chosen or (nonfinite and _went_nonfinite(metrics) and _has_room(folder, number, keep)):
            results = {"state": after, "metrics": metrics} | ({"seen": seen[0]} if seen else {})
            _write_step(step_folder(folder, number), arguments | {"state": before}, results)
        return result

    return recorded


def _went_nonfinite(metrics: dict[str, Tree]) -> bool:
    loss, found_inf = (double(metrics.get(name, 0.0)) for name in ("loss", "found_inf"))
    return not bool(loss.isfinite()) or bool(found_inf != 0)


def _has_room(folder: Path, number: int, keep: int | None) -> bool:
    others = {path.parent.name for path in folder.glob("step-*/rank-*")} - {step_folder(folder, number).name}
    return keep is None or len(others) < keep


def origin_of(state: TrainState) -> JsonDict:
    params: Tree = state.params  # `Sharded`, or plain in the state of a step without shards
    if not isinstance(params, Sharded):
        return {"axes": {}, "rank": 0, "plan": ""}
    plan = params.plan
    return {"axes": dict(plan.axes), "rank": rank_in(plan.live_mesh()), "plan": plan.describe()}


def _write_step(folder: Path, before: dict[str, Tree], after: dict[str, Tree]) -> None:
    try:
        origin = origin_of(before["state"])
    except DonatedError as gone:
        gone.add_note("record: this step donates its state: write record(step, dir, donate=True)")
        raise
    target, writing = folder / f"rank-{origin['rank']}", folder / f"writing-{origin['rank']}"
    for stale in (target, writing):  # folders of an earlier run
        shutil.rmtree(stale, ignore_errors=True)
    try:
        with naming(writing):
            _write_files(writing, before, after, origin)
            writing.rename(target)  # now complete
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        with suppress(OSError):  # rmdir fails if other ranks have written to `folder`
            folder.rmdir()
        raise


def _write_files(folder: Path, before: dict[str, Tree], after: dict[str, Tree], origin: JsonDict) -> None:
    folder.mkdir(parents=True)
    about: JsonDict = {"format": _FORMAT, "threads": torch.get_num_threads(), **origin}
    for name, trees in {"before": before, "after": after}.items():
        tensors = dict[str, Tensor]()
        for what, x in trees.items():
            tensors_of_tree, about[f"{name} {what}"] = _filed(what, x)
            tensors |= tensors_of_tree
        if name == "before":
            about["starts"] = {key: leaf.data_ptr() % _ALIGN for key, leaf in tensors.items()}
        # clones: of a view torch.save would write the whole storage
        copies = {key: leaf.detach().cpu().clone() for key, leaf in tensors.items()}
        try:
            torch.save(copies, file := folder / f"{name}.pt")
        except RuntimeError as error:  # torch names neither the file nor the reason
            raise OSError(f"record: {file}: expected to write it, got an error, as of a full disk: {error}") from error
    (folder / "about.json").write_text(json.dumps(about))


def _filed(what: str, x: Tree) -> tuple[dict[str, Tensor], JsonDict]:
    leaves, spec = flatten(x)
    for path, leaf in zip(paths := tree.leaf_paths(spec), leaves, strict=True):
        if not isinstance(leaf, Tensor | int | float | str):
            raise TypeError(
                f"record: {what} leaf {path!r}: expected a tensor, a number or a string, got {type(leaf).__name__}. "
                "Leave it out of what is given to the step."
            )
        error = unreadable(path, leaf)
        if not error and isinstance(leaf, Tensor) and leaf.dtype not in READABLE:
            error = f"{path!r}: expected a dtype that files have, got {leaf.dtype}: cast it (dequantize() if quantized)"
        if error:
            raise TypeError(f"record: {what} leaf {error}")
    tensors = {f"{what} {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    plain = {str(i): leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    return tensors, {"paths": paths, "plain": plain}


@dataclass(frozen=True)
class RecordedStep:
    """One rank's files of one step."""

    folder: Path
    about: JsonDict

    @legible()
    def check_plan(self, plan: str) -> None:
        if plan != self.about["plan"]:
            difference = consensus.first_unlike_line(self.about["plan"], plan, "{}, got {}")
            raise ValueError(
                f"{self.folder}: recorded with another plan: expected {difference}. Give replay the code it had."
            )

    @legible()
    def tree(self, name: str, what: str, like: Tree) -> Tree:
        """Read a recorded tree, with structure and devices of `like`. ValueError if leaf paths differ.

        `name`: "before" or "after" the step; `what`: the tree, as "state". Tensors from before the step get the
        recorded addresses modulo 64 bytes.
        """
        leaves, spec = flatten(like)
        paths, wanted = tree.leaf_paths(spec), self.about[f"{name} {what}"]["paths"]
        if paths != wanted:
            raise ValueError(
                f"{self.folder}: the {what} is not the one that was recorded: {lacking(wanted, paths) or 'its order'}. "
                "Give replay the code that made the recorded step."
            )
        tensors, plain = _recorded_tensors(self.folder / f"{name}.pt"), self.about[f"{name} {what}"]["plain"]
        keys = [f"{what} {i}" for i in range(len(leaves))]
        missing = [key for i, key in enumerate(keys) if str(i) not in plain and key not in tensors]
        if missing:
            raise ValueError(f"{self.folder / name}.pt: expected {missing[0]!r} ({paths[keys.index(missing[0])]!r})")
        recorded = [plain[str(i)] if str(i) in plain else tensors[key] for i, key in enumerate(keys)]
        if (name, what) == ("before", "state"):
            self._check_forms(paths, keys, recorded, leaves)
        starts = [self.about["starts"].get(key, 0) if name == "before" else 0 for key in keys]
        return unflatten(spec, [_placed(*each) for each in zip(recorded, leaves, starts, strict=True)])

    @legible()
    def seen(self) -> JsonDict:
        if "after seen" not in self.about:
            raise ValueError(f"{self.folder}: expected an observed step: record(observed(step), dir), got another one")
        plain, tensors = self.about["after seen"]["plain"], _recorded_tensors(self.folder / "after.pt")
        num = len(plain)  # leaves: first all names, then all values
        keys = [f"seen {num + i}" for i in range(num)]
        if not {*keys} <= {*tensors} or {*plain} != {str(i) for i in range(num)}:
            raise ValueError(f"{self.folder}: expected {num} names and as many values, got others")
        return {"names": [plain[str(i)] for i in range(num)], "values": [tensors[key] for key in keys]}

    def _check_forms(self, paths: list[str], keys: list[str], recorded: list[object], leaves: list[object]) -> None:
        for path, key, value, like in zip(paths, keys, recorded, leaves, strict=True):
            if path.split(".")[0] in ("params", "opt_state") and form(value) != form(like):
                raise ValueError(
                    f"{self.folder}: {key!r}, leaf {path!r}: expected {form(like)}, got {form(value)}. "
                    "Give replay the code that made the recorded step, and files as they were written."
                )


@legible()
def seen_in(path: str | Path, at: int | None = None) -> tuple[int | None, list[JsonDict]]:
    """Return (step, observed values of each rank), from a file of torch.save or from recorded steps.

    `at`: the step (None: the last); a file has step None.
    """
    path = Path(path)
    if not path.is_dir():
        with _opened(path, "a list of what each rank has seen", _MOST_EQUAL) as (seen, tensor):
            return None, [_seen(rank, each, tensor) for rank, each in enumerate([seen] if type(seen) is dict else seen)]
    number, folder = [*recorded_steps(path, at).items()][-1]
    return number, [recorded.seen() for recorded in read(folder)]


def _seen(rank: int, seen: Plain, tensor: Callable[[str, object], Tensor]) -> JsonDict:
    names, values = seen["names"], seen["values"]
    is_list = type(names) is list and type(values) is list and len(names) == len(values)
    require(is_list and all(isinstance(name, str) for name in names), f"rank {rank}: expected as many values as names")
    return {"names": names, "values": [tensor(f"values {i} of rank {rank}", x) for i, x in enumerate(values)]}


def recorded_steps(folder: Path, at: int | None) -> dict[int, Path]:
    """Return folders by number of step, in order; with `at`, this step's alone."""
    by_number = dict[int, Path]()
    for path in folder.glob("step-*") if at is None else [step_folder(folder, at)]:
        digits = path.name.partition("-")[2]
        if not digits.isdecimal() or path != step_folder(folder, int(digits)):
            raise ValueError(f"{path}: expected the number of a step, as in {step_folder(folder, 12).name}")
        by_number[int(digits)] = path
    require(by_number, f"{folder}: expected recorded steps (step-00000000, ...), found none")
    return dict(sorted(by_number.items()))


def _placed(value: object, like: object, start: int) -> object:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    x = value.to(like.device)
    if not start:
        return x
    memory, dense = x.new_empty(x.numel() + _ALIGN), torch.empty_like(x, device="meta")
    return memory.as_strided(x.shape, dense.stride(), (start - memory.data_ptr()) % _ALIGN // x.itemsize).copy_(x)


@contextmanager
def _opened(path: Path, expected: str, most: int = 1) -> Iterator[tuple[Plain, Callable[[str, object], Tensor]]]:
    """Open a file of torch.save. Yields its pickle, read as data, and a function to load a tensor on the CPU.

    Runs no code of the file, and allocates no more than the file's size. At most `most` tensors may share memory.
    """
    try:
        with open_file(path) as file:
            item = ZipItem(reader := LocalReader(file), 0, reader.size)
            item.check()
            require(item.read("byteorder") == b"little", "expected little-endian numbers")
            yield read_pickle(item.read("data.pkl"), OF_TENSOR), partial(_tensor, file, item, {}, most)
    except Exception as wrong:  # corrupt files raise errors of many types
        raise ValueError(f"{path}: expected {expected}: {wrong}") from wrong


def _recorded_tensors(path: Path) -> dict[str, Tensor]:
    with _opened(path, "the tensors of a recorded step") as (records, tensor):
        require(isinstance(records, dict), f"a {type(records).__name__} in place of tensors by name")
        return {key: tensor(key, record) for key, record in records.items()}


def _tensor(
    file: FileIO, item: ZipItem, loaded: dict[str, list[Tensor]], most: int, key: str, record: object
) -> Tensor:
    name, dtype, first, sizes, strides = stored_tensor(record)
    start, num_bytes = item.data(f"data/{name}")
    # `record` writes no views, and a file's expanded view of a small storage could have any size
    is_whole = not first and math.prod(sizes) * dtype.itemsize == num_bytes
    equal = loaded.setdefault(name, [])
    require(is_whole and len(equal) <= most, f"{key!r} is no whole tensor of its own: save a clone")
    if not equal:
        equal.append(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
        chunks = read_chunks(file, Path(), start, num_bytes, torch.uint8)
        for part, chunk in zip(equal[0].split(CHUNK), chunks, strict=False):
            part.copy_(chunk)
    equal.append(x := from_bytes(equal[0], dtype).as_strided(sizes, strides))
    return x


def _is_number(x: object, least: int, most: int) -> bool:
    return type(x) is int and least <= x <= most  # `isinstance` would take JSON's true


def _are_sizes(x: dict[str, object]) -> bool:
    return len(x) <= _MOST_AXES and all(_is_number(n, 1, _MOST_RANKS) for n in x.values())


def _is_filed(x: object) -> bool:
    if not isinstance(x, dict) or not isinstance(x.get("paths"), list) or not isinstance(x.get("plain"), dict):
        return False
    if len(x["paths"]) > MOST_ITEMS or not all(isinstance(path, str) for path in x["paths"]):
        return False
    keys = {str(i) for i in range(len(x["paths"]))}
    return all(key in keys and isinstance(v, int | float | str) for key, v in x["plain"].items())


# by key of about.json: a predicate of valid values, and their description in errors
_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "format": (lambda x: _is_number(x, _FORMAT, _FORMAT), f"format {_FORMAT}"),
    "threads": (lambda x: _is_number(x, 1, _MOST_THREADS), f"a number from 1 to {_MOST_THREADS}"),
    "starts": (
        lambda x: isinstance(x, dict) and all(_is_number(n, 0, _ALIGN - 1) for n in x.values()),
        f"numbers below {_ALIGN} by tensor",
    ),
    "rank": (lambda x: _is_number(x, 0, _MOST_RANKS), "the number of a rank"),
    "axes": (lambda x: isinstance(x, dict) and _are_sizes(x), f"the sizes of at most {_MOST_AXES} axes, by name"),
    "plan": (lambda x: isinstance(x, str), "a text"),
} | dict.fromkeys(
    ("before state", "before batch", "before args", "after state", "after metrics"),
    (_is_filed, "the paths of a tree, and its values that are no tensors"),
)


def _about(folder: Path) -> JsonDict:
    file = folder / "about.json"
    try:
        about = parsed(read_text(file), "about.json")
    except (OSError, ValueError) as wrong:
        raise ValueError(f"{file}: expected what is known of a recorded step: {wrong}") from wrong
    optional = {} if "after seen" not in about else {"after seen": _KEYS["after state"]}
    for key, (is_good, expected) in (_KEYS | optional).items():
        if key not in about or not is_good(about[key]):
            got = repr(about[key])[:_MOST_SHOWN] if key in about else "nothing"
            raise ValueError(f"{file}: {key!r}: expected {expected}, got {got}")
    return about


@legible()
def read(folder: Path) -> list[RecordedStep]:
    """Read the records of all ranks of a step, in rank order.

    ValueError if ranks are missing or disagree.
    """
    by_rank = [RecordedStep(path, _about(path)) for path in folder.glob("rank-*")]
    by_rank.sort(key=lambda recorded: recorded.about["rank"])  # as a number: the name "rank-10" sorts before "rank-2"
    require(by_rank, f"{folder}: expected a recorded step (rank-0, ...), found none")
    for key in ("axes", "plan", "threads"):
        for recorded in by_rank:
            if recorded.about[key] != by_rank[0].about[key]:
                raise ValueError(
                    f"{recorded.folder / 'about.json'}: {key!r}: expected that of {by_rank[0].folder.name}"
                )
    num_ranks = math.prod(by_rank[0].about["axes"].values())
    ranks = [recorded.about["rank"] for recorded in by_rank]
    if len(ranks) != num_ranks or ranks != list(range(len(ranks))):
        raise ValueError(f"{folder}: expected what {num_ranks} ranks wrote, got that of ranks {ranks}")
    return by_rank
