"""Find the first value in which two observed runs differ: operator, gradient, metric or parameter, with unit and line.

  fshard compare sharded plain              # folders with observed steps, from fshard.testing.record
  fshard compare sharded plain --at 7       # step 7 of both folders
  fshard compare new.pt old.pt --rtol 1e-6  # files of torch.save: a list with the observed values of each rank

`plain` may be a run on one device with the batches of all ranks. Without --at, the last steps are compared.

Exit status: 0: no difference; 1: a difference; 2: an error.
"""

from __future__ import annotations

import argparse

from ..watch.first_difference import first_difference
from ..watch.recording import seen_in
from .output import FAULT, Line, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("got", help="a folder of recorded steps, or a file")
    parser.add_argument("expected", help="the same of the run that is right")
    parser.add_argument("--at", type=int, metavar="N", help="of recorded steps the one of this number")
    parser.add_argument("--rtol", type=float, metavar="X", help="how far numbers may be, relative to the largest")


def run(args: argparse.Namespace) -> int:
    (step, got), (other, expected) = (seen_in(path, args.at) for path in (args.got, args.expected))
    if step != other and None not in (step, other):
        raise ValueError(f"{args.got} ends with step {step}, {args.expected} with step {other}: give --at N")
    difference = first_difference(got, expected, args.rtol)
    if difference is None:
        count = len(expected[0]["names"])
        return report([Line(f"no difference in {count} values", {"difference": None})], args.json)
    return report([Line(str(difference), {"difference": difference._asdict()}, FAULT)], args.json)
