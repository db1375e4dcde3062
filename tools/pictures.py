"""Draw the pictures of docs/cli.md and docs/compile.md: python tools/pictures.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fshard

DOCS = Path(__file__).resolve().parent.parent / "docs"


def plan_picture() -> str:
    """The plan of the model of docs/cli.md, on eight ranks."""
    code = (DOCS / "cli.md").read_text().partition("```python\n")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    exec(code, scope)
    with torch.device("meta"):
        apply, params, _ = fshard.module.functionalize(scope["Model"]())
    plan = fshard.make_plan(params, fshard.AbstractMesh(shard=8), units=apply.units("layers.*"))
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


if __name__ == "__main__":
    (DOCS / "plan.svg").write_text(plan_picture())
    (DOCS / "step.svg").write_text(step_picture())
