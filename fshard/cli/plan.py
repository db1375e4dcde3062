"""Show a model's plan: the part of each unit that a rank holds, its bytes, and the memory and traffic of a step.

  fshard plan my_model:build --units "layers.*" --mesh shard=8
  fshard plan my_model:build --units "layers.*" --mesh shard=8 --batch tokens=4x2049:int64 --loss my_model:loss
  fshard plan checkpoint/model.safetensors --units "model.layers.*" --mesh replicate=2 shard=4 --json

A model is a function that returns a module or a tree of tensors. It is called on the device meta, so its tensors take
no memory. A model may also be a safetensors file or a folder of Hugging Face's; only the files' headers are read.

With --batch and --loss, fshard.estimate shows memory and traffic of a jitted, donated step. The loss is a function of
the model (the module, or the tree of tensors) and the batch.

Exit status: 0; 2: an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import optim
from ..comm.mesh import AbstractMesh
from ..compiler.jit import jit
from ..compiler.trace import eval_shape
from ..core import tree
from ..core.tree import Tree
from ..files.hugging_face import entries_at
from ..module.functionalize import functionalize
from ..module.skeleton import nested
from ..plan.owners import TableLine, size
from ..plan.planning import make_plan
from ..planner.estimate import estimate
from ..sharding.sharded import shard_params
from ..train.step import TrainState, init_state, train_step
from .output import Line, report
from .values import function

_OPTIMIZERS = ("adafactor", "adagrad", "adam", "adamw", "lamb", "lion", "muon", "rmsprop", "sgd")
_OVERS = ("params_over", "grads_over", "state_over")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; options of `make_plan` keep their names."""
    parser.add_argument("model", help="MODULE:FUNCTION, or the path of a safetensors file or a folder of such files")
    parser.add_argument("--mesh", nargs="+", metavar="AXIS=SIZE", help="the axes of the mesh (one device)")
    parser.add_argument("--units", nargs="+", metavar="PATTERN", help='subtrees that are gathered together: "layers.*"')
    for name in _OVERS:
        text = f"the axes over which {name.partition('_')[0]} are cut (shard); without a name: over none"
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="*", metavar="AXIS", default=["shard"], help=text)
    parser.add_argument("--bucket", type=int, default=0, metavar="BYTES", help="join small units, up to so many bytes")
    parser.add_argument("--no-regather", action="store_true", help="keep gathered parameters for the backward")
    parser.add_argument("--frozen", nargs="+", metavar="PATTERN", help="leaves without gradient and optimizer state")
    parser.add_argument("--whole", nargs="+", metavar="PATTERN", help="leaves that stay whole on every rank")
    parser.add_argument("--policy", help='dtypes: "storage=f32,compute=bf16"')
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw", help="for the optimizer's state (adamw)")
    parser.add_argument("--batch", nargs="+", metavar="SHAPE", help="a rank's batch: 4x2049:int64, or NAME=SHAPE each")
    parser.add_argument("--loss", metavar="MODULE:FUNCTION", help="a function of the model and the batch")
    parser.add_argument("--capacity", metavar="GIB", type=float, help="whether the step fits a device of this memory")


def run(args: argparse.Namespace) -> int:
    apply, params, buffers = _model(args.model)
    mesh = AbstractMesh(**_mesh_sizes(args.mesh)) if args.mesh else None
    how = {name: getattr(args, name) for name in ("units", "bucket", *_OVERS, "frozen", "whole", "policy")}
    plan = make_plan(params, mesh, regather=not args.no_regather, **how)
    picture = plan.picture()
    tx = getattr(optim, args.optimizer)(1e-3)
    state = eval_shape(lambda x: init_state(shard_params(x, plan), tx), params)
    shares = [row.shares for row in picture.rows]
    nbytes = {
        "parameters": sum(share["parameters"].nbytes for share in shares),
        "gradients": sum(share["gradients"].nbytes for share in shares if "gradients" in share),
        "optimizer_state": sum(x.nbytes for x in tree.leaves(state.opt_state) if isinstance(x, Tensor)),
    }
    said = ", ".join(f"{name.replace('_', ' ')} {size(number)}" for name, number in nbytes.items())
    text = f"{picture.text}\nbytes of a rank with {args.optimizer}: {said}"
    shown: dict[str, object] = {"mesh": dict(plan.axes)} | {name: getattr(plan, name) for name in _OVERS}
    shown |= {"bytes_of_rank": nbytes, "units": [_row_data(row) for row in picture.rows]}
    if args.batch or args.loss or args.capacity is not None:
        needed, more = _estimate(args, apply, buffers, tx, state)
        text, shown = f"{text}\n\n{needed}", shown | more
    return report([Line(text, shown)], args.json)


def _model(model: str) -> tuple[Callable[..., Tree] | None, Tree, Tree]:
    """Return a model's function (None for a tree of tensors), parameters and buffers, on the device meta."""
    if Path(model).exists():
        entries = entries_at(Path(model)).values()
        if lacking := [f"{x.name!r} is {x.kind}" for x in entries if x.dtype is None]:
            raise ValueError(f"{model}: dtypes that torch lacks: {'; '.join(lacking)}")
        return None, nested({x.name: torch.empty(x.shape, dtype=x.dtype, device="meta") for x in entries}), None
    if ":" not in model:
        raise ValueError(f"{model}: expected MODULE:FUNCTION, or the path of a file or folder, of which there is none")
    build = function("model", model, "without arguments", 0)
    with torch.device("meta"):
        made = build()
    return functionalize(made) if isinstance(made, nn.Module) else (None, made, None)


def _estimate(
    args: argparse.Namespace, apply: Callable[..., Tree] | None, buffers: Tree, tx: optim.Transform, state: TrainState
) -> tuple[str, dict[str, object]]:
    if not args.batch or not args.loss:
        raise ValueError("--batch and --loss: expected both, of which a step is made, or neither; --capacity needs it")
    if args.capacity is not None and not 0 < args.capacity < 1e9:
        raise ValueError(f"--capacity {args.capacity:g}: expected a number of GiB above 0, as in 80")
    loss = function("--loss", args.loss, "of the model and the batch", 2)

    def loss_fn(params: Tree, batch: Tree, buffers: Tree) -> Tree:
        return loss(params if apply is None else lambda *x, **kw: apply(params, buffers, *x, **kw)[0], batch)

    needed = estimate(jit(train_step(loss_fn, tx), donate=True), state, _batch(args.batch), buffers)
    if args.capacity is None:
        return f"{needed}", {"estimate": needed.to_dict()}
    fits = needed.device.fits(round(args.capacity * (1 << 30)))
    return f"{needed}\nfits {args.capacity:g} GiB: {fits}", {"estimate": needed.to_dict(), "fits": fits}


def _batch(texts: Sequence[str]) -> Tree:
    """Return tensors on meta by name, from texts such as "x=4x8:int64"; one tensor if the text has no name."""
    batch = {}
    for text in texts:
        name, _, form = text.rpartition("=")
        sizes, _, dtype = form.partition(":")
        kind = getattr(torch, dtype or "float32", None)
        if not isinstance(kind, torch.dtype) or not all(number.isdecimal() for number in sizes.split("x")):
            raise ValueError(f"--batch {text}: expected sizes and a dtype, as in 4x2049:int64 or tokens=4x2049:int64")
        batch[name] = torch.empty([*map(int, sizes.split("x"))], dtype=kind, device="meta")
    if ("" in batch and len(texts) > 1) or len(batch) < len(texts):
        raise ValueError(f"--batch {' '.join(texts)}: expected one tensor, or several with names that differ")
    return batch.get("", batch)


def _mesh_sizes(texts: Sequence[str]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, _, number) in zip(texts, pairs, strict=True) if not number.isdecimal()]:
        raise ValueError(f"--mesh {wrong[0]}: expected the name of an axis and its size, as in shard=8")
    return {axis: int(number) for axis, _, number in pairs}


def _row_data(row: TableLine) -> dict[str, object]:
    data = {name: getattr(row, name) for name in ("unit", "kind", "leaves", "elements")}
    data |= {"regather": {"True": True, "False": False}.get(row.regather, row.regather)}
    shares = {name: share.nbytes for name, share in row.shares.items()}
    return data | {"count": row.num_units, "bytes": row.nbytes, "bytes_of_rank": shares}
