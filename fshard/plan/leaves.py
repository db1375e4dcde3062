"""Checks of a tree of parameters; tied and frozen leaves."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.differences import listed
from ..core.storage import address, byte_range, share_elements
from ..layout.layout import Leaf

_MODULE = "Give its parameters: apply, params, buffers = fshard.module.functionalize(module)."
_NODE = (
    "Make it a tensor, or a field fshard.tree.static() of its node; or make its class a node: @fshard.tree.node, or "
    "register its type as a pytree node (optree, or torch.utils._pytree.register_dataclass)."
)


def check_tensors(flat: Sequence[object], paths: Sequence[str]) -> None:
    """Raise ValueError unless leaves are dense plain tensors."""
    if twice := [path for path, number in Counter(paths).items() if number > 1]:
        raise ValueError(f"two leaves have the path {twice[0]!r}: keys with dots, or 1 and '1', look alike. Rename one")
    for path, leaf in zip(paths, flat, strict=True):
        if not isinstance(leaf, Tensor):
            remedy = _MODULE if hasattr(leaf, "named_parameters") else _NODE
            raise ValueError(f"leaf {path!r}: expected a tensor, got {type(leaf).__name__}. {remedy}")
        if hasattr(leaf, "__tensor_flatten__"):  # tensors with inner tensors, as DTensor
            raise ValueError(
                f"leaf {path!r}: expected a plain tensor, got a {type(leaf).__name__}, which holds other tensors. "
                "Give the whole tensor (of a DTensor: .full_tensor())."
            )
        if is_lazy(leaf):
            raise ValueError(f"leaf {path!r}: expected a tensor with a shape, got a lazy one. Run its module once.")
        if leaf.layout is not torch.strided:
            raise ValueError(f"leaf {path!r}: expected a dense tensor, got layout {leaf.layout}. Use .to_dense().")
        if leaf.is_quantized:
            raise ValueError(f"leaf {path!r}: expected no quantised tensor, got {leaf.dtype}. Use .dequantize().")


def first_places(flat: Sequence[Tensor], paths: Sequence[str]) -> list[int]:
    """Return, for every leaf, the number of the first leaf tied to it.

    ValueError for leaves that share memory but are not tied.
    """
    first: dict[Hashable, int] = {}
    places = [first.setdefault(memory_key(leaf), i) for i, leaf in enumerate(flat)]
    by_storage: dict[int, list[int]] = defaultdict(list)  # without later tied leaves: these may share memory
    for i in dict.fromkeys(places):
        if flat[i].numel():
            by_storage[address(flat[i])].append(i)
    for numbers in by_storage.values():
        _check_apart([(flat[i], paths[i]) for i in numbers])
    return places


def memory_key(leaf: Tensor) -> Hashable:
    """Return a key, equal for living tied leaves: the same elements of the same memory."""
    if not leaf.numel():  # all empty tensors may have one storage
        return id(leaf)
    # lazy bits: a conjugated view has the memory of its base, but other values
    bits = leaf.is_conj(), leaf.is_neg()
    # the stride of a dimension of size 1 means nothing
    strides = tuple(stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True) if size > 1)
    return address(leaf), leaf.dtype, leaf.storage_offset(), leaf.shape, strides, bits


def _check_apart(leaves: Sequence[tuple[Tensor, str]]) -> None:
    # `cluster`: leaves with overlapping byte ranges up to `end`; other pairs need no comparison
    cluster, end = list[tuple[Tensor, str]](), 0
    for leaf, path in sorted(leaves, key=lambda pair: (byte_range(pair[0]).start, byte_range(pair[0]).stop)):
        bytes_ = byte_range(leaf)
        cluster = [*cluster, (leaf, path)] if bytes_.start < end else [(leaf, path)]
        for other, other_path in cluster[:-1]:
            if share_elements(leaf, other):
                raise ValueError(
                    f"leaves {other_path!r} and {path!r} share memory, but are not the same tensor (shapes "
                    f"{list(other.shape)} and {list(leaf.shape)}): keep one, and make the other of it in the loss, "
                    "or .clone() one"
                )
        end = max(end, bytes_.stop)


def is_differentiable(leaf: Tensor | Leaf) -> bool:
    return leaf.dtype.is_floating_point or leaf.dtype.is_complex


def read_frozen(
    flat: Sequence[Tensor], places: Sequence[int], paths: Sequence[str], picked: Sequence[bool]
) -> list[bool]:
    """True for every frozen leaf: `picked` by `frozen=`, under any of its paths, or frozen by the tree itself.

    If any floating leaf requires a gradient, the tree freezes parameters without `requires_grad` (a tied leaf if none
    of its occurrences requires a gradient). Otherwise the tree freezes no leaf. Integer leaves never train.

    ValueError for an unpicked plain tensor next to parameters, and for a picked leaf with `requires_grad` next to a
    parameter without it. Warns of a leaf that trains, picked under some of its paths.
    """
    chosen = {place: path for place, path, is_picked in zip(places, paths, picked, strict=True) if is_picked}
    says: dict[int, int] = {}  # by a leaf's first occurrence
    for leaf, place in zip(flat, places, strict=True):
        if is_differentiable(leaf):
            said = _TRAINS if leaf.requires_grad else _STILL if isinstance(leaf, nn.Parameter | nn.Buffer) else _NOTHING
            says[place] = max(says.get(place, _NOTHING), said)
    trained, still = ([i for i, said in says.items() if said == word] for word in (_TRAINS, _STILL))
    plain = [paths[i] for i, said in says.items() if said == _NOTHING and i not in chosen]
    if plain and (decided := [paths[i] for i in (*trained, *still) if i not in chosen]):
        raise ValueError(
            f"leaves {listed(plain)}: {len(plain)} of {len(says)} are plain tensors beside a module's parameters "
            f"({decided[0]!r}), and nothing says whether they train. To train x, give nn.Parameter(x), or "
            "x.requires_grad_(); to freeze it, name it in frozen=, or give nn.Parameter(x, requires_grad=False). Plain "
            "tensors alone all train: tree.map(torch.Tensor.detach, params)."
        )
    if still and (other := [paths[i] for i in trained if i in chosen]):
        raise ValueError(
            f"frozen: leaf {other[0]!r} requires a gradient, while leaf {paths[still[0]]!r} of the same "
            "tree does not and is frozen for that: the tree says which leaves train, and frozen= says otherwise. "
            "Set requires_grad of the leaf to False, or give a tree of plain tensors (x.detach())."
        )
    of_tree = {i for i in still if trained}
    by_choice = says.keys() & chosen.keys() - of_tree
    rows = zip(places, paths, picked, strict=True)
    if tied := [(chosen[i], path) for i, path, is_picked in rows if i in by_choice and not is_picked]:
        told = "frozen: leaf {!r} is the same tensor as {!r}, outside of frozen=, so both are frozen".format(*tied[0])
        remedy = "To train one, clone it: tree.map(torch.clone, ...); else select both paths"
        warnings.warn(f"{told} ({len(tied)} such leaves). {remedy}", stacklevel=4)
    return [i in chosen or i in of_tree for i in places]


_NOTHING, _STILL, _TRAINS = range(3)  # by itself, a leaf is undecided, frozen, or trained
