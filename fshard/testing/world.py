"""Ranks without processes: the same step on several ranks in one process, in a fixed order, under a debugger.

Note [One for all]
    What a gather or a reduction gives is worked out once, by the last rank to arrive, from the tensors of all: work
    in proportion to the number of ranks, where W messages of each of W ranks would make its square. Results are
    copied to each: no rank sees what another writes later.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.log import Call
from ..comm.mesh import Grid, digits, numbered
from ..comm.primitives import fold, sum_dtype
from ..comm.process_groups import Works, places
from ..comm.ranks import Exchange, MismatchError
from ..core.arguments import check_flags, check_whole, wrong
from .late import UnderWay
from .scheduler import Collective, Fault, Post, Run, Stopped, on_threads


def _deliver(posts: list[Post]) -> None:
    """A tensor of each rank to each other."""
    for i, post in enumerate(posts):
        for j, source in enumerate(posts):
            if i != j and post.places[j].numel():
                post.places[j].copy_(source.sent[i])


def _garbled(post: Post) -> bool:
    return post.sent is not post.own


def _received(post: Post, posts: list[Post]) -> list[Tensor]:
    """What all sent; of this rank itself what it has."""
    return [p.own[0] if p is post else p.sent[0] for p in posts]


def _fill(place: Tensor, xs: list[Tensor]) -> None:
    for part, x in zip(place.chunk(len(xs)) if place.numel() else [], xs, strict=False):
        part.copy_(x)


def _gather(posts: list[Post]) -> None:
    # by way of one rank's place: another tensor would count as the memory of the rank that came last
    filled = None
    for post in posts:
        (place,) = post.places
        if filled is None or _garbled(post):
            _fill(place, _received(post, posts))
            filled = filled if _garbled(post) else place
        else:
            place.copy_(filled)


def _sums(posts: list[Post], op: str) -> list[tuple[Tensor, Tensor]]:
    """Every rank's place, and what to take from: one sum for all but those whose messages are garbled."""
    x = posts[0].own[0]
    dtype = sum_dtype(x.dtype) if op == "sum" else x.dtype
    common = fold([p.sent[0] for p in posts], op, torch.empty_like(x, dtype=dtype))
    own = [fold(_received(p, posts), op, torch.empty_like(common)) if _garbled(p) else common for p in posts]
    return [(post.places[0], total) for post, total in zip(posts, own, strict=True)]


def _scatter(posts: list[Post]) -> None:
    for number, (place, total) in enumerate(_sums(posts, "sum")):
        numel = total.shape[0] // len(posts)
        place.copy_(total.narrow(0, number * numel, numel))


def _reduce(posts: list[Post], op: str) -> None:
    for place, total in _sums(posts, op):
        place.copy_(total)


class SimulatedMesh(Grid):
    """The mesh one simulated rank sees: it reads like a DeviceMesh with the world's axes."""

    def __init__(self, run: Run, rank: int, under_way: UnderWay | None = None):
        super().__init__(run.sizes, rank, digits(rank, [*run.sizes.values()]), run.device)
        self._run, self.under_way = run, under_way  # of a late world
        self._ranks: dict[str, _SimulatedRanks] = {}

    def ranks(self, axis: str) -> _SimulatedRanks:
        """The ranks along one axis (what `fshard.comm` asks of a mesh)."""
        if axis not in self._ranks:
            self._ranks[axis] = _SimulatedRanks(self, self._run, axis)
        return self._ranks[axis]


class _SimulatedRanks:
    built_in = None

    def __init__(self, mesh: SimulatedMesh, run: Run, axis: str):
        self.axis, self._run, self._me, self._under_way = axis, run, mesh.get_rank(), mesh.under_way
        self.device = mesh.device
        number = mesh.mesh_dim_names.index(axis)
        self.rank, self.size = mesh.get_coordinate()[number], mesh.shape[number]
        stride = math.prod(mesh.shape[number + 1 :])
        first = self._me - self.rank * stride
        self._group = tuple(first + i * stride for i in range(self.size))

    @property
    def whole(self) -> _SimulatedRanks | None:
        # late ones are made of exchanges, as those of process groups are
        return self if self._under_way is None else None

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        return like.new_empty(numel)

    def idle(self, x: Tensor) -> bool:
        return True

    def _meet(
        self, call: Call, sends: Sequence[Tensor], into: Sequence[Tensor], act: Callable[[list[Post]], None]
    ) -> Exchange:
        post = Post(self._me, call, sends, into, act, sends)
        if self.size == 1:
            with torch.no_grad():
                act([post])
            return Works([], post.places)
        # ranks may have streams of their own, and the last to arrive moves the data of all on its own
        far = self.device.type != "cpu"
        if far:
            torch.get_device_module(self.device).synchronize()
        found = self._run.meet(self._group, post)
        if far:
            torch.get_device_module(self.device).synchronize()
        return Works([], found)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Exchange:
        into = places(sends, recvs, self.rank)
        if self._under_way is None:
            return self._meet(call, sends, into, _deliver)
        # a gather sends from its place: a backend that is given the tensor itself writes this rank's part as well
        gathers = recvs[self.rank] is sends[self.rank]
        aside = [place.clone() if rank == self.rank else torch.empty_like(place) for rank, place in enumerate(into)]
        self._meet(call, sends, aside, _deliver)
        to, results = ([x for rank, x in enumerate(xs) if gathers or rank != self.rank] for xs in (into, aside))
        return self._under_way.start(call, [] if gathers else sends, to, results, into)

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> Exchange:
        # one of its own even if it is lent: a rank's memory is to live and die as it would in a process
        place = x.new_empty(self.size * x.shape[0], *x.shape[1:]) if out is None else out
        return self._meet(call, [x], [place], _gather)

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        place = x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if out is None else out
        return self._meet(call, [x], [place], _scatter)

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        place = torch.empty_like(x) if out is None else out
        return self._meet(call, [x], [place], lambda posts: _reduce(posts, call.op))


def _load_forward_mode() -> None:
    with warnings.catch_warnings():  # torch 2.13 scripts a few formulas when it is first used, and warns of that itself
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        torch.func.jvp(torch.neg, (torch.zeros((), device="cpu"),), (torch.zeros((), device="cpu"),))


def _on_rank(mesh: SimulatedMesh, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    result = fn(mesh, *args)
    if mesh.under_way is not None:
        mesh.under_way.check_none()
    return result


def _on_ranks(
    world: World, fn: Callable[..., Any], args: Sequence[Any]
) -> tuple[list[Collective], list[Any], BaseException | None]:
    """`fn(mesh, *args)` on every rank: the collectives, the results in rank order, and what failed."""
    run = Run(world.axes, numbered(world.device), world.faults)
    results: list[Any] = [None] * run.num_ranks
    num_threads = torch.get_num_threads()

    def rank_main(rank: int) -> None:
        failure: BaseException | None = None
        try:
            run.begin(rank)
            torch.set_num_threads(num_threads)
            if run.device.type != "cpu":  # a thread's own: without it the first of its kind
                torch.get_device_module(run.device).set_device(run.device)
            # else ranks would wait for each other inside CUDA's one backward thread
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = _on_rank(SimulatedMesh(run, rank, UnderWay() if world.late else None), fn, args)
        except Stopped as stopped:
            hidden = stopped.__context__
            if hidden is not None and run.failure is not None and hidden is not run.failure:
                run.failure.add_note(f"(simulated rank {rank} was handling {hidden!r})")
        except BaseException as error:
            if not isinstance(error, MismatchError):
                error.add_note(f"(raised in simulated rank {rank} of {run.num_ranks})")
            failure = error
        run.end(rank, failure)

    def all_ranks(x: Tensor) -> Tensor:
        on_threads(run, rank_main)
        return x

    try:
        # Forward-mode levels belong to the process: a rank whose jvp ends would end the others'. Inside this one,
        # which no rank ever sees, theirs open none.
        _load_forward_mode()
        torch.func.jvp(all_ranks, (torch.zeros((), device="cpu"),), (torch.zeros((), device="cpu"),))
    finally:
        run.generators.restore()
    return run.log, results, run.failure


class World:
    """Simulated ranks: `run(fn, *args)` calls `fn(mesh, *args)` on each, in this process, and gives the results.

    `axes` are names and sizes, the first the slowest, in place of `replicate` and `shard`. Ranks advance in a fixed
    order, which timing does not change, and reductions add in rank order. Each has random states of its own: python's,
    numpy's (if it was imported before), torch's; they follow from the caller's, which are as before afterwards. The
    first exception of any rank stops all and is raised, with a note of the rank; ranks that call different
    collectives, or of which one ends early, raise MismatchError naming both sides. `log` has the collectives of the
    latest run, each once, in the order in which they were done; along an axis of one rank there are none. `faults` are
    what is to go wrong: `Dies`, `Garbage`, `Slow`. In a `late` world collectives are a GPU's: results arrive when they
    are waited for, until then their places hold NaN (whole numbers: bytes 0xA5), and it is an InFlightError to write to
    what is sent or received meanwhile, or never to wait; a gather or a sum is logged as the messages it is made of.
    Inside, use torch.func.jvp, not dual levels of your own (torch has one for all threads). ValueError for axes without
    ranks, and for faults of ranks that are not there.

    >>> world = World(axes={"data": 2, "model": 3})
    >>> world.run(lambda mesh: all_reduce(torch.tensor(mesh.get_rank()), mesh, "model", label="sums").item())
    [3, 3, 3, 12, 12, 12]
    >>> [(one.kind, one.unit, one.ranks) for one in world.log]
    [('all_reduce', 'sums', (0, 1, 2)), ('all_reduce', 'sums', (3, 4, 5))]
    """

    def __init__(
        self,
        shard: int = 4,
        replicate: int = 1,
        *,
        axes: Mapping[str, int] | None = None,
        device: str = "cpu",
        faults: Sequence[Fault] = (),
        late: bool = False,
    ):
        check_flags(**{"a simulated world: late": late})
        if axes is not None and not isinstance(axes, Mapping):
            raise TypeError(f"a simulated world: {wrong('axes', axes, 'a dict of the number of ranks by axis')}")
        if axes is not None and not axes:
            raise ValueError("a simulated world: axes={}: expected axes, a dict of the number of ranks by axis")
        self.axes = {"replicate": replicate, "shard": shard} if axes is None else dict(axes)
        for axis, number in self.axes.items():
            check_whole(f"a simulated world: {axis}", number, what="a number of ranks along this axis")
        num = math.prod(self.axes.values())
        for fault in faults:
            if not isinstance(fault, Fault):
                raise TypeError(f"a simulated world: {wrong('faults', fault, 'Dies, Garbage or Slow of a rank')}")
            if not 0 <= fault.rank < num or getattr(fault, "at", 0) < 0:
                raise ValueError(f"{fault}: expected one of the {num} ranks, from 0, and a collective from 0 on")
        self.size, self.device, self.faults, self.late = num, device, tuple(faults), late
        self.log: list[Collective] = []

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(mesh, *args)` once for every rank; the results in rank order."""
        if not callable(fn):
            raise TypeError(f"a simulated world: {wrong('fn', fn, 'fn(mesh, *args), a function')}")
        self.log, results, failure = _on_ranks(self, fn, args)
        if failure is not None:
            raise failure
        return results
