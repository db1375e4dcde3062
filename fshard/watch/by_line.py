"""The first wrong line of a loss on ranks, beside the loss on one device, which may call other operators.

Note [Counterparts]
    1. Operators of one line and name are counterparts if the line calls them equally often on each rank and on one
       device. A collective, which one device lacks, has the counterpart of its input.
    2. A value with a counterpart is right if it has a kind (Note [Kinds of values] in `values.py`). A right program may
       have wrong values: row numbers of a rank, a maximum before its all_reduce. So the search goes back from a wrong
       total or count, through wrong floating-point values, to those whose inputs are right.
    3. The kinds of the inputs tell which collective is missing or too many.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ..core.storage import is_inexact
from .values import ORDER, Difference, ObservedRun, ObservedValue, ValueName, kinds_of, limit_of

Kinds = Mapping[str, str]  # by axis of several ranks
_SUMS = ("all_reduce over", "all_reduce(dim", "reduce_scatter")
_PERMUTING = ("shift", "sizes", "broadcast")
_ENDS = "A total and its count are of one kind; a Sum is summands along each axis, a plain number is a mean over ranks"
_MISSING = {  # by the beginning of an input's kind
    "shares": "it is divided by the number of ranks once too often",
    "summands": "a sum over the ranks (all_reduce, reduce_scatter) is missing before this line, or belongs after it",
    "values to average": "a mean over the ranks is missing before this line",
    ORDER: "rows, blocks or words are not in one device's order",
    "parts": "if it works over this dim, an all_gather, or a sum or maximum of its results over the ranks, is missing",
}


class ByLine:
    """A run on ranks beside a run on one device, compared by line."""

    def __init__(self, got: Sequence[ObservedRun], one: ObservedRun, rtol: float | None):
        self._got, self._one, self._rtol = got, one, rtol
        self._values = {n: x[0] for (kind, n), x in got[0].items() if kind == "operator" and isinstance(n, int)}
        self._parts: dict[int, list[ObservedValue]] = {}  # by number on rank 0: the values of all ranks
        self._wanted: dict[int, ValueName] = {}  # by number on rank 0: the counterpart
        of_one, *of_ranks = map(_by_line, (one, *got))
        for line, number in of_ranks[0].items():
            if all(line in lines for lines in of_ranks):
                each = (run["operator", lines[line]] for run, lines in zip(got, of_ranks, strict=True))
                self._parts[number] = [x for values in each for x in values]
                if line in of_one:
                    self._wanted[number] = "operator", of_one[line]
        self._kinds: dict[int, Kinds | None] = {}  # None: unlike one device's
        for number, x in self._values.items():  # in the order of the program
            if number < -1 and number in self._parts and x.inputs and x.inputs[0] in self._wanted:
                self._wanted[number] = self._wanted[x.inputs[0]]
            if number in self._wanted:
                self._kinds[number] = self._kinds_of(number)

    def departure(self, end: ValueName) -> Difference | None:
        """Return the first wrong value from which a wrong total or count comes; None if no value is wrong."""
        (x, *_), (kind, name) = self._got[0][end], end
        if self._kinds_like(end) is not None:
            ends = dict.fromkeys([str(name).replace("count", "total"), name])
            said = (f"{each} is {_in_words(self._kinds_like((kind, each)))}" for each in ends)
            return x.differs(None, f"{_code_of(x)}{'; '.join(said)}. {_ENDS}")
        reasons = [(self._reason(n), n) for n in self._first_wrong(x.inputs, is_inexact)]
        if not reasons:
            return None
        reason, number = min(reasons, key=lambda pair: (not pair[0], pair[1]))
        return self._values[number].differs(None, self._text(number, reason))

    def _kinds_like(self, key: ValueName, parts: Sequence[ObservedValue] = ()) -> Kinds | None:
        """Return the kinds of ranks' values beside one device's value of `key`. `parts`: by default those of `key`."""
        parts, want = parts or [x for run in self._got for x in run[key]], self._one[key]
        sizes, num = self._got[0].sizes, len(self._got[0].forwards)
        limit = limit_of(key, parts, self._one, self._rtol)
        kinds = kinds_of(parts, want, sizes, limit)
        axes = zip([*self._got[0].axes, "micro-batches"], [*sizes, num], kinds, strict=False)
        return {axis: word for axis, size, word in axes if size > 1} if kinds else None

    def _kinds_of(self, number: int) -> Kinds | None:
        kinds = self._kinds_like(self._wanted[number], self._parts[number])
        if kinds and ORDER in kinds.values():  # only if the operator may permute right values
            given = [self._kinds[n] for n in self._inputs(number) if is_inexact(self._values[n].value)]
            permutes = number > -1 or any(word in self._values[number].name for word in _PERMUTING)
            is_right = None not in given and (permutes or any(ORDER in each.values() for each in given if each))
            return kinds if is_right else None
        return kinds

    def _inputs(self, number: int) -> list[int]:
        """Return the nearest values with counterparts from which a value is computed."""
        nearest, seen, waiting = list[int](), {-1}, [*self._values[number].inputs]
        while waiting:
            if (n := waiting.pop()) not in seen:
                seen.add(n)
                into, numbers = (nearest, [n]) if n in self._wanted else (waiting, self._values[n].inputs)
                into += numbers
        return sorted(nearest)

    def _first_wrong(self, ends: Iterable[int], passes: Callable[[Tensor], bool]) -> list[int]:
        first, seen, waiting = list[int](), {-1}, [*ends]
        while waiting:
            if (n := waiting.pop()) not in seen:
                seen.add(n)
                wrong = [m for m in self._inputs(n) if self._kinds[m] is None and passes(self._values[m].value)]
                waiting += wrong
                if not wrong and self._kinds.get(n) is None:
                    first.append(n)
        return first

    def _reason(self, number: int) -> str:
        """Say which collective is missing before a value, or too many; "" if its inputs' kinds do not tell."""
        name, given = self._values[number].name, self._inputs(number)
        each = [(n, *of) for n in given if is_inexact(self._values[n].value) for of in (self._kinds[n] or {}).items()]
        taken = [(n, axis, kind) for n, axis, kind in each if number < -1 and name.endswith(repr(axis))]
        if taken and name.startswith(_SUMS) and taken[0][2] == "equal":
            return f"it sums equal values along {taken[0][1]!r}: one sum too many"
        missing = {"": "another collective, or other dims"} if taken else _MISSING
        for begin, remedy in missing.items():
            for n, axis, kind in taken or each:
                if kind.startswith(begin):
                    source = self._shown(self._origin(n, axis), number)
                    return f"along {axis!r} it takes {kind}, from {source}: {remedy}"
        return ""

    def _origin(self, number: int, axis: str) -> int:
        """Return the first of the values, each computed from the one before, of the kind of a value along an axis."""
        kind, seen = (self._kinds[number] or {})[axis], {number}
        while before := [n for n in self._inputs(number) if (self._kinds[n] or {}).get(axis) == kind and n not in seen]:
            seen.add(number := before[0])
        return number

    def _text(self, number: int, reason: str) -> str:
        given = self._inputs(number)
        before = self._first_wrong((n for n in given if self._kinds[n] is None), lambda x: True)
        told = (f"{self._shown(n, number)} ({_in_words(self._kinds[n])})" for n in sorted({*given, *before}))
        inputs = "; ".join(dict.fromkeys(told)) or "leaves, the batch, or values of no line"
        reason = reason or (
            "it takes numbers unlike one device's" if before else "its value differs, and no known input does"
        )
        return f"{_code_of(self._values[number])}{reason}. Inputs: {inputs}"

    def _shown(self, number: int, beside: int) -> str:
        x, (file, _, _) = self._values[number], self._values[beside].line.rpartition(":")
        return f"{x.name}, {x.line.replace(f'{file}:', 'line ')}, {_code_of(x)[:-2]}"


def _in_words(kinds: Kinds | None) -> str:
    return ", ".join(f"{kind} along {axis!r}" for axis, kind in (kinds or {}).items()) or "unlike one device's"


def _by_line(run: ObservedRun) -> dict[object, int]:
    """Return the numbers of operators by line and name, the place among such operators, and how many there are."""
    lines: dict[object, list[int]] = {}
    for (kind, number), values in run.items():
        if kind == "operator" and isinstance(number, int) and len(values) == len(run.forwards):
            lines.setdefault((values[0].line, values[0].name), []).append(number)
    return {(line, i, len(all)): number for line, all in lines.items() for i, number in enumerate(all)}


def _code_of(x: ObservedValue) -> str:
    file, _, number = x.line.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdecimal() and os.path.isfile(file) else ""
    return f"`{source}`: " if source else ""
