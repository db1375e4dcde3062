"""The code between column and row projections: it computes with this rank's part of the activations."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ..comm.primitives import along as ranks_along
from ..core.random import end_fork, fork
from .along import Along, with_attributes
from .forwards import replace_forward
from .heads import Attention

# torch's errors of unlike shapes, and Python's of unlike lengths
_SHAPES = re.compile("is invalid for input|must match|cannot be multiplied|expanded size|split_with_sizes|to unpack")
RanksNow = Callable[[], Along | None]  # the ranks of a submodule in the current call; None if it is whole


class Between:
    """A submodule with column and row projections, each rank with other random numbers between them.

    Random numbers differ from the output of the first column to the input of a row, and are equal after it.
    """

    def __init__(
        self,
        part: nn.Module,
        path: str,
        where: RanksNow,
        again: Callable[[], bool],
        columns: Sequence[nn.Module],
        rows: Sequence[nn.Module],
    ):
        self._part, self._name, self._where, self._again = part, path or type(part).__name__, where, again
        self._in_forward = False  # True in the submodule's forward
        self._first: nn.Module | None = None  # the column that the last forward called first
        self._back: Callable[[], None] | None = None  # in a forward, ends the block of other random numbers
        replace_forward(part, self._around)
        for column in columns:
            replace_forward(column, functools.partial(self._column, column))
        for row in rows:
            replace_forward(row, self._row)

    def _around(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if (along := self._where()) is None:
            return forward(*args, **kwargs)
        self._in_forward = self._part.training and along.ranks > 1
        try:
            with _shapes_explained(self._name, along):
                return forward(*args, **kwargs)
        finally:
            self._end()
            self._in_forward = False

    def _column(self, column: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        # a checkpoint of a part of the forward runs again outside of it, and may end before a row
        begins = self._back is None if self._in_forward else self._first is column and self._again()
        if begins and (along := self._where()):
            back = fork(along.rank, ranks_along(along.mesh, along.axis).device)
            self._first, self._back = column, back if self._in_forward else None
        return out

    def _row(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._end()
        # the checkpoint may begin after the column
        if not self._in_forward and self._first and self._again() and (along := self._where()):
            end_fork(along.rank, ranks_along(along.mesh, along.axis).device)
        return forward(*args, **kwargs)

    def _end(self) -> None:
        back, self._back = self._back, None
        if back is not None:
            back()


@contextmanager
def _shapes_explained(name: str, along: Along) -> Iterator[None]:
    """Raise torch's errors of shapes again, with a remedy."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError) or error.__cause__ or not _SHAPES.search(str(error)):
            raise
        raise RuntimeError(
            f"{name}: {error}. Its projections are split over {along.axis!r}: its forward must take numbers of heads "
            "and features from shapes, as view(batch, length, -1, head_dim) does. Else leave its submodules out of "
            "parallel="
        ) from error


def share_heads(copied: nn.Module, attention: Attention, where: Callable[[str], RanksNow]) -> None:
    """Let an attention whose keys are whole, and whose queries are split, take a head of keys for each query head."""
    part, query, keys = copied.get_submodule(attention.path), where(attention.query), [*map(where, attention.few)]

    def taking() -> Along | None:
        return None if all(ranks() for ranks in keys) else query()

    def around(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        with with_attributes(part, num_key_value_groups=1) if attention.repeats and taking() else nullcontext():
            return forward(*args, **kwargs)

    def taken(heads: int, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        out, ranks = forward(x), taking()
        if ranks is None:
            return out
        begin, end = ranks._replace(size=attention.queries).part
        which = torch.arange(begin, end, device=out.device) // (attention.queries // heads)
        return out.unflatten(-1, (heads, -1))[..., which, :].flatten(-2)

    replace_forward(part, around)
    for path in attention.few:
        replace_forward(copied.get_submodule(path), functools.partial(taken, attention.heads[path]))
