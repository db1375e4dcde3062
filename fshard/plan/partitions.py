"""The mesh axes of parameters, gradients and optimizer state, and copies of units kept for the backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from ..comm.mesh import Axes
from ..core import tree
from ..core.arguments import wrong
from ..layout.rules import COPIES, Rule
from .units import fitting, no_unit

Over = str | Sequence[str] | None  # names of axes; None: left out
Regather = bool | str | Sequence[str]  # True: gather a unit again; False: keep it; axes: keep a copy cut over these


_PARTITIONS = ("params_over", "grads_over", "state_over")
# by strategy: how many of the partitions, from the parameters on, are whole on every rank
STRATEGIES = {"ddp": 3, "zero1": 2, "zero2": 1, "zero3": 0, "hsdp": 0, "hsdp-all": 0}


def overs_of(sizes: Mapping[str, int], strategy: str | None, regather: object, overs: Sequence[Over]) -> list[Over]:
    """Return the three `_over` arguments. A strategy replaces them; else the axis of shards replaces None."""
    if strategy is None:
        return [_shard_axis(sizes) if over is None else over for over in overs]
    if strategy not in [*STRATEGIES]:
        raise ValueError(f"strategy={strategy!r}: expected one of {_texts(STRATEGIES)}, or None")
    given = [name for name, over in zip(_PARTITIONS, overs, strict=True) if over is not None]
    if given := given + ["regather"] * (regather is not True):
        raise ValueError(f"strategy={strategy!r}: it says {given[0]} already. Leave out the strategy, or {given[0]}=")
    is_hybrid, whole = strategy.startswith("hsdp"), STRATEGIES[strategy]
    others = [axis for axis in sizes if not is_hybrid or axis != "replicate"]
    if is_hybrid and sizes and (not others or len(others) == len(sizes)):
        raise ValueError(
            f"strategy={strategy!r}: expected a mesh with the axis 'replicate' and another one, got {_texts(sizes)}. "
            "Use init_device_mesh(..., mesh_dim_names=('replicate', 'shard')), or strategy='zero3'"
        )
    axis = _shard_axis(others) if whole < len(_PARTITIONS) else ""
    result: list[Over] = [(axis,) if number >= whole else () for number in range(len(_PARTITIONS))]
    return [*result[:2], ("replicate", axis)] if strategy == "hsdp-all" else result


def _shard_axis(sizes: Collection[str]) -> str:
    """Return the only axis of the mesh, else "shard"."""
    if len(sizes) == 1:
        return next(iter(sizes))
    if sizes and "shard" not in sizes:
        remedy = "Name one so, or say params_over=, grads_over= and state_over= in place of a strategy"
        raise ValueError(f"make_plan: the mesh has axes {_texts(sizes)}: expected one, or an axis 'shard'. {remedy}")
    return "shard"


def _texts(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def partitions(sizes: dict[str, int], overs: Sequence[Over]) -> dict[str, Axes]:
    """Return each partition's axes. ValueError unless a partition contains the axes of the partition before."""
    result = dict[str, Axes]()
    before: Axes = ()
    for name, over in zip(_PARTITIONS, overs, strict=True):
        wanted = axes_of(name, over, sizes)
        if len(set(wanted)) < len(wanted) or not set(before) <= set(wanted):
            raise ValueError(
                f"{name}={over!r} must name each axis once and contain the axes {before} of the partition before it: "
                "what is sharded stays sharded from parameters to gradients to optimizer state"
            )
        before = before + tuple(axis for axis in wanted if axis not in before)
        result[name] = before
    return result


def axes_of(name: str, over: object, sizes: Mapping[str, int]) -> Axes:
    """Return the axes in an argument: on one device () for "shard" and "replicate".

    Raises TypeError if `over` is neither a name nor several names, ValueError for an axis not in the mesh.
    """
    names = (over,) if isinstance(over, str) else over
    if not isinstance(names, list | tuple) or not all(isinstance(axis, str) for axis in names):
        raise TypeError(wrong(name, over, "the name of an axis of the mesh, a tuple of names, or ()"))
    known = list(sizes) or ["shard", "replicate"]
    if unknown := [axis for axis in names if axis not in known]:
        where = "the mesh has no axis" if sizes else "one device has no axis"
        raise ValueError(
            f"{name}={over!r}: {where} {unknown[0]!r}, it has {_texts(known)}. "
            "Name one of those, or give init_device_mesh other mesh_dim_names."
        )
    return tuple(names) if sizes else ()


def keep_rules(
    units: Mapping[str, Sequence[str]],
    regather: Regather | Mapping[str, Regather],
    spec: tree.Spec,
    sizes: Mapping[str, int],
    over: Mapping[str, Axes],
) -> list[Rule | None]:
    """Return each unit's `Unit.keep_rule`.

    `units`: by unit, the names of its subtrees if it has several; patterns may name units and subtrees. Raises
    TypeError for a value of another type, ValueError for wrong axes and for a pattern without units.
    """
    if not isinstance(regather, Mapping):
        return [_keep_rule("regather", regather, sizes, over["params_over"])] * len(units)
    for pattern in regather:
        if not isinstance(pattern, str):
            raise TypeError(wrong("regather: a key", pattern, "the name of a unit, or a pattern such as 'blocks.*'"))
    rules = [_keep_rule(f"regather[{pattern!r}]", x, sizes, over["params_over"]) for pattern, x in regather.items()]
    names = [*units, *chain.from_iterable(units.values())]
    numbers = dict(zip(names, fitting([name.split(".") for name in names], list(regather), spec), strict=True))
    fits = [sorted({*chain(numbers[name], *(numbers[part] for part in parts))}) for name, parts in units.items()]
    matched, chosen = set(chain.from_iterable(fits)), {row[0] for row in fits if row}
    for number, pattern in enumerate(regather):
        if number not in matched:
            raise ValueError(f"regather: {no_unit(pattern, names)}")
        if number not in chosen:
            raise ValueError(
                f"regather: the pattern {pattern!r} chooses no unit: the patterns before it match all of its units, "
                "and the first that matches counts. Put it before them."
            )
    return [rules[row[0]] if row else None for row in fits]


def _keep_rule(name: str, value: object, sizes: Mapping[str, int], params_over: Axes) -> Rule | None:
    """Return None if nothing is kept, `COPIES` for the whole unit, else the rule of the kept shards."""
    if isinstance(value, bool):
        return None if value else COPIES
    if not isinstance(value, str | list | tuple):
        raise TypeError(wrong(name, value, "True, False, or names of the last axes of params_over"))
    axes = axes_of(name, value, sizes)
    if axes != params_over[len(params_over) - len(axes) :]:
        raise ValueError(
            f"{name}={value!r}: expected the last axes of params_over={params_over}, in this order: a copy of the unit "
            "stays cut over them, and is gathered over them alone in the backward"
        )
    # a copy cut over all axes of `params_over` would equal the shard itself
    return None if value and axes == params_over else Rule(axes)
