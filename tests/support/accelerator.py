"""A device that computes nothing (meta tensors), cannot be mixed with the CPU, and counts what crosses over."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard.comm import consensus, process_groups
from fshard.comm.mesh import Grid
from fshard.comm.ranks import Call

DEVICE = torch.device("meta")
_CROSS = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
# a number of the host's among tensors of a device is an argument of a kernel; not of these
_STRICT = (torch.ops.aten.where, torch.ops.aten.cat, torch.ops.aten.stack)
_PACKAGE = str(Path(fshard.__file__).parent)


def place() -> str:
    """The function of the package that is running, as `module.function`, or of a test's."""
    frame = sys._getframe(1)
    first = None
    while frame.f_back is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            return f"{Path(code.co_filename).stem}.{code.co_qualname.replace('.<locals>', '')}"
        if first is None and "/tests/" in code.co_filename and "/test_" in code.co_filename:
            first = f"{Path(code.co_filename).stem}.{code.co_qualname.replace('.<locals>', '')}"
        frame = frame.f_back
    return first or "?"


class Apart(TorchDispatchMode):
    """As between a GPU and its host: what takes tensors of both is an error, unless it copies, or one is a number.

    `crossed` counts copies and reads, by direction and place: each of them has the host wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossed: Counter[tuple[str, str]] = Counter()

    def _note(self, to: torch.device) -> None:
        self.crossed["to the device" if to == DEVICE else "to the host", place()] += 1

    # Any: operators have arguments and results of all types
    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        op, kwargs = func.overloadpacket, {**(kwargs or {}), "pin_memory": False}
        kwargs = {key: x for key, x in kwargs.items() if key in {a.name for a in func._schema.arguments}}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        wide = {x.device.type for x in tensors if x.dim() or x.device == DEVICE or op in _STRICT}
        assert len(wide) < 2 or op in _CROSS, f"{func} of tensors on {[x.device for x in tensors]}"
        if op is torch.ops.aten._local_scalar_dense and tensors[0].device == DEVICE:
            self._note(torch.device("cpu"))
            return 0
        if op is torch.ops.aten.copy_ and args[0].device != args[1].device:
            self._note(args[0].device)
            return args[0].zero_() if args[1].device == DEVICE else args[0]
        if op is torch.ops.aten._to_copy and args[0].device != kwargs.get("device", args[0].device):
            self._note(kwargs["device"])
            if args[0].device == DEVICE:
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if op is torch.ops.aten._pin_memory:
            return args[0].clone()
        if op is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_ and tensors[0].device == DEVICE:
            return None
        return func(*args, **kwargs)


class _Numbers(TorchFunctionMode):
    """Counts Python's numbers that become tensors of the device: torch makes them in host memory, and copies."""

    def __init__(self, apart: Apart):
        super().__init__()
        self._apart = apart

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor)
        made = made or (func is Tensor.new_tensor and not isinstance(args[1], Tensor))
        device = kwargs.get("device", args[0].device if func is Tensor.new_tensor else None)
        if made and device is not None and torch.device(device) == DEVICE:
            self._apart._note(DEVICE)
        if func is Tensor.__setitem__ and args[0].device == DEVICE and not isinstance(args[2], Tensor):
            self._apart._note(DEVICE)
        if func in (Tensor.__setitem__, Tensor.__getitem__) and args[0].device == DEVICE:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list) for i in index):
                self._apart._note(DEVICE)
        return func(*args, **kwargs)


class Ranks:
    """One of two ranks, the other of which sends nothing of interest."""

    built_in, whole, rank, size = None, None, 0, 2

    def __init__(self, axis: str, size: int = 2):
        self.axis, self.device, self.size = axis, DEVICE, size

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """A tensor."""
        return like.new_empty(numel)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> process_groups.Works:
        """What travels is on the device."""
        assert all(x.device == self.device for x in (*sends, *(r for r in recvs if r is not None))), call
        return process_groups.Works([], process_groups.outputs_of(sends, recvs, self.rank))


class Mesh(Grid):
    """Ranks with a GPU each: two along an axis, or as many as are said; this is the first."""

    def __init__(self, **sizes: int):
        sizes = sizes or {"shard": 2}
        super().__init__(sizes, 0, [0] * len(sizes), DEVICE)

    def ranks(self, axis: str) -> Ranks:
        """Along one axis."""
        return Ranks(axis, self.size(axis))


@contextmanager
def on_accelerator() -> Iterator[Apart]:
    """The device of a mesh is one that computes nothing, and ranks agree without asking the one that is not there."""
    find = torch.get_device_module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda x: torch.cpu if torch.device(x) == DEVICE else find(x))
        patch.setattr(consensus, "check_same", lambda *args: None)
        apart = Apart()
        with apart, _Numbers(apart):
            yield apart
