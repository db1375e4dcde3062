"""The command line: `python -m fshard COMMAND ...`."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence

from .checkpoint.comparing import compare
from .checkpoint.inspecting import contents_lines, overview, step_lines, verify
from .core.foreign import printable
from .files.directory import at, finished, no_checkpoint, numbers
from .files.index import CheckpointError
from .files.other_formats import format_at, source_at
from .files.places import Place
from .testing.replaying import Make, replay

SAME, DIFFERENT, WRONG, NONFINITE = range(4)


def _say(text: str, style: str = "") -> None:
    """Print, in colour where rich is installed; paths and errors may have codes for a terminal."""
    text = "\n".join(printable(line, 10_000) for line in text.splitlines())
    try:
        from rich.console import Console
    except ImportError:
        style = ""
    if style:
        Console(soft_wrap=True, highlight=False).print(text, style=style, markup=False)
    else:
        print(text)


def _function(name: str) -> Make:
    """Return the function that `module:function` names. Raises ValueError if it cannot be imported."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as failure:
        raise ValueError(f"--step {name}: expected MODULE:FUNCTION that can be imported: {failure}") from failure


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="the folder that fshard.testing.record wrote to")
    parser.add_argument(
        "--step",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function of the mesh that gives (step, state, batch), or (step, state, batch, loss_fn)",
    )
    parser.add_argument("--at", type=int, metavar="N", help="only the step of this number")


def _replay(args: argparse.Namespace) -> int:
    steps = replay(args.dir, _function(args.step), args.at)
    for step in steps:
        _say(str(step), "red" if step.different else "yellow" if step.nonfinite else "green")
    if any(step.different for step in steps):
        return DIFFERENT
    return NONFINITE if any(step.nonfinite for step in steps) else SAME


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="a directory of checkpoints, or its URL")
    parser.add_argument(
        "--step", type=int, metavar="N", help="show leaves, values and files of the checkpoint of a step"
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--verify", action="store_true", help="read all data, and compare it with the checksums")
    task.add_argument("--against", metavar="DIR", help="show how the checkpoint differs from one of this directory")
    parser.add_argument("--at", type=int, metavar="N", help="with --against: the step there (the last one)")


def _inspect(args: argparse.Namespace) -> int:
    if args.at is not None and args.against is None:
        raise ValueError(f"--at {args.at}: expected --against DIR besides")
    place = at(args.dir)
    if args.against is not None:
        other = at(args.against)
        lines = compare(place, _step(place, args.step), other, _step(other, args.at))
    elif args.verify:
        steps = finished(place) if args.step is None else [args.step]
        if not steps:
            raise CheckpointError(no_checkpoint(place, None))
        lines = itertools.chain.from_iterable(verify(place, step) for step in steps)
    elif args.step is not None:
        lines = step_lines(place, args.step)
    elif not numbers(place) and (kind := format_at(str(place), place)):
        _say(f"{place}: a checkpoint of {kind}")
        lines = contents_lines(source_at(str(place), place, kind).index)
    else:
        lines = overview(place)
    status = SAME
    for line in lines:
        _say(line.text, "red" if line.is_fault else "")
        status = DIFFERENT if line.is_fault else status
    return status


def _step(place: Place, step: int | None) -> int:
    """The step that is asked for, or the last one."""
    steps = [step] if step is not None else finished(place)[-1:]
    if not steps:
        raise CheckpointError(no_checkpoint(place, None))
    return steps[0]


# name of a command: its help, the function that adds its arguments, the function that runs it
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "replay": ("run recorded steps again on simulated ranks", _replay_arguments, _replay),
    "inspect": ("show checkpoints, verify them, or compare two", _inspect_arguments, _inspect),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: no difference; 2: an error. Of `replay` also 1: other bits; 3: the same bits, of which some are not finite. Of
    `inspect` also 1: something is damaged, or two checkpoints differ.
    """
    parser = argparse.ArgumentParser("python -m fshard", description="Functional sharding for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, arguments, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        arguments(command)
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # whoever reads the output has seen enough, as `head` does; Python would flush the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG
    except (ValueError, OSError, ImportError) as wrong:
        _say(f"{args.command}: {wrong}", "red")
        return WRONG


if __name__ == "__main__":
    sys.exit(main())
