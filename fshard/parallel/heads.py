"""Attentions, split by whole heads.

Note [Heads]
    A submodule with `head_dim` (or another name of `_SIZES`), column projections and a row projection is an attention.
    If heads of keys do not divide by the ranks, their projections stay whole, and each rank takes one head of keys for
    each of its query heads. If query heads do not divide, the attention stays whole. Code between the projections must
    take numbers of heads from shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from .styles import ROWS

_SIZES = ("head_dim", "head_size", "qk_head_dim")


class Attention(NamedTuple):
    """An attention: the number of heads in each column projection, by path, and of queries."""

    path: str
    queries: int
    heads: Mapping[str, int]  # 0 if it is unknown
    repeats: bool  # True if `num_key_value_groups` says how often the code repeats a head of keys

    @property
    def query(self) -> str:
        return next(path for path, number in self.heads.items() if number == self.queries)

    @property
    def few(self) -> list[str]:
        """The projections of keys and values, if several query heads share one."""
        return [path for path, number in self.heads.items() if number < self.queries]

    def whole(self, ranks: int) -> list[str]:
        """Return the paths of the submodules to leave whole on so many ranks."""
        divides = all(self.heads[path] % ranks == 0 for path in self.few)
        if self.queries % ranks or not all(self.heads.values()) or not (divides or self.repeats):
            return [self.path]
        return [] if divides else self.few


def attentions(module: nn.Module, styles: Mapping[str, str]) -> Iterator[Attention]:
    """Yield the attentions in a module."""
    for path, part in module.named_modules():
        sizes = [size for name in ("v_head_dim", *_SIZES) if isinstance(size := getattr(part, name, None), int)]
        children = {f"{path}.{name}".removeprefix("."): child for name, child in part.named_children()}
        columns = {at: child for at, child in children.items() if _style(styles, at) == "colwise"}
        row = next((child for at, child in children.items() if _style(styles, at) in ROWS), None)
        if not sizes or not columns or row is None or not hasattr(row, "in_features"):
            continue
        queries, groups = row.in_features // sizes[0], getattr(part, "num_key_value_groups", None)
        heads = {at: _num_heads(child, queries, groups, sizes) for at, child in columns.items()}
        if queries in heads.values():
            yield Attention(path, queries, heads, groups is not None)


def _style(styles: Mapping[str, str], path: str) -> str | None:
    """The style of a layer; of its base layer, if adapters are around it."""
    return styles.get(f"{path}.base_layer") or styles.get(path)


def _num_heads(child: nn.Module, queries: int, groups: int | None, sizes: list[int]) -> int:
    """The number of heads in a projection: of queries, or of keys if several query heads share one; 0 if unknown."""
    features = getattr(child, "out_features", 0)
    keys = {features // size for size in sizes if features % size == 0}
    for number in sorted(keys):
        if 0 < number < queries and queries % number == 0 and groups in (None, queries // number):
            return number
    return queries if features % queries == 0 else 0
