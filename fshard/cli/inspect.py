"""Show checkpoints, verify them, or compare two.

  fshard inspect run                             # the steps: sizes, and remains of killed saves
  fshard inspect run --step 100                  # leaves, values and files of step 100
  fshard inspect run --verify                    # read all data, and compare it with the checksums
  fshard inspect run --against other --at 100    # the last step of `run` against step 100 of `other`

Exit status: 0: no fault; 1: damage, or two different checkpoints; 2: an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain

from ..checkpoint import inspecting
from ..checkpoint.comparing import compare
from ..checkpoint.inspecting import contents_lines, overview, step_lines, verify
from ..files.directory import dir_at, finished, no_checkpoint, numbers
from ..files.folders import Folder
from ..files.foreign import require
from ..files.index import CheckpointError
from ..files.other_formats import format_at, source_at
from .output import FAULT, OK, Line, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="a directory of checkpoints, or its URL")
    parser.add_argument("--step", type=int, metavar="N", help="show leaves, values and files of a step's checkpoint")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--verify", action="store_true", help="read all data, and compare it with the checksums")
    task.add_argument("--against", metavar="DIR", help="show how the checkpoint differs from one of this directory")
    parser.add_argument("--at", type=int, metavar="N", help="with --against: the step there (the last one)")


def run(args: argparse.Namespace) -> int:
    require(args.at is None or args.against is not None, f"--at {args.at}: expected --against DIR besides")
    lines = (Line(line.text, line.data, FAULT if line.is_fault else OK) for line in _answer(args, dir_at(args.dir)))
    return report(lines, args.json)


def _answer(args: argparse.Namespace, place: Folder) -> Iterator[inspecting.TextLine]:
    if args.against is not None:
        other = dir_at(args.against)
        return compare(place, _steps(place, args.step)[-1], other, _steps(other, args.at)[-1])
    kind = "" if numbers(place) else format_at(str(place), place)
    if kind and (args.verify or args.step is not None):
        raise CheckpointError(f"{place}: a checkpoint of {kind}, which has neither steps nor checksums")
    if args.verify:
        return chain.from_iterable(verify(place, step) for step in _steps(place, args.step))
    if args.step is not None:
        return step_lines(place, args.step)
    if kind:
        title = inspecting.TextLine(f"{place}: a checkpoint of {kind}", False, {"format": kind})
        return chain([title], contents_lines(source_at(str(place), place, kind).index))
    return overview(place)


def _steps(place: Folder, step: int | None) -> list[int]:
    steps = finished(place) if step is None else [step]
    if not steps:
        raise CheckpointError(no_checkpoint(place, None))
    return steps
