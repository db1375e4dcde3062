"""Checks that a loss does not write in place to its parameters: the new values would be lost.

Note [Writes in place]
    torch counts in-place operations on a tensor and its views. Each gathered buffer of trainable leaves, and each
    frozen leaf, gets its own counter. The tape keeps an alias with the same counter but without memory, so watching
    keeps no buffer alive. `batch_norm` updates running statistics without counting. So a loss gets copies of small
    frozen leaves, and fshard compares these with the originals after the loss.

    fshard does not notice a write through `.data` to a larger or trainable leaf. It notices an assignment to `.data`:
    the leaf then lies in another storage. While a graph is traced, a mode looks at the arguments of writing operators.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..comm.announce import refusing_raw
from ..core import tree
from ..core.storage import address, ranges_meet, writes
from ..core.tracing import SET_DATA, Args, Kwargs, Operator, is_tracing
from ..plan.plan import Slot
from ..sharding.schedule import Entry
from .under_way import TapeUnit

# leaves that share a counter; True if they lie in the passed parameters' memory
Written: TypeAlias = tuple[Sequence[Slot], bool]
_ADDRESS = operator.attrgetter("_cdata")  # of a storage; `address` takes tensors
_SMALL_BUFFER = 1 << 16  # elements: running statistics and counters have fewer
_REMEDY = (
    "A loss changes nothing that it is given: work on a clone, and return its new value, as aux (has_aux=True) or, to "
    "have it in the next step, as extra (train_step(..., with_extra=True))."
)

# in torch's errors about a write to an autograd function's view
_VIEWS = ("was created inside a custom Function", "is the output of a function that returns multiple views")
_OF_ANCHOR = re.compile(r"Output (\d+) of _?Anchor(?:Backward)? is")
_CHANGED = " The parameters that were passed are changed by it: do not use them again."


class _Refusing(TorchFunctionMode):
    """Raise ValueError for `x.data = y`, or batch_norm's write to a leaf: a tracer sees neither write."""

    def __init__(self, frozen: Sequence[tuple[Tensor, Slot]]):
        super().__init__()
        self._frozen = frozen

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if func == SET_DATA:
            raise ValueError(
                f"the loss function: a graph has no `x.data = y`, and would compute with the old x. {_REMEDY}"
            )
        for x in _statistics(func, args, kwargs or {}):
            places = {_place_of(leaf): slot.path for leaf, slot in self._frozen if _is_small(leaf)}
            if isinstance(x, Tensor) and (path := places.get(_place_of(x))) is not None:
                raise ValueError(f"the loss function: batch_norm would write to leaf {path!r} in place. {_REMEDY}")
        return func(*args, **(kwargs or {}))


class _RefusingWrites(TorchDispatchMode):
    """Raise ValueError if a traced operator writes to a frozen leaf."""

    def __init__(self, frozen: Sequence[tuple[Tensor, Slot]]):
        super().__init__()
        self._frozen = frozen

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for x in tree.leaves([by_name.get(name) for name in written]):
            for leaf, slot in self._frozen if isinstance(x, Tensor) else []:
                if ranges_meet(x, leaf):
                    raise _written([([slot], False)])
        return func(*args, **(kwargs or {}))


def _place_of(x: Tensor) -> tuple[int, int]:
    return address(x), int(x.storage_offset())


def _is_small(x: Tensor) -> bool:
    return x.dim() < 2 and x.numel() <= _SMALL_BUFFER


def _statistics(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    if getattr(func, "__name__", "").removeprefix("native_") != "batch_norm":
        return []
    first = 1 if func is F.batch_norm else 3  # torch.batch_norm and its kin take weight and bias first
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    return [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")] if training else []


class Writes:
    """Watches the leaves of a loss."""

    def __init__(self) -> None:
        # (alias without memory, leaves of its counter, `is_callers`)
        self._watched: list[tuple[Tensor, Sequence[Slot], bool]] = []
        # small frozen leaves end to end, (n,): the loss's copy, and the values before the loss
        self._copies: list[tuple[Tensor, Tensor, Sequence[Slot], Sequence[int]]] = []
        self.bound: list[Entry] = []  # the units with anchors
        self._nothing: Tensor | None = None  # (0,), the data of all aliases
        self._tracing = is_tracing()
        self._storages = set[int]()  # addresses of watched storages
        self._frozen_leaves: list[tuple[Tensor, Slot]] = []  # while a graph is traced

    @contextmanager
    def refusing(self) -> Iterator[None]:
        with (
            _Refusing(self._frozen_leaves) if self._tracing else nullcontext(),
            _RefusingWrites(self._frozen_leaves) if self._tracing else refusing_raw(),
        ):
            try:
                yield
            except RuntimeError as failure:
                if not any(words in str(failure) for words in _VIEWS):
                    raise
                raise self._refused(str(failure)) from failure

    def _refused(self, words: str) -> ValueError:
        if written := self._counted():
            return _written(written)
        number = _OF_ANCHOR.search(words)
        if number is None:
            return ValueError(
                "the loss function: it wrote in place to a view of a leaf it was given, or of one of several results "
                f"of an operator. {_REMEDY}"
            )
        # torch names the output of an `Anchor`, but no unit: the error names the leaf at this output in each unit
        output = int(number[1])
        slots = [entry.slots[entry.trained[output]] for entry in self.bound if output < len(entry.trained)]
        leaves = {slot.path: slot for slot in slots}
        return _written([(list(leaves.values()), False)])

    def watch(self, x: Tensor, slots: Sequence[Slot], is_callers: bool) -> Tensor:
        """Return an alias of `x` with its own counter. `is_callers`: True if `x` is memory of the passed parameters."""
        x = x.data  # unlike `detach`, this starts a new counter
        counter = x.detach()  # shares the counter of the new `x`
        if not self._tracing:  # fake tensors have no memory to keep alive
            if self._nothing is None:
                self._nothing = x.new_empty(0)
            counter.data = self._nothing
        self._watched.append((counter, slots, is_callers))
        self._storages.add(_ADDRESS(x.untyped_storage()))
        return x

    def frozen(self, leaves: Sequence[Tensor], slots: Sequence[Slot], is_callers: bool) -> list[Tensor]:
        """Return frozen leaves, each with its own counter; small leaves are copied."""
        visible, small = list(leaves), [n for n, x in enumerate(leaves) if _is_small(x)]
        if self._tracing:
            self._frozen_leaves += zip(visible, slots, strict=True)
        elif small:
            flat = torch.cat([leaves[n].reshape(-1) for n in small])  # (n,)
            numels = [leaves[n].numel() for n in small]
            self._copies.append((flat, flat.clone(), [slots[n] for n in small], numels))
            for n, copy in zip(small, flat.split(numels), strict=True):
                visible[n] = copy.view(leaves[n].shape)
        copied = () if self._tracing else small
        return [self.watch(x, [slots[n]], is_callers and n not in copied) for n, x in enumerate(visible)]

    def leave(self, unit: TapeUnit) -> None:
        leaves = unit.bound or unit.leaves or ()
        if not self._storages.issuperset(map(_ADDRESS, map(Tensor.untyped_storage, leaves))):
            pairs = zip(unit.entry.slots, leaves, strict=True)
            raise _written([([slot], False) for slot, x in pairs if address(x) not in self._storages])

    def check(self) -> None:
        written = self._counted()
        for flat, before, slots, numels in self._copies:
            # as bytes: NaN is equal to itself
            sizes = [numel * flat.itemsize for numel in numels]
            written += _changed(flat.detach().view(torch.uint8), before.view(torch.uint8), slots, sizes)
        if written:
            raise _written(written)
        self._watched.clear()
        self._copies.clear()

    def _counted(self) -> list[Written]:
        # under inference_mode torch counts nothing
        return [(slots, is_callers) for counter, slots, is_callers in self._watched if writes(counter)]


def _changed(now: Tensor, before: Tensor, slots: Sequence[Slot], sizes: Sequence[int]) -> list[Written]:
    """Return the leaves with changed bytes; on an accelerator assert that there are none."""
    if now.device.type != "cpu":  # the host does not wait: the device stops with these words
        words = f"the loss function: it wrote in place to a frozen leaf: work on a clone. Leaf {_slot_names(slots)}"
        # CUDA's kernel takes fewer than 255 bytes
        torch._assert_async((now == before).all(), words.encode()[:254].decode(errors="ignore"))
        return []
    if torch.equal(now, before):
        return []
    pairs = zip(now.split(sizes), before.split(sizes), slots, strict=True)
    return [([slot], False) for new, old, slot in pairs if not torch.equal(new, old)]


def _written(writes: Sequence[Written]) -> ValueError:
    names = dict.fromkeys(_slot_names(slots) for slots, _ in writes)
    changed = _CHANGED if any(is_callers for _, is_callers in writes) and not is_tracing() else ""
    return ValueError(f"the loss function: it wrote in place to leaf {' and '.join(names)}.{changed} {_REMEDY}")


def _slot_names(slots: Sequence[Slot]) -> str:
    names = ", ".join(repr(slot.path) for slot in slots[:4]) + ", ..." * (len(slots) > 4)
    return names if len(slots) == 1 else f"(one of {names})"
