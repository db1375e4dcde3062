"""What autograd keeps of a tape: anchors of units, and places in place of saved views.

Note [Anchors]
    The first touch of a unit in a tape makes an autograd node, the anchor. The gathered leaves are its outputs.
    Another touch, after the unit was let go of, makes another node, which takes an output of the anchor as its input.
    So autograd runs the anchor last, and the anchor starts the one reduction of the unit, of the gradients of all
    touches. Of earlier outputs the tape keeps none but that one, of one element, so that no node keeps a buffer alive.
    The tape waits for the reductions at the end of the backward.

Note [One root]
    A backward runs only the nodes on the way to the tensor that it differentiates with respect to. Here that is the
    root, a constant that all anchors take as input. So a backward also reaches leaves of an earlier call or
    micro-batch that a loss has kept, and their tape, which is closed, raises; otherwise the gradient would silently
    lack a part. Only a loss inside another loss has a root of its own: to it the outer loss's parameters are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.storage import address, span
from ..core.tracing import assigned, unhooked

OnGrads = Callable[[Any, Sequence[Tensor | None]], None]  # of a `TapeUnit`, and its gradients
Ctx = Any  # torch's context of a function, on which forward sets any attributes for backward


def _new_root() -> Tensor:
    # dtype and device are given: a user may have set other defaults
    return torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


_OUTERMOST = _new_root()
_root: ContextVar[Tensor] = ContextVar("fshard_root", default=_OUTERMOST)


def root() -> Tensor:
    """The 0-d tensor that backwards differentiate with respect to (Note [One root])."""
    return _root.get()


def another_root() -> AbstractContextManager[None]:
    """A block in which the root is another tensor: for a loss inside a loss."""
    return assigned(_root, _new_root())


class Anchor(torch.autograd.Function):
    """The node of a touch of a unit: its backward gets the gradients of all leaves and calls `take(unit, gradients)`.

    `before` is the root, or the last output of another anchor: for further touches of a unit, that of the first (Note
    [Anchors]); else that of the unit before (Note [One order on all ranks] in `chain.py`).
    """

    @staticmethod
    def forward(ctx: Ctx, before: Tensor, touch: tuple[OnGrads, object, Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Return views of the leaves, and a 0-d tensor."""
        ctx.take, ctx.unit, leaves = touch  # one argument: torch looks at each in Python
        # None, not zeros, for a leaf that the loss does not use: the tape zeroes its place in the flat buffer
        ctx.set_materialize_grads(False)
        # without leaves not of `before`, which in a graph may be a tensor of no graph
        last = leaves[0].new_empty(()) if leaves else torch.empty((), dtype=torch.float32, device=before.device)
        return (*leaves, last)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[None, ...]:
        """Hand the gradients on; what the node depends on gets none."""
        ctx.take(ctx.unit, grads[:-1])
        return None, None


def has_reentrant(outs: Sequence[Tensor]) -> bool:
    """Whether a reentrant checkpoint is anywhere in the graph of these tensors."""
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
    """ValueError if a backward of `outs` has `reached` no parameter, or if a reentrant checkpoint hides some.

    `hides` says that gradients of some parameters are lacking, or that some were read where gradients are off.
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


# private: nothing public tells which hooks are on (test_prefetch.py notices when it goes)
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Block(NamedTuple):
    """A checkpoint of torch that runs, and will run again in the backward: the outermost, which runs again first."""

    hook: object  # tells it from others
    is_nested: bool  # whether one inside it runs, which will run once more


def in_checkpoint() -> Block | None:
    """The checkpoint that runs, whose hooks on saved tensors are on; None if none does."""
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
    """The part of a `Tape` that gives saved tensors back."""

    index: int

    def again(self, unit: Any) -> object:
        """Return a unit's buffers, gathered again if they are not in memory."""

    def pack(self, x: Tensor) -> object:
        """Return what autograd saves for a tensor."""

    def unpack(self, saved: object) -> Tensor:
        """Return the tensor for which autograd saved this."""


class SavedView(NamedTuple):
    """The place of a view of a gathered buffer, which autograd holds instead of the view."""

    tape: Saves  # which gathers the unit again
    unit: int
    kind: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the buffer's first element, in elements of `dtype`
    dtype: torch.dtype  # a view may have another dtype than its buffer
    conj: bool  # whether torch conjugates, or negates, the elements when they are read
    neg: bool

    def view_of(self, full: Tensor) -> Tensor:
        """The same view of another buffer of the unit."""
        buffer = full if full.dtype == self.dtype else full.view(self.dtype)
        view = buffer.as_strided(self.size, self.stride, buffer.storage_offset() + self.offset)
        view = view.conj() if self.conj else view
        return view.neg() if self.neg else view  # a copy: torch has no public way to set the negative bit


def saved_by(tapes: Sequence[Saves], x: Tensor) -> object:
    """What autograd saves for a tensor: its place in a buffer of one of the tapes, or the tensor and its version."""
    *others, last = tapes
    place = next((saved for tape in others if isinstance(saved := tape.pack(x), SavedView)), None)
    # what is in no buffer is packed by the last: the tape of `hvp`, which comes last, asks its tape of tangents
    return last.pack(x) if place is None else place


def unpacked(tape: Saves, saved: object) -> Tensor:
    """The tensor for which this was saved: a view by the tape that gathers its unit, all else by the given one."""
    return (saved.tape if isinstance(saved, SavedView) else tape).unpack(saved)


class SavedTensor(NamedTuple):
    """A saved tensor that is not a view of a gathered buffer, and how often it had been written to by then."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> SavedTensor:
        """The tensor without its node: a result that its own node saves would form a cycle with it."""
        # private, as in `storage.writes`; not by a call, because every saved tensor comes here
        return cls(x.detach() if x.requires_grad else x, x._version)

    def unchanged(self) -> Tensor:
        """The tensor. RuntimeError if it was written to since, which torch does not check where there are hooks."""
        x = self.tensor
        if x._version != self.version:
            raise RuntimeError(
                f"the loss function: a {x.dtype} tensor of shape {list(x.shape)}, needed for the gradient, was "
                "written to in place after it was used. Make a new tensor instead, or a clone first."
            )
        return x


_NOWHERE = None, 0, 0, None


class Owners:
    """The memory of a tape's leaves, by which a tensor that autograd saves is known as a view of a gathered buffer."""

    def __init__(self) -> None:
        # by the address of a storage: a reference that keeps the address taken, the kind, the buffer's first byte, and
        # the unit that the backward gathers again; None for buffers that stay: their saved tensors have no place
        self._owners: dict[int, tuple[StorageWeakRef, int, int, int | None]] = {}

    def add(self, full: Tensor, unit: int, kind: int, regathers: bool) -> None:
        """Note whose buffer this is; `regathers` says whether the backward gathers the unit again."""
        first_byte, again = int(full.storage_offset()) * full.itemsize, unit if regathers else None
        self._owners[address(full)] = StorageWeakRef(full.untyped_storage()), kind, first_byte, again

    def know(self, kind: int, *leaves: Tensor) -> None:
        """Note that leaves of a kind, or buffers of such, lie in these tensors."""
        for x in leaves:
            self._owners.setdefault(address(x), (StorageWeakRef(x.untyped_storage()), kind, 0, None))

    def kind_of(self, x: Tensor) -> int | None:
        """The kind of the leaves in the memory of a tensor; None if no leaf lies there."""
        return self._owners[address(x)][1] if address(x) in self._owners else None

    def places(self) -> list[range]:
        """The memory of the buffers that live."""
        # private: nothing public turns the reference into a storage (test_tape.py notices when it goes)
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, *_ in self._owners.values()]
        return [span(storage) for storage in storages if storage is not None]

    def place(self, x: Tensor) -> tuple[int, int, torch.Size, tuple[int, ...], int, torch.dtype, bool, bool] | None:
        """The fields of the `SavedView` of a tensor, after `tape`; None if it is in no buffer to be gathered."""
        owner = self._owners.get(address(x)) if x.layout is torch.strided else None
        _, kind, first_byte, unit = owner or _NOWHERE
        if unit is None:
            return None
        offset = int(x.storage_offset()) - first_byte // x.itemsize
        return unit, kind, x.size(), x.stride(), offset, x.dtype, x.is_conj(), x.is_neg()
