"""Selection of submodules as units, and overrides of a policy for batch norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..core.arguments import check_predicate, check_whole, wrong
from ..core.patterns import matches
from ..plan.precision import Policy, SomePolicy, policy_of
from .batch_norm import BATCH_NORMS
from .skeleton import member_of

Which = type | str | int | Callable[[str, nn.Module], bool]


def units_of(module: nn.Module, which: Sequence[Which]) -> list[str]:
    paths = {path: part for path, part in module.named_modules() if path and any(True for _ in part.parameters())}
    picked = {path for selection in which for path in _picked(module, paths, selection)}
    return [path for path in paths if path in picked]


def _picked(module: nn.Module, paths: dict[str, nn.Module], selection: Which) -> list[str]:
    if isinstance(selection, int):
        check_whole("units", selection, what="a number of elements")
        full = _full(module, "", selection, set())[0]
        if not full:
            raise ValueError(
                f"units: no submodule has {selection:,} elements: give a smaller number, or leave units out"
            )
        return full
    if isinstance(selection, str):
        names = {path for path, _ in module.named_modules(remove_duplicate=False)}
        chosen = [path for path in paths if matches(path.split("."), selection, names)]
    elif isinstance(selection, type) and issubclass(selection, nn.Module):
        chosen = [path for path, part in paths.items() if isinstance(part, selection)]
    elif callable(selection) and not isinstance(selection, type):
        check_predicate("units", selection, "(path, submodule) -> bool")
        chosen = [path for path, part in paths.items() if selection(path, part)]
    else:
        expected = "a class of submodules, a pattern of their paths, a predicate (path, submodule) -> bool, or a number"
        raise TypeError(wrong("units", selection, expected))
    if not chosen:
        top = ", ".join(f"{path} ({type(part).__name__})" for path, part in module.named_children())
        name = getattr(selection, "__name__", selection)
        raise ValueError(f"units: {name!r} selects no submodule with parameters; there are {top}")
    return chosen


def _full(module: nn.Module, path: str, size: int, seen: set[int]) -> tuple[list[str], int]:
    """The units in a module, and the number of elements outside these units; tied parameters count once."""
    units, left = list[str](), 0
    for _, x in module.named_parameters(recurse=False):
        left += member_of(x).form.numel() if id(x) not in seen else 0
        seen.add(id(x))
    for name, child in module.named_children():
        inside, more = _full(child, f"{path}.{name}".removeprefix("."), size, seen)
        units, left = [*units, *inside], left + more
    return ([*units, path], 0) if path and left >= size else (units, left)


def policy_for(skeleton: nn.Module, policy: SomePolicy) -> Policy:
    """Add overrides: batch norms are computed and reduced in the dtype of their parameters, at least float32."""
    given, overrides = policy_of(policy), list[tuple[str, Policy]]()
    for path, part in skeleton.named_modules():
        for name, x in part.named_parameters(recurse=False) if isinstance(part, BATCH_NORMS) else []:
            dtype = torch.promote_types(member_of(x).form.dtype, torch.float32)
            overrides.append((f"{path}.{name}".removeprefix("."), Policy(compute=dtype, reduce=dtype)))
    return replace(given, overrides=(*given.overrides, *overrides))
