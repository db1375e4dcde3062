"""Run recorded steps again on simulated ranks, and compare every bit.

  fshard replay crash --step my_training:make --at 7

Exit status: 0: the same bits; 1: other bits; 2: an error; 3: the same bits, some of them not finite.
"""

from __future__ import annotations

import argparse

from ..testing.replaying import Finding, Replayed, replay
from .output import FAULT, NONFINITE, OK, Line, report
from .values import function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="the folder that fshard.testing.record wrote to")
    text = "a function of the mesh that gives (step, state, batch), or (step, state, batch, loss_fn)"
    parser.add_argument("--step", required=True, metavar="MODULE:FUNCTION", help=text)
    parser.add_argument("--at", type=int, metavar="N", help="only the step of this number")


def run(args: argparse.Namespace) -> int:
    make = function("--step", args.step, "of the mesh", 1)
    return report(map(_replayed_line, replay(args.dir, make, args.at)), args.json)


def _replayed_line(step: Replayed) -> Line:
    findings = {"different": _data(step.different), "nonfinite": _data(step.nonfinite)}
    data = {"step": step.number, "ranks": step.num_ranks, **findings}
    return Line(str(step), data, FAULT if step.different else NONFINITE if step.nonfinite else OK)


def _data(x: Finding | None) -> dict[str, object] | None:
    """Return a finding as a dict, with the keys of `fshard compare`."""
    names = {"kind": "what", "name": "path", "unit": "unit", "rank": "rank", "text": "text"}
    return None if x is None else {key: getattr(x, name) for key, name in names.items()}
