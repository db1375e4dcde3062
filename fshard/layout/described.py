"""The state that a user's function makes of whole leaves, told so that every rank knows what the others have of it.

Each rank sees the state of its own leaves alone. So the function is run on meta tensors, too: of all leaves, for the
shapes and dtypes of what it keeps of each, and of two leaves and of one, for the lists that have an entry for each
(TorchOpt flattens trees). Where it does not run on meta, nothing is known but the parameters' layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import tree
from ..core.differences import Form
from ..core.tree import Tree
from .layout import Layout
from .moves import on_rank
from .pieces import Parts, layout_of, reshaped


@dataclass(frozen=True)
class Flattened:
    """A list, or a tuple, that has an entry for each leaf of the tree."""

    entries: Parts
    kind: type

    def plain(self) -> Tree:
        """The list or tuple of this rank's entries."""
        return self.kind(self.entries.tensors)


tree.register_fields(Flattened, ("entries",), ("kind",), names=("",))  # a leaf has the path that it has in a tree


def described(state: Tree, whole: Parts, init: Callable[[Tree], Tree]) -> Tree:
    """Return a state of whole leaves in which every tensor that belongs to a leaf is in `Parts` of its own form."""
    everywhere = on_rank(whole.layout)
    try:
        two, single, of_all = _made(init, whole.layout, everywhere)
        state, of_all = _listed(state, two, single, whole.layout), _listed(of_all, two, single, everywhere)
        pairs = zip(tree.nodes(state, Parts), tree.nodes(of_all, Parts), strict=True)
        forms = iter([_forms(shapes) if x.layout == whole.layout else {} for x, shapes in pairs])
    except Exception:  # the user's function needs values, say
        return state
    return tree.map_tops(lambda x: _in_forms(x, next(forms)) if isinstance(x, Parts) else x, Parts, state)


def _made(init: Callable[[Tree], Tree], layout: Layout, everywhere: Layout) -> list[Tree]:
    """The state of two leaves, of one and of all, on meta."""
    with torch.device("meta"):
        leaves = [layout.leaves[span.leaf] for span in everywhere.mine]
        metas = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves]
        few = [[torch.empty_like(metas[0]) for _ in range(num)] for num in (2, 1)]
        return [init(Parts(layout_of(xs), xs)) for xs in few] + [init(Parts(everywhere, metas))]


def is_listed(x: Tree, y: Tree, num: int) -> bool:
    """Whether a node has an entry for each leaf: `num` entries of that many leaves, and in `y`, of one leaf, one."""
    return type(x) in (list, tuple) and type(x) is type(y) and (len(x), len(y)) == (num, 1)


def _listed(state: Tree, two: Tree, one: Tree, layout: Layout) -> Tree:
    """A state with `Flattened` in place of its lists that have a tensor for each leaf."""
    if is_listed(two, one, 2) and all(isinstance(x, Tensor) for x in (*two, *one, *state)):
        return Flattened(Parts(layout, state), type(state))
    if isinstance(state, Parts) or tree.opened(state)[0] is None:
        return state
    (children, spec), *others = (tree.one_level(x) for x in (state, two, one))
    parts = zip(children, *(x for x, _ in others), strict=True)
    return tree.unflatten(spec, [_listed(x, a, b, layout) for x, a, b in parts])


def _forms(x: Parts) -> dict[int, Form]:
    """The form of each leaf of a state, by number; none if all are those of the parameters."""
    leaves, pairs = x.layout.leaves, zip(x.layout.mine, x.tensors, strict=True)
    forms = {span.leaf: Form(tuple(t.shape), t.dtype) for span, t in pairs}
    return forms if any((leaves[n].shape, leaves[n].dtype) != form for n, form in forms.items()) else {}


def _in_forms(x: Parts, forms: Mapping[int, Form]) -> Parts:
    return _moved(x, reshaped(x.layout, forms)) if forms else x


def _moved(x: Parts, layout: Layout) -> Parts:
    """The tensors of a tree of whole leaves under another layout of the same owners."""
    tensors = dict(zip((span.leaf for span in x.layout.mine), x.tensors, strict=True))
    return Parts(layout, [tensors[span.leaf] for span in layout.mine])


def undescribed(state: Tree, layout: Layout) -> Tree:
    """Return the state as an update takes it: under the layout of the gradients, and with its lists. Dual: `again`."""
    numbers = {span.leaf for span in layout.mine}

    def plain(x: Tree) -> Tree:
        if isinstance(x, Flattened):
            return Flattened(plain(x.entries), x.kind).plain()
        if not isinstance(x, Parts) or x.layout == layout or x.layout.flat:
            return x
        return _moved(x, layout) if {span.leaf for span in x.layout.mine} == numbers else x

    return tree.map_tops(plain, _is_told, state)


def again(new: Tree, state: Tree, layout: Layout) -> Tree:
    """Return a new state, which an update under this layout gave, in the forms of the one before. Dual: `undescribed`.

    An update may give a state of another structure: that is returned as it is.
    """
    tops = tree.tops(state, _is_told)
    if not any(isinstance(x, Flattened) or (isinstance(x, Parts) and x.layout != layout) for x in tops):
        return new

    def under(old: Tree, x: Tree) -> Tree:
        if isinstance(old, Flattened):
            return Flattened(_moved(Parts(layout, x), old.entries.layout), old.kind)
        return _moved(x, old.layout) if isinstance(old, Parts) and isinstance(x, Parts) and x.layout == layout else x

    return tree.map_tops(under, _is_told, state, new)


def _is_told(x: Tree) -> bool:
    return isinstance(x, Parts | Flattened)
