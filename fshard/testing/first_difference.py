"""The first value in which two observed runs differ: an operator, a gradient, a metric or a new parameter.

Note [Several ranks and one device]
    Values of ranks, and of their micro-batches, are those of one device in one of four ways along each axis: copies,
    pieces along a dim, summands, or a mean. What is none of these is wrong. Where a wrong value was made of right ones
    the difference begins, but not each counts. Row numbers of a rank, a maximum that is subtracted, an order of experts
    are other values in a right program, whose effect ends. So a wrong operator is a difference by itself if its numbers
    are floating, it is one rank's, and what it was given are copies and pieces. Of others the results decide: totals
    and counts, gradients, metrics, parameters. A wrong total leads back to where it begins.

    Rounding is relative to what an operator is given, and to the largest gradient. A parameter is compared where its
    gradient is more than rounding, which Adam would make as large as any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .observed import GRADIENT, LOSS, METRIC, PARAMETER, SUM, Observed

Way: TypeAlias = str | tuple[int, int]  # "copies", "sum", "mean", or a dim and the number of blocks along it
Key: TypeAlias = tuple[str, str | int]  # the kind and the name of a value; of an operator its number in the forward
_KINDS = ("operator", GRADIENT, SUM, METRIC, PARAMETER)
_SMALL = 2.0**-6  # of what a value comes of: rounding that large is none of its own


class Difference(NamedTuple):
    """The first difference of two observed runs: which value, its unit, its rank and the line of the user's code.

    `kind` is "operator", "gradient on this rank of", "summed gradient of", "metric" or "new parameter"; `name` that of
    the operator, metric or leaf; `unit` is as in `print(plan)`; `rank` is None if only the ranks together are wrong.
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
        return f"{self.kind} {self.name!r}{of}{unit}{f', at {self.line}' if self.line else ''}: {self.text}"


class _Value(NamedTuple):
    """A value with the fields of its name."""

    kind: str
    name: str
    unit: str
    line: str
    inputs: str
    value: Tensor

    def differs(self, rank: int | None, text: str) -> Difference:
        return Difference(self.kind, self.name, self.unit, rank, self.line, text)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" + f" at {self.line}" * bool(self.line)


class _Run(dict[Key, list[_Value]]):
    """What a rank computed: each value once for each forward, or once in a step."""

    @cached_property
    def forwards(self) -> list[_Value]:
        return self["forward", ""]

    @cached_property
    def largest_gradient(self) -> float:
        return _largest([x for (kind, _), values in self.items() if kind == SUM for x in values])


def _read(seen: Observed) -> _Run:
    run, count = _Run(), 0
    for name, value in zip(seen["names"], seen["values"], strict=True):
        kind, called, unit, line, inputs = name.split("\t")
        x = _Value(kind, called, unit, line, inputs, value.cpu())
        numbered = x.kind == "operator" and not x.name.startswith(LOSS)
        run.setdefault((x.kind, count if numbered else "" if x.kind == "forward" else x.name), []).append(x)
        count = 0 if x.kind == "forward" else count + numbered
    if ("forward", "") not in run:
        raise ValueError("first_difference: expected what observed(step) returns besides, got a value without names")
    return run


def first_difference(
    got: Sequence[Observed], expected: Sequence[Observed], rtol: float | None = None
) -> Difference | None:
    """The first value in which runs of observed steps differ, or None: `got` and `expected`, lists by rank of `seen`.

    Runs on equally many ranks are compared rank by rank: every bit, or within `rtol` times the largest element. A run
    on any number of ranks, in any number of micro-batches, is compared with one on one device that has the batch of all
    ranks: values must be copies of the one, pieces of it along a dim, its summands, or equal parts of a mean, within
    2**12 units in the last place by default (2**4 of float16 and bfloat16, if there is any). What differs and has no
    effect on the loss, on gradients and new parameters is then no difference.

    ValueError for other numbers of ranks, or of micro-batches on several ranks.

    >>> from fshard.testing import observed
    >>> def run(fn):
    ...     step = observed(train_step(lambda w, x: fn(w * x).sum(), sgd(0.5)))
    ...     return [step(init_state(shard_of(torch.ones(2)), sgd(0.5)), torch.tensor([1.0, 2.0]))[1]]
    >>> first_difference(run(torch.sin), run(torch.sin))
    >>> print(first_difference(run(torch.sin), run(torch.tanh)).text)
    expected operator 'tanh' at ...
    """
    runs, wanted = [_read(x) for x in got], [_read(x) for x in expected]
    numbers = [[len(run.forwards) for run in each] for each in (runs, wanted)]
    if runs and len(runs) == len(wanted) and len({*numbers[0], *numbers[1]}) == 1:
        return _by_rank(runs, wanted, rtol or 0.0)
    if len({*numbers[0]}) != 1 or len(wanted) != 1:
        raise ValueError(
            f"first_difference: micro-batches by rank {numbers[0]}, expected {numbers[1]}: give runs on equally many "
            "ranks and micro-batches, or as `expected` one on one device with the batch of all"
        )
    return _Ranks(runs, wanted[0], rtol).first()


def _keys(runs: Sequence[_Run]) -> list[Key]:
    """What any run has, in the order of a step."""
    keys = dict.fromkeys(key for run in runs for key in run if key[0] != "forward")
    return sorted(keys, key=lambda key: _KINDS.index(key[0]))


def _unlike(got: Sequence[_Value], want: Sequence[_Value], rank: int) -> Difference | None:
    """Another operator, or another leaf, at the same place."""
    a, b = (next(iter(values), None) for values in (got, want))
    if a is not None and b is not None and a.name == b.name:
        return None
    place = a or b
    assert place is not None
    return place.differs(rank, f"expected {b or 'nothing more'}, got {a or 'nothing more'}")


def _by_rank(runs: Sequence[_Run], wanted: Sequence[_Run], rtol: float) -> Difference | None:
    for key in _keys([*runs, *wanted]):
        for rank, (run, want) in enumerate(zip(runs, wanted, strict=True)):
            pairs = run.get(key, []), want.get(key, [])
            if unlike := _unlike(*pairs, rank):
                return unlike
            for x, y in zip(*pairs, strict=False):
                if text := _far(x.value, y.value, _limit(key, [x], want, rtol), _shown(key, want, rtol)):
                    return x.differs(rank, text)
    return None


def _largest(values: Sequence[_Value]) -> float:
    """The largest finite number."""
    return max(
        (float(_flat(x.value).nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in values if x.value.numel()), default=0.0
    )


def _limit(key: Key, got: Sequence[_Value], want: _Run, rtol: float) -> float:
    """How far numbers may be from those of `want`: `rtol` of the largest, or of what they come of."""
    if not rtol or not want[key][0].value.dtype.is_floating_point:
        return 0.0
    numbers = [int(number) for number in want[key][0].inputs.split(",") if number.isdigit()]
    given = [x for number in numbers for x in want["operator", number]]
    behind = want.largest_gradient if key[0] in (GRADIENT, SUM) else _largest(given)
    return rtol * max(_largest([*got, *want[key]]), _SMALL * behind)


def _shown(key: Key, want: _Run, rtol: float) -> Tensor | None:
    """Of a new parameter, where its gradient is more than rounding."""
    if key[0] != PARAMETER or not rtol or (SUM, key[1]) not in want:
        return None
    return _flat(want[SUM, key[1]][0].value).abs() > _SMALL * want.largest_gradient


def _flat(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.double().reshape(-1)


def _far(x: Tensor, y: Tensor, limit: float, where: Tensor | None = None) -> str:
    """How `x` differs from `y` by more than `limit`, and where that is asked for; "" if it does not."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"expected {y.dtype}{list(y.shape)}, got {x.dtype}{list(x.shape)}"
    a, b = _flat(x), _flat(y)
    far = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    far = far if where is None else far * where
    if not (wrong := far > limit).any():
        return ""
    at = int(far.argmax())
    return f"expected {b[at]:.9g}, got {a[at]:.9g} at element {at}; {int(wrong.sum())} of {len(a)} differ"


def _merged(
    parts: Sequence[Tensor], sizes: Sequence[int], ways: Sequence[Way], limit: float
) -> Iterator[tuple[tuple[Way, ...], Tensor]]:
    """What parts are together, by the ways in which they are joined along axes of these sizes, the last one first."""
    if not sizes:
        yield (), parts[0]
        return
    groups = [parts[i : i + sizes[-1]] for i in range(0, len(parts), sizes[-1])]
    for way in ways if sizes[-1] > 1 else ways[:1]:
        joined = [x for group in groups if (x := _joined(group, way, limit)) is not None]
        if len(joined) == len(groups):
            yield from (((*others, way), x) for others, x in _merged(joined, sizes[:-1], ways, limit))


def _joined(parts: Sequence[Tensor], way: Way, limit: float) -> Tensor | None:
    first = parts[0]
    if isinstance(way, tuple):
        dim, blocks = way
        rests = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in parts}
        if first.dim() <= dim or len(rests) > 1 or any(x.dim() != first.dim() or x.shape[dim] % blocks for x in parts):
            return None
        return torch.cat(
            [x.chunk(blocks, dim)[i] for i in range(blocks) for x in parts if x.shape[dim]] or [first], dim
        )
    if any(x.shape != first.shape for x in parts):
        return None
    if way == "copies":
        return None if any(_far(x, first, limit) for x in parts) else first
    total = torch.stack([x if x.is_complex() else x.double() for x in parts]).sum(0)
    return (total / len(parts) if way == "mean" else total).to(first.dtype)


class _Ranks:
    """A run on ranks beside one on one device (Note [Several ranks and one device])."""

    def __init__(self, runs: Sequence[_Run], one: _Run, rtol: float | None):
        self._got, self._one, self._rtol = runs, one, _default(one) if rtol is None else rtol
        sizes = [int(size) for size in runs[0].forwards[0].name.split("x") if size]
        self._num, self._is_split = len(runs[0].forwards), runs[0].forwards[0].unit == "split"
        self._sizes, self._sizes_of_one = [*sizes, self._num], [len(one.forwards)]
        self._states = dict[str, str]()  # of operators by number: "copies", "pieces", "partial" or "wrong"
        self._ways: set[object] = set()  # in which the last total is right

    def first(self) -> Difference | None:
        apart: Difference | None = None  # where programs of split leaves run other operators, as they may
        for key in _keys([*self._got, self._one]):
            numbered = isinstance(key[1], int)
            if not (apart and numbered) and (unlike := self._unlike(key)):
                if not (numbered and self._is_split):
                    return apart or unlike
                apart = unlike
            elif not (apart and numbered) and (difference := self._difference(key)):
                return apart or difference
        return None

    def _unlike(self, key: Key) -> Difference | None:
        pairs = [(run.get(key, []), self._one.get(key, [])) for run in self._got]
        return next((unlike for rank, pair in enumerate(pairs) if (unlike := _unlike(*pair, rank))), None)

    def _difference(self, key: Key) -> Difference | None:
        parts, want = [x for run in self._got for x in run[key]], self._one[key]
        limit = _limit(key, parts, self._one, self._rtol)
        if isinstance(key[1], int):
            return self._operator(key, parts, want, limit)
        if key[0] == "operator":
            return self._loss(parts, want, limit)
        if key[0] == GRADIENT:
            return None if next(self._explained(parts, want, limit), None) else self._told(parts, want, limit)
        shown = _shown(key, self._one, self._rtol)
        texts = [_far(x.value, want[0].value, limit, shown) for x in parts]
        return next((parts[rank].differs(rank, text) for rank, text in enumerate(texts) if text), None)

    def _explained(
        self, parts: Sequence[_Value], want: Sequence[_Value], limit: float, ways: Sequence[Way] = ()
    ) -> Iterator[object]:
        """The ways in which the parts are what one device has."""
        ways = ways or (*self._pieces(want), "sum", "mean")
        wanted = list(_merged([x.value for x in want], self._sizes_of_one, ways, limit))
        for of_ranks, x in _merged([x.value for x in parts], self._sizes, ways, limit):
            yield from ((of_ranks, of_one) for of_one, y in wanted if not _far(x, y, limit))

    def _pieces(self, want: Sequence[_Value]) -> list[Way]:
        blocks = (1, 2, 3) if self._is_split else (1,)  # gate and up, or q, k and v, end to end
        return ["copies", *((dim, number) for dim in range(want[0].value.dim()) for number in blocks)]

    def _operator(self, key: Key, parts: Sequence[_Value], want: Sequence[_Value], limit: float) -> Difference | None:
        state = self._states[str(key[1])] = self._state(parts, want, limit)
        given = {self._states.get(number, "pieces") for number in want[0].inputs.split(",") if number}
        is_own = state == "wrong" and not given & {"wrong", "partial"}
        if self._is_split or not is_own or not want[0].value.is_floating_point():
            return None
        difference = self._told(parts, want, limit, is_copy="pieces" not in given)
        return None if difference.rank is None else difference

    def _state(self, parts: Sequence[_Value], want: Sequence[_Value], limit: float) -> str:
        if not any(_far(x.value, want[0].value, limit) for x in (*parts, *want)):
            return "copies"
        same_parts = len(parts) == len(want)
        if same_parts and not any(_far(x.value, y.value, limit) for x, y in zip(parts, want, strict=True)):
            return "pieces"
        for state, ways in {"pieces": self._pieces(want), "partial": ()}.items():
            if next(self._explained(parts, want, limit, ways), None):
                return state
        return "wrong"

    def _told(self, parts: Sequence[_Value], want: Sequence[_Value], limit: float, is_copy: bool = False) -> Difference:
        """The difference of a wrong value, with the rank that has it, if it is one's."""
        values, wanted = [x.value for x in parts], [x.value for x in want]
        for dim in range(wanted[0].dim()):
            x, y = (_joined(each, (dim, 1), limit) for each in (values, wanted))
            if x is not None and y is not None and x.shape == y.shape:
                pieces = y.split([part.shape[dim] for part in values], dim)
                texts = [_far(a, b, limit) for a, b in zip(values, pieces, strict=True)]
                number, text = next((number, text) for number, text in enumerate(texts) if text)
                return parts[number].differs(number // self._num, text)
        texts = [_far(x, wanted[0], limit) for x in values]
        wrong = [number for number, text in enumerate(texts) if text]
        if is_copy and len(wrong) <= len(parts) // 2:
            return parts[wrong[0]].differs(wrong[0] // self._num, texts[wrong[0]])
        text = "the values of ranks are neither copies, pieces, summands nor equal parts of a mean of one device's"
        shown = [[x.item() if x.numel() == 1 else list(x.shape) for x in each] for each in (wanted, values)]
        return parts[0].differs(None, f"{text}: expected {str(shown[0])[1:-1]}, got {str(shown[1])[1:-1]}")

    def _loss(self, parts: Sequence[_Value], want: Sequence[_Value], limit: float) -> Difference | None:
        """A total or a count: the count must be right in a way in which the total before it is."""
        of = want[0].name.partition("(")[2]
        ways: dict[str, tuple[Way, ...]] = {"Sum)": ("sum",), "Tensor)": ("mean",)}
        right = {*self._explained(parts, want, limit, ways.get(of, ()))}
        self._ways = right & self._ways if "count" in want[0].name else right
        if self._ways:
            return None
        number = self._root(want[0].inputs)
        if number is None:
            return self._told(parts, want, limit)
        key = ("operator", number)
        return self._told([x for run in self._got for x in run[key]], self._one[key], limit)

    def _root(self, inputs: str) -> int | None:
        """The operator with which a wrong value begins: wrong, and made of right ones."""
        wrong = next((number for number in inputs.split(",") if self._states.get(number) == "wrong"), None)
        if wrong is None:
            return None
        before = self._root(self._one["operator", int(wrong)][0].inputs)
        return int(wrong) if before is None else before


def _default(one: _Run) -> float:
    """2**12 units in the last place of the lowest precision; 2**4 of those with few bits."""
    dtypes = {x.value.dtype for key in one if key[0] in ("operator", PARAMETER) for x in one[key]}
    return max(torch.finfo(x).eps * (2**4 if x.itemsize < 4 else 2**12) for x in dtypes if x.is_floating_point)
