"""The first value in which two observed runs differ: an operator, a gradient, a metric or a new parameter.

Note [Several ranks and one device]
    1. Values of ranks and micro-batches must combine to one device's value (Note [Kinds of values] in `values.py`).
       Operators are compared by number, or by line (Note [Counterparts] in `by_line.py`) if leaves are split, or if
       the loss calls collectives.
    2. The first difference is a wrong value computed from right values. But a right program may have wrong values
       without effect: a rank's row numbers, a subtracted maximum, logged values. So only wrong results count: the
       loss's totals and counts, gradients, metrics, parameters. From a wrong total, wrong arguments lead back to the
       first wrong operator. For another wrong result, the first operator is named with a wrong value on one rank, and
       copies or pieces as arguments.
    3. Values may differ by rounding in the lowest precision used so far, relative to an operator's arguments or the
       largest gradient. Parameters may differ by a part of the largest update, and are compared where gradients agree
       and exceed rounding errors, of which Adam makes large updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

from torch import Tensor

from ..core.arguments import is_number, wrong
from ..core.storage import is_inexact
from ..files.foreign import require
from .by_line import ByLine
from .observed import GRADIENT, METRIC, OLD, PARAMETER, SUM, Observed
from .values import (
    MOST_UPDATE,
    SMALL_PART,
    Difference,
    ObservedRun,
    ObservedValue,
    ValueName,
    Way,
    far_text,
    flat,
    largest,
    limit_of,
    pieces_of,
    right_ways,
)

_KINDS = ("operator", GRADIENT, SUM, METRIC, PARAMETER)
_MOST_TRIED_AXES = 6  # axes of several ranks: each triples the ways to combine values


def first_difference(
    got: Sequence[Observed], expected: Sequence[Observed], rtol: float | None = None
) -> Difference | None:
    """Return the first different value of two observed runs, or None. `got`, `expected`: the `seen` of each rank.

    - Runs on equally many ranks are compared rank by rank: numbers must be equal, or within `rtol` times the largest.
    - A run on any number of ranks, in any number of micro-batches, is compared with a run on one device over the
      batches of all ranks. Ranks' values must be copies, pieces or summands of one device's values, or average to
      these, by default within `2**12` units in the last place (`2**4` for 16 bits and fewer). Differences without
      effect on loss, gradients, metrics and new parameters do not count.

    ValueError for anything but results of observed steps, and if numbers of ranks or micro-batches differ, except if
    `expected` is of one device, and all ranks of `got` have equally many micro-batches.

    >>> from fshard.testing import observed
    >>> def run(fn):
    ...     step = observed(train_step(lambda w, x: fn(w * x).sum(), sgd(0.5)))
    ...     return [step(init_state(shard_of(torch.ones(2)), sgd(0.5)), torch.tensor([1.0, 2.0]))[1]]
    >>> first_difference(run(torch.sin), run(torch.sin))
    >>> print(first_difference(run(torch.sin), run(torch.tanh)).text)
    expected operator 'tanh' at ...
    """
    if rtol is not None and not (is_number(rtol) and 0 <= rtol < math.inf):
        raise ValueError(f"first_difference: {wrong('rtol', rtol, 'a finite number from 0 on')}")
    runs, wanted = _read_runs("got", got), _read_runs("expected", expected)
    numbers = [[len(run.forwards) for run in each] for each in (runs, wanted)]
    is_same = len(runs) == len(wanted) and (len(runs) > 1 or runs[0].sizes == wanted[0].sizes)
    is_same = is_same and len({*numbers[0], *numbers[1]}) == 1
    if not is_same and (len({*numbers[0]}) != 1 or len(wanted) != 1):
        raise ValueError(
            f"first_difference: micro-batches by rank {numbers[0]}, expected {numbers[1]}: give runs on equally many "
            "ranks and micro-batches, or as `expected` one on one device with the batch of all"
        )
    try:
        return _by_rank(runs, wanted, rtol or 0.0) if is_same else _Ranks(runs, wanted[0], rtol).first()
    except (RuntimeError, LookupError, AssertionError) as error:
        raise ValueError(f"first_difference: expected what observed(step) returns, by rank: {error}") from error


def _read_runs(name: str, by_rank: Sequence[Observed]) -> list[ObservedRun]:
    try:
        runs = [ObservedRun(seen) for seen in by_rank]
        sizes = [size for size in runs[0].sizes if size != 1]
        require(len(sizes) <= _MOST_TRIED_AXES, f"more than {_MOST_TRIED_AXES} axes of several ranks")
        ranks = math.prod(sizes) if all(run.forwards and run.end for run in runs) else 0
    except Exception as error:  # foreign data raise errors of many types
        expected = "what observed(step) returns beside its results, by rank"
        raise ValueError(f"first_difference: {name}: expected {expected}: {error}") from error
    if len(runs) != ranks:
        raise ValueError(f"first_difference: {name}: expected what all {ranks} ranks have seen, got {len(runs)}")
    return runs


def departure(got: Sequence[Observed], one: Observed, rtol: float) -> Difference | None:
    """Return the first wrong value of a loss on ranks by Note [Counterparts] in `by_line.py`, as `first_difference`."""
    return _Ranks(_read_runs("got", got), _read_runs("expected", [one])[0], rtol, by_line=True).first()


def _keys(runs: Sequence[ObservedRun]) -> list[ValueName]:
    keys = dict.fromkeys(key for run in runs for key in run if key[0] in _KINDS)
    return sorted(keys, key=lambda key: (_KINDS.index(key[0]), isinstance(key[1], str)))


def _unlike(key: ValueName, run: ObservedRun, want: ObservedRun, rank: int) -> Difference | None:
    values, b = run.get(key, []), next(iter(want.get(key, [])), None)
    a = next((x for x in values if b is None or x.name != b.name), next(iter(values), None))
    is_partial = key[0] == "operator" and any(len(each.get(key, [])) % len(each.forwards) for each in (run, want))
    if a is not None and b is not None and a.name == b.name and not is_partial:
        return None
    value = a or b
    assert value is not None
    if a is None and key[0] == "operator":  # `run` ends before this operator
        value = value._replace(line=run.end)
    some = ", not in all micro-batches" * is_partial
    return value.differs(rank, f"expected {b or 'nothing more'}, got {a or 'nothing more'}{some}")


def _by_rank(runs: Sequence[ObservedRun], wanted: Sequence[ObservedRun], rtol: float) -> Difference | None:
    for key in _keys([*runs, *wanted]):
        for rank, (run, want) in enumerate(zip(runs, wanted, strict=True)):
            if unlike := _unlike(key, run, want, rank):
                return unlike
            limit, agreeing = limit_of(key, run[key], want, rtol), _agreeing(key, run, want, rtol)
            for x, y in zip(run[key], want[key], strict=False):
                if text := far_text(x.value, y.value, limit, agreeing):
                    return x.differs(rank, text)
    return None


def _agreeing(key: ValueName, run: ObservedRun, want: ObservedRun, rtol: float | None) -> Tensor | None:
    """Return a new parameter's mask: True where old values agree, and gradients agree and exceed rounding."""
    kind, path = key
    if kind != PARAMETER or rtol == 0 or any((kind, path) not in each for each in (run, want) for kind in (SUM, OLD)):
        return None
    given = want[key][0].rtol if rtol is None else rtol
    (x, old), (y, other) = ([flat(each[kind, path][0].value) for kind in (SUM, OLD)] for each in (run, want))
    agree = (x - y).abs() <= min(2**5 * given, MOST_UPDATE) * y.abs()
    is_rounding = (y.abs() <= SMALL_PART * given * want.largest_gradient) & bool(y.any())
    return agree & ~is_rounding & ((old - other).abs() <= given * largest(other))


class _Ranks:
    """A run on ranks, compared with a run on one device (Note [Several ranks and one device])."""

    def __init__(self, runs: Sequence[ObservedRun], one: ObservedRun, rtol: float | None, by_line: bool = False):
        self._got, self._one, self._rtol = runs, one, rtol
        self._num, self._is_split = len(runs[0].forwards), runs[0].forwards[0].unit == "split"
        has_collectives = ("operator", -2) in runs[0] and ("operator", -2) not in one
        self._by_line = by_line or self._is_split or has_collectives
        self._states = {-1: "pieces"}  # by number of operator: "copies", "pieces", "partial" or "wrong"
        self._operator: Difference | None = None  # the first operator with a wrong value, maybe without effect
        self._ways = set[tuple[Way, Way]]()  # ways to combine the last total's values to the expected total

    def first(self) -> Difference | None:
        for key in _keys([*self._got, self._one]):
            if self._by_line and isinstance(key[1], int):
                continue
            each = (_unlike(key, run, self._one, rank) for rank, run in enumerate(self._got))
            if difference := next(filter(None, each), None) or self._difference(key):
                return difference
        return None

    def _difference(self, key: ValueName) -> Difference | None:
        kind, number = key
        parts, want = [x for run in self._got for x in run[key]], self._one[key]
        limit = limit_of(key, parts, self._one, self._rtol)
        if isinstance(number, int):
            self._note(number, parts, want, limit)
            return None
        if kind == "operator":
            return self._loss(parts, want, limit)
        if kind == GRADIENT:
            words = () if self._is_split else ("sum",)
            right = next(right_ways(parts, want, self._got[0].sizes, limit, words), None)
            return None if right else self._operator or self._told(parts, want, limit)
        for rank, x in enumerate(parts):
            agreeing = _agreeing(key, self._got[rank], self._one, self._rtol)
            if text := far_text(x.value, want[0].value, limit, agreeing):
                return self._operator or x.differs(rank, text)
        return None

    def _note(self, number: int, parts: Sequence[ObservedValue], want: Sequence[ObservedValue], limit: float) -> None:
        state, given = "wrong", {self._states[n] for n in want[0].inputs}
        words = ("apart",) if given <= {"copies"} else ()  # results from copies are copies
        if ways := next(right_ways(parts, want, self._got[0].sizes, limit, words), None):
            state = "pieces" if {*ways[0], *ways[1]} <= {"apart"} else "partial"
            if state == "pieces" and not any(x.value.shape != y.value.shape for x in parts for y in want):
                state = "copies"
        self._states[number] = state
        if state == "wrong" and is_inexact(want[0].value) and not given & {"wrong", "partial"}:
            difference = self._told(parts, want, limit)
            is_certain = difference.rank is not None or given <= {"copies"}  # row numbers do not come from copies
            self._operator = self._operator or (difference if is_certain else None)

    def _told(self, parts: Sequence[ObservedValue], want: Sequence[ObservedValue], limit: float) -> Difference:
        values, wanted = [x.value for x in parts], [x.value for x in want]
        is_copy = want[0].kind == "operator" and "pieces" not in {self._states.get(n, "pieces") for n in want[0].inputs}
        for pieces in (*pieces_of(values, wanted), [*islice(cycle(wanted), len(parts))]):
            texts = [far_text(a, b, limit) for a, b in zip(values, pieces, strict=False)]
            wrong = [number for number, text in enumerate(texts) if text]
            if wrong and (pieces[0] is not wanted[0] or (is_copy and len(wrong) <= len(parts) // 2)):
                return parts[wrong[0]].differs(wrong[0] // self._num, texts[wrong[0]])
        total = values[0].new_tensor(0) + sum(values) if len({x.shape for x in values}) == 1 else values[0]
        forms = [[x.item() if x.numel() == 1 else list(x.shape) for x in each] for each in (wanted, values)]
        text = "the values of ranks are neither copies, pieces, summands nor equal parts of a mean of one device's"
        shown = f"expected {str(forms[0])[1:-1]}, got {str(forms[1])[1:-1]}"
        return parts[0].differs(None, f"{text}: {shown}; their sum: {far_text(total, wanted[0], limit)}")

    def _loss(self, parts: Sequence[ObservedValue], want: Sequence[ObservedValue], limit: float) -> Difference | None:
        """Check a total or a count: values of both must combine in the same way."""
        of = want[0].name.partition("(")[2]
        words = {"Sum)": ("sum",), "Tensor)": ("mean",)}
        right = {*right_ways(parts, want, self._got[0].sizes, limit, words.get(of, ()))}
        self._ways = right & self._ways if "count" in want[0].name else right
        if self._ways:
            return None
        if self._by_line:
            departs = ByLine(self._got, self._one, self._rtol).departure(("operator", want[0].name))
            return departs or self._told(parts, want, limit)
        number, inputs = None, want[0].inputs
        while wrong := [n for n in inputs if self._states.get(n) == "wrong"]:
            number, inputs = wrong[0], self._one["operator", wrong[0]][0].inputs
        if number is None:
            return self._operator or self._told(parts, want, limit)
        key = ("operator", number)
        return self._told([x for run in self._got for x in run[key]], self._one[key], limit)
