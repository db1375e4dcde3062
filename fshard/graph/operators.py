"""Operators that start, merge and wait for collectives (Note [Collectives in a graph] in `announce.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import MESHES
from ..comm.ranks import Call, Pending, Ranks, note
from ..core.tracing import define

_AT = "str mesh, str axis, str label, int nbytes"
Started = tuple[Tensor, Tensor]


def _ticket(*args: object) -> Tensor:
    """Return a tensor whose storage will hold a pending collective: operators take only tensors."""
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _started(place: Tensor, pending: Pending) -> Started:
    ticket = _ticket()
    # on the storage: a compiled graph may make new tensor objects of the same memory
    ticket.untyped_storage().under_way = pending  # type: ignore[attr-defined]
    return place, ticket


def _wait(place: Tensor, ticket: Tensor, sent: Sequence[Tensor]) -> None:
    # popped, to free the sent tensors now
    result = vars(ticket.untyped_storage()).pop("under_way").wait()
    if result.data_ptr() != place.data_ptr():  # a compiler has copied `place`
        place.copy_(result.view(place.shape))


define("wait(Tensor(a!) place, Tensor ticket, Tensor[] sent) -> ()", _wait, lambda place, ticket, sent: None)


def _ranks(mesh: str, axis: str) -> Ranks:
    return primitives.along(MESHES.find(mesh), axis)


def _define_start(schema: str, run: Callable[..., object], shapes: Callable[..., object]) -> None:
    schema = schema.replace(") ->", ", *, Tensor? after=None) ->")
    define(schema, lambda *args, after=None, **rest: run(*args, **rest), lambda *args, after=None, **_: shapes(*args))


def _room(ranks: Ranks, numel: int, like: Tensor, lent: bool) -> Tensor:
    """Return a flat tensor. Its memory is lent (Note [Lent memory] in `ranks.py`) only to a backend's collectives.

    Peers of other collectives may read it after this rank's wait, when a compiler may have reused it.
    """
    return ranks.empty(numel, like, lent and ranks.built_in is not None)


def _all_gather(x: Tensor, mesh: str, axis: str, label: str, nbytes: int, lent: bool) -> Started:
    ranks = _ranks(mesh, axis)
    place = _room(ranks, ranks.size * x.numel(), x, lent).view(ranks.size * x.shape[0], *x.shape[1:])  # (W n, ...)
    return _started(place, primitives.all_gather(x, ranks, label, place))


def _fake_gathered(x: Tensor, mesh: str, axis: str, *rest: object) -> Started:
    return x.new_empty(_ranks(mesh, axis).size * x.shape[0], *x.shape[1:]), _ticket()


_define_start(f"all_gather(Tensor x, {_AT}, bool lent) -> (Tensor, Tensor)", _all_gather, _fake_gathered)


def _new_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    place = torch.empty(shape, dtype=dtype, device=device)
    place.view(-1)[:1].zero_()  # run a kernel: torch warns of CUDA graphs without kernels
    return place


# not aten's: compilers move aten's allocations to the first use, perhaps out of a CUDA graph
define("place(int[] shape, ScalarType dtype, Device device) -> Tensor", _new_buffer, _new_buffer, captured=True)


def _all_gather_into(place: Tensor, x: Tensor, mesh: str, axis: str, label: str, nbytes: int) -> Tensor:
    return _started(place, primitives.all_gather(x, _ranks(mesh, axis), label, place))[1]


_define_start(f"all_gather_into(Tensor(a!) place, Tensor x, {_AT}) -> Tensor", _all_gather_into, _ticket)


def _reduce_scatter(place: Tensor, x: Tensor, mesh: str, axis: str, label: str, nbytes: int, fast: bool) -> Tensor:
    return _started(place, primitives.reduce_scatter(x, _ranks(mesh, axis), label, place, fast=fast))[1]


def _all_reduce(
    place: Tensor, x: Tensor, mesh: str, axis: str, label: str, nbytes: int, op: str, fast: bool, more: str
) -> Tensor:
    return _started(place, primitives.all_reduce(x, _ranks(mesh, axis), label, place, op=op, fast=fast, more=more))[1]


_define_start(f"reduce_scatter(Tensor(a!) place, Tensor x, {_AT}, bool fast) -> Tensor", _reduce_scatter, _ticket)
_define_start(
    f"all_reduce(Tensor(a!) place, Tensor x, {_AT}, str op, bool fast, str more) -> Tensor", _all_reduce, _ticket
)
define(
    "room(Tensor like, int numel, str mesh, str axis, bool lent) -> Tensor",
    lambda like, numel, mesh, axis, lent: _room(_ranks(mesh, axis), numel, like, lent),
    lambda like, numel, *rest, **more: like.new_empty(numel),
)


def _exchange(
    sends: Sequence[Tensor], numels: Sequence[int], mesh: str, axis: str, label: str, nbytes: int, kind: str, call: str
) -> Started:
    ranks, called = _ranks(mesh, axis), Call(kind, axis, label, nbytes, text=call)
    note(called)
    place, _ = _exchanged(sends, numels)  # (sum(numels),): all peers' messages
    exchange = ranks.exchange([x.reshape(-1) for x in sends], list(place.split(list(numels))), called)
    if not place.numel():
        # wait now: a compiler would drop the `wait` of an empty result, and reuse sent memory too early
        exchange.wait()
        exchange.done()
        return _started(place, Pending(None, lambda _: place))
    return _started(place, Pending(exchange, lambda _: place))


def _exchanged(sends: Sequence[Tensor], numels: Sequence[int], *rest: object) -> Started:
    return sends[0].new_empty(sum(numels)), _ticket()


_define_start(
    f"exchange(Tensor[] sends, int[] numels, {_AT}, str kind, str call) -> (Tensor, Tensor)", _exchange, _exchanged
)


def _merged(parts: Sequence[Tensor], num_rows: int) -> Tensor:
    return torch.cat([x.view(num_rows, -1) for x in parts], 1).view(-1)


def _parts(x: Tensor, lengths: Sequence[int], numbers: Sequence[int], num_rows: int) -> list[Tensor]:
    """Copy parts, by number, of tensors merged as `num_rows` rows. Dual: `merged`."""
    parts = x.view(num_rows, -1).split_with_sizes(lengths, 1)
    return [parts[i].clone(memory_format=torch.contiguous_format).view(-1) for i in numbers]


def _fill_places(places: list[Tensor], x: Tensor) -> None:
    # private, as in `layout/row.py`: on a GPU `split_with_sizes_copy` sends its table of addresses from pinned memory
    torch._foreach_copy_(places, list(x.split([place.numel() for place in places])))


define("merged(Tensor[] parts, int num_rows) -> Tensor", _merged, _merged)
define("parts(Tensor x, int[] lengths, int[] numbers, int num_rows) -> Tensor[]", _parts, _parts)
define("fill(Tensor(a!)[] places, Tensor x) -> ()", _fill_places, lambda places, x: None)
