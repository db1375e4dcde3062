"""Values that were given away, and the error when such a value is used."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .tree import Tree

Static = TypeVar("Static", bound=Hashable)


class DonatedError(RuntimeError):
    """A value was used after a call that was allowed to take it over."""


@dataclass
class Life:
    """Whether a value may still be used; shared by all values that share its tensors."""

    given_away: bool = False

    def check(self, name: str, touched: str) -> None:
        """Raise DonatedError if the value was given away; `touched` is the attribute that was read."""
        if self.given_away:
            raise DonatedError(
                f"this {name} was given away: a step, or another call, with donate=True wrote to its tensors in place "
                f"(touched: .{touched}). Use the state which that call returned, or donate=False."
            )

    def __getstate__(self) -> dict[str, object]:
        self.check("value", "__getstate__")  # the memory now holds another state, which a copy or a file would take
        return vars(self)


@dataclass(frozen=True, eq=False)
class Source(Generic[Static]):
    """Metadata of a node that can be given away: `static` is compared, `of` refers to the node weakly."""

    static: Static
    of: weakref.ref[Tree]

    # `of` is left out, so that structures of two equal nodes are equal, and each node's own can be told apart
    def __eq__(self, other: object) -> bool:
        return self.static == (other.static if isinstance(other, Source) else other)

    def __hash__(self) -> int:
        return hash(self.static)

    def __repr__(self) -> str:
        return repr(self.static)
