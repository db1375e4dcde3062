"""`Sharded`, a tree in shards on ranks: made, gathered, and cut over more or fewer axes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..comm import collectives, consensus, primitives
from ..comm.mesh import AnyMesh, Axes, mesh_device, rank_in
from ..core import tree
from ..core.arguments import check_whole, wrong
from ..core.differences import equal_values, lacking
from ..core.func_levels import depending, differentiates
from ..core.lazy import Container, Readable
from ..core.random import HOST
from ..core.storage import Life, Source
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parts, Views, packed
from ..layout.row import Row, Span
from ..layout.rules import COPIES, reshard
from ..plan import ahead
from ..plan.leaves import check_tensors, memory_key
from ..plan.owners import Picture, picture
from ..plan.plan import Plan, Slot, check_plain
from ..plan.planning import with_policy
from ..plan.precision import SomePolicy
from ..whole.moves import gathered
from .schedule import View, check_replaced, check_static


class Sharded(Parts, Readable):
    """This rank's shards of parameters, gradients or optimizer state: a pytree node.

    The node's leaves are flat 1-D tensors, one for each kind (dtype, trainable or frozen, sharded or whole): this
    rank's shards of all units, end to end, padded with zeros. `x["blocks"][3]` is a subtree, still sharded.
    """

    __getitem__, __getattr__ = Readable.__getitem__, Readable.__getattr__  # `Parts` refuses these

    # while a tree is mapped, `tensors` may be anything
    def __init__(self, view: View, tensors: Sequence[Tensor], life: Life | None = None):
        self.view = view
        self._tensors = tuple(tensors)
        self._life = life or Life()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The leaves, (n / W,) for each kind of the view. DonatedError after they were given away."""
        self._life.check(type(self).__name__, "tensors")
        return self._tensors

    def by_kind(self) -> list[tuple[int, Tensor]]:
        """The leaves, each with its kind."""
        return [(kind, x) for (kind, _), x in zip(self.view.tensors, self.tensors, strict=True)]

    @property
    def key(self) -> View:
        """The view: two `Sharded` with equal views can be combined."""
        return self.view

    def give_away(self) -> None:
        """Make every use of this value and its subtrees a DonatedError."""
        self._life.given_away = True

    @property
    def layout(self) -> Layout:
        """The positions of the leaves' elements, on all ranks."""
        return self.view.layout

    @property
    def plan(self) -> Plan:
        """The plan of the tree."""
        return self.view.plan

    @property
    def home(self) -> Plan:
        """The plan."""
        return self.plan

    @property
    def mesh(self) -> AnyMesh:
        """The mesh of the plan."""
        return self.plan.live_mesh()

    @property
    def trainable(self) -> Sharded:
        """The trainable kinds: the structure of gradients and optimizer state."""
        return self.only(k for k in self.view.kinds if self.plan.kinds[k].trainable)

    @property
    def for_state(self) -> Sharded:
        """The trainable kinds, cut over `state_over`: a copy if `state_over` cuts them further."""
        return packed(refine(self.trainable, self.plan.state_over))

    def with_trained(self, fine: Sharded | Views[View]) -> Sharded:
        """Return these parameters with trainable kinds gathered from `fine`, a tree cut over `state_over`."""
        return self.updated(coarsen(fine, self.plan.params_over))

    def with_policy(self, policy: SomePolicy) -> Sharded:
        """Return the same tensors under another policy for computation, such as full precision to evaluate.

        ValueError if the policy stores other dtypes, or has different dtypes for leaves of one flat buffer.

        >>> plan = make_plan(torch.tensor([0.1]), policy="compute=bf16")
        >>> params = shard_params(torch.tensor([0.1]), plan)
        >>> [evaluate(lambda w: w.double().sum())(x) for x in (params, params.with_policy(None))]
        [tensor(0.1001, dtype=torch.float64), tensor(0.1000, dtype=torch.float64)]
        """
        return Sharded(replace(self.view, plan=with_policy(self.plan, policy)), self.tensors, self._life)

    def replace(self, subtrees: Mapping[str, Tree]) -> Sharded:
        """Return this tree with other values for subtrees, by path: whole tensors, or a `Sharded` of any plan.

        Floating dtypes are cast. Every rank must call this. ValueError: other names, shapes or dtypes, or unequal ties.

        >>> gather_params(shard_of({"body": torch.zeros(2), "head": torch.zeros(1)}).replace({"head": torch.ones(1)}))
        {'body': tensor([0., 0.]), 'head': tensor([1.])}
        """
        return _replaced(self, subtrees)

    def by_plan(self, plan: Plan) -> Sharded:
        """Return the same tensors, by a plan with other units."""
        return Sharded(replace(self.view, plan=plan, units=(0, len(plan.units))), self.tensors, self._life)

    def only(self, kinds: Iterable[int]) -> Sharded:
        """Return the tree of some kinds, with the same tensors: both trees are given away together."""
        keep = tuple(kinds)
        if keep == self.view.kinds:
            return self
        by_kind = dict(zip(self.view.kinds, self.tensors, strict=True))
        return Sharded(replace(self.view, kinds=keep), [by_kind[k] for k in keep], self._life)

    def updated(self, new: Sharded) -> Sharded:
        """Return this tree, with the tensors of `new` for the kinds of `new`."""
        by_kind = dict([*self.by_kind(), *new.by_kind()])
        return Sharded(self.view, [by_kind[k] for k in self.view.kinds])

    def shard(self, unit: int, kind: int) -> Tensor:
        """This rank's shard (n / W,) of one unit and kind, a view."""
        return self.view.rows[unit, kind].of(self.tensors)

    def local_views(self) -> dict[str, Tensor]:
        """This rank's piece of every leaf, by path: 1-D views, empty if other ranks hold the whole leaf.

        Ranks along uncut axes have the same pieces, so a sum over ranks counts some elements several times.
        `optim.global_norm(x)` and `tree.dot`, of the tree, a subtree or a leaf (`x["head"]`), count each element once.

        >>> grads = shard_of({"w": torch.ones(4), "head": torch.full((4,), 2.0)})
        >>> grads.local_views()["w"], optim.global_norm(grads["head"])
        (tensor([1., 1., 1., 1.]), tensor(4.))
        """
        layout, views = self.layout, {}
        names = self.plan.paths[self.view.first :][: self.view.spec.num_leaves]
        for path, number in zip(names, layout.leaf_at, strict=True):
            if number is not None:
                span = layout.span_of.get(number) or Span(number, layout.row_of[number].tensor, 0, 0, 0)
                views[path] = self.tensors[span.tensor][span.start : span.start + span.numel]
        return views

    def gathered(self, parts: bool = False) -> Tree:
        """Return the tree of whole tensors, or of this rank's parts."""
        slots, whole = self.view.slots(), dict[Slot, Tensor]()
        # sorted: ranks start the same gathers in one order
        for unit, kind in sorted({(s.unit, s.kind) for s in slots if s.kind in self.view.kinds}):
            whole.update(leaves_of_unit(self, unit, kind, parts))
        # None for a leaf of a missing kind: a frozen leaf among gradients
        return tree.unflatten(self.view.spec, [whole.get(slot) for slot in slots])

    def _container_(self) -> Container:
        return self.plan.container(self.view.spec, self.view.first)

    def _pick_(self, index: int) -> Tree:
        spec, first = self._container_().children[index]
        if spec.num_leaves == 0:
            return tree.unflatten(spec, [])
        first += self.view.first
        view = replace(self.view, spec=spec, first=first, units=self.plan.units_of(first, spec.num_leaves))
        parts = []
        for kind, x in zip(self.view.kinds, self.tensors, strict=True):
            row = next((row for row in view.rows.values() if row.kind == kind), None)  # the kind's first row
            start = self.view.rows[row.unit, kind].start if row else 0
            parts.append(x[start : start + view.numel(kind)])
        return Sharded(view, parts, self._life)

    def picture(self) -> Picture:
        """The ranks and their parts of this tree, as `fshard.show` shows it."""
        itemsize = {kind: x.itemsize for kind, x in self.by_kind()}
        sizes = [itemsize.get(kind, 0) for kind in range(len(self.plan.kinds))]
        over = f"over {','.join(self.view.over)}" if self.view.over else "whole on every rank"
        lines = self.plan.lines({"of a rank": (self.view.over, sizes)}, range(*self.view.units))
        lines = [line for line in lines if line.shares]
        return picture([f"Sharded on {dict(self.plan.axes) or 'one device'}"], {"of a rank": over}, lines)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def __repr__(self) -> str:
        # `x` may be no tensor while a tree is mapped
        tensors = (f"{self.plan.kinds[k]}{list(getattr(x, 'shape', ['?']))}" for k, x in self.by_kind())
        return f"Sharded({self.view.spec.num_leaves} leaves over {self.view.over or 'no axis'}: {', '.join(tensors)})"


def _flatten(x: Sharded) -> tuple[tuple[Tensor, ...], View | Source]:
    return x.tensors, (x.view if torch.compiler.is_dynamo_compiling() else Source(x.view, weakref.ref(x)))


def _unflatten(source: View | Source, tensors: Iterable[Tensor]) -> Sharded:
    """Make a `Sharded`, given away with its source if they share trainable tensors."""
    view, old = (source.static, source.of()) if isinstance(source, Source) else (source, None)
    assert isinstance(view, View)
    new = tuple(tensors)
    pairs = zip(view.kinds, old._tensors if old is not None else (), new, strict=False)
    # a donated step writes to trainable kinds alone: sharing frozen ones is safe
    shared = any(before is x and view.plan.kinds[kind].trainable for kind, before, x in pairs)
    return Sharded(view, new, old._life if old is not None and shared else None)


tree.register(Sharded, _flatten, _unflatten)


def in_new_containers(x: Tree) -> Tree:
    return tree.map_tops(lambda top: Sharded(top.view, top.tensors) if isinstance(top, Sharded) else top, Sharded, x)


def whole_view(plan: Plan, over: Axes, kinds: Sequence[int]) -> View:
    return View(plan, over, tuple(kinds), plan.spec, 0, (0, len(plan.units)))


def shard_params(params: Tree, plan: Plan, src: int | None = None) -> Sharded:
    """Cut `params`, a tree of whole tensors, into this rank's shards. Values are copied.

    If `src` is a rank of the mesh, all ranks receive this rank's values, leaf by leaf; others may pass meta tensors.
    Without `src` every rank passes the same values. ValueError if the tree, or a leaf's shape, dtype or device, is not
    the plan's. Dual: `gather_params`.

    >>> plan = make_plan({"w": torch.arange(3.0)})
    >>> gather_params(shard_params({"w": torch.arange(3.0)}, plan))
    {'w': tensor([0., 1., 2.])}
    """
    if not isinstance(plan, Plan):
        raise TypeError(wrong("plan", plan, "what fshard.make_plan gives", "The order is shard_params(params, plan)."))
    check_plain("params", params)
    if src is not None:
        check_whole("src", src, least=0, below=math.prod(dict(plan.axes).values()), what="a rank of the plan's mesh")
    plan.live_mesh()
    leaves = _placed_leaves(params, plan)
    device = _check_leaves(leaves, plan, src)
    sharded = empty_params(plan, device)
    by_slot = dict(zip(plan.slots, leaves, strict=True))
    for place, row in plan.rows.items():
        values = by_slot
        if src is not None:  # the leaves of one row at a time: a rank may lack room for all
            values = {slot: _from_rank(by_slot[slot].detach(), plan, src, device) for slot in row.leaves}
        pack_shard(values, plan, sharded.view.rows[place], sharded.shard(*place))
    return sharded


def empty_params(plan: Plan, device: torch.device) -> Sharded:
    view = whole_view(plan, plan.params_over, range(len(plan.kinds)))
    likes = [torch.empty(0, dtype=kind.dtype, device=device) for kind in plan.kinds]
    return Sharded(view, [room(view, k, like).zero_() for k, like in enumerate(likes)])  # (n / W,) for each kind


def room(view: View, kind: int, like: Tensor) -> Tensor:
    """Allocate the tensor of one kind; in host memory for a host kind."""
    plan, numel = view.plan, view.numel(kind)
    return ahead.host_row(numel, like.dtype, plan.device) if plan.kinds[kind].host else like.new_empty(numel)


def pack_shard(leaves: Mapping[Slot, Tensor], plan: Plan, row: Row[Slot], out: Tensor) -> Tensor:
    """Fill `out`, this rank's shard of a row, from whole leaves; padding is zero."""
    return row.fill(lambda slot: slot.flat(leaves[slot].detach()), row.number(plan.mesh), out)


def _from_rank(leaf: Tensor, plan: Plan, src: int, device: torch.device) -> Tensor:
    whole = torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if leaf.is_meta else leaf.to(device)
    return primitives.from_rank(whole, plan.live_mesh(), src, "shard_params")


def _placed_leaves(params: Tree, plan: Plan) -> list[Tensor]:
    flat, spec = tree.flatten(params)
    by_path = dict(zip(tree.leaf_paths(spec), flat, strict=True))
    if difference := lacking(plan.paths, [*by_path]):
        raise ValueError(
            f"the tree is not the plan's: {difference} (expected {len(plan.paths)} leaves, got {len(by_path)}). Make "
            "the plan from this tree, or pass the plan's."
        )
    if spec != plan.spec:
        check_static(plan.spec, params)
    placed: dict[int, Tensor] = {}
    for path, number in zip(plan.paths, plan.leaves, strict=True):
        leaf = by_path[path]
        first = placed.setdefault(number, leaf)
        same = isinstance(first, Tensor) and isinstance(leaf, Tensor) and memory_key(first) == memory_key(leaf)
        if first is not leaf and not same:
            very = f"expected the very tensor of {plan.slots[number].path!r}, as in the plan, got another one"
            raise ValueError(f"leaf {path!r}: {very}. Tie them again, or make the plan from this tree.")
    return [placed[n] for n in range(len(plan.slots))]


def _check_leaves(leaves: Sequence[Tensor], plan: Plan, src: int | None) -> torch.device:
    device = mesh_device(plan.mesh) if plan.axes or not leaves else leaves[0].device
    is_source = src is None or src == rank_in(plan.mesh)  # True if this rank's values are used
    for slot, leaf in zip(plan.slots, leaves, strict=True):
        kind = plan.kinds[slot.kind]
        cast = plan.policy.stores and isinstance(leaf, Tensor) and leaf.is_floating_point()
        dtype = kind.dtype if cast and kind.dtype.is_floating_point else getattr(leaf, "dtype", None)
        if not isinstance(leaf, Tensor) or (tuple(leaf.shape), dtype) != (slot.shape, kind.dtype):
            got = f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            remedy = "Make the plan from this tree, or convert the leaf."
            raise ValueError(f"leaf {slot.path!r}: expected {kind.dtype} {list(slot.shape)}, got {got}. {remedy}")
        if is_source and leaf.device not in (device, HOST if kind.host else device):
            raise ValueError(
                f"leaf {slot.path!r}: expected a tensor on {device}, where the mesh is, got one on {leaf.device}. "
                f"Move it there {'with values, or take them from `src`' if leaf.is_meta else 'first'}."
            )
    check_tensors(leaves, [slot.path for slot in plan.slots])
    return device


@torch.no_grad()
def _replaced(x: Sharded, subtrees: Mapping[str, Tree]) -> Sharded:
    tops = {tree.joined(at, path): top for at in subtrees for path, top in tree.paths_to(subtrees[at], Sharded)}
    given = {at: top.view if isinstance(top, Sharded) else top for at, top in tops.items()}
    mesh = None if is_tracing() else x.mesh  # `jit` compares the ranks' graphs
    names = consensus.together(mesh, lambda: check_replaced(x.view, subtrees, given))
    consensus.check_same(mesh, names, "replace: the paths", "Give all ranks the same subtrees")
    slots, seen = x.view.by_name(), dict[Slot, Tensor]()
    new = Sharded(x.view, [row.detach().clone() for row in x.tensors])
    spans = {new.layout.leaves[span.leaf].path: span for span in new.layout.mine}
    for name, leaf in (pair for top in tops.items() for pair in _leaves_by_unit(*top)):
        first = seen.get(slot := slots[name], leaf)
        if first is not leaf and (is_tracing() or not equal_values(first.to(leaf), leaf)):
            raise ValueError(f"replace: {name!r} is tied with a leaf that has other values: give equal ones")
        seen |= {slot: leaf} if [*slots.values()].count(slot) > 1 else {}
        if span := spans.get(slot.path):
            new.tensors[span.tensor][span.start :][: span.numel] = slot.flat(leaf)[span.begin :][: span.numel]
    return new


def _leaves_by_unit(above: str, x: Tree) -> Iterator[tuple[str, Tensor]]:
    slots = x.view.by_name(above) if isinstance(x, Sharded) else {}
    yield from [] if slots else [(above, x)]
    for place in sorted({(slot.unit, slot.kind) for slot in slots.values()}):
        leaves = leaves_of_unit(x, *place)
        yield from ((name, leaves[slot]) for name, slot in slots.items() if slot in leaves)


def gather_params(x: Tree, *, parts: bool = False) -> Tree:
    """Gather the whole tensors of `x`, a `Sharded` or a subtree of one, as a plain tree; a plain tree stays as it is.

    `Sharded` nodes inside a tree `x` are gathered. Tied leaves come as one tensor, a frozen leaf of gradients as None.
    With `parts`, a leaf split over an axis comes as this rank's part, as in a loss: a split program needs this under
    torch.func. TypeError for a plan, and with `parts` for moments held by owners.

    Differentiable to any order, under autograd and torch.func. The transpose reduce-scatters over the axes of the cut
    and sums over the rest of the mesh, so differentiating on every rank gives the gradient of the sum of all ranks'
    outputs.

    >>> plan = make_plan({"w": torch.ones(2), "n": torch.tensor(3)})
    >>> gather_params(shard_params({"w": torch.ones(2), "n": torch.tensor(3)}, plan)["n"])
    tensor(3)
    """
    if isinstance(x, Sharded):
        return x.gathered(parts)
    if isinstance(x, tree.StandIn):
        return tree.plain(x)
    if isinstance(x, Parts):
        if parts:
            raise TypeError(f"gather_params(parts=True): {wrong('x', x, 'a Sharded, or a tree')}")
        return gathered(x)
    if isinstance(x, Plan):
        raise TypeError(wrong("x", x, "a Sharded, or a tree", "fshard.shard_params(params, plan) makes a Sharded."))
    if isinstance(x, Tensor) or not any(map(_is_apart, tree.tops(x, _is_apart))):
        return x
    return tree.map_tops(lambda node: gather_params(node, parts=parts) if _is_apart(node) else node, _is_apart, x)


def _is_apart(x: Tree) -> bool:
    return isinstance(x, Parts | tree.StandIn)


def gather_unit(x: Sharded, unit: int, kind: int) -> Tensor:
    plan, axes = x.plan, x.view.axes(kind)
    # the derivative of `to(copy=True)` brings gradients back to host memory
    full, label = x.shard(unit, kind), plan.units[unit].name
    if _is_on_host(plan, kind, full):
        full = full.to(plan.device, copy=True)
    elif not axes:  # a copy, as a gather returns: a donated step overwrites the parameters
        full = full.clone()
    if not full.numel():
        return full
    for axis in plan.rest(axes, kind):  # `vary` changes no value; its transpose sums the ranks' gradients
        full = collectives.of_one("vary", full, plan.live_mesh(), axis, label)
    for axis in reversed(axes):  # the last axis first: the first axis varies slowest in the buffer
        full = collectives.all_gather(full, plan.live_mesh(), axis, label)
    return full


def _is_on_host(plan: Plan, kind: int, x: Tensor) -> bool:
    return plan.kinds[kind].host or (plan.state_on_host and x.device == HOST)


def leaves_of_unit(x: Sharded, unit: int, kind: int, parts: bool = False) -> dict[Slot, Tensor]:
    """Gather the leaves of one unit and kind, whole or in parts; differentiable."""
    row, full, plan = x.view.rows[unit, kind], gather_unit(x, unit, kind), x.plan
    if row.split is None or parts:
        return dict(zip(row.leaves, row.views(full), strict=True))
    rows = collectives.all_gather(full[None], plan.live_mesh(), row.split.axis, plan.units[unit].name)  # (parts, n)
    whole = dict[Slot, Tensor]()
    for slot, bounds in zip(row.leaves, row.split.bounds, strict=True):
        pairs = zip(rows, pairwise(bounds), strict=True)
        whole[slot] = slot.shaped(torch.cat([part[slot.start :][: high - low] for part, (low, high) in pairs]))
    return whole


def refine(x: Sharded, over: Axes) -> Sharded | Views[View]:
    """Cut a whole tree over its axes and more, `over`: return `Views`, or the same tensors if nothing is cut.

    A unit's new shard lies inside its old shard, so new shards are not adjacent in a tensor.
    """
    view = replace(x.view, over=over, room=0)
    if view == x.view:
        return x
    plan, further = x.plan, over[len(x.view.over) :]
    if plan.num_ranks(further) == 1:
        runs = [[tensor for of, tensor in x.by_kind() if of == kind] for kind in view.kinds]
        return Views(Sharded, view, runs) if x.view.room else Sharded(view, x.tensors, x._life)
    if differentiates(x):  # ranks' copies of one value become parts with different derivatives
        x = _of_one("vary", x, further)
    # by kind, the views of all units, (n / W,) each, W the number of ranks along `over`
    shards = ([(kind, row.of(x.tensors)) for row in x.view.of_kind(kind)] for kind in view.kinds)
    runs = [[plan.shard_of(shard, kind, further) for kind, shard in of_kind] for of_kind in shards]
    return Views(Sharded, view, runs)


def shards_of(x: Sharded | Views[View]) -> dict[tuple[int, int], Tensor]:
    view: View = x.key
    rows = [view.of_kind(kind) for kind in view.kinds]
    runs = x.runs if isinstance(x, Views) else [[row.of(x.tensors) for row in of_kind] for of_kind in rows]
    pairs = (pair for of_kind, run in zip(rows, runs, strict=True) for pair in zip(of_kind, run, strict=True))
    return {(row.unit, row.kind): shard for row, shard in pairs}


def coarsen(x: Sharded | Views[View], over: Axes, into: Sharded | None = None) -> Sharded:
    """Gather a whole tree over its axes outside `over`, into `into`, if given. Dual: `refine`.

    If nothing is gathered, return the tensors of `x`.
    """
    fine: View = x.key
    view = replace(fine, over=over)
    if isinstance(x, Sharded) and view == fine:
        return x
    plan, further = fine.plan, fine.over[len(over) :]
    if isinstance(x, Sharded) and plan.num_ranks(further) == 1:  # every shard is whole already
        return Sharded(view, x.tensors)
    if differentiates([*shards_of(x).values()]):
        return _summed(x, view, further)
    if into is None:
        likes = [run[0] for run in x.runs] if isinstance(x, Views) else x.tensors
        into = Sharded(view, [room(view, k, like) for k, like in zip(view.kinds, likes, strict=True)])
    started = []
    for (unit, kind), shard in ((place, shard) for place, shard in shards_of(x).items() if shard.numel()):
        whole, rule = into.shard(unit, kind), plan.rule(kind, further)
        out = ahead.landing(whole, plan.device) if rule.over and _is_on_host(plan, kind, whole) else whole
        pending = reshard(shard.to(out.device), rule, COPIES, plan.live_mesh(), plan.units[unit].name, out)
        if out is whole:
            started.append(pending)
        else:  # host memory: one after the other, as the device may have no room for all
            whole.copy_(pending.wait())
    for pending in started:
        pending.wait()
    return into


def _of_one(way: str, x: Sharded, axes: Axes) -> Sharded:
    tensors = list(x.tensors)
    for number, (kind, _) in enumerate(x.by_kind()):
        for axis in x.plan.rule(kind, axes).over:
            tensors[number] = collectives.of_one(way, tensors[number], x.plan.live_mesh(), axis, label="parameters")
    return Sharded(x.view, tensors)


def _summed(x: Sharded | Views[View], view: View, further: Axes) -> Sharded:
    """Differentiable `coarsen`: each rank writes its shards into zeros, and ranks sum these tensors."""
    shards, plan = shards_of(x), view.plan
    like = {kind: shard for (_, kind), shard in shards.items()}
    into = Sharded(view, [depending(torch.zeros_like(room(view, k, like[k])), [*shards.values()]) for k in view.kinds])
    for (unit, kind), shard in shards.items():
        plan.shard_of(into.shard(unit, kind), kind, further).copy_(shard)
    return _of_one("total", into, further)
