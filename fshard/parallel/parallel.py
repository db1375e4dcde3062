"""`Parallel`: the styles of a module's submodules, the splits of its leaves, and the forwards of its copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from ..comm.mesh import AnyMesh, axis_sizes
from ..core.arguments import shown
from ..plan.plan import Plan, Slot
from .along import Along, Alongs, CurrentCall
from .between import Between, RanksNow, share_heads
from .forwards import Forward, Styled, experts, replace_forward, without_fast_path
from .heads import attentions
from .styles import COLUMNS, ROWS, STYLES, Style, chosen, parent, style_of


class Parallel:
    """The styles of a module, by path; `params` are its parameters by path, numbered in their order."""

    def __init__(self, module: nn.Module, params: Mapping[str, Tensor], given: Mapping[str, str]):
        self._styles = chosen(module, params, given)
        first: dict[int, int] = {}
        self._numbers = {path: first.setdefault(id(x), n) for n, (path, x) in enumerate(params.items())}
        self._shapes = {path: tuple(x.shape) for path, x in params.items()}
        self._attentions = list(attentions(module, self._styles))
        splits = {path: style_of(self._styles, path).split(shape) for path, shape in self._shapes.items()}
        self._splits = {path: split for path, split in splits.items() if split is not None}
        self._experts = {path for path in self._splits if self._around(path).forward is experts}
        for path in self._splits:
            if self._styles.get(path) in (*ROWS, "grouped_gemm") and self._around(path).forward is None:
                raise ValueError(
                    f"parallel: {path!r} is {self._styles[path]!r}, and nothing sums what its submodule makes of it: "
                    f"give {parent(path)!r} the style 'moe_tp_experts', or 'ep_dispatch_experts' for whole experts"
                )

    def _around(self, path: str) -> Style:
        """The style of a parameter's submodule."""
        return STYLES[self._styles.get(parent(path), "replicate")]

    def split(self, mesh: AnyMesh, axis: str, experts: str | None = None) -> dict[str, tuple[str, int, int]]:
        """Return (axis, dim, blocks) of split leaves, by path."""
        sizes = axis_sizes(mesh)
        for name in (axis, experts or axis):
            if sizes and name not in sizes:
                raise ValueError(f"split: axis: expected one of {', '.join(sizes)}, got {shown(name)}")
        whole = [path for each in self._attentions for path in each.whole(sizes.get(axis, 1))]
        over = {path: (experts or axis) if path in self._experts else axis for path in self._splits}
        parts = [path for path in over if sizes.get(over[path], 1) > 1 and not any(_is_in(path, x) for x in whole)]
        return {path: (over[path], *self._splits[path]) for path in parts}

    def along(self, homes: Sequence[tuple[Plan, Slot] | None], shape: Callable[[int], tuple[int, ...]]) -> Alongs:
        """Return the ranks of a call's split submodules. ValueError for parts without a style.

        `homes`: the plan and slot of each leaf, None for a tensor of no plan; `shape`: its shape, by number.
        """
        alongs = dict[str, Along]()
        for path, number in self._numbers.items():
            home = homes[number]
            if home is None and (got := shape(number)) != (expected := self._shapes[path]):
                raise ValueError(
                    f"leaf {path!r}: expected shape {expected}, or a part as the loss is given it, got shape {got} of "
                    "a tensor that is no leaf of the plan: pass the loss's own parameters to apply"
                )
            if home is not None and home[1].split is not None:
                self._check_known(path, *home)
                along = alongs.setdefault(parent(path), Along.of(*home))
                if along.axis != home[1].split.axis:
                    raise ValueError(f"leaf {path!r} is {home[1].split}, and others beside it over {along.axis!r}")
        return alongs

    def _check_known(self, path: str, plan: Plan, slot: Slot) -> None:
        """ValueError if a leaf's part differs from its submodule's style."""
        assert slot.split is not None
        known, axis, name = self._splits.get(path), slot.split.axis, self._styles.get(parent(path))
        if known != (slot.split.dim, slot.split.blocks):
            style = f"is {name!r}" if name else "has no style in parallel="
            expected = "a whole leaf" if known is None else f"a split along dim {known[0]}, {known[1]} blocks"
            raise ValueError(
                f"leaf {path!r} is {slot.split}, and submodule {parent(path)!r} {style}: expected {expected}. "
                f"Use make_plan(split=apply.split(mesh, {axis!r})), or give the submodule a style"
            )
        if axis in plan.data and path not in self._experts:
            raise ValueError(
                f"leaf {path!r} is {slot.split}, along which batches differ (data={plan.data}): expected equal batches "
                f"there. Make the plan with data={tuple(x for x in plan.data if x != axis)}"
            )

    def install(self, copied: nn.Module, current: Callable[[], CurrentCall]) -> None:
        """Put forwards of styles into a copy of the module; `current` returns the current call."""
        parts, known = dict(copied.named_modules()), sorted({parent(path) for path in self._splits})

        def where(*paths: str) -> RanksNow:
            """The ranks of submodules: their own, those of a submodule inside, or of the one around."""
            inside = [x for path in paths for x in known if _is_in(x, path)] or [parent(paths[0])]
            return lambda: next((alongs[x] for alongs in [current().along] for x in inside if x in alongs), None)

        for path, part in parts.items():
            without_fast_path(part, where(path))
        for path, name in self._styles.items():
            if path in parts and (styled := STYLES[name].forward) is not None:
                replace_forward(parts[path], functools.partial(_in_style, styled, parts[path], path, where(path)))
        for path, *pair in self._between(parts):
            columns, rows = ([parts[x] for x in paths] for paths in pair)
            Between(parts[path], path, where(*pair[0]), lambda: current().returned, columns, rows)
        for attention in self._attentions:
            if attention.few and all(attention.heads.values()):
                share_heads(copied, attention, where)

    def _between(self, parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield submodules with column and row projections, and the paths of these."""
        pairs: dict[str, tuple[list[str], list[str]]] = {}
        for path in (path for path in parts if self._styles.get(path) in (*COLUMNS, *ROWS)):
            around = parent(path.removesuffix(".base_layer"))
            pairs.setdefault(around, ([], []))[self._styles[path] in ROWS].append(path)
        return ((path, *pair) for path, pair in pairs.items() if all(pair))


def _is_in(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(f"{around}.")


def _in_style(
    styled: Forward, part: nn.Module, path: str, where: RanksNow, forward: Forward, *args: object, **kwargs: object
) -> object:
    along = where()
    if along is None:
        return forward(*args, **kwargs)
    return styled(Styled(part, forward, along, path), *args, **kwargs)
