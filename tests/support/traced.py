"""Graphs on an accelerator as a tracer sees one: its tensors have a device and a size, and no data."""

from collections import Counter

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fshard.compiler.lowered import Lowered
from fshard.graph.inspect import operator, values

# a number of the host's among tensors of a device is an argument of a kernel; not of these
_STRICT = ("where", "cat", "stack", "copy_", "_to_copy")
NAME = "elsewhere"
_KEPT = list[torch.library.Library]()


def accelerator() -> torch.device:
    """A device that makes tensors, and copies to them: torch then takes it for available, as a GPU that is there.

    It is one of the process, which should do nothing else. Private: torch has nothing public that makes its tensors.
    """

    def empty(size: tuple[int, ...], *_: object, dtype: torch.dtype | None = None, **__: object) -> Tensor:
        return torch._C._acc.create_empty_tensor(size, dtype or torch.get_default_dtype())

    _setup_privateuseone_for_python_backend(NAME)
    _KEPT.append(torch.library.Library("aten", "IMPL"))
    for name in ("empty.memory_format", "empty_strided"):
        _KEPT[0].impl(name, empty, "PrivateUse1")
    _KEPT[0].impl("_copy_from", lambda x, y, non_blocking=False: y, "PrivateUse1")
    return torch.device(NAME, 0)


def crossed(lowered: Lowered) -> Counter[str]:
    """The operators of a graph that take tensors of the host's for a device's, or the other way round; constants."""
    crossings = Counter[str]()
    for node in lowered.graph.nodes:
        name, inputs = operator(node), [x for source in node.all_input_nodes for x in values(source)]
        if node.op == "get_attr":
            crossings[f"constant on {getattr(lowered.traced.module, node.target).device.type}"] += 1
        if node.op != "call_function" or name == "getitem":
            continue
        # 0-d tensors of the host are arguments of a kernel, as numbers are, except those of `_STRICT`
        wide = [x for x in inputs if x.dim() or x.device.type != "cpu" or name in _STRICT]
        if name.startswith("fshard."):  # tickets and random states are the host's
            wide = [x for x in wide if x.dtype != torch.uint8 or x.device.type != "cpu"]
            made = [x for x in values(node) if x.dtype != torch.uint8]
        else:
            made = values(node)
        crossings[name] += len({x.device.type for x in (*wide, *made)}) > 1
    return +crossings  # without the operators that were counted 0 times
