"""Compare values between ranks; tell all ranks of a flag or an error on any rank, or that this rank gives up."""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import call_site, frame_of, line_of
from ..core.func_levels import differentiates
from ..core.storage import words
from . import collectives, primitives
from .mesh import AnyMesh, Axes, Grid, adapted, axis_sizes, mesh_device, num_ranks, to_close
from .primitives import all_gather, all_reduce, along
from .ranks import MismatchError, Ranks

T = TypeVar("T")
M = TypeVar("M", bound=AnyMesh)
_LONGEST_REASON = 2000  # characters
_SAME_TREE = "Build the same tree, in the same order, on all of them"
_QUOTED = 200  # characters
# under 255 bytes: CUDA's assertions take no more
_UNEQUAL = (
    "ranks have states of different steps or seeds: restore the same; or losses of other classes or dtypes: return the "
    "same; or read different units: read the same, with an empty batch, or params_over=(); or, if some use or copy a "
    "unit, regather=False"
)


def check_same(mesh: AnyMesh, describe: str, what: str, remedy: str = _SAME_TREE) -> None:
    """Raise `MismatchError` on every rank if `describe` differs. Ranks send its text only if digests differ."""
    digests = of_all(_sha(describe), mesh)
    other_rank = next((rank for rank, text in enumerate(digests) if text != digests[0]), None)
    if other_rank is None:
        return
    texts = of_all(describe, mesh)  # all ranks send, or none
    sentence = f"rank 0 has {{}}; rank {other_rank} has {{}}"
    raise MismatchError(
        f"{what} differs between ranks: {first_unlike_line(texts[0], texts[other_rank], sentence)}. {remedy}."
    )


def differing_keys(texts: Mapping[str, str], mesh: AnyMesh) -> set[str]:
    """Return the keys of texts unlike between ranks. All ranks must give the same keys."""
    digests = {key: _sha(text) for key, text in texts.items()}
    if len({*of_all(_sha(json.dumps(digests)), mesh)}) == 1:
        return set()
    by_rank = [json.loads(text) for text in of_all(json.dumps(digests), mesh)]
    return {key for key in digests if len({of_rank[key] for of_rank in by_rank}) > 1}


def of_first(text: str, mesh: AnyMesh) -> str:
    """Return rank 0's text.

    >>> of_first("a", None)
    'a'
    """
    return of_all(text, mesh)[0]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def together(
    mesh: AnyMesh,
    make: Callable[[], T],
    remedy: str = "give all ranks the same arguments",
    kind: type[Exception] = MismatchError,
) -> T:
    """Return `make()`, which must not communicate. All ranks must call; if `make` raises on one rank, all raise.

    Other ranks raise `kind` with the first failed rank's text, or an OSError if that rank's error has a number.

    >>> together(None, lambda: 1)
    1
    """
    result, failure = list[T](), None
    try:
        result.append(make())
    except Exception as error:
        failure = error
    texts = of_all("" if failure is None else _described(failure), mesh)
    if failure is not None:
        raise failure
    rank = next((rank for rank, text in enumerate(texts) if text), None)
    if rank is not None:
        number, _, text = texts[rank].partition(" ")
        if int(number):
            raise OSError(int(number), f"rank {rank}: {text}")  # Python picks the subclass by number
        raise kind(f"rank {rank}: {text}. This rank has no such error: {remedy}")
    return result[0]


def _described(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.errno:
        return f"{failure.errno} {failure.strerror}" + (f": {failure.filename!r}" if failure.filename else "")
    return f"0 {type(failure).__name__}: {failure}"


def unlike_index(rows: Sequence[Tensor], mesh: AnyMesh, axes: Axes, label: str = "replicas") -> int | None:
    """Return the number of the first tensor with different bits along `axes`, on all ranks."""
    if not rows or not axes:
        return None
    local = digests(rows, mesh)
    # ~x = -x - 1: one maximum finds both extremes
    most, least = primitives.total(torch.stack([local, ~local]), mesh, axes, op="max", label=label).unbind()
    # over all axes: ranks with equal replicas return the same number
    unlike = primitives.total((most != ~least).long(), mesh, op="max", label=label)
    return next((number for number, differs in enumerate(unlike.tolist()) if differs), None)


def digests(rows: Sequence[Tensor], mesh: AnyMesh) -> Tensor:
    """Sum the bits of contiguous tensors: int64, (number of tensors,)."""
    # changing one bit changes the sum; sums of bytes would take 18 times as long
    sums = (whole.sum() + rest.sum(dtype=torch.int64) for whole, rest in map(words, rows))
    return torch.stack([x.to(mesh_device(mesh)) for x in sums])


def without_place(sums: Tensor, local: Tensor, mesh: AnyMesh) -> Tensor:
    """Return all sums but the last. If ranks added different last numbers, the device stops with an error."""
    torch._assert_async(sums[-1] == local[-1] * num_ranks(mesh), _UNEQUAL)  # private: no public name
    return sums[:-1]


def any_rank(flags: T, mesh: AnyMesh) -> T:
    """Return flags (0-d, 1 or 0), each the maximum over ranks.

    >>> any_rank({"a": torch.tensor(1.0)}, None)
    {'a': tensor(1.)}
    """
    if mesh is None:
        return flags
    leaves, spec = tree.flatten(flags)
    if not leaves:
        return flags
    stacked = torch.stack([flag.to(mesh_device(mesh)) for flag in leaves])
    if differentiates(stacked):
        for axis in axis_sizes(mesh):
            stacked = collectives.of_one("total", stacked, mesh, axis, "found_inf", "max")
    else:
        stacked = primitives.total(stacked, mesh, op="max", label="found_inf")
    return tree.unflatten(spec, list(stacked.unbind()))


def of_all(text: str, mesh: AnyMesh) -> list[str]:
    """Return all ranks' texts.

    >>> of_all("a", None)
    ['a']
    """
    grid = adapted(mesh)
    if grid is None or grid.abstract:
        return [text]
    data, end = text.encode(errors="surrogatepass"), b"\x1e"
    for axis in reversed(axis_sizes(mesh)):
        data = end.join(rows_of_bytes(data, along(mesh, axis)))
    return [row.decode(errors="surrogatepass") for row in data.split(end)]


def rows_of_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    # a row begins with its length, and is padded to the longest row
    data = len(data).to_bytes(8, "little") + data
    length = all_reduce(torch.tensor([len(data)], device=ranks.device), ranks, "bytes", op="max").wait()
    x = torch.frombuffer(bytearray(data.ljust(int(length), b"\0")), dtype=torch.uint8).to(ranks.device)
    rows = all_gather(x, ranks, "bytes").wait().view(ranks.size, -1).cpu()  # (W, length)
    texts = [bytes(row.tolist()) for row in rows]
    return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]


def close(mesh: AnyMesh) -> None:
    """End this rank's communication over a mesh: ranks that wait for this one get a MismatchError at once.

    Call `close` on a rank that gives up; otherwise other ranks wait until the process ends, or until their timeout. The
    error names this rank and, on one host and in checked calls, the exception that this rank handles. Other ranks need
    not call `close`. A second call does nothing.

    - What ends: links and shared memory of one host, connections of checked calls, and gloo's connections of the mesh's
      process groups. Nobody can use these groups again: a mesh of one axis from `init_device_mesh` has the default
      group, which `dist.barrier()` uses. Meshes that share a group, such as `mesh["shard"]`, close together.
    - What stays: the groups. Whoever made them calls `dist.destroy_process_group`, before or after. NCCL's connections
      stay open until then, because kernels may run: GPUs hear at NCCL's timeout, or in a checked call.
    - Afterwards: tensors and states keep their values. Collectives and `make_plan` on the mesh raise RuntimeError,
      collectives under way MismatchError. Make the next mesh of new process groups.
    - `mesh`: a DeviceMesh, a simulated mesh, or a plan's. None and an `AbstractMesh` have nothing to close.

    RuntimeError in a second thread or a forked process. Dual: `make_plan`, which connects ranks.

    >>> import fshard
    >>> def give_up(mesh):
    ...     fshard.close(mesh)
    ...     try:
    ...         fshard.all_reduce(torch.ones(1), mesh, "shard")
    ...     except RuntimeError as error:
    ...         return str(error).partition(" at ")[0]
    >>> fshard.testing.simulate(give_up, shard=1)
    ["axis 'shard' of a mesh: this rank has closed the mesh"]

    Source: torch.distributed.destroy_process_group.
    """
    grid = to_close(mesh)
    if isinstance(grid, Grid):
        grid.close(_reason())


def _reason() -> str:
    failure = sys.exc_info()[1]
    if failure is None:
        return f"has closed the mesh at {call_site()}"
    said = traceback.TracebackException(type(failure), failure, None)  # as `__str__` may raise
    text = f"{type(failure).__name__}: {said}"[:_LONGEST_REASON]
    if failure.__traceback__ is None:
        return f"raised {text}, and has closed the mesh"
    frame = frame_of(failure)
    return f"raised {text} at {line_of(frame.filename, frame.lineno)}, and has closed the mesh"


class closing(Generic[M]):
    """Close a mesh (`close`) at the end of a `with` block. If an exception ends the block, other ranks hear of it.

    `mesh`: as for `close`; the value of the block.

    >>> import fshard
    >>> def job(mesh):
    ...     with fshard.closing(mesh):
    ...         return fshard.all_reduce(torch.ones(1), mesh, "shard").item()
    >>> fshard.testing.simulate(job, shard=2)
    [2.0, 2.0]

    Source: contextlib.closing.
    """

    def __init__(self, mesh: M):
        adapted(mesh)  # raises here, not at the end
        self.mesh: M = mesh

    def __enter__(self) -> M:
        return self.mesh

    def __exit__(self, *failure: object) -> None:
        close(self.mesh)


def first_unlike_line(a: str, b: str, sentence: str) -> str:
    """Fill the two `{}` of `sentence` with the first unlike lines."""
    end = "nothing more"
    pairs = zip_longest(a.splitlines(), b.splitlines(), fillvalue=end)
    x, y = next(((x, y) for x, y in pairs if x != y), (end, end))
    at = next((number for number, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    return sentence.format(_quoted(x, at), _quoted(y, at))


def _quoted(line: str, at: int) -> str:
    begin, end = max(0, at - _QUOTED), at + _QUOTED
    return "..." * (begin > 0) + line[begin:end] + "..." * (end < len(line))
