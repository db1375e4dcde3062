"""Styles: along which dim the leaves of a submodule are split, and its forward.

Note [Styles]
    Names are as in transformers' plans (`model.tp_plan`, `model.ep_plan`). A submodule has its style only in calls with
    a plan that splits its leaves: with whole parameters `apply` is the plain module. Gradients of whole leaves are
    always summed over the axis, so styles for a sum in the backward (`replicated_with_grad_allreduce`,
    `mla_kv_a_proj`) do nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from ..core.arguments import wrong
from ..core.patterns import matches
from .forwards import Forward, experts, gathered_features, looked_up, once, row, row_of_whole, summed


class Style(NamedTuple):
    """The dim of leaves (..., out, in), None for whole leaves; the blocks of the dim; the forward, None for its own."""

    dim: int | None = None
    blocks: int = 1
    forward: Forward | None = None

    def split(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return (dim, blocks) of a leaf; None for a whole one, as the bias of a row is.

        >>> STYLES["colwise"].split((3, 2)), STYLES["colwise"].split((3,)), STYLES["rowwise"].split((3,))
        ((0, 1), (0, 1), None)
        """
        if self.dim is None or (len(shape) == 1 and self.dim == -1):
            return None
        return max(0, self.dim if self.dim >= 0 else len(shape) + self.dim), self.blocks


STYLES = {
    "colwise": Style(-2),
    "colwise_gather_output": Style(-2, forward=gathered_features),
    "rowwise": Style(-1, forward=row),
    "rowwise_split_input": Style(-1, forward=row_of_whole),
    "packed_colwise": Style(-2, 2),
    "packed_rowwise": Style(-1, 2, row),
    "embedding_rowwise": Style(-2, forward=looked_up),
    "embedding_colwise": Style(-1, forward=gathered_features),
    "moe_tp_experts": Style(forward=summed),
    "all_reduce": Style(forward=summed),
    "moe_identity_expert": Style(forward=once),
    "grouped_gemm": Style(0),
    "ep_dispatch_experts": Style(forward=experts),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"), Style()),
}
STYLES |= {"colwise_rep": STYLES["colwise_gather_output"], "rowwise_rep": STYLES["rowwise_split_input"]}
COLUMNS, ROWS = ("colwise", "packed_colwise"), ("rowwise", "packed_rowwise")  # between these a rank has its part


def parent(path: str) -> str:
    return path.rpartition(".")[0]


def chosen(module: nn.Module, params: Mapping[str, Tensor], given: Mapping[str, str]) -> dict[str, str]:
    """Return the names of styles by path of submodules and parameters. ValueError for an unknown style."""
    if not isinstance(given, Mapping):
        raise TypeError(f"functionalize: {wrong('parallel', given, 'a mapping of patterns to styles')}")
    parts = {path: part for path, part in module.named_modules(remove_duplicate=False) if path}
    paths, styles = {**parts, **params}, dict[str, str]()
    for pattern, name in given.items():
        if name not in STYLES:
            raise ValueError(f"parallel[{pattern!r}]: expected one of {', '.join(STYLES)}, got {name!r}")
        styles |= dict.fromkeys((path for path in paths if matches(path.split("."), pattern, paths)), name)
    if given and not styles:
        raise ValueError(f"parallel: no path of {type(module).__name__} fits {', '.join(map(repr, given))}")
    for path in [path for path in styles if path in parts]:
        styles |= _around_adapters(path, parts[path], styles[path])
    for path, name in styles.items():
        if path in parts:
            _check_kind(path, parts[path], name)
    return styles | dict(_of_ties(parts, params, styles))


def _around_adapters(path: str, part: nn.Module, name: str) -> dict[str, str]:
    """Return styles in a layer with LoRA (PEFT): the base layer, and the adapters' matrix with the same split dim."""
    if not hasattr(part, "base_layer"):
        return {}
    for inside, _ in part.named_parameters():
        if not inside.startswith(("base_layer.", "lora_A.", "lora_B.", "lora_embedding_")):
            raise TypeError(f"parallel: {path!r}: expected LoRA's two matrices around it, got {inside!r}")
    inner = "lora_B" if STYLES[name].dim == -2 else "lora_A"
    adapters = getattr(part, inner, {})
    return {path: "replicate", f"{path}.base_layer": name, **{f"{path}.{inner}.{key}": name for key in adapters}}


def _check_kind(path: str, part: nn.Module, name: str) -> None:
    """TypeError if a module is of another kind than its style splits."""
    if STYLES[name].dim is None or not any(True for _ in part.parameters(recurse=False)):
        return
    expected = "Embedding" if "embedding" in name else "Linear"
    attribute = {"Embedding": "num_embeddings", "Linear": "out_features"}[expected]
    if not hasattr(part, attribute):
        raise TypeError(
            f"parallel: {path!r} is {name!r}: expected a torch.nn.{expected}, got a {type(part).__name__}. A "
            f"pattern may also name a parameter ({path}.weight) with dims (..., out, in)"
        )


def style_of(styles: Mapping[str, str], path: str) -> Style:
    """Return the style of a parameter: its own, or its submodule's."""
    return STYLES[styles.get(path) or styles.get(parent(path)) or "replicate"]


def _of_ties(
    parts: Mapping[str, nn.Module], params: Mapping[str, Tensor], styles: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield styles for matrices tied to split ones: a look-up, or features, by parts."""
    split = {id(x): path for path, x in params.items() if style_of(styles, path).split(tuple(x.shape))}
    for path, x in params.items():
        if id(x) in split and not style_of(styles, path).split(tuple(x.shape)):
            if style_of(styles, split[id(x)]).dim != -2:
                raise ValueError(f"parallel: {path!r} is tied to {split[id(x)]!r}, which is split along its inputs")
            is_table = isinstance(parts[parent(path)], nn.Embedding)
            yield parent(path), "embedding_rowwise" if is_table else "colwise_gather_output"
