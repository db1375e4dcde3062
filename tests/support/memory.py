"""The bytes of tensors that are alive, counted operator by operator."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def resident(name: str) -> int:
    """Bytes of this process: VmRSS, VmHWM or RssShmem (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Live(TorchDispatchMode):
    """Counts what operators of this thread allocate: `peak` is the most bytes that were alive at once.

    Simulated ranks may enter one together, which then counts what all of them allocate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._before: dict[int, torch.Tensor] = {}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def leave_out(self, before: Iterable[torch.Tensor]) -> None:
        """Do not count the memory of these tensors, of which operators may give views."""
        self._before |= {x.untyped_storage()._cdata: x for x in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note the memory of what it returns."""
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and not x.is_meta:
                storage = x.untyped_storage()
                if storage._cdata not in self._before:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out
