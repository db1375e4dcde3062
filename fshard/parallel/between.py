"""The code between column and row projections, which computes with this rank's part of the activations."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.primitives import along as ranks_along
from ..core.random import forked
from .along import Along, assigned
from .heads import Attention

# torch's errors of unlike shapes, and Python's of unlike lengths
_SHAPES = re.compile("is invalid for input|must match|cannot be multiplied|expanded size|split_with_sizes|to unpack")


class Between:
    """A submodule with column and row projections: random numbers between them differ along the axis.

    Random numbers differ from the output of the first column to the input of a row, and are equal after it. In a call
    without parts, `along` returns None, and nothing changes.
    """

    def __init__(self, part: nn.Module, path: str, along: Callable[[], Along | None]):
        self._part, self._path, self._along = part, path, along
        self._draws: ExitStack | None = None  # None outside of the submodule's forward
        self._is_forked = False

    def wrap(self, columns: list[nn.Module], rows: list[nn.Module]) -> None:
        """Wrap the forwards of the submodule and of its projections."""
        _put(self._part, self._around)
        for column in columns:
            _put(column, self._column)
        for row in rows:
            _put(row, self._row)

    def _around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        along = self._along()
        if along is None:
            return forward(*args, **kwargs)
        with ExitStack() as self._draws, _explained(self._path, along):
            try:
                return forward(*args, **kwargs)
            finally:
                self._end()
                self._draws = None

    def _end(self) -> None:
        if self._draws is not None:
            self._draws.close()
        self._is_forked = False

    def _column(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if self._draws is not None and not self._is_forked and self._part.training and (along := self._along()):
            ranks = ranks_along(along.mesh, along.axis)
            self._draws.enter_context(forked(ranks.rank, ranks.device) if ranks.size > 1 else nullcontext())
            self._is_forked = True
        return out

    def _row(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end()
        return forward(*args, **kwargs)


@contextmanager
def _explained(path: str, along: Along) -> Iterator[None]:
    """Raise torch's errors of shapes again, with a remedy."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error) not in (RuntimeError, ValueError) or error.__cause__ or not _SHAPES.search(str(error)):
            raise
        raise RuntimeError(
            f"{path}: {error}. Its projections are split over {along.axis!r}: its forward must take numbers of heads "
            "and features from shapes, as view(batch, length, -1, head_dim) does. Else leave its submodules out of "
            "parallel="
        ) from error


def _put(part: nn.Module, around: Callable[..., Any]) -> None:
    forward = part.forward
    vars(part)["forward"] = functools.wraps(forward)(functools.partial(around, forward))


def share_heads(copied: nn.Module, attention: Attention, along: Callable[..., Callable[[], Along | None]]) -> None:
    """Let an attention whose keys are whole, and whose queries are split, take a head of keys for each query head."""
    part, query, split = copied.get_submodule(attention.path), along(attention.query), list(map(along, attention.few))

    def taking() -> Along | None:
        return None if all(each() for each in split) else query()

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        repeats = attention.repeats and taking()
        with assigned(part, num_key_value_groups=1) if repeats else nullcontext():
            return forward(*args, **kwargs)

    def keys(heads: int, forward: Callable[..., Any], x: Tensor) -> Tensor:
        out, ranks = forward(x), taking()
        if ranks is None:
            return out
        begin, end = ranks._replace(size=attention.queries).part
        which = torch.arange(begin, end, device=out.device) // (attention.queries // heads)
        return out.unflatten(-1, (heads, -1))[..., which, :].flatten(-2)

    _put(part, around)
    for path in attention.few:
        _put(copied.get_submodule(path), functools.partial(keys, attention.heads[path]))
