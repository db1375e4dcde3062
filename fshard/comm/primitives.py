"""Asynchronous collectives over the ranks of one mesh axis, without derivatives.

All are built from `Ranks.exchange`, a message to and a message from every peer. On GPUs, and between more than `FEW`
CPU processes, torch's own collectives replace `exchange`, with the same bits unless `fast`.

Note [Sums in rank order]
    Reductions add the tensors of ranks 0, 1, 2 and so on, in this order. More than `GROUP` ranks are added in groups of
    `GROUP` consecutive ranks, then the groups' sums in the same way. The result depends neither on timing nor on
    buckets, and a simulated world has the same bits. `fold` defines the order. `fold_rows` adds in the same order in
    one buffer: each kernel adds one rank of every group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.storage import Held, as_bytes, pack_bytes, packed_size, unpack_bytes
from ..core.tracing import is_tracing, profiled
from .announce import Announced, NodeRanks, announced
from .mesh import AnyMesh, Axes, adapted, axis_sizes
from .process_groups import FEW, Works, all_gather_single, as_real, as_sent, reduce_scatter_single
from .ranks import Call, Pending, Ranks, message_timeout, note

GROUP = 8
# an all-reduce sends smaller tensors whole: one stage, the same bits
_SMALL_MESSAGE = 1 << 14  # bytes
_only = itemgetter(0)
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ORDERED = frozenset({*_INTEGER_DTYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64})


def along(mesh: AnyMesh, axis: str) -> Ranks:
    """Return the ranks along an axis (ValueError if unknown); in a trace, ranks that add nodes."""
    grid = adapted(mesh)
    if grid is None or axis not in grid.mesh_dim_names:
        names = ", ".join(map(repr, axis_sizes(mesh)))
        once = ". Call it once for each axis: all_gather for the last first, reduce_scatter for the first"
        raise ValueError(
            f"the mesh has no axis {axis!r}: it has {names or 'no axes'}{once * isinstance(axis, tuple | list)}"
        )
    ranks = grid.ranks(axis)
    return NodeRanks(ranks, grid) if is_tracing() else announced(ranks, grid)


def _counted(
    kind: str, x: Tensor, ranks: Ranks, label: str, nbytes: int, shape: Sequence[int] | None = None, **more: str
) -> Call:
    call = Call(kind, ranks.axis, label, nbytes, x.dtype, x.shape if shape is None else shape, **more)
    if not isinstance(ranks, NodeRanks):  # a graph's collectives count when it runs
        note(call)
    return call


def _built_in(collective: Callable[..., dist.Work], ranks: Ranks, call: Call, *args: Tensor) -> Works:
    if isinstance(ranks, Announced):
        ranks.announce(str(call))
    if not args[0].numel():  # no elements, no message
        return Works([], [], call)
    # on a GPU, `wait` with a timeout would block the host
    timeout = message_timeout(ranks) if ranks.device.type == "cpu" else None
    work = collective(*args, group=ranks.built_in, async_op=True)
    return Works([work], [], call, timeout, connections=getattr(ranks, "connections", None))


def _dealt(x: Tensor, ranks: Ranks, call: Call) -> tuple[Works, Tensor]:
    place = ranks.empty(x.numel(), x, lent=False).view(x.shape)  # (W n, ...)
    # bytes: backends lack some dtypes
    return _built_in(dist.all_to_all_single, ranks, call, as_bytes(place), as_bytes(x)), place


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _combined_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    return sum_dtype(dtype) if op == "sum" else dtype


def fold(parts: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    """Reduce all ranks' tensors into `out` (Note [Sums in rank order])."""
    dtype = _combined_dtype(op, parts[0].dtype)
    total = out if out.dtype == dtype else torch.empty_like(parts[0], dtype=dtype)  # rounded once
    _fold(parts, op, total)
    return out if total is out else out.copy_(total)


def _fold(parts: Sequence[Tensor], op: str, total: Tensor) -> Tensor:
    if 1 < len(parts) <= GROUP and parts[0].dtype == total.dtype:
        _COMBINE[op](parts[0], parts[1], out=total)
        return _combine(parts[2:], op, total)
    if len(parts) <= GROUP:
        return _combine(parts[1:], op, total.copy_(parts[0]))
    span = GROUP
    while span * GROUP < len(parts):
        span *= GROUP
    _fold(parts[:span], op, total)
    for begin in range(span, len(parts), span):  # one group's sum at a time is in memory
        _COMBINE[op](total, _fold(parts[begin : begin + span], op, torch.empty_like(total)), out=total)
    return total


def _combine(parts: Sequence[Tensor], op: str, total: Tensor) -> Tensor:
    for part in parts:
        # kernels convert a part while adding, except float8
        _COMBINE[op](total, part if part.dtype.itemsize > 1 else part.to(total.dtype), out=total)
    return total


def fold_rows(rows: Tensor, op: str, out: Tensor, group: int = GROUP) -> Tensor:
    """Reduce rows (W, ...), overwriting them, in the order of `fold`; in a binary tree if `group` is 2."""
    while len(rows) > group:
        full = len(rows) // group
        total = rows[::group].to(_combined_dtype(op, rows.dtype))  # (groups, ...), in the memory of `rows` unless wider
        _combine(rows[: full * group].unflatten(0, (full, group)).unbind(1)[1:], op, total[:full])
        if full < len(total):
            _combine(rows[full * group + 1 :].unbind(), op, total[-1])
        rows = total
    return fold(rows.unbind(), op, out)


def all_gather(x: Tensor, ranks: Ranks, label: str = "", out: Tensor | None = None, *, lent: bool = False) -> Pending:
    """Concatenate the tensors of all ranks along dim 0: (n, ...) -> (W n, ...).

    Each rank sends `x` W - 1 times. `label` names the call in errors; `out`, if given, gets the result. `lent` promises
    that nobody writes to the result, so peers may read this rank's part from the result's memory.

    >>> import fshard
    >>> start = lambda mesh: fshard.reduction.start_all_gather(torch.ones(1), mesh.ranks("shard"))
    >>> fshard.testing.simulate(lambda mesh: start(mesh).wait().tolist(), shard=2)
    [[1.0, 1.0], [1.0, 1.0]]
    """
    x = x.contiguous()
    call = _counted("all_gather", x, ranks, label, (ranks.size - 1) * x.nbytes)
    with profiled(call.kind, label):
        if ranks.whole is not None:
            return Pending(ranks.whole.all_gather(x, out, lent, call), _only)
        return _start_gather(x, ranks, out, call, lent)


def _start_gather(x: Tensor, ranks: Ranks, out: Tensor | None, call: Call, lent: bool = False) -> Pending:
    if out is None:
        out = ranks.empty(ranks.size * x.numel(), x, lent).view(ranks.size * x.shape[0], *x.shape[1:])
    full = out
    if ranks.built_in is not None and ranks.device.type == "cpu":
        # all-to-all of copies: gloo's all-gather takes W - 1 rounds
        work = _built_in(dist.all_to_all_single, ranks, call, as_bytes(full), as_bytes(x).repeat(ranks.size))
        return Pending(work, lambda _: full)
    if ranks.built_in is not None:
        return Pending(_built_in(all_gather_single, ranks, call, as_sent(full), as_sent(x)), lambda _: full)
    parts = _rank_parts(full, ranks)
    local = sent = parts[ranks.rank]  # (n, ...), a view of `full`
    if local.data_ptr() != x.data_ptr():
        local.copy_(x)
        sent = local if lent else x  # `exchange` sends an `x` in lent memory without a copy
    sends = [local if p == ranks.rank else sent for p in range(ranks.size)]
    return Pending(ranks.exchange(sends, parts, call), lambda _: full)


def reduce_scatter(
    x: Tensor, ranks: Ranks, label: str = "", out: Tensor | None = None, *, fast: bool = False
) -> Pending:
    """Sum over ranks and keep this rank's part of dim 0: (W n, ...) -> (n, ...).

    Each rank sends W - 1 parts of `x`. The sum is in rank order, or with `fast` in the backend's. `label` names the
    call in errors; `out`, if given, gets the sum, perhaps in a wider dtype. ValueError if W does not divide dim 0.

    >>> import fshard
    >>> start = lambda mesh: fshard.reduction.start_reduce_scatter(torch.tensor([1, 2]), mesh.ranks("shard"))
    >>> fshard.testing.simulate(lambda mesh: start(mesh).wait().tolist(), shard=2)
    [[2], [4]]
    """
    x = x.contiguous()
    call = _counted("reduce_scatter", x, ranks, label, (ranks.size - 1) * (x.nbytes // ranks.size))
    with profiled(call.kind, label):
        if ranks.whole is not None:
            check_divides(x.shape, ranks.size, ranks.axis)
            return Pending(ranks.whole.reduce_scatter(x, out, fast, call), _only)
        return _start_scatter(x, ranks, out, call, fast)


def _start_scatter(x: Tensor, ranks: Ranks, out: Tensor | None, call: Call, fast: bool) -> Pending:
    check_divides(x.shape, ranks.size, ranks.axis)
    shape = (x.shape[0] // ranks.size, *x.shape[1:])
    result = x.new_empty(shape) if out is None else out
    if ranks.built_in is None:
        exchange = ranks.exchange(_rank_parts(x, ranks), [None] * ranks.size, call)
        return Pending(exchange, lambda received: fold(received, call.op, result))
    if fast:
        # a backend sums in the dtype of `x`
        summed = result if result.dtype == x.dtype else x.new_empty(shape)
        work = _built_in(reduce_scatter_single, ranks, call, as_real(summed), as_real(x))
        return Pending(work, lambda _: result if summed is result else result.copy_(summed))
    work, place = _dealt(x, ranks, call)
    return Pending(work, lambda _: fold_rows(place.view(ranks.size, *shape), call.op, result))


def scatter(
    sends: Sequence[Tensor], ranks: Ranks, finish: Callable[[Sequence[Tensor]], Tensor], label: str = ""
) -> Pending:
    """Send `sends[p]` to rank p; the result is `finish(received)`, of all ranks' tensors in rank order.

    All tensors have the same number of elements; `label` names the call in errors.

    >>> import fshard
    >>> start = lambda mesh: fshard.reduction.start_scatter([torch.ones(1), torch.zeros(1)], mesh.ranks("shard"), sum)
    >>> fshard.testing.simulate(lambda mesh: start(mesh).wait().tolist(), shard=2)
    [[2.0], [0.0]]
    """
    sends, nbytes = [x.contiguous() for x in sends], sum(x.nbytes for p, x in enumerate(sends) if p != ranks.rank)
    call = _counted("reduce_scatter", sends[0], ranks, label, nbytes)
    with profiled(call.kind, label):
        return Pending(ranks.exchange(sends, [None] * ranks.size, call), finish).keeping(*sends)


def check_divides(shape: Sequence[int], size: int, axis: str, dim: int = 0, leaf: str = "") -> None:
    if not shape or shape[dim] % size:
        raise ValueError(
            f"{leaf}dim {dim} of a tensor of shape {tuple(shape)} does not divide over the {size} ranks of axis "
            f"{axis!r}: pad it to a multiple of {size}"
        )


def _rank_parts(x: Tensor, ranks: Ranks) -> Sequence[Tensor]:
    check_divides(x.shape, ranks.size, ranks.axis)
    # `chunk` cuts an empty tensor into one part
    return x.chunk(ranks.size) if x.numel() else [x[: x.shape[0] // ranks.size]] * ranks.size


def all_reduce(
    x: Tensor,
    ranks: Ranks,
    label: str = "",
    out: Tensor | None = None,
    *,
    op: str = "sum",
    fast: bool = False,
    more: str = "",
) -> Pending:
    """All-reduce by sum, max or min: (...) -> (...).

    Each rank sends 2 (W - 1) / W of a large tensor, in two stages, or W - 1 copies of a small tensor.

    - `label`: the name of the call in errors; `more`: more text of the call, which ranks compare.
    - `out`: the tensor for the result. If the dtype of `out` is wider, the sums are gathered in this dtype. If `out` is
      `x`, the result replaces `x` part by part, and this rank's part is summed in a buffer, (numel / W,).
    - `op`: "sum", "max" or "min" (else a ValueError; TypeError for a dtype without this reduction).
    - `fast`: the backend may choose the order of the sum.

    >>> import fshard
    >>> start = lambda mesh: fshard.reduction.start_all_reduce(torch.ones(1), mesh.ranks("shard"), op="max")
    >>> fshard.testing.simulate(lambda mesh: start(mesh).wait().tolist(), shard=2)
    [[1.0], [1.0]]
    """
    check_combines("all_reduce", op, x.dtype)
    x, size = x.contiguous(), ranks.size
    width = max(1, (x if out is None else out).dtype.itemsize // x.dtype.itemsize)
    direct = not _is_place_of(out, x) and is_direct(x, size, op)
    part = -(-x.numel() // size) * x.itemsize  # bytes of one padded part
    nbytes = (size - 1) * (x.nbytes if direct else (1 + width) * part)
    call = _counted("all_reduce", x, ranks, label, nbytes, op=op, more=more)
    fast_here = fast and op == "sum" and ranks.built_in is not None
    algorithm = _summed_by_backend if fast_here else _all_to_everyone if direct else _in_two_stages
    with profiled(call.kind, label):
        if ranks.whole is not None:
            return Pending(ranks.whole.all_reduce(x, out, fast, call), _only)
        return algorithm(x, ranks, torch.empty_like(x) if out is None else out, call)


def is_direct(x: Tensor, size: int, op: str) -> bool:
    # between two ranks, two stages would send as many bytes
    if size <= 2 or x.nbytes * max(size, FEW) <= _SMALL_MESSAGE * FEW:
        return True
    # whole tensors from many ranks could fill the memory
    return size <= FEW and (op != "sum" or x.numel() % size != 0)


def _is_place_of(out: Tensor | None, x: Tensor) -> bool:
    # in a compiled graph `x` may be another object with the memory of `out`
    return out is x or (out is not None and not is_tracing() and out.data_ptr() == x.data_ptr() != 0)


def _summed_by_backend(x: Tensor, ranks: Ranks, result: Tensor, call: Call) -> Pending:
    return Pending(_built_in(dist.all_reduce, ranks, call, result.copy_(x)), lambda _: result)


def _all_to_everyone(x: Tensor, ranks: Ranks, result: Tensor, call: Call) -> Pending:
    if ranks.built_in is None:
        exchange = ranks.exchange([x] * ranks.size, [None] * ranks.size, call)
        return Pending(exchange, lambda received: fold(received, call.op, result))
    gathered = _start_gather(x.view(-1), ranks, None, call.of(x.view(-1)))  # (W numel,)
    return gathered.then(lambda full: fold_rows(full.view(ranks.size, *x.shape), call.op, result))


def _in_two_stages(x: Tensor, ranks: Ranks, result: Tensor, call: Call) -> Pending:
    flat, into, gap = x.view(-1), result.view(-1), -x.numel() % ranks.size
    if gap:
        flat, into = torch.cat([flat, flat.new_zeros(gap)]), into.new_empty(into.numel() + gap)
    local = into.view(ranks.size, -1)[ranks.rank]
    if _is_place_of(result, x):  # else the sum would overwrite this rank's part of `x`
        local = ranks.empty(local.numel(), local, lent=True)
    scattered = _start_scatter(flat, ranks, local, call.of(flat), fast=False)
    gathered = scattered.then(lambda part: _start_gather(part, ranks, into, call.of(part)).keeping(part))
    return gathered.then(lambda full: result.copy_(full[: x.numel()].view(x.shape)) if gap else result)


def check_combines(kind: str, op: str, dtype: torch.dtype, leaf: str = "") -> None:
    if op not in _COMBINE:
        raise ValueError(f"{kind} knows op={', '.join(map(repr, _COMBINE))}, not {op!r}")
    sums = op == "sum" and (dtype.is_complex or dtype.is_floating_point)  # float8: summed in float32
    if dtype not in _ORDERED and not sums:
        raise TypeError(f"{kind}{leaf}: torch has no {op} of {dtype}: convert it first, or use all_gather")


def all_to_all(x: Tensor, ranks: Ranks, label: str = "", kind: str = "all_to_all") -> Pending:
    """Send part p of dim 0 to rank p, which stores it at this rank's index: (W n, ...) -> (W n, ...).

    `kind` names the call in the tally, `label` in errors. ValueError if W does not divide dim 0 of `x`.

    >>> import fshard
    >>> start = lambda mesh: fshard.reduction.start_all_to_all(torch.arange(2) + mesh.get_rank(), mesh.ranks("shard"))
    >>> fshard.testing.simulate(lambda mesh: start(mesh).wait().tolist(), shard=2)
    [[0, 1], [1, 2]]
    """
    x = x.contiguous()
    check_divides(x.shape, ranks.size, ranks.axis)
    call = _counted(kind, x, ranks, label, (ranks.size - 1) * (x.nbytes // ranks.size))
    with profiled(call.kind, label):
        if ranks.built_in is not None:
            work, place = _dealt(x, ranks, call)
            return Pending(work, lambda _: place)
        out = torch.empty_like(x)
        parts, recvs = _rank_parts(x, ranks), _rank_parts(out, ranks)
        exchange = ranks.exchange(parts, recvs, call)
        recvs[ranks.rank].copy_(parts[ranks.rank])
    return Pending(exchange, lambda _: out)


def deal(
    x: Tensor,
    sizes: Sequence[Sequence[int]],
    ranks: Ranks,
    label: str = "",
    out: Tensor | None = None,
    kind: str = "all_to_all",
    more: str = ", sizes",
) -> Pending:
    """Send `sizes[0][p]` rows to rank p, receive `sizes[1][p]` into the first rows of `out`: (n, ...) -> (m, ...).

    Ranks compare `kind`, `more` and the shape of one row.
    """
    x, (sent, received) = x.contiguous(), sizes
    nbytes = (sum(sent) - sent[ranks.rank]) * (x.nbytes // max(1, len(x)))
    call = _counted(kind, x, ranks, label, nbytes, x.shape[1:], more=more)
    with profiled(kind, label):
        out = x.new_empty(sum(received), *x.shape[1:]) if out is None else out
        # all ranks split off a rest, even if empty, and drop it: equal graphs
        parts, recvs = (
            whole.split([*lengths, len(whole) - sum(lengths)])[:-1] for whole, lengths in ((x, sent), (out, received))
        )
        exchange = ranks.exchange(parts, recvs, call)
        recvs[ranks.rank].copy_(parts[ranks.rank])
    return Pending(exchange, lambda _: out)


def swap(sends: Sequence[Sequence[Tensor]], recvs: Sequence[Held], ranks: Ranks, label: str = "") -> list[list[Tensor]]:
    """Send the flat tensors `sends[p]`, of any sizes and dtypes, to rank p; return the received tensors by rank.

    `recvs[p]`: dtypes and sizes of tensors from rank p. This rank's own entries must be empty.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device=ranks.device)
    data = [nothing] * ranks.size
    for peer, xs in enumerate(sends):
        if xs:
            size = packed_size([(x.dtype, x.numel()) for x in xs])
            # lent: nobody writes to the message again
            data[peer] = pack_bytes([x.to(ranks.device) for x in xs], ranks.empty(size, nothing, lent=True))
    # the text has no sizes: they differ between ranks
    text = f"all_to_all(bytes, axis={ranks.axis!r}) for {label!r}"
    call = _counted("all_to_all", nothing, ranks, label, sum(x.numel() for x in data), text=text)
    places = [ranks.empty(packed_size(row), nothing, lent=False) for row in recvs]
    with profiled(call.kind, label):
        Pending(ranks.exchange(data, places, call), lambda _: nothing).wait()
    return [unpack_bytes(place, row) for place, row in zip(places, recvs, strict=True)]


def broadcast(x: Tensor, ranks: Ranks, src: int = 0, label: str = "") -> Pending:
    """Send rank `src`'s tensor to all ranks: `src` sends W - 1 copies; other ranks' values are ignored.

    `x` has the same shape on all ranks; `label` names the call in errors. ValueError if `src` is no rank of the axis.

    >>> import fshard
    >>> start = lambda mesh: fshard.reduction.start_broadcast(torch.tensor(mesh.get_rank()), mesh.ranks("shard"), src=1)
    >>> fshard.testing.simulate(lambda mesh: start(mesh).wait().tolist(), shard=2)
    [1, 1]
    """
    if not 0 <= src < ranks.size:
        raise ValueError(f"broadcast: src={src}: expected one of the {ranks.size} ranks of axis {ranks.axis!r}, from 0")
    x, sender = x.contiguous(), ranks.rank == src
    call = _counted("broadcast", x, ranks, label, (ranks.size - 1) * x.nbytes if sender else 0, more=f", src={src}")
    out = x.clone() if sender else torch.empty_like(x)
    if ranks.built_in is not None:
        with profiled(call.kind, label):
            return Pending(_built_in(partial(dist.broadcast, group_src=src), ranks, call, as_bytes(out)), lambda _: out)
    nothing = x.new_empty(0)
    sends = [x if sender else nothing] * ranks.size
    recvs = [out if p == src and not sender else nothing for p in range(ranks.size)]
    with profiled(call.kind, label):
        return Pending(ranks.exchange(sends, recvs, call), lambda _: out)


def from_rank(x: Tensor, mesh: AnyMesh, src: int, label: str = "") -> Tensor:
    """Return the tensor of rank `src` of the mesh; `x` has the same shape and dtype on all ranks."""
    sizes = axis_sizes(mesh)
    # lines without `src` first send a wrong tensor; a later axis replaces it
    for axis in reversed(sizes):
        src, coordinate = divmod(src, sizes[axis])
        x = broadcast(x, along(mesh, axis), coordinate, label).wait()
    return x


def buffer(mesh: AnyMesh, axes: Sequence[str], numel: int, like: Tensor, *, lent: bool) -> Tensor:
    """Return a flat tensor; `lent`: written once, then sent along the first of `axes`."""
    return along(mesh, axes[0]).empty(numel, like, lent) if axes else like.new_empty(numel)


def total(
    x: Tensor, mesh: AnyMesh, axes: Axes | None = None, op: str = "sum", label: str = "", more: str = ""
) -> Tensor:
    return start_total(x, mesh, axes, op, label, more).wait()


def start_total(
    x: Tensor, mesh: AnyMesh, axes: Axes | None = None, op: str = "sum", label: str = "", more: str = ""
) -> Pending:
    """Start `total`, and wait along all axes but the last."""
    sizes = axis_sizes(mesh)
    names = tuple(sizes) if axes is None else axes
    needed = [axis for axis in names if sizes[axis] > 1] or names[:1]
    pending = Pending(None, lambda _: x)
    for axis in needed:
        pending = all_reduce(pending.wait(), along(mesh, axis), label, op=op, more=more)
    return pending
