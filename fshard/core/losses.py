"""Losses as values, and their sums over ranks."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from operator import add
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from . import tree
from .arguments import is_number, shown
from .scalars import Number, on_device, wide
from .tracing import assigned, memo
from .tree import Tree


class Home(Protocol):
    """The structure and whole shapes of all parameters: a plan, say."""

    @property
    def spec(self) -> tree.Spec: ...

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]: ...


class Running(NamedTuple):
    """Settings and records of the running loss."""

    policy: Any
    mesh: Any
    home: Home | None
    remarks: set[str]  # words for ranks to compare
    lost: list[str]  # modules whose new running statistics are dropped
    tapes: Sequence[Any]  # of this loss, then of the losses around it


_OF_ONE_RANK = (
    "its total is one rank's: all_reduce total and count in the loss (recipes.md, Statistics of all ranks' rows)"
)
NO_GRADIENT = "the loss function: the loss depends on no trainable parameter (was it detached?)"
_RUNNING_LOSS: ContextVar[Running | None] = ContextVar("fshard.core.losses", default=None)


def loss_of(
    policy: object, mesh: object, home: Home | None, tapes: Sequence[object] = ()
) -> AbstractContextManager[None]:
    """Return a block for a loss and its backward. `tapes` gather parameters and `Sharded` arguments."""
    around = loss.tapes if (loss := _RUNNING_LOSS.get()) else ()
    return assigned(_RUNNING_LOSS, Running(policy, mesh, home, set(), [], (*tapes, *around)))


def running() -> Running | None:
    return _RUNNING_LOSS.get()


def remarks() -> str:
    return "".join(f", {words}" for words in sorted(loss.remarks)) if (loss := _RUNNING_LOSS.get()) else ""


def warn_of_lost() -> None:
    if torch.is_grad_enabled() and (loss := _RUNNING_LOSS.get()) and loss.lost:
        told = "drops the running statistics that batch norms update: evaluation has old ones. Return the new buffers"
        warnings.warn(f"{loss.lost[0]}: the loss {told} (with_extra=True, init_state(extra=))", stacklevel=2)


class _Summand:
    """A loss with `+`, `-`, `*`, `/`."""

    def on_totals(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return added([replace(x, total=fn(x.total)) for x in terms_of(self)])

    def __add__(self, other: object) -> Tree:
        if is_number(other) and other == 0:  # Python's `sum` starts with 0
            return self
        return added([*terms_of(self), *terms_of(other)]) if isinstance(other, _Summand) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Tree) -> Tree:
        return self + -other

    def __neg__(self) -> Self:
        return self.on_totals(lambda total: -total)

    def __mul__(self, scalar: Number) -> Self:
        return self.on_totals(lambda total: total * scalar)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Number) -> Self:
        return self.on_totals(lambda total: total / scalar)

    def __pow__(self, _: object) -> Self:
        raise TypeError(f"a power or inverse of a {type(self).__name__}: {_OF_ONE_RANK}")

    __rpow__ = __rtruediv__ = __pow__


@dataclass(frozen=True)
class Mean(_Summand):
    """A mean loss: the sum of all totals, divided by the sum of all counts, across ranks and micro-batches.

    - `total`: a 0-d tensor.
    - `count`: a number (of tokens, say) or a 0-d tensor. Some ranks or micro-batches may count 0; if all do, loss and
      gradients are NaN (0 / 0), and a loss scaler skips the update. A negative number is a ValueError; a negative
      tensor becomes NaN. A count depending on the parameters is differentiated; with micro-batches or slices it is a
      ValueError.

    Losses can be added: in `Mean(t, c) + 0.1 * Mean(u, d) - Sum(v) / 2` each `Mean` is divided by its own summed
    counts. A factor (a number or a 0-d tensor) multiplies this rank's total. Adding anything but a loss is a TypeError;
    with micro-batches or slices, a `Mean` next to other terms is a ValueError.

    >>> value_and_grad(lambda w: Mean((w * 3).sum(), 2))(shard_of(torch.ones(2)))[0]
    tensor(3.)
    >>> value_and_grad(lambda w: Mean((w * 3).sum(), 2) + 0.5 * Mean(w.sum(), 1))(shard_of(torch.ones(2)))[0]
    tensor(4.)
    """

    total: Tensor
    count: Number


@dataclass(frozen=True)
class Sum(_Summand):
    """A sum loss: the sum of all totals, across ranks and micro-batches. `total` is a 0-d tensor.

    A `Sum` can be added and multiplied like a `Mean`.

    >>> value_and_grad(lambda w: Sum((w * 3).sum()))(shard_of(torch.ones(2)))[0]
    tensor(6.)
    """

    total: Tensor


@dataclass(frozen=True)
class Terms(_Summand):
    """A sum of losses, each with its own count: `Mean`s, and at most one `Sum`."""

    terms: tuple[Mean | Sum, ...]

    @property
    def total(self) -> Tensor:
        return reduce(add, [x.total for x in self.terms])


# nodes of trees, so that totals in an aux get detached
tree.register_fields(Mean, ("total", "count"))
tree.register_fields(Sum, ("total",))
tree.register_fields(Terms, ("terms",), names=("",))


def terms_of(x: Tree) -> tuple[Tree, ...]:
    return x.terms if isinstance(x, Terms) else (x,)


def added(terms: Sequence[Mean | Sum]) -> Tree:
    """Add losses: return `Terms`, with all `Sum`s in one, or the only loss."""
    means, totals = [x for x in terms if isinstance(x, Mean)], [x.total for x in terms if isinstance(x, Sum)]
    merged: tuple[Mean | Sum, ...] = (*means, Sum(reduce(add, totals))) if totals else tuple(means)
    return Terms(merged) if len(merged) > 1 else merged[0]


def is_loss(x: Tree) -> bool:
    return isinstance(x, Mean | Sum | Terms)


def _is_term(x: Tree) -> bool:
    return isinstance(x, Mean | Sum)


def value_dtype(total: Tensor, output: object) -> torch.dtype:
    """Return `output`, or the dtype of a sum over ranks: at least float32, float64 for integers."""
    if isinstance(output, torch.dtype):
        return output
    return wide(total.dtype) if total.is_floating_point() else torch.float64


def averages(aux: Tree) -> dict[str, Mean | Sum]:
    """Return an aux's `Mean`s and `Sum`s by path, sorted; also those in `Terms`."""
    return dict(sorted((path, x) for path, x in tree.paths_to(aux, _is_term) if _is_term(x)))


def averaged(aux: Tree) -> str:
    return ", ".join(f"{path!r}: {type(x).__name__}" for path, x in averages(aux).items())


def check_averages(aux: Tree) -> None:
    for path, x in averages(aux).items():
        what = f"the loss function: aux leaf {path!r}"
        _check_count(x, what)
        if not isinstance(x.total, Tensor) or x.total.dim() or x.total.is_complex():
            raise ValueError(f"{what}: the total of a Mean or Sum: expected a real 0-d tensor, got {shown(x.total)}")


def _check_count(loss: Mean | Sum, what: str) -> None:
    count = loss.count if isinstance(loss, Mean) else 1
    if not is_number(count) and not (isinstance(count, Tensor) and not count.dim() and not count.is_complex()):
        raise ValueError(f"{what}: the count of a Mean: expected a number or a 0-d tensor, got {shown(count)}")
    if not isinstance(count, Tensor) and count < 0:
        raise ValueError(
            f"{what}: the count of a Mean: expected a number that is not negative, got {count}: training would go "
            "uphill. To maximize, negate the total."
        )


def read_loss(loss: Tree) -> tuple[Tree, type]:
    """Return a loss, a plain scalar as a `Mean`, and its class. ValueError unless totals and counts are 0-d."""
    if isinstance(loss, Terms):
        return Terms(tuple(read_loss(term)[0] for term in loss.terms)), Terms
    kind = type(loss) if isinstance(loss, Mean | Sum) else Tensor
    loss = Mean(loss, 1) if kind is Tensor else loss
    _check_count(loss, "the loss function")
    if not isinstance(loss.total, Tensor) or loss.total.dim() or not loss.total.is_floating_point():
        total = loss.total
        other = f"a {type(total).__name__} ({_OF_ONE_RANK})" if is_loss(total) else repr(total)
        got = f"a {total.dtype} tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else other
        raise ValueError(
            f"the loss function: expected a 0-d floating tensor (or fshard.Mean or Sum of one), got {got}. For a mean "
            "return fshard.Mean(losses.sum(), losses.numel()); for (loss, aux) or (loss, extra) has_aux, with_extra."
        )
    return loss, kind


def loss_text(kind: type, dtype: torch.dtype, aux: Tree, output: object) -> tuple[str, int]:
    """Return a text of classes and dtypes of loss and averages, equal on all ranks, and its checksum.

    For `Terms`, `aux` is [loss, aux].
    """
    summed = [f"{k!r}: {type(x).__name__} of {value_dtype(x.total, output)}" for k, x in averages(aux).items()]
    text = f", loss={'a scalar' if kind is Tensor else kind.__name__} of {dtype}"
    text += f", aux={{{', '.join(summed)}}}" * bool(summed)
    return text, zlib.crc32(text.encode())


def put_averages(aux: Tree, sums: Sequence[Tensor], output: object) -> Tree:
    """Replace an aux's averages by values; `sums`: total and count of each, in the order of `averages`."""
    pairs = dict(zip(averages(aux), zip(sums[::2], sums[1::2], strict=True), strict=True))

    def value(path: str, x: Tree) -> Tree:
        if path not in pairs:
            return x
        total, count = pairs[path]
        return total / torch.where(count == 0, torch.nan, count) if isinstance(x, Mean) else total

    values = tree.put_tops(aux, _is_term, [value(path, x) for path, x in tree.paths_to(aux, _is_term)])
    rounded = lambda x, of_terms: reduce(add, terms_of(of_terms)).to(value_dtype(x.total, output))  # noqa: E731
    return tree.map_tops(lambda x, y: rounded(x, y) if is_loss(x) else x, is_loss, aux, values)


def local_sums(losses: Iterable[Mean | Sum], device: torch.device) -> list[Tensor]:
    # float64 keeps counts exact, and rounds sums less than the loss's dtype
    return [x for each in losses for x in (each.total.detach().to(device).double(), _weight(each, device))]


def _weight(loss: Mean | Sum, device: torch.device) -> Tensor:
    """Return the count, 1 for a `Sum`, NaN if negative: training would go uphill."""
    if not isinstance(loss, Mean) or not isinstance(loss.count, Tensor):
        return on_device(loss.count if isinstance(loss, Mean) else 1, device)
    count = on_device(loss.count.detach(), device)
    return torch.where(count < 0, torch.nan, count)


@dataclass(frozen=True)
class Outcome:
    """The result of one forward: total and count over all ranks (0-d, float64), class and dtype.

    `sums()` returns total and count of the loss, then of each average in `aux`, then the number of ranks with a
    gradient. Its first call waits for other ranks. `weight`: the count, if known before.
    """

    sums: Callable[[], Sequence[Tensor]]
    weight: Tensor | None
    kind: type  # Mean, Sum, or Tensor for a plain scalar
    dtype: torch.dtype
    extra: Tree
    aux: Tree
    output: object = None  # the policy's dtype for Means and Sums in `aux`
    several: bool = False  # one `aux` for each micro-batch
    parts: Sequence[Outcome] = ()  # outcomes of a sum's terms

    @property
    def total(self) -> Tensor:
        return self.sums()[0]

    @property
    def count(self) -> Tensor:
        return self.sums()[1] if self.weight is None else self.weight

    @memo
    def divisor(self) -> Tensor:
        """The total's divisor: the count, NaN in place of 0; 1 for a `Sum`."""
        return torch.ones_like(self.count) if self.kind is Sum else torch.where(self.count == 0, torch.nan, self.count)

    def shared(self, num: int) -> Tensor:
        """Return the divisor in each of `num` micro-batches, with 1 in place of a count of 0."""
        return torch.ones_like(self.count) if self.kind is Sum else torch.where(self.count == 0, 1.0, self.count) * num

    def seeds(self, seed: Tensor) -> list[Tensor]:
        """Return the gradients by each term's total and count; `seed`: the gradient by the total."""
        if self.parts:
            return [x for part in self.parts for x in part.seeds(seed / part.divisor)]
        return [seed, -seed * (self.total / self.divisor)]  # d(T / C) = dT / C - (T / C) dC / C

    @property
    def value(self) -> Tensor:
        return (self.total / self.divisor).to(self.dtype)

    @property
    def metrics(self) -> Tree:
        auxes = [put_averages(x, self.sums()[2:-1], self.output) for x in (self.aux if self.several else [self.aux])]
        return auxes if self.several else auxes[0]


def outcome_of_terms(outcome: Outcome, kinds: Sequence[type]) -> Outcome:
    """Return the outcome of `Terms`; `outcome.sums` begins with each term's total and count. NaN if a term counts 0."""
    later = [partial(lambda i: outcome.sums()[2 * i :], i) for i in range(len(kinds) + 1)]
    parts = [replace(outcome, kind=kind, sums=sums) for kind, sums in zip(kinds, later, strict=False)]

    def sums() -> Sequence[Tensor]:
        divisors = reduce(add, [part.divisor for part in parts])
        return [reduce(add, [part.total / part.divisor for part in parts]), divisors / divisors, *later[-1]()]

    return replace(outcome, sums=cache(sums), parts=parts)
