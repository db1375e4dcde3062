"""The first value in which two observed runs differ: an operator, a gradient, a metric or a new parameter.

Note [Several ranks and one device]
    1. Values of ranks and micro-batches must combine to one device's value: along each mesh axis they are copies or
       pieces ("apart"), summands ("sum"), or values to average ("mean"). Pieces may lie along any dim, in blocks, in
       any order (rows by class, heads among rows), so numbers are sorted before the comparison. Copies repeat each
       number equally often.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle, islice, product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..core.arguments import is_number, wrong
from ..core.storage import is_inexact
from ..core.tracing import memo
from ..files.foreign import require
from .compare import form
from .observed import GRADIENT, LOSS, METRIC, OLD, PARAMETER, SUM, Observed

Way: TypeAlias = tuple[str, ...]  # by axis: "apart", "sum" or "mean"
ValueName: TypeAlias = tuple[str, str | int]  # kind and name of a value; for an operator, its number in the forward
_KINDS = ("operator", GRADIENT, SUM, METRIC, PARAMETER)
_SMALL = 2.0**-6  # values below this part of the largest argument may be rounding errors
_MOST_UPDATE = 2.0**-4  # agreeing gradients differ by at most this part; updates may differ four times as much
_MOST_TRIED_AXES = 6  # axes of several ranks: each triples the ways to combine values
_HALF = 2.0**-20  # between eps of float32 and of 16 bits


class Difference(NamedTuple):
    """The first difference of two observed runs.

    - `kind`: "operator", "gradient on this rank of", "summed gradient of", "metric" or "new parameter".
    - `name`: the operator, metric or leaf.
    - `unit`: as in `print(plan)`.
    - `rank`: None if only the combined values of ranks are wrong.
    - `line`: user code that calls the operator, or first reads the leaf's unit.
    """

    kind: str
    name: str
    unit: str
    rank: int | None
    line: str
    text: str

    def __str__(self) -> str:
        of = "" if self.rank is None else f" on rank {self.rank}"
        unit = f", unit {self.unit!r}" if self.unit else ""
        at = ", at" if self.kind == "operator" else ", which is read at"
        return f"{self.kind} {self.name!r}{of}{unit}{f'{at} {self.line}' if self.line else ''}: {self.text}"


class _Value(NamedTuple):
    kind: str
    name: str
    unit: str
    line: str
    inputs: list[int]  # by argument, the number of its operator, -1 for other tensors
    value: Tensor
    place: str  # numbers of operator and forward
    eps: float  # of the lowest precision used so far

    @property
    def rtol(self) -> float:
        """Allow 2**12 units in the last place, 2**4 for 16 bits and fewer, at most 1/8 of the value."""
        return min(self.eps * (2**12 if self.eps < _HALF else 2**4), max(self.eps, 2.0**-3))

    def differs(self, rank: int | None, text: str) -> Difference:
        return Difference(self.kind, self.name, self.unit, rank, self.line, text + self.place)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" + f" at {self.line}" * bool(self.line)


class _Run(dict[ValueName, list[_Value]]):
    """Values by key: one for each forward, or one for the step."""

    def __init__(self, seen: Observed):
        super().__init__()
        self._largest = dict[int, float]()
        eps, coarsest, forward, count = {-1: 0.0}, 0.0, 0, 0
        for name, value in zip(seen["names"], seen["values"], strict=True):
            kind, called, unit, line, inputs = name.split("\t")
            numbers = [*{int(number): 0 for number in inputs.replace("?", "-1").split(",") if number}]
            comes_of = [eps[number] for number in numbers] if kind == "operator" else [coarsest]
            precision = max([torch.finfo(value.dtype).eps if is_inexact(value) else 0.0, *comes_of])
            key, place = called, ""
            if kind == "forward":
                key, forward, count = "", forward + 1, 0
            elif kind == "operator" and not called.startswith(LOSS):
                key, eps[count], place = count, precision, f" (operator {count + 1}, forward {forward})"
                count, coarsest = count + 1, max(coarsest, precision)
            x = _Value(kind, called, unit, line, numbers, value.detach().cpu().as_subclass(Tensor), place, precision)
            self.setdefault((kind, key), []).append(x)

    @memo
    def forwards(self) -> list[_Value]:
        return self["forward", ""]

    @memo
    def sizes(self) -> list[int]:
        return [int(size) for size in self.forwards[0].name.split("x") if size]

    @property
    def end(self) -> str:
        return [x.line for (kind, _), values in self.items() if kind == "operator" for x in values][-1]

    @memo
    def largest_gradient(self) -> float:
        return _largest(*(x.value for (kind, _), values in self.items() if kind == SUM for x in values))

    def largest_of(self, operator: int) -> float:
        if operator not in self._largest:
            self._largest[operator] = _largest(*(x.value for x in self.get(("operator", operator), [])))
        return self._largest[operator]


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


def _read_runs(name: str, by_rank: Sequence[Observed]) -> list[_Run]:
    try:
        runs = [_Run(seen) for seen in by_rank]
        sizes = [size for size in runs[0].sizes if size != 1]
        require(len(sizes) <= _MOST_TRIED_AXES, f"more than {_MOST_TRIED_AXES} axes of several ranks")
        ranks = math.prod(sizes) if all(run.forwards and run.end for run in runs) else 0
    except Exception as error:  # foreign data raise errors of many types
        expected = "what observed(step) returns beside its results, by rank"
        raise ValueError(f"first_difference: {name}: expected {expected}: {error}") from error
    if len(runs) != ranks:
        raise ValueError(f"first_difference: {name}: expected what all {ranks} ranks have seen, got {len(runs)}")
    return runs


def _keys(runs: Sequence[_Run]) -> list[ValueName]:
    keys = dict.fromkeys(key for run in runs for key in run if key[0] in _KINDS)
    return sorted(keys, key=lambda key: (_KINDS.index(key[0]), isinstance(key[1], str)))


def _unlike(key: ValueName, run: _Run, want: _Run, rank: int) -> Difference | None:
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


def _by_rank(runs: Sequence[_Run], wanted: Sequence[_Run], rtol: float) -> Difference | None:
    for key in _keys([*runs, *wanted]):
        for rank, (run, want) in enumerate(zip(runs, wanted, strict=True)):
            if unlike := _unlike(key, run, want, rank):
                return unlike
            limit, agreeing = _limit(key, run[key], want, rtol), _agreeing(key, run, want, rtol)
            for x, y in zip(run[key], want[key], strict=False):
                if text := _far(x.value, y.value, limit, agreeing):
                    return x.differs(rank, text)
    return None


def _largest(*tensors: Tensor) -> float:
    return max((float(_flat(x).nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in tensors if x.numel()), default=0.0)


def _limit(key: ValueName, got: Sequence[_Value], want: _Run, rtol: float | None) -> float:
    (kind, path), first = key, want[key][0]
    given, values = first.rtol if rtol is None else rtol, [x.value for x in want[key]]
    if not given or not is_inexact(first.value):
        return 0.0
    if rtol is None and kind == PARAMETER and (OLD, path) in want:
        update = _largest(_flat(first.value) - _flat(want[OLD, path][0].value))
        return 4 * min(2**5 * given, _MOST_UPDATE) * update + 4 * torch.finfo(first.value.dtype).eps * _largest(*values)
    behind = max(map(want.largest_of, first.inputs), default=0.0)
    behind = want.largest_gradient if kind in (GRADIENT, SUM) else behind
    return given * max(_largest(*values, *(x.value for x in got)), _SMALL * behind)


def _agreeing(key: ValueName, run: _Run, want: _Run, rtol: float | None) -> Tensor | None:
    """Return a new parameter's mask: True where old values agree, and gradients agree and exceed rounding."""
    kind, path = key
    if kind != PARAMETER or rtol == 0 or any((kind, path) not in each for each in (run, want) for kind in (SUM, OLD)):
        return None
    given = want[key][0].rtol if rtol is None else rtol
    (x, old), (y, other) = ([_flat(each[kind, path][0].value) for kind in (SUM, OLD)] for each in (run, want))
    agree = (x - y).abs() <= min(2**5 * given, _MOST_UPDATE) * y.abs()
    is_rounding = (y.abs() <= _SMALL * given * want.largest_gradient) & bool(y.any())
    return agree & ~is_rounding & ((old - other).abs() <= given * _largest(other))


def _flat(x: Tensor) -> Tensor:
    if not is_inexact(x):
        return x.long().reshape(-1)
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double().reshape(-1)


def _far(x: Tensor, y: Tensor, limit: float, where: Tensor | None = None) -> str:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"expected {form(y)}, got {form(x)}"
    a, b = _flat(x), _flat(y)
    far = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()).double().nan_to_num(nan=torch.inf)
    far = far if where is None else far * where
    if not (wrong := far > limit).any():
        return ""
    at = int(far.argmax())
    return f"expected {b[at]:.9g}, got {a[at]:.9g} at element {at}; {int(wrong.sum())} of {len(a)} differ"


def _ways(sizes: Sequence[int], words: Sequence[str]) -> Iterator[Way]:
    yield from product(*(words if size > 1 else ("apart",) for size in sizes))


def _combined(parts: Sequence[Tensor], sizes: Sequence[int], way: Way) -> list[Tensor] | None:
    """Combine values along summed and averaged axes; None if shapes or dtypes differ."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for at, x in zip(product(*map(range, sizes)), parts, strict=True):
        groups.setdefault(tuple(i for i, word in zip(at, way, strict=True) if word == "apart"), []).append(x)
    if any((x.shape, x.dtype) != (group[0].shape, parts[0].dtype) for group in groups.values() for x in group):
        return None
    if "sum" not in way and "mean" not in way:
        return [*parts]
    num = math.prod(size for size, word in zip(sizes, way, strict=True) if word == "mean")
    totals = [torch.stack([x if x.is_complex() else x.double() for x in group]).sum(0) for group in groups.values()]
    return [(x / num).to(parts[0].dtype) for x in totals]


def _values_alike(got: Sequence[Tensor], want: Sequence[Tensor], limit: float) -> bool:
    if any(x.dtype != want[0].dtype for x in got):
        return False
    same_shapes = all(x.shape == want[0].shape for x in (*got, *want))
    if same_shapes and not any(_far(x, want[0], limit) for x in want[1:]):
        return not any(_far(x, want[0], limit) for x in got)
    a, b = (torch.cat([*map(_flat, each)]) for each in (got, want))
    copies, rest = divmod(len(a), len(b)) if len(b) else (1, len(a))
    return not rest and not _far(a.sort()[0], b.sort()[0].repeat_interleave(copies), limit)


def _pieces(values: Sequence[Tensor], wanted: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield, for each dim along which values concatenate to the expected shape, the expected pieces."""
    for dim in range(wanted[0].dim()):
        with suppress(RuntimeError):  # shapes do not fit
            x, y = torch.cat([*values], dim), torch.cat([*wanted], dim)
            if x.shape == y.shape:
                yield y.split([part.shape[dim] for part in values], dim)


class _Ranks:
    """A run on ranks, compared with a run on one device (Note [Several ranks and one device])."""

    def __init__(self, runs: Sequence[_Run], one: _Run, rtol: float | None):
        self._got, self._one, self._rtol = runs, one, rtol
        self._num, self._is_split = len(runs[0].forwards), runs[0].forwards[0].unit == "split"
        self._states = {-1: "pieces"}  # by number of operator: "copies", "pieces", "partial" or "wrong"
        self._operator: Difference | None = None  # the first operator with a wrong value, maybe without effect
        self._ways = set[tuple[Way, Way]]()  # ways to combine the last total's values to the expected total

    def first(self) -> Difference | None:
        apart: Difference | None = None  # if leaves are split: the first operator unlike one device's
        for key in _keys([*self._got, self._one]):
            numbered = isinstance(key[1], int)
            if numbered and apart:
                continue
            each = (_unlike(key, run, self._one, rank) for rank, run in enumerate(self._got))
            if unlike := next(filter(None, each), None):
                if not (numbered and self._is_split):
                    return apart or unlike
                apart = unlike
            elif difference := self._difference(key):
                return apart or difference
        return None

    def _difference(self, key: ValueName) -> Difference | None:
        kind, number = key
        parts, want = [x for run in self._got for x in run[key]], self._one[key]
        limit = _limit(key, parts, self._one, self._rtol)
        if isinstance(number, int):
            self._note(number, parts, want, limit)
            return None
        if kind == "operator":
            return self._loss(parts, want, limit)
        if kind == GRADIENT:
            words = () if self._is_split else ("sum",)
            right = next(self._right(parts, want, limit, words), None)
            return None if right else self._operator or self._told(parts, want, limit)
        for rank, x in enumerate(parts):
            agreeing = _agreeing(key, self._got[rank], self._one, self._rtol)
            if text := _far(x.value, want[0].value, limit, agreeing):
                return self._operator or x.differs(rank, text)
        return None

    def _right(
        self, parts: Sequence[_Value], want: Sequence[_Value], limit: float, words: Sequence[str] = ()
    ) -> Iterator[tuple[Way, Way]]:
        sizes, sizes_of_one = self._got[0].sizes, list[int]()
        if len(parts) > len(self._got) or len(want) > 1:  # values by micro-batch
            sizes, sizes_of_one = [*sizes, self._num], [len(want)]
        words = words or ("apart", "sum", "mean")
        for of_ranks, of_one in product(_ways(sizes, words), _ways(sizes_of_one, words)):
            got = _combined([x.value for x in parts], sizes, of_ranks)
            wanted = _combined([x.value for x in want], sizes_of_one, of_one)
            if got and wanted and _values_alike(got, wanted, limit):
                yield of_ranks, of_one

    def _note(self, number: int, parts: Sequence[_Value], want: Sequence[_Value], limit: float) -> None:
        state, given = "wrong", {self._states[n] for n in want[0].inputs}
        words = ("apart",) if given <= {"copies"} and not self._is_split else ()  # results from copies are copies
        if ways := next(self._right(parts, want, limit, words), None):
            state = "pieces" if {*ways[0], *ways[1]} <= {"apart"} else "partial"
            if state == "pieces" and not any(x.value.shape != y.value.shape for x in parts for y in want):
                state = "copies"
        self._states[number] = state
        if state == "wrong" and is_inexact(want[0].value) and not (self._is_split or given & {"wrong", "partial"}):
            difference = self._told(parts, want, limit)
            is_certain = difference.rank is not None or given <= {"copies"}  # row numbers do not come from copies
            self._operator = self._operator or (difference if is_certain else None)

    def _told(self, parts: Sequence[_Value], want: Sequence[_Value], limit: float) -> Difference:
        values, wanted = [x.value for x in parts], [x.value for x in want]
        is_copy = want[0].kind == "operator" and "pieces" not in {self._states.get(n, "pieces") for n in want[0].inputs}
        for pieces in (*_pieces(values, wanted), [*islice(cycle(wanted), len(parts))]):
            texts = [_far(a, b, limit) for a, b in zip(values, pieces, strict=False)]
            wrong = [number for number, text in enumerate(texts) if text]
            if wrong and (pieces[0] is not wanted[0] or (is_copy and len(wrong) <= len(parts) // 2)):
                return parts[wrong[0]].differs(wrong[0] // self._num, texts[wrong[0]])
        total = values[0].new_tensor(0) + sum(values) if len({x.shape for x in values}) == 1 else values[0]
        forms = [[x.item() if x.numel() == 1 else list(x.shape) for x in each] for each in (wanted, values)]
        text = "the values of ranks are neither copies, pieces, summands nor equal parts of a mean of one device's"
        shown = f"expected {str(forms[0])[1:-1]}, got {str(forms[1])[1:-1]}"
        return parts[0].differs(None, f"{text}: {shown}; their sum: {_far(total, wanted[0], limit)}")

    def _loss(self, parts: Sequence[_Value], want: Sequence[_Value], limit: float) -> Difference | None:
        """Check a total or a count: values of both must combine in the same way."""
        of = want[0].name.partition("(")[2]
        words = {"Sum)": ("sum",), "Tensor)": ("mean",)}
        right = {*self._right(parts, want, limit, words.get(of, ()))}
        self._ways = right & self._ways if "count" in want[0].name else right
        if self._ways:
            return None
        number, inputs = None, want[0].inputs
        while wrong := [n for n in inputs if self._states.get(n) == "wrong"]:
            number, inputs = wrong[0], self._one["operator", wrong[0]][0].inputs
        if number is None:
            return self._operator or self._told(parts, want, limit)
        key = ("operator", number)
        return self._told([x for run in self._got for x in run[key]], self._one[key], limit)
