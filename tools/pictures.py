"""Draw the pictures of docs/: of cli.md, compile.md, concepts.md and precision.md. python tools/pictures.py"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fshard

ROOT = Path(__file__).resolve().parent.parent
DOCS, BENCHMARKS = ROOT / "docs", ROOT / "benchmarks"


def plan_picture() -> str:
    """The plan of the model of docs/cli.md, on eight ranks."""
    code = (DOCS / "cli.md").read_text().partition("```python\n")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    exec(code, scope)
    with torch.device("meta"):
        _, params, _ = fshard.module.functionalize(scope["Model"]())
    plan = fshard.make_plan(params, fshard.AbstractMesh(shard=8))
    return fshard.show(plan).svg()


def step_picture() -> str:
    """A step of a stack of eight blocks on eight ranks."""
    width, words = 512, torch.arange(1024)
    with torch.device("meta"):
        blocks = [{"up": torch.empty(width, 4 * width), "down": torch.empty(4 * width, width)} for _ in range(8)]
        params = {"embed": torch.empty(8192, width), "blocks": blocks, "head": torch.empty(width, 8192)}

    def loss_fn(params: Any, tokens: Tensor) -> fshard.Mean:
        x = params["embed"][tokens]
        for block in params["blocks"]:
            x = x + F.gelu(x @ block["up"]) @ block["down"]
        losses = F.cross_entropy(x @ params["head"], tokens, reduction="none")
        return fshard.Mean(losses.sum(), losses.numel())

    plan = fshard.make_plan(params, fshard.AbstractMesh(shard=8), units=["blocks.*"])
    tx = fshard.optim.adamw(1e-3)
    state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params)
    return fshard.show(fshard.jit(fshard.train_step(loss_fn, tx), donate=True).lower(state, words)).svg()


COLOURS = {"qkv": "#79b8f2", "norm": "#f2c46d", "up": "#8fd19e", "": "none"}
PLACES = {"qkv": 0.15, "norm": -0.03, "up": 0.55, "": 0.0}  # of names, beside the cuts
LEAVES = {"qkv": 176, "norm": 38, "up": 108, "": 18}  # the widths of the leaves of a unit, and of its padding
STYLE = """
text { font-family: system-ui, Helvetica, Arial, sans-serif; font-size: 13px; fill: #24292f }
rect { stroke: #8b949e }
line { stroke: #57606a; stroke-width: 1.5 }
"""
ARROW = """<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker>"""
TITLE = "A unit is a flat buffer of leaves. Each rank along the axis holds one interval of it, its shard."


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    dashes = ' stroke-dasharray="3 2"' if fill == "none" else ""
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"{dashes}/>'


def _text(x: float, y: float, text: str, place: str = "start", bold: bool = False) -> str:
    weight = "600" if bold else "400"
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{place}" font-weight="{weight}">{text}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str = 'marker-end="url(#arrow)"') -> str:
    return f'<line x1="{x:.1f}" y1="{y}" x2="{to_x:.1f}" y2="{to_y}" {kind}/>'


def _shard(rank: int, y: int) -> list[str]:
    """The interval of a rank: the parts of the leaves that lie in it, side by side in 71 of the 85 pixels."""
    parts, start, first = [], 0, 85 * rank
    for name, width in LEAVES.items():
        low, high = max(start, first), min(start + width, first + 85)
        if low < high:
            parts.append(_rect(17 + first + (low - first) * 71 / 85, y, (high - low) * 71 / 85, 24, COLOURS[name]))
        start += width
    return parts


def concepts_picture() -> str:
    """A unit of three leaves, gathered and cut over four ranks; narrow, so that it can be read on a phone."""
    parts, x = [_text(10, 20, "the unit blocks.0, gathered: its leaves end to end")], 10
    for name, width in LEAVES.items():
        parts += [_rect(x, 32, width, 32, COLOURS[name]), _text(x + 2 + width * PLACES[name], 53, name, bold=True)]
        x += width
    parts += [_line(10 + 85 * n, 27, 10 + 85 * n, 69, 'stroke-dasharray="4 3"') for n in (1, 2, 3)]
    parts += [_text(350, 82, "padding", "end"), _line(30, 140, 30, 72), _line(190, 94, 190, 140)]
    parts += [_text(40, 103, "all-gather:", bold=True), _text(40, 120, "the loss"), _text(40, 137, "reads blocks[0]")]
    parts += [_text(200, 112, "reduce-scatter:", bold=True), _text(200, 129, "its gradients")]
    for rank in range(4):
        left = 13 + 85 * rank
        parts += [_rect(left, 150, 79, 148, "#f3f5f7"), _text(left + 39.5, 168, f"rank {rank}", "middle", bold=True)]
        for row, unit in enumerate(("(first)", "blocks.0", "blocks.1", "(last)")):
            y = 178 + 30 * row
            parts += _shard(rank, y) if row == 1 else [_rect(left + 4, y, 71, 24, "#d5dae0")]
            parts.append(_text(left + 39.5, y + 17, unit, "middle"))
    parts += [_line(13, 312, 347, 312), _text(180, 331, "the axis “shard” of the mesh: four ranks,", "middle")]
    parts.append(_text(180, 348, "each holds one shard of every unit", "middle"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 358" width="480" role="img" aria-label="{TITLE}">'
    back = '<rect width="360" height="358" fill="#ffffff" style="stroke: none"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", f"<defs>{ARROW}</defs>", back, *parts, "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "concepts.svg").write_text(concepts_picture())
    (DOCS / "plan.svg").write_text(plan_picture())
    (DOCS / "step.svg").write_text(step_picture())
    sys.path.insert(0, str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "precision.py"))["picture"](DOCS / "rounding.png")
