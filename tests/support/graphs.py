"""A transformer-like toy, functions of it, and their graphs before any pass."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fshard
from fshard import Sharded, gather_params, tree
from fshard.compiler.lowered import Interface, Lowered
from fshard.compiler.signature import on_meshes, signature
from fshard.compiler.trace import trace
from fshard.graph.dataflow import gathers, index
from fshard.graph.inspect import arguments, operator

from .models import rand, same_bits
from .steps import EXACT

BLOCKS = [f"blocks.{i}" for i in range(4)]
UNITS = ["blocks.*"]
EVERYTHING = 10**9


def params(seed: int = 0, widths: tuple[int, ...] = (8, 8, 8, 8), dtype: torch.dtype = torch.float64) -> Any:
    """Four blocks, each a unit, an embedding and a head; blocks of different widths where asked."""

    def block(seed: int, width: int) -> dict[str, Tensor]:
        shapes = {"ln": (4,), "w": (4, width), "b": (width,), "out": (width, 4)}
        return {k: 0.5 * rand(*s, seed=seed + i, dtype=dtype) for i, (k, s) in enumerate(shapes.items())}

    blocks = [block(seed + 10 * i, width) for i, width in enumerate(widths)]
    ends = {"embed": (5, 4), "head": (4, 3)}
    return {"blocks": blocks, **{k: rand(*s, seed=seed + 90 + i, dtype=dtype) for i, (k, s) in enumerate(ends.items())}}


def block(p: Any, x: Tensor) -> Tensor:
    """Norm, matmul and bias, gelu, matmul."""
    return x + F.gelu(F.layer_norm(x, (4,), p["ln"]) @ p["w"] + p["b"]) @ p["out"]


def batch(rank: int) -> Tensor:
    """Different rows on every rank."""
    return (torch.arange(6) * (rank + 2) + rank) % 5


def net(p: Any, tokens: Tensor, use: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
    """Some of the blocks."""
    x = p["embed"][tokens]
    for i in use:
        x = block(p["blocks"][i], x)
    return (x @ p["head"]).square()


def loss(p: Sharded, tokens: Tensor, use: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
    """Gathers everything before it begins."""
    return net(gather_params(p), tokens, use).mean()


def mean(p: Any, tokens: Tensor) -> fshard.Mean:
    """For a step, which gathers what it touches."""
    rows = net(p, tokens)
    return fshard.Mean(rows.sum(), rows.numel())


def sharded(mesh: Any, seed: int = 0, widths: tuple[int, ...] = (8, 8, 8, 8), **plan: Any) -> Sharded:
    """The parameters on a mesh."""
    whole = params(seed, widths)
    return fshard.shard_params(whole, fshard.make_plan(whole, mesh, **{"units": UNITS, **plan}))


def graph_of(fn: Callable[..., Any], *args: Any) -> Lowered:
    """What was traced, as it is."""
    leaves, spec = tree.flatten((args, {}))
    traced, called = trace(fn, leaves, spec), signature(leaves, spec, on_meshes(args))
    return Lowered(traced, Interface(called, False, (), (), traced.out_spec, traced.results, traced.has_gradient))


def is_right(lowered: Lowered, fn: Callable[..., Any], *args: Any) -> None:
    """A valid graph that has the eager function's bits."""
    lowered.graph.lint()
    assert same_bits(lowered.compile("eager")(*args), fn(*args))


def places(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of every node."""
    return {node: i for i, node in enumerate(graph.nodes)}


def targets(graph: fx.Graph) -> Counter[str]:
    """How many nodes call each operator."""
    return Counter(operator(node) for node in graph.nodes if node.op == "call_function")


def labels(graph: fx.Graph, kind: str = "all_gather") -> list[str]:
    """The units of the collectives of a kind, in the order they start."""
    found = [node for node in graph.nodes if node.op == "call_function" and operator(node) == f"fshard.{kind}"]
    return [arguments(node)["label"] for node in found]


def writers(graph: fx.Graph) -> Counter[str]:
    """Nodes that write to something that is no gathered buffer."""
    kinds = (node for node in graph.nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False))
    waits = {gather.wait for gather in gathers(index(graph))}
    return Counter(operator(node) for node in kinds if node not in waits)


def gradient(p: Sharded, tokens: Tensor) -> Any:
    """Backward."""
    return torch.func.grad(loss)(p, tokens)


def hessian_vector(p: Sharded, tokens: Tensor, v: Sharded) -> Any:
    """Forward over backward."""
    return torch.func.jvp(lambda p: gradient(p, tokens), (p,), (v,))[1]


def per_sample(p: Sharded, tokens: Tensor) -> Any:
    """A gradient for every row."""
    return torch.func.vmap(torch.func.grad(loss), (None, 0))(p, tokens[:, None])


def gradient_of_gradient(p: Sharded, tokens: Tensor) -> Any:
    """Backward over backward."""
    return torch.func.grad(lambda p: torch.stack([g.square().sum() for g in tree.leaves(gradient(p, tokens))]).sum())(p)


DERIVATIVES = {"grad": gradient, "jvp of grad": hessian_vector, "vmap of grad": per_sample}


def given_to(fn: Callable[..., Any], mesh: Any, **plan: Any) -> tuple[Any, ...]:
    """Its arguments."""
    more = (sharded(mesh, seed=5, **plan),) if fn is hessian_vector else ()
    return sharded(mesh, **plan), batch(mesh.get_rank()), *more


def state_of(mesh: Any, tx: Any = None, **plan: Any) -> tuple[Any, Any, Tensor]:
    """A step and its arguments."""
    tx = EXACT if tx is None else tx
    return fshard.train_step(mean, tx), fshard.init_state(sharded(mesh, **plan), tx), batch(mesh.get_rank())
