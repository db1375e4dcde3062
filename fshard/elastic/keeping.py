"""`keep`: each rank holds its own part of a state in host memory, and a copy of a neighbour's part.

Note [Two kept states]
    A rank returns from `keep` after all ranks have entered it, so all ranks have finished the `keep` before. If each
    rank holds its last two states, all ranks together hold one whole state. Memory of older states may be reused, but
    only after all ranks have entered.

    Two histories may have steps of equal numbers: a rank taken for dead may return with its own step 12. So states have
    the key (round, step), and parts of two keys are never mixed. The caller numbers rounds, one for each set of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..checkpoint.contents import Contents, contents_to_save, digest_of_blocks
from ..comm import consensus, primitives
from ..comm.mesh import AnyMesh, axis_sizes, coordinate, mesh_device, number_of
from ..comm.ranks import Ranks
from ..core import tree
from ..core.arguments import check_whole
from ..core.differences import Form
from ..core.random import HOST
from ..core.storage import Life, as_bytes, pack_bytes, packed_size, unpack_bytes
from ..core.tree import Tree
from ..files.index import Json
from ..layout.pieces import Parts, mesh_of
from ..plan.ahead import host_row

StateKey: TypeAlias = tuple[int, int]  # round, step
Interval: TypeAlias = tuple[str, int, int]  # leaf, number of the first element, number of elements
_BATCH = 1 << 26  # bytes that a rank sends at once, on average of all ranks
_KEEP_OUTSIDE = "Keep values of one rank outside of the state, or the values of all ranks in one leaf (all_gather)"


@dataclass(frozen=True, eq=False)
class Kept:
    """A rank's share of a state, in host memory: its own part, and a copy of a neighbour's.

    `key` is (round, step). `intervals[i]` are the elements in `memory[i]`, bytes. `orders` has the order of elements of
    split leaves.
    """

    key: StateKey
    forms: Mapping[str, Form] = field(repr=False)
    orders: Mapping[str, tuple[int, ...]] = field(repr=False)
    values: Mapping[str, Json] = field(repr=False)
    intervals: Sequence[Sequence[Interval]] = field(repr=False)
    memory: Sequence[Tensor] = field(repr=False)
    life: Life = field(default_factory=Life, repr=False)

    def parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (leaf, number of the first element, elements (n,)), views of `memory`."""
        for intervals, data in zip(self.intervals, self.memory, strict=True):
            forms = [(self.forms[name].dtype, numel) for name, _, numel in intervals]
            for (name, begin, _), x in zip(intervals, unpack_bytes(data, forms), strict=True):
                yield name, begin, x


def keep(
    state: Tree,
    step: int,
    *,
    round: int = 0,
    reuse: Kept | None = None,
    axis: str | None = None,
    distance: int = 1,
    mesh: AnyMesh = None,
) -> Kept:
    """Copy this rank's part of a state to host memory, and to the next rank's; every rank must call this.

    `state` is a tree as for `checkpoint.save`. If ranks are lost, `move` makes the state of the other ranks. Two ranks
    hold each element: its own rank, and the rank `distance` further along `axis`. Elements of several ranks (along a
    replicate axis, or whole) are not sent. Hold two states: the last may be whole on no ranks yet.

    - `step`, `round`: `move` takes the largest (round, step), and never mixes two. Each new set of ranks is a round.
    - `reuse`: an older state of this rank, given away: its memory takes the new state. It must be older than the last.
    - `axis`: by default the first axis of several ranks. `distance`: with the number of ranks on a host, copies are on
      another host.
    - `mesh`: the ranks, for a state without sharded leaves.

    MismatchError on all ranks names a number, string or unsharded tensor with other values on other ranks. ValueError
    for an unknown axis, a multiple of the axis as distance, a leaf without values; TypeError for other leaves.
    DonatedError if `reuse` was given away before. Dual: `move`.

    >>> from fshard import elastic
    >>> kept = elastic.keep({"w": torch.arange(3.0), "epoch": 7}, step=100)
    >>> elastic.move([kept], {"w": torch.zeros(3), "epoch": 0})
    {'w': tensor([0., 1., 2.]), 'epoch': 7}
    """
    mesh = mesh_of(state) if mesh is None else mesh
    sizes = axis_sizes(mesh)
    axis = next((name for name, size in sizes.items() if size > 1), None) if axis is None else axis

    def checked() -> Contents:
        _check_keep(step, round, axis, distance, reuse, mesh)
        return contents_to_save(state, mesh, "keep")

    contents = consensus.together(mesh, checked)
    _check_values(contents, f"keep: step={step}, round={round}, axis={axis!r}, distance={distance}")
    old = [] if reuse is None else [*reuse.memory]
    if reuse is not None:  # all ranks have entered
        reuse.life.given_away = True
    neighbour = _Neighbour(primitives.along(mesh, axis), distance) if axis is not None and sizes[axis] > 1 else None
    arriving = {} if neighbour is None else _alone_before(state, mesh, neighbour)
    intervals, memory = _copied(contents, arriving, neighbour, old)
    return Kept((round, step), contents.forms, contents.orders, contents.values, intervals, memory)


def live(state: Tree, mesh: AnyMesh) -> Kept:
    """Return views of this rank's part of a state."""
    contents = consensus.together(mesh, lambda: contents_to_save(state, mesh, "replan"))
    _check_values(contents, "replan: the state")
    parts = [part for part in contents.parts if part.elements.numel()]
    intervals = [[(part.name, part.begin, part.elements.numel())] for part in parts]
    memory = [as_bytes(part.elements) for part in parts]
    return Kept((0, 0), contents.forms, contents.orders, contents.values, intervals, memory)


def _check_keep(step: int, round: int, axis: str | None, distance: int, reuse: Kept | None, mesh: AnyMesh) -> None:
    check_whole("keep: step", step, least=0, what="the number of a step")
    check_whole("keep: round", round, least=0, what="the number of a round")
    check_whole("keep: distance", distance, what="a number of ranks")
    size = 1 if axis is None else primitives.along(mesh, axis).size
    if size > 1 and distance % size == 0:
        raise ValueError(f"keep: distance={distance}: expected no multiple of {size}, the ranks along axis {axis!r}")
    if reuse is not None:
        reuse.life.check("Kept", "memory")


def _check_values(contents: Contents, call: str) -> None:
    """MismatchError on every rank if calls, forms of leaves, or values of unsharded leaves differ."""
    lines = [call, *(f"{name!r} = {value!r}" for name, value in contents.values.items())]
    forms = ((name, form, contents.orders.get(name) or "") for name, form in contents.forms.items())
    lines += [f"{name!r} {form.dtype} {list(form.shape)}{order}" for name, form, order in forms]
    plain = (part for part in contents.parts if part.name not in contents.orders)
    lines += [f"{part.name!r} with bits {digest_of_blocks(part.elements)}" for part in plain]
    consensus.check_same(contents.mesh, "\n".join(lines), f"{call.partition(':')[0]}: the state", _KEEP_OUTSIDE)


class _Neighbour(NamedTuple):
    """The ranks along an axis, and the distance to the rank with the copy."""

    ranks: Ranks
    distance: int

    @property
    def before(self) -> int:
        return (self.ranks.rank - self.distance) % self.ranks.size

    @property
    def after(self) -> int:
        return (self.ranks.rank + self.distance) % self.ranks.size


def _alone_before(state: Tree, mesh: AnyMesh, neighbour: _Neighbour) -> dict[str, tuple[int, int]]:
    """Return (first element, number of elements) by leaf of all parts on the rank before this one alone."""
    sizes, intervals = axis_sizes(mesh), dict[str, tuple[int, int]]()
    at = {axis: coordinate(mesh, (axis,)) for axis in sizes} | {neighbour.ranks.axis: neighbour.before}
    layouts = ((path, node.layout) for path, node in tree.paths_to(state, Parts) if isinstance(node, Parts))
    for path, layout in layouts:
        for row in layout.rows:
            if all(size == 1 or axis in row.over for axis, size in sizes.items()):
                number = number_of([at[axis] for axis in row.over], [sizes[axis] for axis in row.over])
                spans = ((layout.leaves[span.leaf].path, span) for span in row.spans(number) if span.numel)
                intervals |= {tree.joined(path, leaf): (span.begin, span.numel) for leaf, span in spans}
    return intervals


def batches(forms: Mapping[str, Form], ranks: int) -> Iterator[list[str]]:
    """Yield lists of leaves, equal on all ranks; a rank has about `_BATCH` bytes of each list."""
    ends = accumulate(form.numel * form.dtype.itemsize for form in forms.values())
    for _, batch in groupby(zip(forms, ends, strict=True), lambda pair: pair[1] // (_BATCH * ranks)):
        yield [name for name, _ in batch]


def _copied(
    contents: Contents, arriving: Mapping[str, tuple[int, int]], neighbour: _Neighbour | None, old: list[Tensor]
) -> tuple[list[list[Interval]], list[Tensor]]:
    """Copy this rank's parts, and `arriving`, to host memory, to `old` if it has room; return intervals and memory."""
    by_name = {part.name: part for part in contents.parts if part.elements.numel()}
    device, intervals, memory = mesh_device(contents.mesh), list[list[Interval]](), list[Tensor]()

    def room(block: list[Interval]) -> Tensor:
        size, number = packed_size([(contents.forms[name].dtype, numel) for name, _, numel in block]), len(memory)
        fits = number < len(old) and len(old[number]) >= size
        intervals.append(block)
        memory.append(old[number] if fits else host_row(size, torch.uint8, device))
        return memory[-1][:size]

    for names in batches(contents.forms, contents.ranks):
        spans = sorted((by_name[name] for name in names if name in by_name), key=lambda x: x.holders > 1)  # stable
        data = room([(x.name, x.begin, x.elements.numel()) for x in spans])
        message = _packed([x.elements for x in spans], data, device)
        if neighbour is not None:
            alone = packed_size([(x.elements.dtype, x.elements.numel()) for x in spans if x.holders == 1])
            _sent_on(message[:alone], room([(name, *arriving[name]) for name in names if name in arriving]), neighbour)
    return intervals, memory


def _packed(tensors: Sequence[Tensor], out: Tensor, device: torch.device) -> Tensor:
    """Pack tensors into `out`, host memory; return the bytes on the device of messages."""
    if not tensors or device == HOST:
        return pack_bytes(tensors, out) if tensors else out.to(device)
    data = pack_bytes([x.to(device) for x in tensors])
    out.copy_(data)
    return data


def _sent_on(message: Tensor, out: Tensor, neighbour: _Neighbour) -> None:
    """Send a message to the rank after this one, and receive one from the rank before, into host memory."""
    ranks = neighbour.ranks
    sent, received = ([0] * ranks.size for _ in range(2))
    sent[neighbour.after], received[neighbour.before] = len(message), len(out)
    place = out if ranks.device == HOST else torch.empty_like(out, device=ranks.device)
    primitives.deal(message, (sent, received), ranks, "copies", place).wait()
    if place is not out:
        out.copy_(place)
