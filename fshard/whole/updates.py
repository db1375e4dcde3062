"""Run an update on whole leaves, each on its owner, or piece by piece with random numbers of its own.

Note [Random numbers of an update]
    In a step random numbers come from the state's seed and step (`core.random.Seeds`), and from a leaf's number, or the
    numbers of a flat tensor and of this rank's shard. So ranks with copies draw the same numbers, and other ranks draw
    others. Torch's generator depends on earlier draws, so a drawing update runs on one tensor after another, each with
    a new seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TypeAlias

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import coordinate, num_ranks
from ..comm.ranks import MismatchError
from ..core import tree
from ..core.differences import lacking
from ..core.func_levels import aside, differentiates, needs_gradient, unwrapped
from ..core.random import UPDATE, Seeds
from ..core.storage import writes
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Misplaced, Parts, device_of
from .copies import Update, check_cut_alike, copied_whole, on_copies, own_part
from .described import Init, check_shapes, check_told, described, formed, named, reformed, undescribed
from .moves import collect, on_rank, owned, spread
from .trial import check_alone

Places: TypeAlias = Sequence[tuple[int, ...]]  # seeds of tensors, distinct for leaves and shards


def bring(x: Tree) -> Tree:
    """Send each leaf of `Parts` whole to one rank; a whole leaf is not copied."""
    return tree.map_tops(_whole_parts, Parts, x)


def _whole_parts(x: Tree) -> Tree:
    if not isinstance(x, Parts) or not x.layout.flat:
        return x
    layout = to_owners(x.layout)
    if differentiates(x):
        return own_part(copied_whole(x, x, layout), Parts(layout, ()))
    return collect(x, layout, "whole leaves")


def to_owners(layout: Layout) -> Layout:
    return owned(layout, layout.mesh, layout.axes)


def back(x: Tree, like: Tree) -> Tree:
    """Send whole leaves back to the ranks and tensors of `like`. Dual: `bring`."""

    def sent(to: Tree, part: Tree) -> Tree:
        return spread(part, to, "whole leaves") if isinstance(to, Parts) and to.layout.flat else part

    return tree.map_tops(sent, Parts, like, x)


def on_leaves(init: Init, update: Update) -> tuple[Init, Update]:
    """Wrap `init` and `update`, so that in place of cut `Parts` both get whole leaves.

    ValueError from `init` if the update of a leaf depends on other leaves.
    """

    def begin(params: Tree) -> Tree:
        whole = bring(params)
        nodes = tree.nodes(whole, Parts)
        if not nodes:
            return init(params)
        forms = formed(init, whole) if isinstance(whole, Parts) else None
        check_alone(init, update, nodes)
        state = _begun(init, whole)
        if differentiates(params) and not is_tracing():
            _check_passed(named(update), nodes, state)
        return state if forms is None else described(state, whole, forms)

    def run(grads: Tree, state: Tree, params: Tree = None, *more: Tree, **extra: object) -> tuple[Tree, Tree]:
        whole, known = bring(grads), [] if params is None else [bring(params)]
        if not isinstance(whole, Parts):
            updates, state = _whole_tree(update, whole, state, *known, *more, **extra)
            return _sent_back(update, updates, whole, grads), state
        plain = undescribed(state, whole.layout)
        if whole.tensors:
            updates, new = _leaf_by_leaf(update, whole, plain, *known, *more, **extra)
        else:
            updates, new = _on_none(init, update, whole, plain, *known, *more, **extra)
        new = reformed(new, state, whole.layout)
        check_shapes(update, state, new)
        return _sent_back(update, updates, whole, grads), new

    return begin, on_copies(run, named(update), to_owners, apart=False)


def in_trees(init: Init, told: bool) -> Init:
    """Make `init` raise `Misplaced` if fshard cannot see the leaf of a tensor.

    `told`: also if the state's tensors outside of trees depend on the rank's elements.
    """

    @wraps(init)
    def run(params: Tree) -> Tree:
        state = init(params)
        entries: list[tuple[str, Tree]] = [
            (path, x) for path, node in tree.paths_to(state, Parts) if isinstance(node, Parts) for x in node.tensors
        ]
        for path, entry in entries:
            if not isinstance(entry, Tensor) and tree.tensors(tree.leaves(entry)):
                raise Misplaced(
                    f"{named(init)}: its state{f' {path!r}' * bool(path)} has for a leaf {_several(entry)}: expected a "
                    "tensor, because a tree that lies on ranks has one for each leaf. Make a tree for each: "
                    '{"mu": fshard.tree.map(torch.zeros_like, params), "nu": ...}'
                )
        for path, entry in tree.paths_to(state, lambda x: False):
            if not isinstance(entry, Tensor) and (names := _tensor_attributes(entry)):
                kind = type(entry).__name__
                raise Misplaced(
                    f"{named(init)}: its state{f' {path!r}' * bool(path)} is an object of the class {kind}, in which "
                    f"fshard does not see the tensors of {', '.join(map(repr, names))}: expected containers that it "
                    f"knows. Call fshard.tree.register_fields({kind}, {names}) first, or make it a NamedTuple"
                )
        if told:
            check_told(init, params, state)
        return state

    return run


def _tensor_attributes(entry: object) -> list[str]:
    names = getattr(entry, "__dict__", getattr(type(entry), "__slots__", ()))
    return [name for name in names if tree.tensors(tree.leaves(getattr(entry, name, None)))]


def _several(entry: Tree) -> str:
    names = [str(name) for name, _ in tree.opened(entry)[0] or ()]
    return f"a {type(entry).__name__} of {', '.join(names)}"


def unwritten(update: Update) -> Update:
    """Give `update` new containers; ValueError if `update` writes in place to a given tensor.

    With `own_grads` the update may write to gradients.
    """

    @wraps(update)
    def run(*args: Tree, **extra: object) -> tuple[Tree, Tree]:
        if torch.compiler.is_compiling():  # dynamo's tensors count no writes
            return update(*args, **extra)
        leaves, spec = tree.flatten(dict(zip(("gradients", "state", "params"), args, strict=False)) | extra)
        before = _num_writes(leaves)
        given = tree.unflatten(spec, leaves)
        result = update(*[given.pop(name) for name in [*given][: len(args)]], *args[3:], **given)
        if (after := _num_writes(leaves)) != before:
            counts = zip(tree.leaf_paths(spec), before, after, strict=True)
            _check_written([path for path, a, b in counts if a != b], update, extra)
        return result

    return run


def _num_writes(leaves: Sequence[object]) -> list[int | None]:
    return [writes(unwrapped(x)) if isinstance(x, Tensor) else None for x in leaves]


def _check_written(paths: Sequence[str], update: Update, extra: Mapping[str, object]) -> None:
    wrong = [path for path in paths if not (path.startswith("gradients") and extra.get("own_grads"))]
    if wrong:
        raise ValueError(
            f"{named(update)}: wrote in place to {wrong[0]!r}, which its caller may read again, also where a step "
            "donates: expected new tensors (0.9 * m + g in place of m.mul_(0.9).add_(g)), or writes to copies of these "
            "(fshard.tree.map(torch.clone, state))"
        )


def _sent_back(update: Update, updates: Tree, whole: Tree, grads: Tree) -> Tree:
    given, got = ([getattr(x, "key", None) for x in tree.tops(t, Parts)] for t in (whole, updates))
    if given != got and tree.nodes(grads, Parts):
        raise ValueError(
            f"{named(update)}: expected updates of the structure of the gradients it was given (fshard.tree.map over "
            f"them), got {type(updates).__name__}"
        )
    return back(updates, grads)


def _whole_tree(update: Update, *trees: Tree, **extra: object) -> tuple[Tree, Tree]:
    """Run an update once; in a step, with this call's random numbers."""
    seeds = UPDATE.get()
    if seeds is None:
        return update(*trees, **extra)
    with seeds.following().block():
        return update(*trees, **extra)


def _leaf_by_leaf(update: Update, grads: Parts, state: Tree, *more: Tree, **extra: object) -> tuple[Tree, Tree]:
    """Run an update on all whole leaves at once, or leaf by leaf if it draws random numbers in a step."""
    seeds = UPDATE.get()
    if seeds is None:
        return update(grads, state, *more, **extra)
    # an update that runs twice may not overwrite gradients
    here, extra = seeds.following(), {name: x for name, x in extra.items() if name != "own_grads"}
    with here.block() as drew:
        updates, new = update(grads, state, *more, **extra)
        if not drew():
            return updates, new
    updates, states = _piecewise(here, update, grads, state, *more, **extra)
    return updates, _joined_states(new, states)


def row_by_row(update: Update) -> Update:
    """Let an elementwise update, plain or fused, draw equal numbers in a step for copies of a tensor."""

    def run(grads: Tree, state: Tree, params: Tree = None, *more: Tree, **extra: object) -> tuple[Tree, Tree]:
        given, seeds = (state, *[params] * (params is not None), *more), UPDATE.get()
        if seeds is None or not isinstance(grads, Parts) or not grads.tensors:
            updates, new = _whole_tree(update, grads, *given, **extra)
        else:
            updates, states = _piecewise(seeds.following(), update, grads, *given, **extra)
            _check_same_structure(update, tree.map_tops(_leaf_picker(0), Parts, state), states[-1])
            last = tree.map_tops(lambda old, new: old if isinstance(old, Parts) else new, Parts, state, states[-1])
            new = _joined_states(last, states)
        check_shapes(update, state, new)
        return updates, new

    return run


def at_once(update: Update) -> Update:
    """Let an update of a whole tree, plain or fused, draw random numbers only on a mesh of one rank."""

    def run(grads: Tree, state: Tree, *more: Tree, **extra: object) -> tuple[Tree, Tree]:
        if differentiates(grads):
            check_cut_alike(named(update), [x.layout for x in tree.nodes(grads, Parts)])
        seeds = UPDATE.get()
        if seeds is None:
            return update(grads, state, *more, **extra)
        with seeds.following().block() as drew:
            result = update(grads, state, *more, **extra)
            check_shapes(update, state, result[1])
            if drew() and any(num_ranks(x.mesh) > 1 for x in tree.nodes(grads, Parts)):
                raise ValueError(
                    f"{named(update)}: an update with over='tree' draws random numbers, and which of them ranks should "
                    "share is not known. Draw them in a transformation of its own, over='leaves' or 'elements', and "
                    "put both into optim.chain."
                )
        return result

    return run


def _places(layout: Layout) -> Places:
    """The seed of each tensor: a whole leaf's number, or a flat tensor's number and this rank's shard's."""
    if not layout.flat:
        return [(span.leaf,) for span in layout.mine]
    return [(n, coordinate(layout.live_mesh(), over)) for n, over in sorted(layout.cut_over.items())]


def _piecewise(seeds: Seeds, update: Update, grads: Parts, *trees: Tree, **extra: object) -> tuple[Tree, list[Tree]]:
    """Run an update on each tensor of `Parts`, seeded by `_places`; return the updates, and each run's state."""

    for x in tree.nodes(trees, Parts):
        if len(x.tensors) != len(grads.tensors):
            raise ValueError(
                f"{named(update)}: draws random numbers, and so is run on {len(grads.tensors)} parts one by one; its "
                f"state has {len(x.tensors)}. Draw them in a transformation of its own (optim.chain)."
            )
    results = []
    for number, place in enumerate(_places(grads.layout)):
        with seeds.at(*place).block():
            given = tree.map_tops(_leaf_picker(number), Parts, (grads, *trees))
            results.append(update(*given, **extra))
    tensors = [x for updates, _ in results for x in tree.leaves(updates)]
    return tree.unflatten(tree.flatten(grads)[1], tensors), [state for _, state in results]


def _leaf_picker(number: int) -> Callable[[Tree], Tree]:
    return lambda x: [x.tensors[number]] if isinstance(x, Parts) else x


def _check_same_structure(update: Update, old: Tree, new: Tree) -> None:
    """ValueError if the state's structure has changed: the leaves of new tensors are not known."""
    if tree.flatten(old)[1] != tree.flatten(new)[1]:
        same = "a number or None has become a tree, or a list or dict has other entries"
        raise ValueError(
            f"{named(update)}: expected a state of the structure that it was given, got another one: "
            f"{lacking(*(tree.paths(x) for x in (old, new))) or same}. Start with its final form "
            "(fshard.tree.map(torch.zeros_like, params))"
        )


def _joined_states(like: Tree, states: Sequence[Tree]) -> Tree:
    """Return `like`, its `Parts` filled with the tensors of all states."""

    def put(x: Tree, *pieces: Tree) -> Tree:
        return tree.unflatten(tree.flatten(x)[1], [t for (t,) in pieces]) if isinstance(x, Parts) else x

    return tree.map_tops(put, Parts, like, *states)


def _check_passed(name: str, nodes: Sequence[Parts], state: Tree) -> None:
    """TypeError if a gradient passes through one rank's state, and another rank owns no leaf to pass it on."""
    with aside():
        kept, none = any(map(needs_gradient, tree.leaves(state))), not all(x.tensors for x in nodes)
        answers = torch.tensor([kept, none], dtype=torch.float32, device="cpu")
        flags = consensus.any_rank(list(answers), nodes[0].layout.mesh)
    if all(flags):
        raise TypeError(
            f"{name}: its init keeps parameters, through which a gradient passes, but some ranks own no leaf, and "
            "cannot pass it on: give init detached parameters (fshard.tree.detached), or say over='elements'"
        )


def _begun(init: Init, whole: Tree) -> Tree:
    """Make the state; if `init` fails on a rank without leaves, make its counts from a leaf of zeros."""
    try:
        return init(whole)
    except Exception as failure:  # perhaps `init` reads the first leaf
        if isinstance(failure, MismatchError) or not isinstance(whole, Parts) or whole.tensors:
            raise
        stand_in = _smallest_leaf(whole)
        return _put_back(init(stand_in), stand_in, whole)


def _on_none(init: Init, update: Update, grads: Parts, state: Tree, *more: Tree, **extra: object) -> tuple[Tree, Tree]:
    """If the update needs a leaf, run it on a leaf of zeros, for counts alone."""
    try:
        return _whole_tree(update, grads, state, *more, **extra)
    except MismatchError:
        raise
    except Exception:  # as in `_begun`
        stand_in = _smallest_leaf(grads)
        made = tree.map_tops(lambda new, old: new if isinstance(new, Parts) else old, Parts, init(stand_in), state)
        given = tree.map_tops(lambda x: stand_in if isinstance(x, Parts) else x, Parts, more)
        return _put_back(_whole_tree(update, stand_in, made, *given, **extra), stand_in, grads)


def _smallest_leaf(x: Parts) -> Parts:
    """The smallest leaf of `x`, filled with zeros."""
    layout = x.layout
    smallest = min(layout.numbers, key=lambda n: layout.leaves[n].numel)
    leaf, single = layout.leaves[smallest], on_rank(layout.pick([smallest]))
    return Parts(single, [torch.zeros(leaf.shape, dtype=leaf.dtype, device=device_of(x))])


def _put_back(made: Tree, stand_in: Parts, x: Parts) -> Tree:
    def empty(node: Tree) -> Tree:
        return Parts(x.layout, []) if isinstance(node, Parts) and node.layout == stand_in.layout else node

    return tree.map_tops(empty, Parts, made)
