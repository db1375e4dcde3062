"""The state that a user's function makes of whole leaves, described so that every rank knows its form on other ranks.

Each rank sees only the state of its own leaves, so it also runs the function on meta tensors: of each leaf alone, for
shapes and dtypes; of two leaves and of one, to find lists with an entry for each leaf (TorchOpt flattens trees). If the
function fails on meta, it runs on made-up values; if it fails on these, nothing is described.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from ..comm.mesh import AbstractMesh, axis_sizes, num_ranks
from ..core import tree
from ..core.arguments import shown
from ..core.differences import Form
from ..core.random import bookmark
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.layout import Layout, Leaf
from ..layout.pieces import Misplaced, Parts, device_of, layout_of, path_of, reshaped
from .moves import on_rank

Init: TypeAlias = Callable[[Tree], Tree]


class Communicated(Exception):
    """Raised if a user's function calls a collective, and so may know other ranks' leaves."""


class Alone(AbstractMesh):
    """A mesh for trials that other ranks may not run: a collective is an error."""

    def ranks(self, axis: str) -> NoReturn:
        """Raise: no rank would answer a message."""
        raise Communicated


def named(function: Callable[..., object]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__).replace(".<locals>", "")
    return f"{getattr(function, '__module__', '')}.{name}"


@dataclass(frozen=True)
class Flattened:
    """A list or tuple with an entry for each leaf, as one entry with `Parts` in place of tensors."""

    entries: Tree
    kind: type

    def plain(self) -> Tree:
        spec = tree.structure_above(self.entries, Parts)
        columns = [x.tensors for x in tree.tops(self.entries, Parts)]
        return self.kind(tree.unflatten(spec, entry) for entry in zip(*columns, strict=True))


tree.register_fields(Flattened, ("entries",), ("kind",), names=("",))  # adds no name to leaf paths


def formed(init: Init, whole: Parts) -> list[Tree] | None:
    """The states of two leaves, of one leaf, and of all, on meta; None if the function fails on made-up values.

    On several ranks, `Misplaced` if a state's tensors outside of trees depend on the given leaves.
    """
    everywhere, device = on_rank(whole.layout), device_of(whole)
    restore = bookmark(device)
    try:
        try:
            with torch.device("meta"):
                two, single, *each = _made_states(init, everywhere, torch.device("meta"))
        except Exception:  # perhaps the function needs values
            two, single, *each = _made_states(init, everywhere, device)
        pairs = zip(each, everywhere.mine, strict=True)
        each = [_listed(x, two, single, on_rank(everywhere.pick([span.leaf]))) for x, span in pairs]
        if num_ranks(whole.mesh) > 1:
            pair = _listed(two, two, single, layout_of([torch.empty(0, device="cpu")] * 2))
            for other in (pair, *each):
                _check_alike(init, each[0], other)
        return [two, single, tree.map_tops(partial(_joined_parts, everywhere), Parts, *each)]
    except Misplaced:
        raise
    except Exception:  # perhaps the function needs real values
        return None
    finally:
        restore()


def described(state: Tree, whole: Parts, formed: Sequence[Tree]) -> Tree:
    """Return a state of whole leaves, whose `Parts` know their tensors' shapes and dtypes."""
    two, single, of_all = formed
    try:
        listed = _listed(state, two, single, whole.layout)
        pairs = zip(tree.nodes(listed, Parts), tree.nodes(of_all, Parts), strict=True)
        forms = iter([_changed_forms(shapes) if x.layout == whole.layout else {} for x, shapes in pairs])
    except Exception:  # made-up values give another structure
        return state
    return tree.map_tops(lambda x: _in_forms(x, next(forms)) if isinstance(x, Parts) else x, Parts, listed)


def check_told(init: Init, params: Tree, state: Tree) -> None:
    """`Misplaced` if a state's tensors outside of trees grow with the flat tensors of `params`."""
    nodes = tree.nodes(params, Parts)
    if not any(num_ranks(x.mesh) > 1 for x in nodes) or is_tracing() or torch.compiler.is_compiling():
        return
    restore = bookmark(device_of(params))
    try:
        with torch.device("meta"):
            longer = init(tree.map_tops(_longer, Parts, params))
    except Exception:  # perhaps it needs values, or communicates
        return
    finally:
        restore()
    _check_alike(init, state, longer)


def _longer(x: Tree) -> Tree:
    """Add an element to each tensor, on a mesh without other ranks."""
    if not isinstance(x, Parts):
        return x
    mesh = Alone("cpu", 0, **axis_sizes(x.mesh)) if x.mesh is not None else None
    longer = [torch.empty(len(t) + 1, dtype=t.dtype, device="meta") for t in x.tensors]
    return Parts(replace(x.layout, mesh=mesh), longer)


def _check_alike(init: Init, state: Tree, other: Tree) -> None:
    """`Misplaced` if two states differ outside of trees."""
    a, b = (tree.paths_to(x, Parts) for x in (state, other))
    plain, others = ({path: tuple(x.shape) for path, x in pairs if isinstance(x, Tensor)} for pairs in (a, b))
    if plain == others and [path for path, _ in a] == [path for path, _ in b]:
        return
    wrong = next((path for path, _ in (*a, *b) if plain.get(path) != others.get(path)), "")
    raise Misplaced(
        f"{named(init)}: its state{f' {wrong!r}' * bool(wrong)} depends on which leaves or elements it is given, and "
        "each rank has others: expected a tensor for each leaf, or what does not depend on them. Make a tree: "
        "fshard.tree.map(torch.zeros_like, params)"
    )


def _made_states(init: Init, everywhere: Layout, device: torch.device) -> list[Tree]:
    """The states of two leaves, of one leaf, and of each leaf alone, made on `device`, moved to meta."""

    def of(*leaves: Leaf) -> Tree:
        xs = [_filled_leaf(leaf, number, device) for number, leaf in enumerate(leaves)]
        state = init(Parts(layout_of(xs), xs))
        return tree.map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, state)

    leaves = [everywhere.leaves[span.leaf] for span in everywhere.mine]
    return [of(leaves[0], leaves[0]), of(leaves[0]), *map(of, leaves)]


def _joined_parts(everywhere: Layout, *each: Tree) -> Tree:
    return Parts(everywhere, [t for x in each for t in x.tensors]) if isinstance(each[0], Parts) else each[0]


def _filled_leaf(leaf: Leaf, place: int, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return made_up(leaf, place, 1.0).to(device)


def made_up(leaf: Leaf, place: int, scale: float) -> Tensor:
    """Values up to `scale` that look random, but come from no generator."""
    numbers = torch.arange(leaf.numel, dtype=torch.float64, device="cpu") + 1
    return (torch.sin(numbers * numbers + 1.7 * place) * scale).view(leaf.shape).to(leaf.dtype)


def is_listed(x: Tree, y: Tree, num: int) -> bool:
    """True if `x`, of `num` leaves, is a list with `num` entries, and `y`, of one leaf, with one entry."""
    return type(x) in (list, tuple) and type(x) is type(y) and (len(x), len(y)) == (num, 1)


def _listed(state: Tree, two: Tree, one: Tree, layout: Layout) -> Tree:
    """Replace lists with an entry for each leaf, all of one structure, by `Flattened`."""
    if is_listed(two, one, 2):
        entry = tree.flatten(two[0])[1]
        flat = [tree.flatten(x) for x in (*two, *one, *state)]
        if (
            entry.num_leaves
            and len(state) == len(layout.mine)
            and all(spec == entry and len(tree.tensors(xs)) == len(xs) for xs, spec in flat)
        ):
            columns = [*zip(*map(tree.leaves, state), strict=True)] or [()] * entry.num_leaves
            return Flattened(tree.unflatten(entry, [Parts(layout, x) for x in columns]), type(state))
    if isinstance(state, Parts) or tree.opened(state)[0] is None:
        return state
    (children, spec), *others = (tree.one_level(x) for x in (state, two, one))
    if any(len(x) != len(children) for x, _ in others):
        return state
    parts = zip(children, *(x for x, _ in others), strict=True)
    return tree.unflatten(spec, [_listed(x, a, b, layout) for x, a, b in parts])


def _changed_forms(x: Parts) -> dict[int, Form]:
    """Shapes and dtypes by leaf number; {} if all are those of parameters."""
    leaves, pairs = x.layout.leaves, zip(x.layout.mine, x.tensors, strict=True)
    forms = {span.leaf: Form(tuple(t.shape), t.dtype) for span, t in pairs}
    return forms if any((leaves[n].shape, leaves[n].dtype) != form for n, form in forms.items()) else {}


def _in_forms(x: Parts, forms: Mapping[int, Form]) -> Parts:
    return _moved(x, reshaped(x.layout, forms)) if forms else x


def _moved(x: Parts, layout: Layout) -> Parts:
    tensors = dict(zip((span.leaf for span in x.layout.mine), x.tensors, strict=True))
    return Parts(layout, [tensors[span.leaf] for span in layout.mine])


def undescribed(state: Tree, layout: Layout) -> Tree:
    """Return the state as the user's update takes it: in the gradients' layout, with plain lists. Dual: `reformed`."""
    numbers = {span.leaf for span in layout.mine}

    def plain(x: Tree) -> Tree:
        if isinstance(x, Flattened):
            return Flattened(undescribed(x.entries, layout), x.kind).plain()
        if not isinstance(x, Parts) or x.layout == layout or x.layout.flat:
            return x
        return _moved(x, layout) if {span.leaf for span in x.layout.mine} == numbers else x

    return tree.map_tops(plain, _is_told, state)


def reformed(new: Tree, state: Tree, layout: Layout) -> Tree:
    """Return a new state with the old state's layouts and `Flattened` lists. Dual: `undescribed`."""
    tops = tree.tops(state, _is_told)
    if not any(isinstance(x, Flattened) or (isinstance(x, Parts) and x.layout != layout) for x in tops):
        return new

    def under(old: Tree, x: Tree) -> Tree:
        if isinstance(old, Flattened):
            nodes = tree.tops(old.entries, Parts)
            columns = [*zip(*map(tree.leaves, x), strict=True)] or [()] * len(nodes)
            moved = [_moved(Parts(layout, ts), o.layout) for ts, o in zip(columns, nodes, strict=True)]
            return Flattened(tree.put_tops(old.entries, Parts, moved), old.kind)
        return _moved(x, old.layout) if isinstance(old, Parts) and isinstance(x, Parts) and x.layout == layout else x

    return tree.map_tops(under, _is_told, state, new)


def check_shapes(update: Callable[..., object], old: Tree, new: Tree) -> None:
    """`Misplaced` if an update changed the shape of a tensor in a tree: other ranks do not know the new shape."""
    pairs = [*zip(tree.tops(old, Parts), tree.tops(new, Parts), strict=False)]
    for a, b in ((a, b) for a, b in pairs if isinstance(a, Parts) and isinstance(b, Parts) and a.layout == b.layout):
        for number, (x, y) in enumerate(zip(a.tensors, b.tensors, strict=True)):
            if getattr(x, "shape", ()) != getattr(y, "shape", ()) and isinstance(x, Tensor):
                leaf = path_of(a.layout, number)
                raise Misplaced(
                    f"{named(update)}: its state has for leaf {leaf!r} {shown(y)} after an update: expected "
                    f"{shown(x)}, as before, because other ranks know its shape from `init`. Start with its final "
                    "shape (fshard.tree.map(torch.zeros_like, params))"
                )


def _is_told(x: Tree) -> bool:
    return isinstance(x, Parts | Flattened)
