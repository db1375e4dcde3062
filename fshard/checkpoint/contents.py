"""The contents of a state, leaf by leaf: this rank's elements, and the pieces that this rank writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, Axes, adapted, axis_sizes, coordinate, mesh_device, num_ranks, rank_in
from ..core import tree
from ..core.arguments import shown
from ..core.differences import Form, unreadable
from ..core.storage import as_bytes
from ..core.tree import Tree
from ..files.index import Json, checksum, rank_key
from ..files.safetensors_file import CHUNK, check_fits
from ..layout.pieces import Parts, pieces, typed
from ..sharding.sharded import Sharded
from ..state.dtensors import is_sharded, sharding

# a piece of a leaf: the leaf's name, first element, end, and tensors with the piece's bytes
Named = tuple[str, int, int, list[Tensor]]
_SMALL_PART = 1 << 18  # elements; if several ranks have copies of a larger span, each writes a share of the span


@dataclass(frozen=True)
class SavedSpan:
    """Elements of a leaf on this rank, from number `begin` on, counted in `order`; a view of the state if possible.

    `holders` ranks have copies; this rank is number `holder` of these ranks.
    """

    name: str
    begin: int
    elements: Tensor  # any shape
    holder: int
    holders: int
    order: tuple[int, ...] = ()

    def share(self, number: int) -> tuple[int, int]:
        """Return the range [begin, end) of `elements` for this rank to write. `number`: the leaf's number."""
        numel = self.elements.numel()
        if numel <= _SMALL_PART:  # one holder writes all; the leaf's number says who
            return (0, numel) if number % self.holders == self.holder else (0, 0)
        return numel * self.holder // self.holders, numel * (self.holder + 1) // self.holders


@dataclass(frozen=True)
class Contents:
    """A state as a rank sees it: forms of leaves (equal on all ranks), this rank's spans, numbers and strings."""

    mesh: AnyMesh
    forms: dict[str, Form] = field(default_factory=dict)
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of a leaf's elements; row-major if missing
    parts: list[SavedSpan] = field(default_factory=list)
    values: dict[str, Json] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)  # of tied leaves: other names to the first name
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def rank(self) -> int:
        return rank_in(self.mesh)

    @property
    def ranks(self) -> int:
        return num_ranks(self.mesh)


def contents_of(state: Tree, function: str, mesh: AnyMesh) -> Contents:
    """Return the contents. TypeError or ValueError, beginning with `function`, for an unsupported leaf."""
    contents, names = Contents(mesh), list[str]()
    for path, node in tree.paths_to(state, Parts):
        if isinstance(node, Parts):
            _check_mesh(function, path, node.mesh, mesh)
            names += add_parts(contents, path, node)
        elif isinstance(node, Tensor):
            names.append(path)
            if is_sharded(node):
                raise ValueError(f"{function}: leaf {path!r}: expected a tensor or a Sharded, got {sharding(node)}")
            if node.layout != torch.strided:
                text = f"expected a dense tensor, got {node.layout}: call to_dense() on it"
                raise ValueError(f"{function}: leaf {path!r}: {text}")
            contents.forms[path] = Form(tuple(node.shape), node.dtype)
            plain = node.detach().resolve_conj().resolve_neg().contiguous()  # then the bytes are the values, row-major
            contents.parts.append(SavedSpan(path, 0, plain, contents.rank, contents.ranks))
        elif isinstance(node, bool | int | float | str):
            names.append(path)
            contents.values[path] = node
        else:
            raise TypeError(
                f"{function}: leaf {path!r}: expected a tensor, a number or a string, got {shown(node)}. Nothing is "
                "pickled: keep what describes it"
            )
    check_fits(function, names, ((name, form.dtype) for name, form in contents.forms.items()))
    return contents


def add_parts(contents: Contents, path: str, node: Parts) -> list[str]:
    """Add the leaves of `node`, and this rank's spans; return the leaves' names."""
    layout = typed(node)
    names = {number: tree.joined(path, layout.leaves[number].path) for number in layout.numbers}
    forms = {name: Form(layout.leaves[number].shape, layout.leaves[number].dtype) for number, name in names.items()}
    contents.forms.update(forms)
    # files have whole leaves row-major, even if collectives use another order
    orders = {name: layout.leaves[number].order if layout.flat else () for number, name in names.items()}
    contents.orders.update(orders)
    contents.plans.append(getattr(node.home, "fingerprint", ""))
    if isinstance(node, Sharded):
        for first, *same in node.view.names().values():
            contents.aliases.update({tree.joined(path, name): tree.joined(path, first) for name in same})
    copies = dict[Axes, tuple[int, int]]()  # by axes of a row: this rank's number among ranks with copies, their number
    for over in dict.fromkeys(row.over for row in layout.rows):
        axes = [axis for axis in axis_sizes(contents.mesh) if axis not in over]
        copies[over] = coordinate(contents.mesh, axes), num_ranks(contents.mesh, axes)
    for span, (number, piece) in zip(layout.mine, pieces(node), strict=True):
        name, (holder, holders) = names[number], copies[layout.row_of[number].over]
        contents.parts.append(SavedSpan(name, span.begin, piece.detach(), holder, holders, orders[name]))
    return [*names.values()]


def _check_mesh(function: str, path: str, mesh: AnyMesh, whole: AnyMesh) -> None:
    of_leaf, of_all = adapted(mesh), adapted(whole)
    if of_leaf is not None and of_all is not None and of_leaf.likeness != of_all.likeness:
        meshes = [f"{axis_sizes(grid)} of processes {[*getattr(grid, 'members', ())]}" for grid in (of_all, of_leaf)]
        raise ValueError(
            f"{function}: leaf {path!r}: expected all leaves on one mesh, {meshes[0]}, got a leaf on another, "
            f"{meshes[1]}: let the ranks of each mesh save in a directory of their own"
        )


def contents_to_save(state: Tree, mesh: AnyMesh, function: str = "save") -> Contents:
    contents = contents_of(state, function, mesh)
    for part in contents.parts:
        if reason := unreadable(part.name, part.elements):
            raise ValueError(f"{function}: leaf {reason}")
    return contents


def made_like(like: Tree, mesh: AnyMesh, donate: bool, value: Callable[[str, Tree], Tree]) -> Tree:
    """Return a state like `like`: tensors to write into, from `like` if donated, and `value(path, leaf)` elsewhere."""
    taken = set[int]()

    def memory(x: Tensor) -> Tensor:
        has_memory = x.untyped_storage().device.type != "meta"  # fake tensors have no memory, either
        # lazy views (conj, neg) and inference tensors cannot be written to
        if donate and has_memory and x.is_contiguous() and not (x.is_conj() or x.is_neg() or x.is_inference()):
            address = x.untyped_storage().data_ptr()
            # parameters and their first average may share memory, but get different values
            if address not in taken:
                taken.add(address)
                return x.detach()
        device = mesh_device(mesh) if x.is_meta else x.device
        return torch.zeros(x.shape, dtype=x.dtype, device=device, pin_memory=x.is_pinned())

    def node_at(path: str, node: Tree) -> Tree:
        return tree.map(memory, node) if isinstance(node, Parts | Tensor) else value(path, node)

    result = tree.put_tops(like, Parts, [node_at(path, node) for path, node in tree.paths_to(like, Parts)])
    if donate:
        tree.give_away(like)
    return result


def check_same_call(contents: Contents, function: str, **arguments: object) -> None:
    """MismatchError on every rank if leaves or arguments differ between ranks."""
    lines = [f"{name}={value!s}" for name, value in arguments.items()]
    forms = ((name, form, contents.orders.get(name) or "") for name, form in contents.forms.items())
    lines += [f"{name!r} {form.dtype} {list(form.shape)}{order}" for name, form, order in forms]
    lines += [f"{name!r} {type(value).__name__}" for name, value in contents.values.items()]
    remedy = (
        "Give all ranks the same directory, step and tree. A list or dict in an optimizer's state has leaves of one "
        "rank: keep a tensor for each leaf in a tree (fshard.tree.map(torch.zeros_like, params))"
    )
    consensus.check_same(contents.mesh, "\n".join(lines), f"{function}: the call", remedy)


def differing(contents: Contents) -> set[str]:
    """Return the names of leaves and values that every rank has whole, but with different bits."""
    texts = {name: repr(value) for name, value in contents.values.items()}
    for part in contents.parts if contents.ranks > 1 else ():
        if part.holders == contents.ranks:
            texts[part.name] = texts.get(part.name, "") + digest_of_blocks(part.elements)
    by_rank = consensus.differing_keys(texts, contents.mesh)
    for name, rank in product(sorted(by_rank), range(contents.ranks)):
        if (key := rank_key(name, rank)) in contents.forms or key in contents.values:
            raise ValueError(
                f"save: leaf {name!r} differs between ranks, and {key!r}, as that of rank {rank} is called in the "
                "checkpoint, is another leaf: give it another name"
            )
    return by_rank


def digest_of_blocks(x: Tensor) -> str:
    """Return two checksums of each block: swapped words change at least one."""
    return "".join(f"{checksum(block):08x}{checksum(block, 1009):08x}" for block in as_bytes(x).split(CHUNK))


def own_pieces(contents: Contents, by_rank: set[str]) -> Iterator[Named]:
    """Yield the pieces for this rank to write. A leaf in `by_rank` is one piece, named with the rank's number."""
    numbers = {name: number for number, name in enumerate(contents.forms)}  # equal on all ranks
    for part in contents.parts:
        begin, end = (0, part.elements.numel()) if part.name in by_rank else part.share(numbers[part.name])
        if begin < end:
            name = rank_key(part.name, contents.rank) if part.name in by_rank else part.name
            is_whole = end - begin == part.elements.numel()
            elements = part.elements if is_whole else part.elements.reshape(-1)[begin:end]
            yield name, part.begin + begin, part.begin + end, [elements]
