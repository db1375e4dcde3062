"""Casts of a module's inputs, and of inputs and outputs of submodules with another dtype of computation.

Note [Casts]
    1. A call of a module casts its floating inputs, as in FSDP, if the policy names `compute` or `storage`, or changes
       a parameter's dtype. Other tensors of the batch, such as targets, keep their dtypes.
    2. A policy may compute some submodules, such as norms, in another dtype than the rest. The outermost submodules
       with all parameters in one such dtype cast floating inputs to this dtype, and floating outputs to the dtype of
       the rest.
    3. A submodule in the policy's `cast_at` always casts its inputs, as in FSDP, but outputs only by 2.

    A cast wraps `forward`, and is no hook: activation checkpointing in transformers calls `forward` without hooks.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from traceback import walk_tb

import torch
from torch import Tensor, nn

from ..core import tree
from ..core.lazy import Branch
from ..plan.precision import Policy, precision
from .batch_norm import BATCH_NORMS
from .skeleton import member_of, places_in

# (submodule's path, dtype of its inputs, dtype of its outputs) for each cast; None: outputs are not cast
Casts = tuple[tuple[str, torch.dtype, torch.dtype | None], ...]


def casts_of(
    skeleton: nn.Module,
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]],
    buffers: Sequence[torch.dtype],
    policy: Policy,
    paths: Sequence[str],
    unasked: bool,
) -> Casts:
    """The casts of a module.

    - `dtypes`: (storage, computation) of each parameter
    - `paths`: submodules that always cast their inputs
    - `unasked`: True if the module casts its inputs, and submodules cast by rule 2 of Note [Casts]

    Outputs get the dtype in which the policy, without its overrides, computes most elements. If the policy names no
    dtype and all parameters are computed in one, outputs get that dtype.
    """
    computed = [dtype for _, dtype in dtypes]
    if unasked:
        _check_batch_norms(skeleton, computed, buffers)
    sizes, is_one = Counter[torch.dtype](), len(_computed(skeleton, computed)) == 1
    for place in places_in(skeleton):
        if place.form.is_floating_point():
            stored = dtypes[place.number][is_one]
            sizes[precision(stored, policy).compute] += 1 + place.form.numel()
    if not sizes:
        return ()
    around = sizes.most_common(1)[0][0]
    both_ways = dict(_casting(skeleton, "", computed, around)) if unasked else {}
    paths = (*[""] * unasked, *paths)
    chosen = {path: _asked(skeleton, path, computed, around) for path in paths if path not in both_ways}
    return *((path, dtype, around) for path, dtype in both_ways.items()), *((*pair, None) for pair in chosen.items())


def cast_paths(skeleton: nn.Module, policy: Policy, at: str, beside: Sequence[str]) -> Iterator[str]:
    """Yield the paths of `cast_at` in this module. `beside`: paths of the plan's leaves outside the module.

    If a plan has several modules, a path begins with `at` (the module's path in the plan and a dot), or fits only
    one module.
    """
    known = dict(skeleton.named_modules())
    for path in policy.cast_at:
        if path in known and any(f".{path}." in f".{other}." for other in beside):
            raise ValueError(
                f"policy: cast_at: {path!r} is a submodule of several modules of the plan: write the path in the plan "
                f"({at + path!r}): dataclasses.replace(policy, cast_at=[...])"
            )
        if at and path.startswith(at):
            yield path.removeprefix(at)
        elif path in known or not beside:
            yield path


def _asked(skeleton: nn.Module, path: str, dtypes: Sequence[torch.dtype], around: torch.dtype) -> torch.dtype:
    parts = dict(skeleton.named_modules())
    if path not in parts:
        remedy = "give apply.policy(cast=apply.units(...))"
        raise ValueError(f"policy: cast_at: {path!r} is no submodule of {type(skeleton).__name__}: {remedy}")
    used = _computed(parts[path], dtypes)
    return used.pop() if len(used) == 1 else around


def _computed(part: nn.Module, dtypes: Sequence[torch.dtype]) -> set[torch.dtype]:
    return {dtypes[place.number] for place in places_in(part) if place.form.is_floating_point()}


def _casting(
    part: nn.Module, path: str, dtypes: Sequence[torch.dtype], around: torch.dtype
) -> Iterator[tuple[str, torch.dtype]]:
    """Yield (path, dtype) of the outermost submodules with a forward and one dtype of computation, not `around`."""
    used = _computed(part, dtypes)
    if len(used) == 1 and type(part).forward is not nn.Module.forward:  # a ModuleList has no forward
        (dtype,) = used
        if dtype != around:
            yield path, dtype
    else:
        for name, child in part.named_children():
            yield from _casting(child, f"{path}.{name}".removeprefix("."), dtypes, around)


def _check_batch_norms(skeleton: nn.Module, dtypes: Sequence[torch.dtype], buffers: Sequence[torch.dtype]) -> None:
    for path, part in skeleton.named_modules():
        if not isinstance(part, BATCH_NORMS):
            continue
        tensors = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
        weight, mean = (tensors.get(name) for name in ("weight", "running_mean"))  # two `Stand`s
        if weight is None or mean is None:
            continue
        computed, kept = dtypes[member_of(weight).number], buffers[member_of(mean).number]
        if computed != kept:
            raise ValueError(
                f"batch norm {path!r} would be computed in {computed}, and its running statistics are {kept}: "
                "make_plan(policy=apply.policy(...)) keeps batch norms in float32; or cast the buffers"
            )


def cast_around(part: nn.Module, dtype: torch.dtype, around: torch.dtype | None) -> None:
    """Cast floating inputs to `dtype`, and floating outputs to `around` unless None."""
    forward = part.forward

    @functools.wraps(forward)
    def casting(*args: object, **kwargs: object) -> object:
        kwargs = {name: _cast(x, dtype) for name, x in kwargs.items()}
        out = forward(*[_cast(x, dtype) for x in args], **kwargs)
        return out if around is None else _cast(out, around)

    vars(part)["forward"] = casting
    # torch's transformer layers call a submodule only if it has a hook; else they may read only its parameters
    part.register_forward_pre_hook(lambda module, args: None)


def _cast(x: object, dtype: torch.dtype) -> object:
    """Cast floating tensors; return `x` itself if nothing changes."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    # `tree` takes a dataclass, such as transformers' ModelOutput, for a leaf
    if is_dataclass(x) and not isinstance(x, type):
        values = {field.name: getattr(x, field.name) for field in fields(x) if field.init}
        cast = {name: _cast(value, dtype) for name, value in values.items()}
        changed = {name: value for name, value in cast.items() if value is not values[name]}
        return replace(x, **changed) if changed else x
    tops = tree.tops(x, _stops)
    if len(tops) == 1 and tops[0] is x:
        return x
    new = [_cast(top, dtype) for top in tops]
    same = all(a is b for a, b in zip(new, tops, strict=True))
    return x if same else tree.put_tops(x, _stops, new)


_DIFFER = re.compile("dtype|scalar type|bias type|Type promoting")


def explain(error: RuntimeError, name: str, module: nn.Module) -> None:
    """Raise torch's error about unlike dtypes again, with a remedy; ignore other errors."""
    if type(error) is not RuntimeError or error.__cause__ is not None or not _DIFFER.search(str(error)):
        return
    paths = {id(part): path for path, part in module.named_modules() if path and places_in(part)}
    inside = [paths[id(x)] for frame, _ in walk_tb(error.__traceback__) if id(x := frame.f_locals.get("self")) in paths]
    remedy = f"apply.policy(policy, cast={inside[-1:]}) casts what this submodule is given; or " if inside else ""
    raise RuntimeError(
        f"{name}: {error}. A policy with `compute` casts what the module is given (not with cast_inputs=no), not "
        f"what its forward makes: {remedy}cast in the forward"
    ) from error


def _stops(x: object) -> bool:
    # a `Branch` (core/lazy.py) gathers its parameters if it is flattened
    return isinstance(x, Branch) or is_dataclass(x)
