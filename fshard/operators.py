"""What the nodes of Note [Collectives in a graph] run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import comm
from .nodes import MESHES
from .randomness import draw, empty_state, generator_state
from .record import Record, note

_LIBRARY = torch.library.Library("fshard", "DEF")
_AT = "str mesh, str axis, str label"
Started = tuple[Tensor, Tensor]


def _define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """An operator: what it runs, and what gives tensors of the right shapes without running it."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", shapes, lib=_LIBRARY)


def _ticket() -> Tensor:
    return torch.empty(1, dtype=torch.uint8)


def _started(place: Tensor, pending: comm.Pending) -> Started:
    """A place, and a ticket that has what fills it."""
    ticket = _ticket()
    ticket.untyped_storage().under_way = pending  # type: ignore[attr-defined]
    return place, ticket


def _wait(place: Tensor, ticket: Tensor, sent: Sequence[Tensor]) -> None:
    result = vars(ticket.untyped_storage()).pop("under_way").wait()
    if result.data_ptr() != place.data_ptr():  # a compiler has copied the place meanwhile
        place.copy_(result.view(place.shape))


_define("wait(Tensor(a!) place, Tensor ticket, Tensor[] sent) -> ()", _wait, lambda place, ticket, sent: None)


def _ranks(mesh: str, axis: str) -> comm.Ranks:
    return comm.along(MESHES.find(mesh), axis)


def _all_gather(x: Tensor, mesh: str, axis: str, label: str) -> Started:
    ranks = _ranks(mesh, axis)
    place = ranks.empty(ranks.size * x.numel(), x, True).view(ranks.size * x.shape[0], *x.shape[1:])
    return _started(place, comm.all_gather(x, ranks, label, place, lent=True))


def _gathered(x: Tensor, mesh: str, axis: str, label: str) -> Started:
    return x.new_empty(_ranks(mesh, axis).size * x.shape[0], *x.shape[1:]), _ticket()


_define(f"all_gather(Tensor x, {_AT}) -> (Tensor, Tensor)", _all_gather, _gathered)


def _reduce_scatter(x: Tensor, mesh: str, axis: str, label: str, dtype: torch.dtype, fast: bool) -> Started:
    place, _ = _scattered(x, mesh, axis, label, dtype, fast)
    return _started(place, comm.reduce_scatter(x, _ranks(mesh, axis), label, place, fast=fast))


def _scattered(x: Tensor, mesh: str, axis: str, label: str, dtype: torch.dtype, fast: bool) -> Started:
    return x.new_empty(x.shape[0] // _ranks(mesh, axis).size, *x.shape[1:], dtype=dtype), _ticket()


_define(
    f"reduce_scatter(Tensor x, {_AT}, ScalarType dtype, bool fast) -> (Tensor, Tensor)", _reduce_scatter, _scattered
)


def _all_reduce(x: Tensor, mesh: str, axis: str, label: str, dtype: torch.dtype, op: str, fast: bool) -> Started:
    place, _ = _reduced(x, mesh, axis, label, dtype, op, fast)
    return _started(place, comm.all_reduce(x, _ranks(mesh, axis), label, place, op=op, fast=fast))


def _reduced(x: Tensor, mesh: str, axis: str, label: str, dtype: torch.dtype, op: str, fast: bool) -> Started:
    return x.new_empty(x.shape, dtype=dtype), _ticket()


_define(f"all_reduce(Tensor x, {_AT}, ScalarType dtype, str op, bool fast) -> (Tensor, Tensor)", _all_reduce, _reduced)


def _exchange(
    sends: Sequence[Tensor], numels: Sequence[int], mesh: str, axis: str, label: str, kind: str, nbytes: int, call: str
) -> Started:
    note(Record(kind, axis, label, nbytes))
    place, _ = _exchanged(sends, numels, mesh, axis, label, kind, nbytes, call)
    exchange = _ranks(mesh, axis).exchange([x.contiguous() for x in sends], list(place.split(list(numels))), call)
    return _started(place, comm.Pending(exchange, lambda _: place))


def _exchanged(
    sends: Sequence[Tensor], numels: Sequence[int], mesh: str, axis: str, label: str, kind: str, nbytes: int, call: str
) -> Started:
    return sends[0].new_empty(sum(numels)), _ticket()


_define(
    f"exchange(Tensor[] sends, int[] numels, {_AT}, str kind, int nbytes, str call) -> (Tensor, Tensor)",
    _exchange,
    _exchanged,
)
_define(
    "seeded(Tensor seed, Tensor step, int rank, int part, Device device) -> Tensor",
    generator_state,
    lambda seed, step, rank, part, device: empty_state(device),
)
_define(
    "draw(Tensor state, str how, Tensor[] by, float[] numbers, Tensor like) -> (Tensor, Tensor)",
    draw,
    lambda state, how, by, numbers, like: (torch.empty_like(like), torch.empty_like(state)),
)
