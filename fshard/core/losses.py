"""Losses as values: what a loss function may return, and what its sums over ranks say."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from operator import add
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from . import tree
from .arguments import is_number, shown
from .scalars import Number, on_device, wide
from .tracing import assigned, memo
from .tree import Tree


class Running(NamedTuple):
    """The loss that runs."""

    policy: Any
    mesh: Any
    remarks: set[str]  # words that ranks compare
    lost: list[str]  # modules that updated running statistics
    tapes: Sequence[Any]  # of this loss, and of those around it


NO_GRADIENT = "the loss function: the loss depends on no trainable parameter (was it detached?)"
_RUNNING: ContextVar[Running | None] = ContextVar("fshard.core.losses", default=None)


def loss_of(policy: Any, mesh: Any, tapes: Sequence[Any] = ()) -> AbstractContextManager[None]:
    """The block in which a loss runs, and its backward. Its parameters are on this mesh and have this policy.

    `tapes` gather its parameters, and the `Sharded` among its arguments.
    """
    around = loss.tapes if (loss := _RUNNING.get()) else ()
    return assigned(_RUNNING, Running(policy, mesh, set(), [], (*tapes, *around)))


def running() -> Running | None:
    """The policy and the mesh of the loss that runs, for tensors that no tape has gathered; and the tapes.

    Ranks compare the words that are added to the set; `warn_of_lost` tells of the list. None outside of a loss.
    """
    return _RUNNING.get()


def remarks() -> str:
    """The words of the loss that runs, in an order that does not depend on that of the calls."""
    return "".join(f", {words}" for words in sorted(loss.remarks)) if (loss := _RUNNING.get()) else ""


def warn_of_lost() -> None:
    """Warn if modules updated running statistics in the loss that runs, which returns them nowhere."""
    if torch.is_grad_enabled() and (loss := _RUNNING.get()) and loss.lost:
        told = "drops the running statistics that batch norms update: evaluation has old ones. Return the new buffers"
        warnings.warn(f"{loss.lost[0]}: the loss {told} (with_extra=True, init_state(extra=))", stacklevel=2)


class _Summand:
    """A loss that can be added to others, and multiplied by scalars: `Mean`, `Sum` and `Terms`."""

    def on_totals(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same loss with other totals."""
        return added([replace(x, total=fn(x.total)) for x in terms_of(self)])

    def __add__(self, other: object) -> Tree:
        if is_number(other) and other == 0:  # what `sum` begins with
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


@dataclass(frozen=True)
class Mean(_Summand):
    """A loss that is a mean: the sum of all totals over the sum of all counts, across ranks and micro-batches.

    `total` is a 0-d tensor, `count` a number or a 0-d tensor (of tokens, say). A rank or a micro-batch may have a count
    of 0; where all have, loss and gradients are NaN (0 / 0), and a loss scaler skips the update. A negative count is a
    ValueError; in a tensor, which is not read, it is taken for NaN. A count that depends on the parameters is
    differentiated as well; with micro-batches, or slices, that is a ValueError.

    A sum of losses, `Mean(t, c) + 0.1 * Mean(u, d) - Sum(v) / 2`, is a loss: each total is divided by the sum of its
    own counts. A number or a 0-d tensor multiplies this rank's total, and a tensor is differentiated. Other terms are
    a TypeError: say how they count. A `Mean` beside other terms is a ValueError with micro-batches, or slices.

    >>> value_and_grad(lambda w: Mean((w * 3).sum(), 2))(shard_of(torch.ones(2)))[0]
    tensor(3.)
    >>> value_and_grad(lambda w: Mean((w * 3).sum(), 2) + 0.5 * Mean(w.sum(), 1))(shard_of(torch.ones(2)))[0]
    tensor(4.)
    """

    total: Tensor
    count: Number


@dataclass(frozen=True)
class Sum(_Summand):
    """A loss that is a sum: of all totals, across ranks and micro-batches. `total` is a 0-d tensor.

    It can be added to others, and multiplied, as a `Mean`; the sum of several is a `Sum`.

    >>> value_and_grad(lambda w: Sum((w * 3).sum()))(shard_of(torch.ones(2)))[0]
    tensor(6.)
    """

    total: Tensor


@dataclass(frozen=True)
class Terms(_Summand):
    """A sum of several losses, each of which is divided by its own count: `Mean`s, and a `Sum` at most."""

    terms: tuple[Mean | Sum, ...]

    @property
    def total(self) -> Tensor:
        """This rank's totals, added up: a 0-d tensor of their common dtype, which depends on what they depend on."""
        return reduce(add, [x.total for x in self.terms])


# as nodes of a tree: totals in an aux are detached
tree.register_fields(Mean, ("total", "count"))
tree.register_fields(Sum, ("total",))
tree.register_fields(Terms, ("terms",), names=("",))


def terms_of(x: Tree) -> tuple[Any, ...]:
    """The terms of a sum of losses; anything else is one term."""
    return x.terms if isinstance(x, Terms) else (x,)


def added(terms: Sequence[Mean | Sum]) -> Tree:
    """The sum of losses, in which the `Sum`s are one: a `Terms`, or the loss itself if there is one."""
    means, totals = [x for x in terms if isinstance(x, Mean)], [x.total for x in terms if isinstance(x, Sum)]
    merged: tuple[Mean | Sum, ...] = (*means, Sum(reduce(add, totals))) if totals else tuple(means)
    return Terms(merged) if len(merged) > 1 else merged[0]


def is_loss(x: Tree) -> bool:
    """Whether `x` is a `Mean`, a `Sum`, or a sum of such."""
    return isinstance(x, Mean | Sum | Terms)


def _is_term(x: Tree) -> bool:
    return isinstance(x, Mean | Sum)


def value_dtype(total: Tensor, output: object) -> torch.dtype:
    """The dtype of a sum over ranks: a policy's `output`, else float32 at least, and float64 for integers."""
    if isinstance(output, torch.dtype):
        return output
    return wide(total.dtype) if total.is_floating_point() else torch.float64


def averages(aux: Tree) -> dict[str, Mean | Sum]:
    """Return the `Mean`s and `Sum`s in an aux by path, which are summed with the loss, in the order of the paths.

    A sum of losses is taken apart. The order of the aux itself may differ between ranks and micro-batches: dicts are
    equal in any order.
    """
    return dict(sorted((path, x) for path, x in tree.paths_to(aux, _is_term) if _is_term(x)))


def averaged(aux: Tree) -> str:
    """Name the `Mean`s and `Sum`s in an aux, which must be the same on all ranks and in all micro-batches."""
    return ", ".join(f"{path!r}: {type(x).__name__}" for path, x in averages(aux).items())


def check_averages(aux: Tree) -> None:
    """Raise ValueError for a `Mean` or `Sum` in an aux whose total or count is not a real 0-d tensor."""
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
    """Return a loss as a Mean, Sum or Terms, and its class: Mean, Sum, Terms, or Tensor for a plain scalar.

    Raises ValueError for a total or a count that is not a 0-d tensor.
    """
    if isinstance(loss, Terms):
        return Terms(tuple(read_loss(term)[0] for term in loss.terms)), Terms
    kind = type(loss) if isinstance(loss, Mean | Sum) else Tensor
    loss = Mean(loss, 1) if kind is Tensor else loss
    _check_count(loss, "the loss function")
    if not isinstance(loss.total, Tensor) or loss.total.dim() or not loss.total.is_floating_point():
        total = loss.total
        got = f"a {total.dtype} tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else repr(total)
        raise ValueError(
            f"the loss function: expected a 0-d floating tensor (or fshard.Mean or Sum of one), got {got}. For a mean "
            "return fshard.Mean(losses.sum(), losses.numel()); for (loss, aux) or (loss, extra) has_aux, with_extra."
        )
    return loss, kind


def described(kind: type, dtype: torch.dtype, aux: Tree, output: object) -> tuple[str, int]:
    """Return the text that ranks compare with the loss's collective, which says what is summed; and a checksum of it.

    Of a sum of losses `aux` is a list of the sum and the aux. The checksum is for ranks that compare no texts: their
    losses would differ, or be divided by other counts.
    """
    summed = [f"{k!r}: {type(x).__name__} of {value_dtype(x.total, output)}" for k, x in averages(aux).items()]
    text = f", loss={'a scalar' if kind is Tensor else kind.__name__} of {dtype}"
    text += f", aux={{{', '.join(summed)}}}" * bool(summed)
    return text, zlib.crc32(text.encode())


def put_averages(aux: Tree, sums: Sequence[Tensor], output: object) -> Tree:
    """An aux with values in place of each `Mean` and `Sum`: `sums` are their totals and counts, by `averages`."""
    pairs = dict(zip(averages(aux), zip(sums[::2], sums[1::2], strict=True), strict=True))

    def value(path: str, x: Tree) -> Tree:
        if path not in pairs:
            return x
        total, count = pairs[path]
        return total / torch.where(count == 0, torch.nan, count) if isinstance(x, Mean) else total

    # float64, rounded when the terms of a sum have been added
    values = tree.put_tops(aux, _is_term, [value(path, x) for path, x in tree.paths_to(aux, _is_term)])
    rounded = lambda x, of_terms: reduce(add, terms_of(of_terms)).to(value_dtype(x.total, output))  # noqa: E731
    return tree.map_tops(lambda x, y: rounded(x, y) if is_loss(x) else x, is_loss, aux, values)


def local_sums(losses: Iterable[Mean | Sum], device: torch.device) -> list[Tensor]:
    """This rank's total and count of each, 0-d.

    float64, in which a count of tokens is exact and a sum over ranks rounds far below the loss's own dtype.
    """
    return [x for each in losses for x in (each.total.detach().to(device).double(), _weight(each, device))]


def _weight(loss: Mean | Sum, device: torch.device) -> Tensor:
    """The count; NaN for a negative one, which would train uphill: the host does not read it."""
    if not isinstance(loss, Mean) or not isinstance(loss.count, Tensor):
        return on_device(loss.count if isinstance(loss, Mean) else 1, device)
    count = on_device(loss.count.detach(), device)
    return torch.where(count < 0, torch.nan, count)


@dataclass(frozen=True)
class Outcome:
    """The result of one forward: the loss's total and count over all ranks (0-d, float64), its class and dtype.

    `sums` gives both, those of each `Mean` and `Sum` in `aux` behind them, and last the number of ranks whose loss has
    a gradient. Its first call waits for the other ranks; `weight` is the count where it is known before, which is so
    for all losses but a `Mean`.
    """

    sums: Callable[[], Sequence[Tensor]]
    weight: Tensor | None
    kind: type  # Mean, Sum, or Tensor for a plain scalar
    dtype: torch.dtype  # of the value
    extra: Tree
    aux: Tree
    output: object = None  # the policy's, which Means and Sums in `aux` are cast to
    several: bool = False  # whether `aux` is a list of one for each micro-batch
    parts: Sequence[Outcome] = ()  # of a sum of losses the outcome of each term

    @property
    def total(self) -> Tensor:
        """The sum of all ranks' totals."""
        return self.sums()[0]

    @property
    def count(self) -> Tensor:
        """The sum of all ranks' counts."""
        return self.sums()[1] if self.weight is None else self.weight

    @memo
    def divisor(self) -> Tensor:
        """What the total is divided by: the count, NaN if that is 0, so that the loss is NaN; 1 for a Sum."""
        return torch.ones_like(self.count) if self.kind is Sum else torch.where(self.count == 0, torch.nan, self.count)

    def shared(self, num: int) -> Tensor:
        """The divisor of each of `num` micro-batches that count as much as this one; a count of 0 is taken for 1."""
        return torch.ones_like(self.count) if self.kind is Sum else torch.where(self.count == 0, 1.0, self.count) * num

    def seeds(self, seed: Tensor) -> list[Tensor]:
        """The gradients in this rank's total and count, of each term, if that in the total is `seed`."""
        if self.parts:
            return [x for part in self.parts for x in part.seeds(seed / part.divisor)]
        return [seed, -seed * (self.total / self.divisor)]  # d(T / C) = dT / C - (T / C) dC / C

    @property
    def value(self) -> Tensor:
        """The loss over all ranks, in float32 at least unless the policy names an output dtype."""
        return (self.total / self.divisor).to(self.dtype)

    @property
    def metrics(self) -> Tree:
        """The aux, with the value over all ranks and micro-batches in place of each `Mean` and `Sum`."""
        auxes = [put_averages(x, self.sums()[2:-1], self.output) for x in (self.aux if self.several else [self.aux])]
        return auxes if self.several else auxes[0]


def outcome_of_terms(outcome: Outcome, kinds: Sequence[type]) -> Outcome:
    """The outcome of a sum of losses of these classes: its total is the value, and counts 1; NaN where a term has none.

    `outcome` has sums that begin with the total and the count of each term.
    """
    later = [partial(lambda i: outcome.sums()[2 * i :], i) for i in range(len(kinds) + 1)]
    parts = [replace(outcome, kind=kind, sums=sums) for kind, sums in zip(kinds, later, strict=False)]

    def sums() -> Sequence[Tensor]:
        divisors = reduce(add, [part.divisor for part in parts])
        return [reduce(add, [part.total / part.divisor for part in parts]), divisors / divisors, *later[-1]()]

    return replace(outcome, sums=cache(sums), parts=parts)
