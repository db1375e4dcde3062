"""The training cases of `make gpu`: a small model, its data, and steps of every kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rows import FAKE
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fshard
from fshard import optim, tree, wire
from fshard.comm.mesh import Mesh, mesh_device
from fshard.core.tree import Tree
from fshard.train.loss_scale import LossScale

CUDA = torch.cuda.is_available()
INDUCTOR = CUDA and not FAKE  # else nothing is compiled
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")
VOCAB = 128
Make = Callable[[], Any]


def params(
    d: int = 64 if CUDA else 16,
    layers: int = 4 if CUDA else 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Any:
    """Parameters of a small model. The gate has one element, so the leaves after it need padding to be aligned."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu") / shape[0] ** 0.5

    def block() -> Any:
        bias, norm = torch.zeros(4 * d), torch.ones(d)
        return {"gate": torch.ones(1), "norm": norm, "w": matrix(d, 4 * d), "b": bias, "v": matrix(4 * d, d)}

    whole = {"embed": matrix(VOCAB, d), "blocks": [block() for _ in range(layers)], "head": matrix(d, VOCAB)}
    return tree.map(lambda x: x.to(device or DEVICE, dtype), whole)


def loss(p: Tree, tokens: Tensor, dropout: float = 0.0) -> fshard.Mean:
    """Cross-entropy of predicting `(token + 1) % VOCAB` from each token: a `Mean` over tokens."""
    x = p["embed"][tokens]
    for b in p["blocks"]:
        h = F.layer_norm(x.to(b["norm"].dtype), (x.shape[-1],), b["norm"]).to(x.dtype)  # CUDA refuses two dtypes
        h = F.gelu(h @ b["w"] + b["b"]) @ b["v"]
        x = x + (F.dropout(h, dropout) if dropout else h) * b["gate"]
    logits = x @ p["head"]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    losses = F.cross_entropy(logits, ((tokens + 1) % VOCAB).flatten(), reduction="sum")
    return fshard.Mean(losses, tokens.numel())


def batch(step: int, rank: int = 0, rows: int = 8, device: torch.device | None = None) -> Tensor:
    """Random tokens (rows, length) of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCAB, (rows, 32 if CUDA else 8), generator=generator, device="cpu")
    return tokens.to(device or DEVICE)


def device_of(mesh: DeviceMesh | Mesh | None) -> torch.device:
    """Where a rank of a mesh trains: on the device, unless the mesh is one of CPUs."""
    return DEVICE if mesh is None else mesh_device(mesh)


def start(
    mesh: DeviceMesh | Mesh | None,
    tx: optim.Transform,
    scale: LossScale | None = None,
    plan: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> fshard.TrainState:
    """The training state before the first step, for `plan` as further arguments of `make_plan`."""
    whole = params(dtype=dtype, device=device_of(mesh))
    made = fshard.make_plan(whole, mesh, units=["blocks.*"], **(plan or {}))
    return fshard.init_state(fshard.shard_params(whole, made), tx, scale)


def trained(
    mesh: DeviceMesh | Mesh | None,
    tx: Make = lambda: optim.adamw(1e-3),
    scale: Make = lambda: None,
    plan: dict[str, Any] | None = None,
    jit: str | None = None,
    fn: Callable[..., Any] = loss,
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Any:
    """Train for a few steps. Returns the whole parameters, and the losses (steps,)."""
    transform = tx()
    state, donate = start(mesh, transform, scale(), plan, dtype), how.pop("donate", False)
    # in rank order if nothing else is said: what is compared is bits
    step: Any = fshard.train_step(fn, transform, donate=donate and jit is None, **{"reduction": "exact"} | how)
    step = step if jit is None else fshard.jit(step, backend=jit, donate=donate)
    losses = []
    for i in range(steps):
        rank, _ = fshard.rank_and_size(mesh)
        state, metrics = step(state, batch(i, rank, device=device_of(mesh)))
        losses.append(metrics["loss"])
    return fshard.gather_params(state.params), torch.stack(losses)


OPTIMIZERS: dict[str, Make] = {
    "a number": lambda: optim.adamw(1e-3),
    "linear": lambda: optim.adamw(optim.schedules.linear(1e-4, 1e-3, 9)),
    "cosine sgd": lambda: optim.sgd(optim.schedules.cosine(0.1, 9), momentum=0.9),
    "hyperparams": lambda: optim.with_hyperparams(optim.adamw, lr=1e-3),
    "rmsprop": lambda: optim.rmsprop(centered=True, momentum=0.9),
    "adagrad": optim.adagrad,
    "lion": lambda: optim.lion(optim.schedules.linear(1e-4, 1e-3, 9)),
    "lamb": lambda: optim.lamb(1e-3),
    "adafactor": optim.adafactor,
    "muon": lambda: optim.muon(1e-3),
    "chain": lambda: optim.chain(optim.clip_by_leaf_norm(1.0), optim.scale(-0.1)),
    "torch's RAdam": lambda: optim.from_torch(torch.optim.RAdam, lr=1e-3),
    "labels": lambda: optim.by_label({"a": optim.sgd(0.1), "b": optim.adamw(1e-3)}, {"embed": "a", "**": "b"}),
}
IN_BACKWARD: dict[str, Any] = {"donate": True, "in_backward": True}
OVER: dict[str, Any] = {"params_over": (), "grads_over": (), "state_over": ()}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "donate": {"donate": True, "clip_norm": 0.1, "accumulate": 2},
    "once": {"accumulate": 2, "reduce_once": True},
    "fast": {"reduction": "fast"},
    "tree": {"reduction": "tree", "clip_norm": 1.0},
    "tree ddp": {"reduction": "tree", "plan": OVER},
    "tree whole": {"reduction": "tree", "plan": {"whole": "**.b"}},
    "ddp": {"plan": OVER},
    "zero1": {"plan": {"params_over": (), "grads_over": ()}, "donate": True},
    "bf16": {"plan": {"policy": "compute=bf16, reduce=f32"}},
    "int8": {"plan": {"param_wire": wire.Int8(), "grad_wire": wire.Int8()}},
    "float8": {"plan": {"param_wire": wire.Float8(), "grad_wire": wire.Float8()}},
    "together": {"plan": {"together": True, "policy": "compute=bf16; **.norm: compute=f32"}},
    "muon": {"tx": OPTIMIZERS["muon"], "donate": True},
    "host": {"plan": {"offload": "blocks.*"}, "donate": True},
    "keep": {"plan": {"regather": False}},
    "frozen": {"plan": {"frozen": ["**.gate", "**.norm", "**.b"]}},
}
POLICIES = ("compute=bf16", "compute=f16", "storage=bf16", "compute=bf16, grads=bf16")
FROZEN = (torch.int16, torch.uint16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def same(got: Tree, expected: Tree, exact: bool = True) -> str:
    """How two trees of tensors differ, as text; empty if all bits are equal (values close, without `exact`)."""
    pairs = [*zip(tree.leaves(got), tree.leaves(expected), strict=True)]
    if exact:
        wrong = sum(not torch.equal(x, y.to(x.device)) for x, y in pairs)
        return f"{wrong} of {len(pairs)} tensors have other bits" if wrong else ""
    far = float(torch.stack([(x - y.to(x.device)).abs().max().float() for x, y in pairs]).max())  # NaN if there is one
    return "" if far < 2e-3 else f"up to {far:.1e} apart"


def frozen(mesh: DeviceMesh | Mesh, dtype: torch.dtype) -> str:
    """Shard and gather a frozen leaf of a dtype. Returns how the result differs, as text; empty if it does not."""
    whole = {"n": torch.ones(8, device=DEVICE).to(dtype)}
    back = fshard.gather_params(fshard.shard_params(whole, fshard.make_plan(whole, mesh, frozen="n")))
    return same(back["n"].view(torch.uint8), whole["n"].view(torch.uint8))


def alternatives() -> Iterable[tuple[str, dict[str, Any]]]:
    """Pairs of a case's name and arguments of `trained`: optimizers, policies with a loss scale, kinds of steps."""
    yield from ((f"optimizer {name}", {"tx": tx}) for name, tx in OPTIMIZERS.items())
    yield "optimizer in 8 bits", {"tx": lambda: optim.adamw_8bit(1e-3), "plan": {"block": 256}}
    for policy in POLICIES:
        yield f"loss scale, {policy}", {"scale": lambda: fshard.DynamicLossScale(64.0), "plan": {"policy": policy}}
    yield from ((f"step {name}", kind) for name, kind in KINDS.items())
    yield "jit, as it is", {"jit": "eager", "donate": True}
