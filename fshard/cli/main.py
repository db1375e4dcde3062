"""The commands, and their common parts: help, `--json`, errors and exit statuses.

A command is a module with `add_arguments(parser)` and `run(args) -> int`, the exit status. The module's docstring is
the help: its first line in the list of commands, all lines in the command's `--help`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

import fshard

from ..compiler.trace import TraceError
from . import compare, doctor, inspect, plan, replay
from .output import ERROR, say

COMMANDS: dict[str, ModuleType] = {x.__name__.rpartition(".")[2]: x for x in (plan, inspect, replay, compare, doctor)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. An error is one line on stderr and status 2."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # a reader such as `head` has seen enough; Python flushes the rest to null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except (ValueError, TypeError, OSError, ImportError, TraceError) as wrong:
        say(f"fshard {args.command}: {' '.join(str(wrong).split())}", "red", is_error=True)
        return ERROR


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter  # others would join the docstring's lines
    parser = argparse.ArgumentParser("fshard", description="Functional sharding for PyTorch.", formatter_class=raw)
    version = f"fshard {fshard.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        text = str(module.__doc__)
        command = commands.add_parser(name, help=text.partition("\n")[0], description=text, formatter_class=raw)
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON, one object a line")
        command.set_defaults(run=module.run)
    return parser
