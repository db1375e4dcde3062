"""Autograd's part of a tape: anchors of units, and stand-ins for saved views.

Note [Anchors]
    The first touch of a unit makes an autograd node, the anchor, with the gathered leaves as outputs. If the unit was
    freed since, a touch makes another node, with an output of the anchor as input. So the anchor's backward runs last,
    and starts the unit's only reduction. The tape keeps a further output of the anchor, one element, and no buffer.

Note [One root]
    All anchors take one constant as input, the root, and a backward differentiates with respect to the root. So the
    backward also reaches leaves from an earlier call, and their closed tape raises; else the gradient would silently
    lack a part. A loss inside another loss has its own root: for the inner loss the outer parameters are constants.

Note [Expanded leaves]
    Operators such as a matrix product copy the view `leaf.expand(n, ...)` if n > 1, but not for n of 0 or 1, and would
    save views of other units on ranks with other numbers of rows. An eager step then keeps all units. A rank traces
    alone: in a graph expanded leaves are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.storage import address, address_range
from ..core.tracing import Args, Ctx, Kwargs, Operator, assigned, unhooked

OnGrads = Callable[[Any, Sequence[Tensor | None]], None]  # takes a `TapeUnit` and its gradients


def _new_root() -> Tensor:
    # a user may have set another default dtype or device
    return torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


_OUTERMOST = _new_root()
_INNERMOST: ContextVar[Tensor] = ContextVar("fshard_root", default=_OUTERMOST)


def root() -> Tensor:
    return _INNERMOST.get()


def another_root() -> AbstractContextManager[None]:
    return assigned(_INNERMOST, _new_root())


class Anchor(torch.autograd.Function):
    """The node of one touch of a unit: its backward calls `take(unit, gradients)`.

    `before`: at the first touch, an output of the previous anchor, or the root; later, an output of the unit's anchor.
    """

    @staticmethod
    def forward(ctx: Ctx, before: Tensor, touch: tuple[OnGrads, object, Sequence[Tensor]]) -> tuple[Tensor, ...]:
        ctx.take, ctx.unit, leaves = touch  # one tuple saves time: torch inspects each argument in Python
        # None for unused leaves: the tape zeroes their slots
        ctx.set_materialize_grads(False)
        # not `before.new_empty`: while a graph is traced, `before` may be a tensor outside the graph
        last = leaves[0].new_empty(()) if leaves else torch.empty((), dtype=torch.float32, device=before.device)
        return (*leaves, last)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.take(ctx.unit, grads[:-1])
        return None, None


def has_reentrant(outs: Sequence[Tensor]) -> bool:
    seen, waiting = set[object](), [x.grad_fn for x in outs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [earlier for earlier, _ in node.next_functions]
    return False


def check_reached(outs: Sequence[Tensor], hides: bool, reached: bool) -> None:
    """Raise ValueError if the backward of `outs` `reached` no parameter, or a reentrant checkpoint hides parameters.

    `hides`: True if some parameters lack gradients, or were read while gradients were off.
    """
    if hides and has_reentrant(outs):
        raise ValueError(
            "the loss function: torch.utils.checkpoint(use_reentrant=True) hides the parameters it uses from the "
            "gradient of the loss. Pass use_reentrant=False."
        )
    if outs and not reached:
        raise ValueError(
            "the loss function: the loss depends on no trainable parameter, though on other tensors that require "
            "a gradient (were the parameters touched under no_grad, or detached?)"
        )


# private: no public function returns the current saved-tensor hooks (tested by test_prefetch.py)
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Block(NamedTuple):
    """The outermost running torch checkpoint: the backward first runs this one again."""

    hook: object  # identifies the checkpoint
    is_nested: bool  # True if another checkpoint runs inside


def in_checkpoint() -> Block | None:
    """Return the outermost checkpoint if the innermost hooks are a checkpoint's."""
    hooks = _top_hooks(True)
    return _outermost() if hooks and _is_checkpoint(hooks[0]) else None


def _is_checkpoint(pack: object) -> bool:
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def _outermost() -> Block:
    with unhooked() as stack:
        pass
    running = [pack for pack, _ in stack if _is_checkpoint(pack)]
    return Block(running[-1], len(running) > 1)


class Saves(Protocol):
    """The methods of a `Tape` for tensors saved by autograd."""

    index: int

    def again(self, unit: Any) -> object: ...

    def pack(self, x: Tensor) -> object: ...

    def unpack(self, saved: object) -> Tensor: ...


class SavedView(NamedTuple):
    """A stand-in for a view of a gathered buffer."""

    tape: Saves
    unit: int
    kind: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in the buffer, in elements of `dtype`
    dtype: torch.dtype  # the view's; the buffer may have another
    conj: bool  # torch's lazy conjugation
    neg: bool  # torch's lazy negation

    def view_of(self, gathered: Tensor) -> Tensor:
        buffer = gathered if gathered.dtype == self.dtype else gathered.view(self.dtype)
        view = buffer.as_strided(self.size, self.stride, buffer.storage_offset() + self.offset)
        view = view.conj() if self.conj else view
        return view.neg() if self.neg else view  # a copy: torch has no public way to set the negative bit


def saved_by(tapes: Sequence[Saves], x: Tensor) -> object:
    *others, last = tapes
    place = next((saved for tape in others if isinstance(saved := tape.pack(x), SavedView)), None)
    # last: in `hvp` this tape's `pack` also asks the tape of tangents
    return last.pack(x) if place is None else place


class CopiedExpands(TorchDispatchMode):
    """Copy a tensor before `expand` if `is_leaf(tensor)` and an expand may repeat it (Note [Expanded leaves])."""

    def __init__(self, is_leaf: Callable[[Tensor], bool]):
        super().__init__()
        self._is_leaf = is_leaf

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if func is torch.ops.aten.expand.default:
            x, size, *rest = args
            if (len(size) > x.dim() or 1 in x.shape) and self._is_leaf(x):
                args = (x.clone(), size, *rest)
        return func(*args, **(kwargs or {}))


def unpacked(tape: Saves, saved: object) -> Tensor:
    return (saved.tape if isinstance(saved, SavedView) else tape).unpack(saved)


class SavedTensor(NamedTuple):
    """A saved tensor outside gathered buffers, with the number of writes so far."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> SavedTensor:
        """Save `x` without its node: a result saved by its own node would form a cycle."""
        # private `_version`: a call of `storage.writes` would take longer
        return cls(x.detach() if x.requires_grad else x, x._version)

    def unchanged(self) -> Tensor:
        """RuntimeError if the tensor was written to since: under hooks torch does not check."""
        x = self.tensor
        if x._version != self.version:
            raise RuntimeError(
                f"the loss function: a {x.dtype} tensor of shape {list(x.shape)}, needed for the gradient, was "
                "written to in place after it was used. Make a new tensor instead, or a clone first."
            )
        return x


_NOWHERE = None, 0, 0, None, False


class Owners:
    """The memory of a tape's leaves, by address."""

    def __init__(self) -> None:
        # weak reference (keeps the address from reuse), kind, first byte and unit of the buffer, True if gathered again
        self._owners: dict[int, tuple[StorageWeakRef, int, int, int | None, bool]] = {}

    def add(self, gathered: Tensor, unit: int, kind: int, regathers: bool) -> None:
        first_byte, storage = int(gathered.storage_offset()) * gathered.itemsize, gathered.untyped_storage()
        self._owners[address(gathered)] = StorageWeakRef(storage), kind, first_byte, unit, regathers

    def know(self, kind: int, *leaves: Tensor) -> None:
        for x in leaves:
            self._owners.setdefault(address(x), (StorageWeakRef(x.untyped_storage()), kind, 0, None, False))

    def kind_of(self, x: Tensor) -> int | None:
        return self._owners[address(x)][1] if address(x) in self._owners else None

    def position(self, x: Tensor) -> tuple[int | None, int, int]:
        """Return the unit and kind of the gathered buffer that holds `x`, and the element at which `x` begins."""
        _, kind, first_byte, unit, _ = self._owners.get(address(x), _NOWHERE)
        return unit, kind, int(x.storage_offset()) - first_byte // x.itemsize

    def places(self) -> list[range]:
        # private: no public function turns the reference into a storage (tested by test_tape.py)
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, *_ in self._owners.values()]
        return [address_range(storage) for storage in storages if storage is not None]

    def place(self, x: Tensor) -> tuple[int, int, torch.Size, tuple[int, ...], int, torch.dtype, bool, bool] | None:
        """Return the fields of a `SavedView` after `tape`; None if the backward gathers no buffer for this tensor."""
        owner = self._owners.get(address(x)) if x.layout is torch.strided else None
        _, kind, first_byte, unit, is_gathered_again = owner or _NOWHERE
        if unit is None or not is_gathered_again:
            return None
        offset = int(x.storage_offset()) - first_byte // x.itemsize
        return unit, kind, x.size(), x.stride(), offset, x.dtype, x.is_conj(), x.is_neg()
