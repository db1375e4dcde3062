"""Texts of errors: how names, shapes and dtypes differ from the expected ones, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import shown

# words inserted into names by torch's wrappers
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


_BUFFERS = ". Buffers of a module: functionalize(module)'s apply.load_state_dict reads them"
_LEFT_OUT = ". Names for which rename gives None are left out"


class Form(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Wanted(NamedTuple):
    """An expected leaf; a tied leaf has several names."""

    names: list[str]
    form: Form


def listed(names: Sequence[str]) -> str:
    """List the first eight names.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    return ", ".join(map(repr, names[:8])) + ", and so on" * (len(names) > 8)


def lacking(expected: Collection[str], got: Collection[str]) -> str:
    """List the missing and the extra names; "" if there are none.

    >>> lacking(["a", "b"], ["a"]), lacking(["a"], ["a"])
    ("it lacks ['b'] and has nothing besides", '')
    """
    (missing, extra) = ([x for x in a if x not in b] for a, b in ((expected, {*got}), (got, {*expected})))
    if not missing and not extra:
        return ""
    return f"it lacks {missing[:3] or 'nothing'} and has {extra[:3] or 'nothing'} besides"


def differences(wanted: Iterable[Wanted], given: Mapping[str, object]) -> Iterator[str]:
    """Say how named tensors, or their `Form`s, differ from expected leaves.

    >>> [*differences([Wanted(["w"], Form((2,), torch.float32))], {"w": torch.zeros(3)})]
    ["'w': expected a tensor [2], got one [3]"]
    """
    wanted = [*wanted]
    yield from name_differences([leaf.names for leaf in wanted], given)
    for name, form in ((name, leaf.form) for leaf in wanted for name in leaf.names if name in given):
        if text := unfit(name, form, given[name]):
            yield text


def name_differences(expected: Iterable[Sequence[str]], given: Collection[str], of: str = "the plan") -> Iterator[str]:
    """Report missing and unknown names, with the remedy. One of a leaf's names is enough.

    >>> list(name_differences([["w"]], ["v"]))
    ["it lacks 1 names: 'w'", "it has 1 names that the plan has not: 'v'"]
    """
    expected = [list(names) for names in expected]
    known = {name for names in expected for name in names}
    missing = [names[0] for names in expected if not any(name in given for name in names)]
    unknown = [name for name in given if name not in known]
    remedy = _remedy(missing, unknown)
    if missing:
        yield f"it lacks {len(missing)} names: {listed(missing)}" + remedy * (not unknown)
    if unknown:
        buffers = _BUFFERS * (remedy == _LEFT_OUT and of == "the plan")
        yield f"it has {len(unknown)} names that {of} has not: {listed(unknown)}{buffers}{remedy}"


def _remedy(missing: Sequence[str], unknown: Sequence[str]) -> str:
    if any(name.rpartition(".")[2].startswith("_flat_param") for name in unknown):
        return (
            ". FSDP1's LOCAL_STATE_DICT has flat parameters, which do not say which leaves are in them: let FSDP1 "
            "write FULL_STATE_DICT or SHARDED_STATE_DICT"
        )
    if call := _call(missing, unknown):
        return f". Pass rename=lambda name: {call}"
    if any(word in name for name in missing for word in WRAPPERS):
        return ". The plan has names of a wrapped module: make plans of the module before it is wrapped"
    return _LEFT_OUT * (not missing)


def _call(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """Return code that renames unknown names to missing ones; "" if none is found."""
    words = [word for word in WRAPPERS if any(word in name for name in unknown)]
    replaced = "name" + "".join(f".replace({word!r}, '')" for word in words)
    plain = [reduce(lambda rest, word: rest.replace(word, ""), words, name) for name in unknown]
    if set(plain) & set(missing):
        return replaced
    for leaf in missing[:1]:
        for name in plain:
            if name.endswith(f".{leaf}"):
                return f"{replaced}.removeprefix({name.removesuffix(leaf)!r})"
            if leaf.endswith(f".{name}"):
                return f"{leaf.removesuffix(name)!r} + {replaced}"
    return ""


def unfit(name: str, expected: Form, given: object) -> str:
    """Say why a leaf cannot take a value, or a `Form`; "" if it can.

    >>> unfit("w", Form((2,), torch.float32), torch.zeros(3))
    "'w': expected a tensor [2], got one [3]"
    """
    return form_difference(name, expected, given) or unreadable(name, given)


def form_difference(name: str, expected: Form, given: object) -> str:
    """Say how shape or dtype differ; "" if they fit. Any two floating dtypes fit.

    >>> form_difference("w", Form((2,), torch.float32), torch.zeros(2, dtype=torch.int64))
    "'w': expected torch.float32, got torch.int64"
    """
    if not isinstance(given, Tensor | Form) or tuple(given.shape) != expected.shape:
        got = f"one {list(given.shape)}" if isinstance(given, Tensor | Form) else shown(given)
        return f"{name!r}: expected a tensor {list(expected.shape)}, got {got}"
    if _dtype_kind(given.dtype) != _dtype_kind(expected.dtype):
        return f"{name!r}: expected {expected.dtype}, got {given.dtype}"
    return ""


def _dtype_kind(dtype: torch.dtype) -> torch.dtype | str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else dtype


def unreadable(name: str, value: object) -> str:
    """Say why a tensor's values cannot be read; "" if they can.

    >>> unreadable("w", torch.zeros(2, device="meta"))
    "'w': expected a tensor with values, got one on meta"
    """
    if not isinstance(value, Tensor) or hasattr(value, "local_shards"):  # a ShardedTensor may have no part on this rank
        return ""
    if value.layout != torch.strided:
        return f"{name!r}: expected a dense tensor, got {value.layout}: call to_dense() on it"
    return f"{name!r}: expected a tensor with values, got one on meta" * value.is_meta


def equal_values(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
