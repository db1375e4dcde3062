"""Steps kept on disk: state, batch and result of each rank, so that a step can be run again elsewhere.

Note [Recorded steps]
    DIR/step-00000012/rank-0/ has `before.pt` (leaves of state and batch), `after.pt` (leaves of the new state and
    metrics) and `about.json` (everything that is no tensor, and what must fit). Every rank writes its own folder under
    another name and renames it, so a folder that has its name is whole. A leaf is filed by number, in the order of
    `tree.flatten`; the structure is not kept: who replays a step has the code that makes it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import comm, tree
from .shard import Sharded

Steps = Collection[int] | Callable[[int], bool] | None
_FORMAT = 1


def step_folder(folder: Path, number: int) -> Path:
    """Where a step's ranks write."""
    return folder / f"step-{number:08d}"


def record(
    step: Callable[[Any, Any], tuple[Any, Any]],
    dir: str | Path,
    *,
    steps: Steps = None,
    nonfinite: bool = True,
    keep: int | None = 8,
    donate: bool = False,
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`step`, which also writes chosen steps to `dir`: the state before, the batch, the new state and the metrics.

    Chosen are `steps` (numbers, or a predicate of the number `state.step`), and with `nonfinite` those whose loss is
    not finite or whose `found_inf` is not 0, as long as `dir` has fewer than `keep` steps (None: always). Reading the
    number and the metrics waits for the device. Every rank writes a folder of its own, renamed when it is whole;
    `python -m fshard replay` runs them again. For a step that donates its state say `donate=True`: the state is then
    copied before each step that may be written, with `nonfinite` before every one. TypeError for a leaf that is neither
    a tensor nor a number, a string or None.

    >>> import tempfile
    >>> tx, w = sgd(0.5), torch.ones(2)
    >>> step = record(train_step(lambda w, x: (w * x).sum(), tx), folder := tempfile.mkdtemp(), steps={1})
    >>> state = init_state(shard_of(w), tx)
    >>> for x in (1.0, 2.0):
    ...     state, _ = step(state, torch.tensor([x, x]))
    >>> [path.name for path in Path(folder).iterdir()]
    ['step-00000001']
    """
    folder = Path(dir)

    def recorded(state: Any, batch: Any) -> tuple[Any, Any]:
        chosen = _chosen(steps, number := int(state.step))
        before = _copied(state) if donate and (chosen or nonfinite) else state
        after, metrics = step(state, batch)
        if chosen or (nonfinite and _went_nonfinite(metrics) and _has_room(folder, number, keep)):
            _write(step_folder(folder, number), before, batch, after, metrics)
        return after, metrics

    return recorded


def _chosen(steps: Steps, number: int) -> bool:
    return steps is not None and (bool(steps(number)) if callable(steps) else number in steps)


def _copied(state: Any) -> Any:
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)


def _went_nonfinite(metrics: Any) -> bool:
    loss, found = (torch.as_tensor(metrics.get(name, 0.0)) for name in ("loss", "found_inf"))
    return not bool(loss.isfinite()) or bool(found != 0)


def _has_room(folder: Path, number: int, keep: int | None) -> bool:
    others = {path.name for path in folder.glob("step-*")} - {step_folder(folder, number).name}
    return keep is None or len(others) < keep


@dataclass(frozen=True)
class Origin:
    """Where a state lies: the sizes of the mesh's axes in their order, this rank, and what the plan says."""

    axes: dict[str, int]
    rank: int
    plan: str


def origin_of(state: Any) -> Origin:
    """Of a state's parameters; one rank if they are plain."""
    params = state.params
    if not isinstance(params, Sharded):
        return Origin({}, 0, "")
    plan = params.plan
    return Origin(dict(plan.axes), comm.coordinate(plan.live_mesh(), plan.rest(())), plan.describe())


def _write(folder: Path, state: Any, batch: Any, after: Any, metrics: Any) -> None:
    try:
        origin = origin_of(state)
    except tree.DonatedError as gone:
        gone.add_note("record: this step donates its state: write record(step, dir, donate=True)")
        raise
    target = folder / f"rank-{origin.rank}"
    writing = folder / f"writing-{origin.rank}"
    for stale in (target, writing):  # of an earlier run
        shutil.rmtree(stale, ignore_errors=True)
    writing.mkdir(parents=True)
    about: dict[str, Any] = {"format": _FORMAT, "threads": torch.get_num_threads(), **vars(origin)}
    for name, trees in {
        "before": {"state": state, "batch": batch},
        "after": {"state": after, "metrics": metrics},
    }.items():
        tensors = dict[str, Tensor]()
        for what, x in trees.items():
            held, about[f"{name} {what}"] = _filed(what, x)
            tensors |= held
        torch.save(tensors, writing / f"{name}.pt")
    (writing / "about.json").write_text(json.dumps(about))
    writing.rename(target)


def _filed(what: str, x: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a tree by number, and all its leaves: path, and the value of one that is no tensor."""
    leaves, spec = tree.flatten(x)
    paths = tree.paths(spec)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor | int | float | str):
            raise TypeError(
                f"record: {what} leaf {path!r}: expected a tensor, a number or a string, got {type(leaf).__name__}. "
                "Leave it out of what is given to the step."
            )
    tensors = {f"{what} {i}": x.detach().cpu() for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    # cloned: of a view torch.save writes all of the memory that it is a view of
    tensors = {name: x.clone() for name, x in tensors.items()}
    plain = {str(i): x for i, x in enumerate(leaves) if not isinstance(x, Tensor)}
    return tensors, {"paths": paths, "plain": plain}


@dataclass(frozen=True)
class Recorded:
    """What one rank wrote of one step."""

    folder: Path
    about: dict[str, Any]

    def tree(self, name: str, what: str, like: Any) -> Any:
        """A recorded tree, in the structure of another. ValueError if the leaves' paths differ."""
        leaves, spec = tree.flatten(like)
        paths, wanted = tree.paths(spec), self.about[f"{name} {what}"]["paths"]
        if paths != wanted:
            more, lacks = [p for p in paths if p not in wanted], [p for p in wanted if p not in paths]
            raise ValueError(
                f"{self.folder}: the {what} that was recorded has other leaves: expected {lacks[:3] or 'no others'}, "
                f"got {more[:3] or 'no others'}. Give replay the code that made the recorded step."
            )
        tensors = torch.load(self.folder / f"{name}.pt", weights_only=True)
        plain = self.about[f"{name} {what}"]["plain"]
        found = [plain[str(i)] if str(i) in plain else tensors[f"{what} {i}"] for i in range(len(leaves))]
        return tree.unflatten(spec, [_placed(*row) for row in zip(paths, found, leaves, strict=True)])


def _placed(path: str, value: Any, like: Any) -> Any:
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


def read(folder: Path) -> list[Recorded]:
    """What all ranks wrote of a step, in rank order. ValueError for what is no recorded step, or not of all ranks."""
    found = [Recorded(path, json.loads((path / "about.json").read_text())) for path in folder.glob("rank-*")]
    found.sort(key=lambda one: one.about["rank"])
    if not found:
        raise ValueError(f"{folder}: expected a recorded step (rank-0, ...), found none")
    if found[0].about["format"] != _FORMAT:
        raise ValueError(f"{folder}: expected format {_FORMAT}, got {found[0].about['format']}")
    num_ranks = 1
    for size in found[0].about["axes"].values():
        num_ranks *= size
    ranks = [one.about["rank"] for one in found]
    if ranks != list(range(num_ranks)):
        raise ValueError(f"{folder}: expected what {num_ranks} ranks wrote, got that of ranks {ranks}")
    return found
