"""Output of a command: lines for people, in colour if rich is installed, or JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..files.foreign import printable

OK, FAULT, ERROR, NONFINITE = range(4)  # exit statuses; ERROR: the command itself failed
_STATUS_COLOURS = {OK: "", NONFINITE: "yellow"}


class Line(NamedTuple):
    """A line of output, its data for `--json` (None: no line), and its exit status."""

    text: str
    data: Mapping[str, object] | None = None
    status: int = OK


def report(lines: Iterable[Line], as_json: bool) -> int:
    """Print each line as soon as it comes, and return the lines' lowest exit status above 0; 0 if all are 0.

    With `as_json`, each printed line is a JSON object.
    """
    statuses = set[int]()
    for line in lines:
        statuses.add(line.status)
        if not as_json:
            say(line.text, _STATUS_COLOURS.get(line.status, "red"))
        elif line.data is not None:
            print(json.dumps(line.data))
    return min(statuses - {OK}, default=OK)


def say(text: str, colour: str = "", is_error: bool = False) -> None:
    """Print, in colour if rich is installed. Control characters in paths and errors are escaped."""
    text = "\n".join(printable(line, 10_000) for line in text.splitlines())
    try:
        from rich.console import Console
    except ImportError:
        colour = ""
    if colour:  # `emoji=False`: a name such as "x:smile:" stays as it is
        Console(soft_wrap=True, highlight=False, emoji=False, stderr=is_error).print(text, style=colour, markup=False)
    else:
        print(text, file=sys.stderr if is_error else sys.stdout)
