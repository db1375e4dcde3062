"""A mode in which operators on a GPU that is not there have values, and say in the log what they read and write.

python tools/fakegpu/run.py tools/fakegpu/recorder.py PROGRAM [ARGUMENT ...]    # a program in this mode
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from values import compute, on_the_host

from fshard.core.tracing import is_tracing

STUB = ctypes.CDLL(next(path for path in os.environ["LD_PRELOAD"].split(":") if Path(path).name == "libfakegpu.so"))
STUB.fakegpu_waits.restype = ctypes.c_ulong
# they make a tensor and write nothing into it, or tell the allocator of a stream
EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "set_", "resize_"}
EMPTY |= {"record_stream"}
REDUCES = {"allreduce_", "reduce_scatter_", "_reduce_scatter_base_", "allreduce_coalesced_", "reduce_"}


def mark(words: str) -> None:
    """Write a line into the log."""
    STUB.fakegpu_mark(words.encode())


def tensors(*of: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [x for x in pytree.tree_leaves(of) if isinstance(x, Tensor)]


def spans(xs: Iterable[Tensor]) -> str:
    """Where tensors lie: `begin+size` of each that has elements, separated by commas.

    Not of pageable memory of the host: a copy has read or written it when the call returns, and a number is an
    argument of the kernel.
    """
    places = []
    for x in xs:
        if x.numel() and x.layout is torch.strided and (x.is_cuda or x.is_pinned()):
            last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            places.append(f"{x.data_ptr()}+{(last + 1) * x.itemsize}")
    return ",".join(places)


class Recorder(TorchDispatchMode):
    """Operators on the device have values, and each is a line of the log: its stream, and what it reads and writes.

    `values=False` leaves the values out. TypeError for sums of flags between ranks, which NCCL has no type for: torch
    sends bytes instead, and a sum becomes an "or".
    """

    def __init__(self, values: bool = True):
        super().__init__()
        self._values = values

    # Any: operators have arguments and results of all types
    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_tracing():
            return func(*args, **kwargs)
        if func.namespace == "fshard" and any(x.is_cuda for x in tensors(args, kwargs)):
            with self:  # an operator that is written in Python: what it calls is what runs
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if func.namespace == "c10d":
            return self._sent(func, args, kwargs)
        if is_counted(func, args) and any(x.is_cuda for x in tensors(args, kwargs)):
            return self._counted(func, args, kwargs)
        if func.overloadpacket.__name__ == "record_stream":
            told = torch.cuda.Stream(stream_id=args[1].stream_id, device_index=0, device_type=args[1].device_type)
            mark(f"recorded at={args[0].untyped_storage().data_ptr():#x} stream={told.cuda_stream:#x}")
        waits = STUB.fakegpu_waits()
        out = func(*args, **kwargs)
        if is_view(func) or func.overloadpacket.__name__ in EMPTY:
            return out
        record(func, args, kwargs, out, STUB.fakegpu_waits() != waits)
        on_device = any(x.is_cuda for x in tensors(args, kwargs, out))
        is_real = func.overloadpacket.__name__ == "_local_scalar_dense"  # a number is copied, by no kernel
        return compute(func, args, kwargs, out) if on_device and self._values and not is_real else out

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator whose result's shape depends on values: the host waits for their number."""
        torch.empty((), device="cuda").item()
        out = pytree.tree_map(lambda x: x.to("cuda"), on_the_host(func, args, kwargs))
        record(func, args, kwargs, out, True)
        return out

    def _sent(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket.__name__ in REDUCES and any(x.dtype is torch.bool for x in tensors(args, kwargs)):
            raise TypeError(f"{func}: NCCL has no sum of torch.bool: torch sends bytes, and a sum becomes an 'or'")
        return func(*args, **kwargs)


def is_counted(func: Any, args: Any) -> bool:
    """Whether the shape of an operator's result depends on values."""
    if func.overloadpacket.__name__ == "index":
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors(args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def is_view(func: Any) -> bool:
    """Whether an operator returns a view of an argument, and writes nothing."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


def record(func: Any, args: Any, kwargs: Any, out: Any, waited: bool) -> None:
    """Write a line with what an operator read and wrote, on which stream, and whether the host waited for it."""
    name = func.overloadpacket.__name__
    schema = func._schema.arguments
    named = dict(zip((arg.name for arg in schema), args, strict=False)) | kwargs
    written = tensors([named.get(arg.name) for arg in schema if arg.alias_info is not None and arg.alias_info.is_write])
    given = tensors(args, kwargs)
    read = [x for x in given if not any(x is y for y in written)]
    made = [x for x in tensors(out) if not any(x is y for y in given)]
    on_device = any(x.is_cuda for x in (*given, *made))
    stream = f"{torch.cuda.current_stream().cuda_stream:#x}" if on_device else "host"
    mark(f"op name={name} stream={stream} waited={int(waited)} reads={spans(read)} writes={spans(written + made)}")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with Recorder():
        runpy.run_path(sys.argv[0], run_name="__main__")
