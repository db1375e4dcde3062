"""Parts "correct" and "waits" of `make gpu`: steps beside plain torch in float64, and steps in which no host waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_cases import CUDA, IN_BACKWARD, INDUCTOR, KINDS, OPTIMIZERS, batch, loss, params, start, trained
from gpu_rows import Rows
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fshard
from fshard import optim, tree
from fshard.comm.mesh import Mesh
from fshard.core.tree import Tree

STEPS = 3
F64, F32 = torch.float64, torch.float32
MOST = {F64: 1e-10, F32: 2e-4}  # relative differences
DONATE: dict[str, Any] = {"donate": True}
CLIP: dict[str, Any] = {"clip_norm": 0.1}
Torch = Callable[[list[Tensor]], torch.optim.Optimizer]


def adamw(rate: Any = 1e-2) -> optim.Transform:
    """AdamW as `PLAIN` has it."""
    return optim.adamw(rate, weight_decay=0.01)


def sgd() -> optim.Transform:
    """SGD as `PLAIN` has it."""
    return optim.sgd(0.1, momentum=0.9, nesterov=True)


# by name: torch's optimizer, and the norm that gradients are clipped to
PLAIN: dict[str, tuple[Torch, float | None]] = {
    "adamw": (lambda leaves: torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.01), None),
    "adamw, clipped": (lambda leaves: torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.01), 0.1),
    "sgd": (lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9, nesterov=True), None),
}
BACKEND = "inductor" if INDUCTOR else "eager"
# by name: what plain torch does, the dtype, and arguments of `trained`
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "eager": ("adamw", F64, {}),
    "eager, no mesh": ("adamw", F64, {"mesh": None}),
    "donate": ("adamw", F64, DONATE),
    "accumulate": ("adamw", F64, {"accumulate": 4}),
    "keep gathered": ("adamw", F64, {"accumulate": 4, "keep_gathered": True}),
    "in backward": ("adamw", F64, IN_BACKWARD),
    "in backward, no mesh": ("adamw", F64, IN_BACKWARD | {"mesh": None}),
    "clip": ("adamw, clipped", F64, CLIP),
    "in backward, clip": ("adamw, clipped", F64, IN_BACKWARD | CLIP),
    "fast": ("adamw", F64, {"reduction": "fast"}),
    "tree": ("adamw", F64, {"reduction": "tree"}),
    "sgd": ("sgd", F64, {"tx": sgd}),
    "loss scale": ("adamw", F64, {"scale": lambda: fshard.DynamicLossScale(64.0)}),
    "fused, float32": ("adamw", F32, DONATE),
    "fused, float32, no mesh": ("adamw", F32, DONATE | {"mesh": None}),
    "fused sgd, float32": ("sgd", F32, DONATE | {"tx": sgd}),
    "a schedule's rate, float32": ("adamw", F32, {"tx": lambda: adamw(optim.schedules.constant(1e-2))}),
    "graph": ("adamw", F64, DONATE | {"jit": BACKEND}),
    "graph, float32": ("adamw", F32, DONATE | {"jit": BACKEND}),
}


def plain(make: Torch, norm: float | None) -> Tree:
    """Train by plain torch in float64. Returns the parameters, and the losses (STEPS,)."""
    whole = tree.map(lambda x: x.requires_grad_(), params(dtype=F64))
    leaves, losses = tree.leaves(whole), list[Tensor]()
    optimizer = make(leaves)
    for i in range(STEPS):
        mean = loss(whole, batch(i))
        losses.append(mean.total / mean.count)
        optimizer.zero_grad()
        losses[-1].backward()
        if norm:
            torch.nn.utils.clip_grad_norm_(leaves, norm)
        optimizer.step()
    return tree.map(lambda x: x.detach(), (whole, torch.stack(losses)))


def difference(got: Tree, expected: Tree) -> float:
    """The largest |got - expected| / |expected| of all leaves, by 2-norms; NaN if there is one."""
    pairs = [
        (x.double(), y.to(x.device).double()) for x, y in zip(tree.leaves(got), tree.leaves(expected), strict=True)
    ]
    return float(torch.stack([(x - y).norm() / y.norm().clamp(min=1e-30) for x, y in pairs]).max())


def near(got: Tree, expected: Tree, most: float) -> str:
    """How far apart two trees are, as text; empty if it is less than `most`."""
    far = difference(got, expected)
    return "" if far < most else f"{far:.1e} apart"


def correct(rows: Rows, mesh: DeviceMesh) -> None:
    """A step on one GPU is plain torch's in float64, in every way to run it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = {name: plain(*how) for name, how in PLAIN.items()}
    for name, (which, dtype, how) in CASES.items():

        def compared(which: str = which, dtype: torch.dtype = dtype, how: dict[str, Any] = how) -> str:
            got = trained(**{"mesh": mesh, "tx": adamw, "steps": STEPS, "dtype": dtype, **how})
            return _within(MOST[dtype], got, expected[which], "plain torch in float64")

        rows.measure(name, compared)

    def again() -> str:
        return _within(MOST[F64], dropped(mesh, True), dropped(mesh, False), "the step without remat")

    rows.measure("remat without arguments", again)


def _within(most: float, got: Tree, expected: Tree, of: str) -> str:
    said = f"{(far := difference(got, expected)):.1e} from {of}"
    if not far < most:  # a NaN is not less
        raise ValueError(said)
    return said


def dropped(mesh: DeviceMesh | Mesh, again: bool) -> Tree:
    """Train with dropout, computed again in the backward or not. The computed function takes no argument."""

    def fn(p: Tree, tokens: Tensor) -> fshard.Mean:
        body = lambda: loss(p, tokens, 0.5).total  # noqa: E731
        return fshard.Mean(fshard.remat(body)() if again else body(), tokens.numel())

    return trained(mesh, adamw, fn=fn, steps=STEPS, dtype=F64)


def waits(rows: Rows, mesh: DeviceMesh) -> None:
    """No step makes the host wait for the GPU: torch raises an error where one would."""
    if not CUDA:
        return rows.add("set_sync_debug_mode", "skipped", "no GPU: test_crossings.py counts without one")
    bf16 = {"policy": "storage=bf16"}
    kinds: dict[str, dict[str, Any]] = {
        "loss scale": {"scale": lambda: fshard.DynamicLossScale(8.0)},
        "loss scale, clip": {"scale": lambda: fshard.DynamicLossScale(8.0), "clip_norm": 0.1},
        "loss scale, bf16": {"scale": lambda: fshard.DynamicLossScale(8.0), "plan": bf16},
        "in backward": IN_BACKWARD,
        **{name: kind for name, kind in KINDS.items() if name != "host"},  # the host updates these rows itself
        **{f"optimizer {name}": {"tx": tx} for name, tx in OPTIMIZERS.items() if "torch" not in name},
    }
    for name, kind in kinds.items():
        rows.check(name, lambda kind=kind: _without_waiting(mesh, **kind))  # type: ignore[misc]


def _without_waiting(
    mesh: DeviceMesh | Mesh,
    tx: Any = lambda: optim.adamw(optim.schedules.linear(1e-4, 1e-3, 9)),
    scale: Any = lambda: None,
    plan: Any = None,
    **how: Any,
) -> None:
    transform, tokens = tx(), batch(0)
    how = {"reduction": "exact"} | how
    state, step = start(mesh, transform, scale(), plan), fshard.train_step(loss, transform, **how)
    state, _ = step(state, tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(state, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
