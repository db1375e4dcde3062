"""What the kernels of a GPU that is not there would have computed: the CPU's operator, on the same bytes.

Memory of the device is memory of the host, so a tensor of the device has a twin on the CPU that shares its bytes. After
an operator has run as it does on a GPU (torch's checks, memory from its allocator, launches that do nothing), the
CPU's runs on the twins and leaves its result in the device's memory. What is computed has the CPU's bits, not a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SEEDED = torch.Tag.nondeterministic_seeded
CPU = torch.device("cpu")


def twin(x: Any) -> Any:
    """A tensor of the CPU with the bytes of one of the device; anything else as it is."""
    if isinstance(x, torch.device):
        return CPU
    if isinstance(x, torch.Generator) and x.device.type == "cuda":
        return drawn_by(x)
    if not isinstance(x, Tensor) or not x.is_cuda:
        return x
    storage = x.untyped_storage()
    # private: torch's own CUDA graphs make tensors of an address so
    bytes_there = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    there = torch.empty(0, dtype=x.dtype).set_(bytes_there, x.storage_offset(), x.shape, x.stride())
    there = torch._conj(there) if x.is_conj() else there
    return torch._neg_view(there) if x.is_neg() else there


HALF = (torch.float16, torch.bfloat16)


def in_half(x: Any, half: torch.dtype) -> Any:
    """A tensor in single precision as one in `half`; anything else as it is."""
    return x.to(half) if isinstance(x, Tensor) and x.dtype == torch.float32 else x


def single(x: Any) -> Any:
    """A tensor in half precision as one in single precision; anything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in HALF else x


def attempts(args: Any) -> Iterator[Any]:
    """Arguments as they are, then in half precision if they are mixed, then in single precision.

    A GPU's norms keep statistics in single precision where the CPU's have the dtype of what they normalise.
    """
    yield args
    found = {x.dtype for x in pytree.tree_leaves(args) if isinstance(x, Tensor)}
    for half in found.intersection(HALF) if torch.float32 in found else ():
        yield pytree.tree_map(lambda x, half=half: in_half(x, half), args)
    yield pytree.tree_map(single, args)


def drawn_by(generator: torch.Generator) -> torch.Generator:
    """A generator of the CPU whose numbers follow from the state of a device's."""
    seed = generator.initial_seed() + 7919 * generator.get_offset()
    return torch.Generator().manual_seed(seed % 2**63)


def current() -> torch.Generator:
    """The generator of the current device."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def on_the_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the twins of its arguments; what it writes to is written."""
    if not {arg.name for arg in func._schema.arguments} >= {"generator"} and SEEDED in func.tags:
        with torch.random.fork_rng(devices=[]):  # an operator that draws from the default generator
            torch.set_rng_state(drawn_by(current()).get_state())
            return func(*pytree.tree_map(twin, args), **pytree.tree_map(twin, kwargs))
    if SEEDED in func.tags and kwargs.get("generator") is None:
        kwargs = {**kwargs, "generator": current()}
    args, kwargs = pytree.tree_map(twin, (args, {**kwargs, **dict.fromkeys({"pin_memory"} & {*kwargs}, False)}))
    failures = []
    for some, named in attempts((args, kwargs)):
        try:
            return func(*some, **named)
        except RuntimeError as failure:  # the CPU has no such kernel for these dtypes
            failures.append(failure)
            if func._schema.is_mutable:
                break
    raise failures[0]


def filled(out: Any, computed: Any) -> Any:
    """Put what was computed into an operator's new tensors. Returns the operator's result.

    Numbers and flags are those that were computed.
    """
    if not isinstance(out, Tensor):
        return computed
    there = twin(out)
    if there is not computed and there.data_ptr() != computed.data_ptr():
        there.copy_(computed)
    return out


def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Compute what an operator returned and wrote. Returns `out`, or what replaces it."""
    computed, form = pytree.tree_flatten(on_the_host(func, args, kwargs))
    leaves = pytree.tree_leaves(out)
    return pytree.tree_unflatten([filled(x, y) for x, y in zip(leaves, computed, strict=True)], form)
