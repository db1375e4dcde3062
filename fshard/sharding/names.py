"""Names of leaves in state dicts and files: how they become the names of a plan, and how the two differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.arguments import check_function, shown

Rename = Callable[[str], str | None] | Mapping[str, str | None]

# What torch's wrappers put into names: torch.compile, activation checkpointing, FSDP1.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


_BUFFERS = ". Buffers of a module: functionalize(module)'s apply.load_state_dict reads them"
_LEFT_OUT = ". Names for which rename gives None are left out"


@dataclass(frozen=True)
class Form:
    """What is known of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def renamed(names: Iterable[str], rename: Rename | None = None) -> dict[str, str]:
    """Return the names by what they are called in the plan, in their order.

    `rename` is a function from a name to the plan's name, or a dict that has the names that change; None in place of a
    plan's name leaves the name out. TypeError for another `rename`, ValueError for two names of one leaf, and for names
    in the dict that are not there.

    >>> renamed(["module.w", "module.step"], lambda name: name.removeprefix("module.") if "step" not in name else None)
    {'w': 'module.w'}
    """
    by_name = origins(names, rename)
    for new, (name, *others) in by_name.items():
        if others:
            raise ValueError(f"rename: {name!r} and {others[0]!r} are both called {new!r}: leave one out (None)")
    return {new: name for new, (name,) in by_name.items()}


def origins(names: Iterable[str], rename: Rename | None = None, others: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return the names by what they are called in the plan, as `renamed`, where several may be called the same.

    A dict may also have the names `others`. ValueError for a name in it that is not there.

    >>> origins(["a.step", "b.step"], lambda name: "step")
    {'step': ['a.step', 'b.step']}
    """
    names = [*names]
    if isinstance(rename, Mapping):
        changes, known = rename, {*names, *others}
        if unknown := [name for name in changes if name not in known]:
            raise ValueError(
                f"rename: it has {len(unknown)} names that are not there: {_listed(unknown)}; "
                f"there are {_listed([*names, *others]) or 'none'}"
            )
        rename = lambda name: changes.get(name, name)  # noqa: E731
    if rename is not None:
        check_function("rename", rename, "a dict, or fn(name) -> the plan's name, or None to leave it out")
    by_name: dict[str, list[str]] = {}
    for name in names:
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename: of {name!r}: expected a name, or None to leave it out, got {shown(new)}")
        by_name.setdefault(new, []).append(name)
    return by_name


def name_differences(expected: Iterable[Sequence[str]], given: Collection[str], of: str = "the plan") -> Iterator[str]:
    """Say which names are missing or unknown, and what to do; each of `expected` has all names of one leaf of `of`.

    >>> list(name_differences([["w"]], ["v"]))
    ["it lacks 1 names: 'w'", "it has 1 names that the plan has not: 'v'"]
    """
    expected = [list(names) for names in expected]
    known = {name for names in expected for name in names}
    missing = [names[0] for names in expected if not any(name in given for name in names)]
    unknown = [name for name in given if name not in known]
    remedy = _remedy(missing, unknown)
    if missing:
        yield f"it lacks {len(missing)} names: {_listed(missing)}" + remedy * (not unknown)
    if unknown:
        buffers = _BUFFERS * (remedy == _LEFT_OUT and of == "the plan")
        yield f"it has {len(unknown)} names that {of} has not: {_listed(unknown)}{buffers}{remedy}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + ", and so on" * (len(names) > 8)


def _remedy(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """What to do about names that differ; "" if that is not known."""
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
    """An expression of `name` by which most unknown names become missing ones; "" if there is none."""
    words = [word for word in WRAPPERS if any(word in name for name in unknown)]
    replaced = "name" + "".join(f".replace({word!r}, '')" for word in words)
    plain = [_without(name, words) for name in unknown]
    if set(plain) & set(missing):
        return replaced
    for leaf in missing[:1]:
        for name in plain:
            if name.endswith(f".{leaf}"):
                return f"{replaced}.removeprefix({name.removesuffix(leaf)!r})"
            if leaf.endswith(f".{name}"):
                return f"{leaf.removesuffix(name)!r} + {replaced}"
    return ""


def _without(name: str, words: Sequence[str]) -> str:
    for word in words:
        name = name.replace(word, "")
    return name


def form_difference(name: str, expected: Form, given: object) -> str:
    """Say how a tensor, or the form of one, is not one that a leaf can take: "" if only the floating dtype differs.

    >>> form_difference("w", Form((2,), torch.float32), torch.zeros(2, dtype=torch.int64))
    "'w': expected torch.float32, got torch.int64"
    """
    if not isinstance(given, Tensor | Form) or tuple(given.shape) != expected.shape:
        got = f"one {list(given.shape)}" if isinstance(given, Tensor | Form) else shown(given)
        return f"{name!r}: expected a tensor {list(expected.shape)}, got {got}"
    if given.dtype != expected.dtype and not (given.dtype.is_floating_point and expected.dtype.is_floating_point):
        return f"{name!r}: expected {expected.dtype}, got {given.dtype}"
    return ""


def unreadable(name: str, value: Tensor) -> str:
    """Say why a tensor's values cannot be read; "" if they can.

    >>> unreadable("w", torch.zeros(2, device="meta"))
    "'w': expected a tensor with values, got one on meta"
    """
    if value.layout != torch.strided:
        return f"{name!r}: expected a dense tensor, got {value.layout}: call to_dense() on it"
    return f"{name!r}: expected a tensor with values, got one on meta" * value.is_meta
