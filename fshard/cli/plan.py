"""Show the plan of a model: which ranks hold what of each unit, and how many bytes.

  fshard plan my_model:build --units "layers.*" --mesh shard=8
  fshard plan checkpoint/model.safetensors --units "model.layers.*" --mesh replicate=2 shard=4 --json

A model is a function that returns a module or a tree of tensors; it is called without memory for tensors (on the device
meta). Or it is a safetensors file, or a folder of Hugging Face's, of which the headers alone are read.

Exit status: 0; 2: an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import optim
from ..comm.mesh import AbstractMesh
from ..compiler.trace import eval_shape
from ..core import tree
from ..core.tree import Tree
from ..files.hugging_face import entries_at
from ..module.functionalize import functionalize
from ..module.skeleton import nested
from ..plan.owners import Row
from ..plan.plan import Plan
from ..plan.planning import make_plan
from ..plan.tables import size
from ..sharding.sharded import shard_params
from ..train.step import init_state
from .output import Line, report
from .values import function

_OPTIMIZERS = ("adafactor", "adagrad", "adam", "adamw", "lamb", "lion", "muon", "rmsprop", "sgd")
_OVERS = ("params_over", "grads_over", "state_over")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command; those of make_plan have its names."""
    parser.add_argument("model", help="MODULE:FUNCTION, or the path of a safetensors file or a folder of such files")
    parser.add_argument("--mesh", nargs="+", metavar="AXIS=SIZE", help="the axes of the mesh (one device)")
    parser.add_argument("--units", nargs="+", metavar="PATTERN", help='subtrees that are gathered together: "layers.*"')
    for name in _OVERS:
        what = name.partition("_")[0]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            nargs="*",
            metavar="AXIS",
            default=["shard"],
            help=f"the axes over which {what} are cut (shard); without a name: over none",
        )
    parser.add_argument("--no-regather", action="store_true", help="keep gathered parameters for the backward")
    parser.add_argument("--frozen", nargs="+", metavar="PATTERN", help="leaves without gradient and optimizer state")
    parser.add_argument("--whole", nargs="+", metavar="PATTERN", help="leaves that stay whole on every rank")
    parser.add_argument("--policy", help='dtypes: "storage=f32,compute=bf16"')
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default="adamw", help="for the optimizer's state (adamw)")


def run(args: argparse.Namespace) -> int:
    """Print the plan, and the bytes of a rank."""
    params = _params(args.model)
    mesh = AbstractMesh(**_sizes(args.mesh)) if args.mesh else None
    plan = make_plan(
        params,
        mesh,
        units=args.units,
        params_over=args.params_over,
        grads_over=args.grads_over,
        state_over=args.state_over,
        regather=not args.no_regather,
        frozen=args.frozen,
        whole=args.whole,
        policy=args.policy,
    )
    picture = plan.picture()
    nbytes = _nbytes(plan, picture.rows, params, args.optimizer)
    said = ", ".join(f"{name} {size(number)}" for name, number in nbytes.items())
    text = f"{picture.text}\nbytes of a rank with {args.optimizer}: {said}"
    return report([Line(text, _data(plan, picture.rows, nbytes))], args.json)


def _params(model: str) -> Tree:
    """The parameters of a model, on the device meta."""
    if Path(model).exists():
        entries = entries_at(Path(model)).values()
        if lacking := [f"{x.name!r} is {x.kind}" for x in entries if x.dtype is None]:
            raise ValueError(f"{model}: dtypes that torch lacks: {'; '.join(lacking)}")
        return nested({x.name: torch.empty(x.shape, dtype=x.dtype, device="meta") for x in entries})
    if ":" not in model:
        raise ValueError(f"{model}: expected MODULE:FUNCTION, or the path of a file or folder, of which there is none")
    build = function("model", model, "without arguments", 0)
    with torch.device("meta"):
        made = build()
    return functionalize(made)[1] if isinstance(made, nn.Module) else made


def _sizes(texts: Sequence[str]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, _, number) in zip(texts, pairs, strict=True) if not number.isdecimal()]:
        raise ValueError(f"--mesh {wrong[0]}: expected the name of an axis and its size, as in shard=8")
    return {axis: int(number) for axis, _, number in pairs}


def _nbytes(plan: Plan, rows: Sequence[Row], params: Tree, optimizer: str) -> dict[str, int]:
    """The bytes of a rank by purpose; those of optimizer state are of the state that the optimizer makes."""
    tx = getattr(optim, optimizer)(1e-3)
    state = eval_shape(lambda x: init_state(shard_params(x, plan), tx), params)
    shares = [row.shares for row in rows]
    return {
        "parameters": sum(share["parameters"].nbytes for share in shares),
        "gradients": sum(share["gradients"].nbytes for share in shares if "gradients" in share),
        "optimizer state": sum(x.nbytes for x in tree.leaves(state.opt_state) if isinstance(x, Tensor)),
    }


def _data(plan: Plan, rows: Sequence[Row], nbytes: dict[str, int]) -> dict[str, object]:
    units = [{**row._asdict(), "shares": {name: x.nbytes for name, x in row.shares.items()}} for row in rows]
    return {"mesh": dict(plan.axes), **{name: getattr(plan, name) for name in _OVERS}, "rank": nbytes, "units": units}
