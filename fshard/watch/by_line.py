"""The line where a loss on ranks departs from the loss on one device, if the two call other operators.

Note [Lines]
    1. Operators of one line and name are counterparts if the line calls them equally often on each rank and on one
       device. A collective, which one device lacks, has the counterpart of its input.
    2. A value with a counterpart is right if it has a kind (Note [Kinds of values] in `values.py`). A right program may
       have wrong values: row numbers of a rank, a maximum before its all_reduce. So the search goes back from a wrong
       total or count, through wrong floating-point values, to those whose inputs are right.
    3. The kinds of the inputs tell which collective is missing or too many.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ..core.storage import is_inexact
from .values import ORDER, Difference, ObservedRun, ObservedValue, ValueName, kinds_of, limit_of

Kinds = Mapping[str, str]  # by axis of several ranks
_SUMS = ("all_reduce over", "all_reduce(dim", "reduce_scatter")
_PERMUTING = ("shift", "sizes", "broadcast")
_ENDS = "A total and its count are of one kind; a Sum is summands along each axis, a plain number is a mean over ranks"
_REMEDIES = {
    "summands": "a sum over the ranks (all_reduce, reduce_scatter) is missing before it, or should come after it",
    "values to average": "a mean over the ranks is missing before it",
    "parts": "an all_gather before it, or a collective for what it computes over this dim, is missing",
}


class Lines:
    """A run on ranks beside a run on one device, compared by line."""

    def __init__(self, got: Sequence[ObservedRun], one: ObservedRun, rtol: float | None):
        self._got, self._one, self._rtol = got, one, rtol
        self._values = {n: x[0] for (kind, n), x in got[0].items() if kind == "operator" and isinstance(n, int)}
        self._parts: dict[int, list[ObservedValue]] = {}  # by number on rank 0: the values of all ranks
        self._wanted: dict[int, ValueName] = {}
        self._kinds: dict[int, Kinds | None] = {}
        ours, *of_ranks = [_by_line(run) for run in (one, *got)]
        for line, numbers in of_ranks[0].items():
            if len({len(each.get(line, ())) for each in of_ranks}) == 1:
                for at, number in enumerate(numbers):
                    each = (run["operator", lines[line][at]] for run, lines in zip(got, of_ranks, strict=True))
                    self._parts[number] = [x for values in each for x in values]
                if len(ours.get(line, ())) == len(numbers):
                    self._wanted |= {n: ("operator", m) for n, m in zip(numbers, ours[line], strict=True)}
        for number, x in self._values.items():  # in the order of the program
            if number < -1 and number in self._parts and x.inputs and x.inputs[0] in self._wanted:
                self._wanted[number] = self._wanted[x.inputs[0]]

    def departure(self, end: ValueName) -> Difference | None:
        """Return the first wrong value from which a wrong total or count comes; None if no value is wrong."""
        (x, *_), (kind, name) = self._got[0][end], end
        if self._kinds_like(end) is not None:
            ends = dict.fromkeys([str(name).replace("count", "total"), name])
            said = (f"{each} is {_told(self._kinds_like((kind, each)))}" for each in ends)
            return x.differs(None, f"{_source(x)!r}: {'; '.join(said)}. {_ENDS}")
        found = self._first_wrong(x.inputs, is_inexact)
        if not found:
            return None
        reason, number = min(((self._reason(n), n) for n in found), key=lambda pair: (not pair[0], pair[1]))
        return self._values[number].differs(None, self._text(number, reason))

    def _kinds_like(self, key: ValueName, parts: Sequence[ObservedValue] = ()) -> Kinds | None:
        """Return the kinds of values of ranks beside one device's value of `key`. `parts`: by default those of `key`."""
        parts, want = parts or [x for run in self._got for x in run[key]], self._one[key]
        sizes, num = self._got[0].sizes, len(self._got[0].forwards)
        limit = limit_of(key, parts, self._one, self._rtol)
        kinds = kinds_of([x.value for x in parts], [x.value for x in want], sizes, limit)
        axes = zip([*self._got[0].axes, "micro-batches"], [*sizes, num], kinds, strict=False)
        return {axis: word for axis, size, word in axes if size > 1} if kinds else None

    def _kinds_of(self, number: int) -> Kinds | None:
        if number not in self._kinds:
            x, kinds = self._values[number], self._kinds_like(self._wanted[number], self._parts[number])
            if number < -1 and kinds and ORDER in kinds.values() and not any(word in x.name for word in _PERMUTING):
                before = self._kinds_of(x.inputs[0])
                kinds = None if before and ORDER not in before.values() else kinds
            self._kinds[number] = kinds
        return self._kinds[number]

    def _inputs(self, number: int) -> list[int]:
        """Return the nearest values with counterparts from which a value is computed."""
        found, seen, waiting = list[int](), {-1}, [*self._values[number].inputs]
        while waiting:
            if (n := waiting.pop()) not in seen:
                seen.add(n)
                near = found if n in self._wanted else waiting
                near += [n] if n in self._wanted else self._values[n].inputs
        return sorted(found)

    def _first_wrong(self, ends: Iterable[int], passes: Callable[[Tensor], bool]) -> list[int]:
        found, seen, waiting = list[int](), {-1}, [*ends]
        while waiting:
            if (n := waiting.pop()) not in seen:
                seen.add(n)
                given = [m for m in self._inputs(n) if passes(self._values[m].value)]
                wrong = [m for m in given if self._kinds_of(m) is None]
                waiting += wrong
                if not wrong and (n not in self._wanted or self._kinds_of(n) is None):
                    found.append(n)
        return found

    def _reason(self, number: int) -> str:
        """Say which collective is missing before a value, or too many; "" if its inputs' kinds do not tell."""
        x, given = self._values[number], [kinds for n in self._inputs(number) if (kinds := self._kinds_of(n))]
        for axis in dict.fromkeys(axis for kinds in given for axis in kinds):
            words = {kinds[axis] for kinds in given}
            if number < -1 and x.name.endswith(repr(axis)):
                if x.name.startswith(_SUMS) and words == {"equal"}:
                    return f"it sums equal values along {axis!r}: a sum too many"
                return f"along {axis!r} it takes {_listed(words)}: another collective, or other dims"
            shares = [word for word in words if word.startswith("1/")]
            if shares:
                return f"along {axis!r} it takes {shares[0]} of the value on each rank: divided by the ranks too often"
            if len(dims := {word for word in words if word.startswith("parts of")}) > 1:
                return f"along {axis!r} it takes {_listed(dims)}"
            for word, remedy in _REMEDIES.items():
                if any(each.startswith(word) for each in words):
                    return f"along {axis!r} it takes {word}: {remedy}"
        return ""

    def _text(self, number: int, reason: str) -> str:
        given = self._inputs(number)
        wrong = [n for n in given if self._kinds_of(n) is None]
        before = [n for n in self._first_wrong(wrong, lambda x: True) if n not in given]
        inputs = "".join(f"; {self._shown(n)}" for n in [*given, *before])
        return f"{_source(self._values[number])!r}: its inputs are right, its values are not. {reason}{inputs}"

    def _shown(self, number: int) -> str:
        x, kinds = self._values[number], self._kinds_of(number) if number in self._wanted else None
        return f"{x.name} at {x.line}, {_source(x)!r}, is {_told(kinds)}"


def _told(kinds: Kinds | None) -> str:
    return ", ".join(f"{kind} along {axis!r}" for axis, kind in (kinds or {}).items()) or "none of these"


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted(words))


def _by_line(run: ObservedRun) -> dict[tuple[str, str], list[int]]:
    """Return the numbers of the operators of each line and name, of those in every micro-batch."""
    lines: dict[tuple[str, str], list[int]] = {}
    for (kind, number), values in run.items():
        if kind == "operator" and isinstance(number, int) and len(values) == len(run.forwards):
            lines.setdefault((values[0].line, values[0].name), []).append(number)
    return lines


def _source(x: ObservedValue) -> str:
    file, _, number = x.line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdigit() else ""
