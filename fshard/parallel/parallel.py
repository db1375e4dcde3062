"""`Parallel`: the styles of a module's submodules, the splits of its leaves, and the forwards of its copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from ..comm.mesh import AnyMesh, axis_sizes
from ..core.arguments import shown
from ..plan.plan import Plan, Slot
from .along import Along, Alongs
from .between import Between, share_heads
from .forwards import Forward, experts
from .heads import attentions
from .styles import COLUMNS, ROWS, STYLES, chosen, parent, style_of

T = TypeVar("T")
Home = tuple[Plan, Slot]


class Parallel:
    """The styles of a module, by path; `params` are its parameters by path, numbered in their order."""

    def __init__(self, module: nn.Module, params: Mapping[str, Tensor], given: Mapping[str, str]):
        self._styles = chosen(module, params, given)
        first: dict[int, int] = {}
        self._numbers = {path: first.setdefault(id(x), n) for n, (path, x) in enumerate(params.items())}
        self._shapes = [tuple(x.shape) for x in params.values()]
        self._paths, self._attentions = list(params), list(attentions(module, self._styles))
        splits = {path: style_of(self._styles, path).split(tuple(x.shape)) for path, x in params.items()}
        self._splits = {path: split for path, split in splits.items() if split is not None}
        self._check_summed()

    def _check_summed(self) -> None:
        """ValueError if a parameter is split by itself along its inputs, and no style sums its submodule's output."""
        for path in self._splits:
            name, around = self._styles.get(path), STYLES[self._styles.get(parent(path), "replicate")]
            if name in (*ROWS, "grouped_gemm") and around.forward is None:
                raise ValueError(
                    f"parallel: {path!r} is {name!r}, and nothing sums what {parent(path)!r} makes of it: give "
                    f"{parent(path)!r} the style 'moe_tp_experts', or 'ep_dispatch_experts' for whole experts"
                )

    def split(self, mesh: AnyMesh, axis: str, experts: str | None = None) -> dict[str, tuple[str, int, int]]:
        """Return (axis, dim, blocks) of split leaves, by path."""
        sizes, made = axis_sizes(mesh), dict[str, tuple[str, int, int]]()
        for name in (axis, experts or axis):
            if sizes and name not in sizes:
                raise ValueError(f"split: axis: expected one of {', '.join(sizes)}, got {shown(name)}")
        whole = [path for each in self._attentions for path in each.whole(sizes.get(axis, 1))]
        for path, (dim, blocks) in self._splits.items():
            over = (experts or axis) if self._is_of_experts(path) else axis
            if sizes.get(over, 1) > 1 and (over != axis or not any(_is_in(path, x) for x in whole)):
                made[path] = over, dim, blocks
        return made

    def _is_of_experts(self, path: str) -> bool:
        return STYLES[self._styles.get(parent(path), "replicate")].forward is experts

    def along(self, homes: Sequence[Home | None], shapes: Callable[[int], Sequence[int]]) -> Alongs:
        """Return where the submodules of a call are split. ValueError for parts that no style knows.

        `homes`: the plan and slot of each leaf, None if it is no leaf of a plan; `shapes`: its shape, by number.
        """
        found = dict[str, Along]()
        for path, number in self._numbers.items():
            home = homes[number]
            if home is None:
                self._check_whole(number, tuple(shapes(number)))
            elif home[1].split is not None:
                self._check_known(path, *home)
                found[parent(path)] = Along.of(*home)
        return found

    def _check_whole(self, number: int, shape: Sequence[int]) -> None:
        if shape != self._shapes[number]:
            raise ValueError(
                f"leaf {self._paths[number]!r}: expected shape {self._shapes[number]}, or a part of a leaf of the plan, "
                f"got {shape} of a tensor that is no leaf: pass the loss's own parameters to apply"
            )

    def _check_known(self, path: str, plan: Plan, slot: Slot) -> None:
        """ValueError if a leaf's part is not the one that its submodule's style computes with."""
        assert slot.split is not None
        known, axis = self._splits.get(path), slot.split.axis
        name, remedy = self._styles.get(parent(path)), f"make_plan(split=apply.split(mesh, {axis!r}))"
        if known != (slot.split.dim, slot.split.blocks):
            style = f"is {name!r}" if name else "has no style in parallel="
            expected = "a whole leaf" if known is None else f"a split along dim {known[0]}, {known[1]} blocks"
            raise ValueError(
                f"leaf {path!r} is {slot.split}, and submodule {parent(path)!r} {style}: expected {expected}. "
                f"Use {remedy}"
            )
        if axis in plan.data and not self._is_of_experts(path):
            raise ValueError(
                f"leaf {path!r} is {slot.split}, along which batches differ (data={plan.data}): expected equal batches "
                f"there. Make the plan with data={tuple(x for x in plan.data if x != axis)}"
            )

    def install(self, copied: nn.Module, here: Callable[[], Alongs]) -> None:
        """Put forwards of styles into a copy of the module; `here` returns where the running call is split."""
        parts, known = dict(copied.named_modules()), {parent(path) for path in self._splits}

        def along(*paths: str) -> Callable[[], Along | None]:
            """The ranks of submodules: their own, those of a submodule inside, or of the one around."""
            inside = [x for path in paths for x in sorted(known) if _is_in(x, path)] or [parent(paths[0])]
            return lambda: next((current[x] for current in [here()] for x in inside if x in current), None)

        for path, name in self._styles.items():
            if path in parts and (forward := STYLES[name].forward) is not None:
                _wrap(parts[path], path, forward, along(path))
        for path, columns, rows in self._between(parts):
            between = Between(parts[path], path, along(*columns))
            between.wrap([parts[x] for x in columns], [parts[x] for x in rows])
        for attention in self._attentions:
            if attention.few and all(attention.heads.values()):
                share_heads(copied, attention, along)

    def _between(self, parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield submodules with column and row projections, and the paths of these."""
        inside: dict[str, tuple[list[str], list[str]]] = {}
        for path in (path for path in parts if self._styles.get(path) in (*COLUMNS, *ROWS)):
            around = parent(path) if not path.endswith(".base_layer") else parent(parent(path))
            inside.setdefault(around, ([], []))[self._styles[path] in ROWS].append(path)
        return ((path, *found) for path, found in inside.items() if all(found))


def _is_in(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(f"{around}.")


def _wrap(part: nn.Module, path: str, styled: Forward, along: Callable[[], Along | None]) -> None:
    forward = part.forward

    @functools.wraps(forward)
    def in_style(*args: Any, **kwargs: Any) -> Any:
        split = along()
        return forward(*args, **kwargs) if split is None else styled(part, forward, split, path, *args, **kwargs)

    vars(part)["forward"] = in_style
