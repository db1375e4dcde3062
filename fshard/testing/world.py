"""Simulated ranks: run the ranks of a step as threads of one process, in a fixed order, also under a debugger.

Note [One for all]
    The last rank to arrive at a gather or a reduction computes the result once: work grows with the number of ranks,
    not with its square. Each rank gets a copy of the result, so writes of one rank change no other rank's copy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..comm.mesh import Grid, axis_sizes, digits, numbered
from ..comm.primitives import fold, sum_dtype
from ..comm.process_groups import outputs_of
from ..comm.ranks import Arrived, Call, Exchange, MismatchError, differing_sizes
from ..core import tree
from ..core.arguments import call_site, check_flags, check_whole, expect, wrong
from ..core.tree import Tree
from ..layout.pieces import Parts, Unreduced, mesh_of
from ..sharding.sharded import gather_params
from .late import Late, UnderWay
from .rng import with_threads
from .scheduler import Collective, Fault, Post, Stopped, WorldRun, on_threads

T = TypeVar("T")


def _deliver(posts: list[Post]) -> None:
    for i, post in enumerate(posts):
        for j, source in enumerate(posts):
            sent, place = source.sent[i], post.places[j]
            if i != j and sent.nbytes != place.nbytes:
                raise MismatchError(differing_sizes(post.call, f"rank {j}, to rank {i},", sent.nbytes, place.nbytes))
            if i != j and place.numel():
                place.copy_(sent)


def _garbled(post: Post) -> bool:
    return post.sent is not post.own  # the fault `Garbage` replaces `sent` by copies


def _received(post: Post, posts: list[Post]) -> list[Tensor]:
    return [p.own[0] if p is post else p.sent[0] for p in posts]


def _fill(place: Tensor, xs: list[Tensor]) -> None:
    """Copy W tensors (n, ...) to `place` (W n, ...); W: the number of ranks."""
    # not strict: `chunk` cuts an empty tensor into one part
    for part, x in zip(place.chunk(len(xs)) if place.numel() else [], xs, strict=False):
        part.copy_(x)


def _gather(posts: list[Post]) -> None:
    # fill one rank's output, and copy it: a new tensor would count as memory of the last rank to arrive
    filled = None
    for post in posts:
        (place,) = post.places
        if filled is None or _garbled(post):
            _fill(place, _received(post, posts))
            filled = filled if _garbled(post) else place
        else:
            place.copy_(filled)


def _sums(posts: list[Post], op: str) -> list[tuple[Tensor, Tensor]]:
    """Return (output, total) of each rank. If `Garbage` changes what a rank sends, only this rank's total is right."""
    x = posts[0].own[0]
    dtype = sum_dtype(x.dtype) if op == "sum" else x.dtype
    common = fold([p.sent[0] for p in posts], op, torch.empty_like(x, dtype=dtype))
    totals = [fold(_received(p, posts), op, torch.empty_like(common)) if _garbled(p) else common for p in posts]
    return [(post.places[0], total) for post, total in zip(posts, totals, strict=True)]


def _scatter(posts: list[Post]) -> None:
    for number, (place, total) in enumerate(_sums(posts, "sum")):  # place: (n, ...), total: (W n, ...)
        numel = total.shape[0] // len(posts)
        place.copy_(total.narrow(0, number * numel, numel))


def _reduce(posts: list[Post], op: str) -> None:
    for place, total in _sums(posts, op):
        place.copy_(total)


class SimulatedMesh(Grid):
    """The mesh of one simulated rank, with the methods of a DeviceMesh and the axes of the world."""

    def __init__(self, run: WorldRun, rank: int, under_way: UnderWay | None = None):
        super().__init__(run.sizes, rank, digits(rank, [*run.sizes.values()]), run.device)
        self.run, self.under_way = run, under_way  # `under_way`: only in a late world
        self._ranks: dict[str, _SimulatedRanks] = {}
        self._root: SimulatedMesh | None = None  # the mesh of all axes

    def __getitem__(self, names: str | tuple[str, ...]) -> SimulatedMesh:
        """Return the mesh of some axes, named in this mesh's order."""
        axes = (names,) if isinstance(names, str) else names
        if not axes or tuple(axis for axis in self.mesh_dim_names if axis in axes) != axes:
            raise ValueError(f"mesh[{names!r}]: expected names of axes of {self.mesh_dim_names}, in this order")
        part = copy(self)
        sizes = {axis: self.size(axis) for axis in axes}
        Grid.__init__(part, sizes, self._rank, [self.get_local_rank(axis) for axis in axes], self.device)
        part._root = self._root or self
        return part

    def close(self, why: str) -> None:
        self.run.closed.setdefault(self._rank, why)

    def ranks(self, axis: str) -> _SimulatedRanks:
        """Return the ranks along one axis, with the collectives that `fshard.comm` calls.

        RuntimeError after `close`.
        """
        if why := self.run.closed.get(self._rank):
            raise RuntimeError(f"axis {axis!r} of a mesh: this rank {why}")
        if axis not in self._ranks:
            self._ranks[axis] = _SimulatedRanks(self._root or self, self.run, axis)
        return self._ranks[axis]


class _SimulatedRanks:
    built_in = None

    def __init__(self, mesh: SimulatedMesh, run: WorldRun, axis: str):
        self.axis, self._run, self._me, self._under_way = axis, run, mesh.get_rank(), mesh.under_way
        self.device = mesh.device
        number = mesh.mesh_dim_names.index(axis)
        self.rank, self.size = mesh.get_coordinate()[number], mesh.shape[number]
        stride = math.prod(mesh.shape[number + 1 :])  # between neighbours along the axis; the last axis varies fastest
        first = self._me - self.rank * stride
        self._group = tuple(first + i * stride for i in range(self.size))

    @property
    def whole(self) -> _SimulatedRanks | None:
        # None in a late world: gathers and sums are made of exchanges, as over process groups
        return self if self._under_way is None else None

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        if not lent or self._under_way is None:
            return like.new_empty(numel)
        return self._under_way.lent.empty(numel, like)

    def _meet(
        self, call: Call, sends: Sequence[Tensor], into: Sequence[Tensor], act: Callable[[list[Post]], None]
    ) -> Exchange:
        if self.size == 1:  # `into` has a rank's message to itself already
            return Arrived(into)
        post = Post(self._me, call, sends, into, act, sends)
        # synchronize: the last rank to arrive copies all data on its own stream
        asynchronous = self.device.type != "cpu"
        if asynchronous:
            torch.get_device_module(self.device).synchronize()
        outputs = self._run.meet(self._group, post)
        if asynchronous:
            torch.get_device_module(self.device).synchronize()
        return Arrived(outputs)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Exchange:
        into = outputs_of(sends, recvs, self.rank)
        if self._under_way is None:
            return self._meet(call, sends, into, _deliver)
        # a gather's output contains this rank's tensor, and a backend writes the whole output
        gathers = recvs[self.rank] is sends[self.rank]
        aside = [place.clone() if rank == self.rank else torch.empty_like(place) for rank, place in enumerate(into)]
        self._meet(call, sends, aside, _deliver)
        to, results = ([x for rank, x in enumerate(xs) if gathers or rank != self.rank] for xs in (into, aside))
        reads = [*{id(x): x for x in sends if x is not recvs[self.rank]}.values()]
        return self._under_way.start(Late(call, call_site(), sends, reads, to, results, into, self._under_way))

    def _whole(self, call: Call, x: Tensor, place: Tensor, act: Callable[[list[Post]], None]) -> Exchange:
        if self.size > 1:
            return self._meet(call, [x], [place], act)
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            return Arrived([place.copy_(x)])  # in the dtype of `place`

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> Exchange:
        # new memory even if `lent`, as over process groups
        place = x.new_empty(self.size * x.shape[0], *x.shape[1:]) if out is None else out
        return self._whole(call, x, place, _gather)

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        place = x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if out is None else out
        return self._whole(call, x, place, _scatter)

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        place = torch.empty_like(x) if out is None else out
        return self._whole(call, x, place, lambda posts: _reduce(posts, call.op))


def _load_forward_mode() -> None:
    # torch 2.11 for CUDA without a GPU leaves a guard in the first fake tensors' thread: make these before ranks do
    with FakeTensorMode() if torch.version.cuda and not torch.cuda.is_available() else nullcontext():
        pass
    with warnings.catch_warnings():  # torch scripts some formulas at the first use, and warns about it
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        torch.func.jvp(torch.neg, (torch.zeros((), device="cpu"),), (torch.zeros((), device="cpu"),))


def _on_rank(mesh: SimulatedMesh, fn: Callable[..., T], args: Sequence[object]) -> T:
    result = fn(mesh, *args)
    if mesh.under_way is not None:
        mesh.under_way.check_none()
    return result


def _on_ranks(run: WorldRun, world: World, fn: Callable[..., T], args: Sequence[object]) -> dict[int, T]:
    results = dict[int, T]()

    def rank_main(rank: int) -> None:
        failure: BaseException | None = None
        try:
            run.begin(rank)
            torch.set_num_threads(world.threads)
            if run.device.type != "cpu":  # a new thread has device 0
                torch.get_device_module(run.device).set_device(run.device)
            # autograd has one thread per CUDA device: in it, the backwards of all ranks would wait for each other
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
        # levels of forward-mode AD belong to the process: when one rank's jvp ends, it would end other ranks' levels.
        # Inside this outer jvp, a rank's jvp opens no level
        _load_forward_mode()
        with with_threads(world.threads):
            torch.func.jvp(all_ranks, (torch.zeros((), device="cpu"),), (torch.zeros((), device="cpu"),))
    finally:
        for generator in run.generators:
            generator.restore()
    if run.failure is not None:
        raise run.failure
    return results


def _check_result(result: Tree, rank: int, run: WorldRun) -> None:
    if tree.nodes(result, Unreduced):
        raise TypeError(
            f"World.gather: results[{rank}]: expected reduced gradients, got Unreduced, each rank's own: call "
            "fshard.reduce_grads inside the world"
        )
    for mesh in (part.mesh for part in tree.nodes(result, Parts)):
        if isinstance(mesh, SimulatedMesh) and (mesh.run is not run or mesh.get_rank() != rank):
            raise ValueError(
                f"World.gather: results[{rank}]: expected what rank {rank} returned in the first one's run, got what "
                f"rank {mesh.get_rank()} of {'this' if mesh.run is run else 'another'} run returned. Give the list "
                "that one run returned, in its order"
            )


class World:
    """Simulated ranks: `run(fn, *args)` calls `fn(mesh, *args)` once per rank in this process, and returns results.

    - `axes`: sizes by name of mesh axis, slowest-varying first, in place of `replicate` and `shard`.
    - `device`: the device of all ranks.
    - `faults`: faults to inject: `Dies`, `Garbage`, `Slow`.
    - `late=True`: collectives behave as on a GPU: `wait` delivers the result, and until then outputs hold NaN
      (integers: bytes 0xA5). InFlightError for a write to a tensor of an unfinished collective, and for a collective
      without a wait. `log` then lists the messages of gathers and sums.
    - `threads`: threads of each rank's operators (`torch.set_num_threads`): 1 by default, as under torchrun. The number
      sets the order of sums. After the run, torch has the caller's number again.

    Ranks run in a fixed order, and reductions add in rank order. Each rank has random states of python, numpy (if
    imported before) and torch, seeded from the caller's states. The run restores the caller's states.

    The first exception on any rank stops all ranks and is raised, with a note that names the rank. If ranks call
    different collectives, or one rank returns early, MismatchError names the ranks and their calls. `log` lists each
    collective of the latest run once, in order, without collectives along an axis of one rank.

    For forward-mode AD, `fn` must use torch.func.jvp: ranks would share the level of forward_ad.dual_level. ValueError
    for an axis without ranks, and for a fault of an unknown rank.

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
        threads: int = 1,
    ):
        check_flags(**{"a simulated world: late": late})
        if axes is not None and not isinstance(axes, Mapping):
            raise TypeError(f"a simulated world: {wrong('axes', axes, 'a dict of the number of ranks by axis')}")
        if axes is not None and not axes:
            raise ValueError("a simulated world: axes={}: expected axes, a dict of the number of ranks by axis")
        self.axes = {"replicate": replicate, "shard": shard} if axes is None else dict(axes)
        for axis, number in self.axes.items():
            check_whole(f"a simulated world: {axis}", number, what="a number of ranks along this axis")
        check_whole("a simulated world: threads", threads, what="a number of threads")
        num = math.prod(self.axes.values())
        for fault in faults:
            expect("a simulated world: faults", fault, isinstance(fault, Fault), "Dies, Garbage or Slow of a rank")
            if not 0 <= fault.rank < num or getattr(fault, "at", 0) < 0:
                raise ValueError(f"{fault}: expected one of the {num} ranks, from 0, and a collective from 0 on")
        self.size, self.device, self.faults, self.late, self.threads = num, device, tuple(faults), late, threads
        self.log: list[Collective] = []

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Call `fn(mesh, *args)` once for every rank, and return the results in rank order."""
        expect("a simulated world: fn", fn, callable(fn), "fn(mesh, *args), a function")
        run = WorldRun(self.axes, numbered(self.device), self.faults)
        self.log = run.log
        results = _on_ranks(run, self, fn, args)
        return [results[rank] for rank in range(self.size)]

    def gather(self, results: Sequence[Tree]) -> Tree:
        """Return rank 0's result, with each `Sharded` and optimizer state made whole from all ranks' results.

        `results`: from one run of a world with these axes, in rank order (else ValueError). TypeError if nothing in
        `results` is sharded, or gradients are not reduced.

        >>> from fshard import make_plan, shard_params
        >>> world, params = World(shard=2), {"w": torch.arange(3.0)}
        >>> world.gather(world.run(lambda mesh: shard_params(params, make_plan(params, mesh))))
        {'w': tensor([0., 1., 2.])}
        """
        if not isinstance(results, list | tuple) or len(results) != self.size:
            raise ValueError(f"World.gather: {wrong('results', results, f'a list of what {self.size} ranks returned')}")
        mesh = mesh_of(results)
        if not isinstance(mesh, SimulatedMesh) or mesh.run.sizes != self.axes:
            where = "in nothing that is sharded" if mesh is None else f"over axes {axis_sizes(mesh)}"
            raise TypeError(f"World.gather: results: expected a Sharded of ranks over axes {self.axes}, got {where}")
        if not mesh.run.over.is_set():
            raise RuntimeError("World.gather: the world still runs: call fshard.gather_params in it, on every rank")
        for rank, result in enumerate(results):
            _check_result(result, rank, mesh.run)
        mesh.run.reopen()
        return _on_ranks(mesh.run, self, lambda rank: gather_params(results[rank.get_rank()]), ())[0]
