"""How many units travel beside the one that is computed with: gathers started ahead, and reductions under way.

Note [Two units]
    By default the unit that is computed with and those gathered ahead have together at most the bytes of two of the
    largest unit, and so have the unit whose gradients come and those whose gradients are being reduced. If all units
    are equal, that is one unit ahead and one reduction under way. If they are not, several small units travel beside a
    small one, so that the link has work while a unit computes that is larger than its communication, and a large unit
    is not waited for. At least one unit travels, and at most `_MOST` do: more gained nothing (docs/benchmarks.md).
    Collectives of several stages run beside as many units anyway, so of these one unit is in the first stage.
    `make_plan(prefetch=n)` makes it n units, whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..core.tracing import memo

_MOST = 4


@dataclass(frozen=True)
class Ahead:
    """How many units of these sizes travel at once: `prefetch`, or if that is None what Note [Two units] says."""

    sizes: tuple[int, ...]  # of each unit's gathered buffers, in bytes
    prefetch: int | None

    @memo
    def _room(self) -> int:
        return 2 * max(self.sizes, default=0)

    @memo
    def number(self) -> int | None:
        """The number of units, if it is the same for all of them; else None."""
        if self.prefetch is not None:
            return self.prefetch
        smallest = sorted(size for size in self.sizes if size)[:3]
        return 1 if len(smallest) < 3 or sum(smallest) > self._room else None

    def most(self, stages: int) -> int:
        """The most units whose gathers are under way at once.

        Of gathers of several stages that run one after the other one more is under way for each.

        >>> [Ahead((6, 1, 1, 6), None).most(1), Ahead((6, 1, 1, 6), None).most(2), Ahead((6,), 0).most(2)]
        [4, 2, 0]
        """
        number = 1 if self.number is None and stages > 1 else self.number
        return _MOST if number is None else number + stages - 1 if number else 0

    def gathers(self, unit: int | None, following: Iterable[int], stages: int) -> list[int]:
        """The first of `following` whose gathers are under way while `unit` is computed with.

        >>> Ahead((6, 1, 1, 6), None).gathers(1, [2, 3], 1), Ahead((6, 1, 1, 6), 1).gathers(1, [2, 3], 1)
        ([2, 3], [2])
        """
        fits = self.number is None and stages == 1
        return list(self._fitting(unit, following) if fits else islice(following, self.most(stages)))

    def reductions(self, unit: int, under_way: Sequence[int], stages: int) -> int:
        """How many reductions, the last of `under_way`, may stay in their first stage when `unit`'s gradients arrive.

        >>> Ahead((6, 1, 1, 6), None).reductions(1, [3, 2], 1), Ahead((6, 1, 1, 6), 1).reductions(1, [3, 2], 1)
        (2, 1)
        """
        if self.number is not None:
            return self.number
        return len(list(self._fitting(unit, reversed(under_way)))) if stages <= 1 else 1

    def _fitting(self, unit: int | None, others: Iterable[int]) -> Iterator[int]:
        """The first of `others`, one at least, that fit beside `unit` into the memory of two of the largest."""
        room = self._room - (0 if unit is None else self.sizes[unit])
        for number, other in enumerate(islice(others, _MOST)):
            room -= self.sizes[other]
            if number and room < 0:
                return
            yield other
