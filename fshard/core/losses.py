"""Losses as values: what a loss function may return, and what its sums over ranks say."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import tree
from .arguments import is_number, shown
from .scalars import Number, on_device, wide
from .tree import Tree


@dataclass(frozen=True)
class Mean:
    """A loss that is a mean: the sum of all totals over the sum of all counts, across ranks and micro-batches.

    `total` is a 0-d tensor, `count` a number or a 0-d tensor (of tokens, say). A rank or a micro-batch may have a count
    of 0; where all have, loss and gradients are NaN (0 / 0), and a loss scaler skips the update. A negative count is a
    ValueError; in a tensor, which is not read, it is taken for NaN. A count that depends on the parameters is
    differentiated as well; with micro-batches, or slices, that is a ValueError.

    >>> value_and_grad(lambda w: Mean((w * 3).sum(), 2))(shard_of(torch.ones(2)))[0]
    tensor(3.)
    """

    total: Tensor
    count: Number


@dataclass(frozen=True)
class Sum:
    """A loss that is a sum: of all totals, across ranks and micro-batches. `total` is a 0-d tensor.

    >>> value_and_grad(lambda w: Sum((w * 3).sum()))(shard_of(torch.ones(2)))[0]
    tensor(6.)
    """

    total: Tensor


# as nodes of a tree: totals in an aux are detached
tree.register_fields(Mean, ("total", "count"))
tree.register_fields(Sum, ("total",))


def is_loss(x: Tree) -> bool:
    """Whether `x` is a `Mean` or a `Sum`."""
    return isinstance(x, Mean | Sum)


def value_dtype(total: Tensor, output: object) -> torch.dtype:
    """The dtype of a sum over ranks: a policy's `output`, else float32 at least, and float64 for integers."""
    if isinstance(output, torch.dtype):
        return output
    return wide(total.dtype) if total.is_floating_point() else torch.float64


def averages(aux: Tree) -> dict[str, Mean | Sum]:
    """Return the `Mean`s and `Sum`s in an aux by path, which are summed with the loss, in the order of the paths.

    The order of the aux itself may differ between ranks and micro-batches: dicts are equal in any order.
    """
    return dict(sorted((path, x) for path, x in tree.paths_to(aux, is_loss) if is_loss(x)))


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


def read_loss(loss: Tree) -> tuple[Mean | Sum, type]:
    """Return a loss as a Mean or Sum, and its class: Mean, Sum, or Tensor for a plain scalar.

    Raises ValueError for a total or a count that is not a 0-d tensor.
    """
    kind = type(loss) if isinstance(loss, Mean | Sum) else Tensor
    loss = Mean(loss, 1) if kind is Tensor else loss
    total = loss.total
    _check_count(loss, "the loss function")
    if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point():
        got = f"a {total.dtype} tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else repr(total)
        raise ValueError(
            f"the loss function: expected a 0-d floating tensor (or fshard.Mean or Sum of one), got {got}. Sum it, and "
            "return fshard.Mean(losses.sum(), losses.numel()) for a mean."
        )
    return loss, kind


def described(kind: type, dtype: torch.dtype, aux: Tree, output: object) -> tuple[str, int]:
    """Return the text that ranks compare with the loss's collective, which says what is summed; and a checksum of it.

    The checksum is for ranks that compare no texts: their losses would differ, or be divided by other counts.
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
        value = total / torch.where(count == 0, torch.nan, count) if isinstance(x, Mean) else total
        return value.to(value_dtype(x.total, output))

    return tree.put_tops(aux, is_loss, [value(path, x) for path, x in tree.paths_to(aux, is_loss)])


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

    `sums` gives both, and those of each `Mean` and `Sum` in `aux` behind them. Its first call waits for the other
    ranks; `weight` is the count where it is known before, which is so for all losses but a `Mean`.
    """

    sums: Callable[[], Sequence[Tensor]]
    weight: Tensor | None
    kind: type  # Mean, Sum, or Tensor for a plain scalar
    dtype: torch.dtype  # of the value
    extra: Tree
    aux: Tree
    output: object = None  # the policy's, which Means and Sums in `aux` are cast to
    several: bool = False  # whether `aux` is a list of one for each micro-batch

    @property
    def total(self) -> Tensor:
        """The sum of all ranks' totals."""
        return self.sums()[0]

    @property
    def count(self) -> Tensor:
        """The sum of all ranks' counts."""
        return self.sums()[1] if self.weight is None else self.weight

    @cached_property
    def divisor(self) -> Tensor:
        """What the total is divided by: the count, NaN if that is 0, so that the loss is NaN; 1 for a Sum."""
        return torch.ones_like(self.count) if self.kind is Sum else torch.where(self.count == 0, torch.nan, self.count)

    def shared(self, num: int) -> Tensor:
        """The divisor of each of `num` micro-batches that count as much as this one; a count of 0 is taken for 1."""
        return torch.ones_like(self.count) if self.kind is Sum else torch.where(self.count == 0, 1.0, self.count) * num

    @property
    def value(self) -> Tensor:
        """The loss over all ranks, in float32 at least unless the policy names an output dtype."""
        return (self.total / self.divisor).to(self.dtype)

    @property
    def metrics(self) -> Tree:
        """The aux, with the value over all ranks and micro-batches in place of each `Mean` and `Sum`."""
        auxes = [put_averages(aux, self.sums()[2:], self.output) for aux in (self.aux if self.several else [self.aux])]
        return auxes if self.several else auxes[0]
