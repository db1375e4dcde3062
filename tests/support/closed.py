"""Losses of sharded parameters for torch.func's transforms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import func

from fshard import tree

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def randn(*shape: int, seed: int) -> torch.Tensor:
    """Random float64 numbers of a generator with this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def params(seed: int = 0) -> dict[str, Any]:
    """Parameters of two layers; with another seed, a tangent of the same shapes."""
    return {"w1": randn(6, 4, seed=seed), "b": randn(4, seed=seed + 1), "w2": randn(4, 6, seed=seed + 2)}


def net(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Two layers; the output is not linear in any parameter."""
    return torch.tanh(x @ p["w1"] + p["b"]) @ p["w2"]


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss that is written for one device."""
    return net(p, x).square().sum()


def dot(a: Any, b: Any) -> torch.Tensor:
    """The inner product of two trees."""
    return torch.stack([(x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]).sum()


def grad(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """First derivative in reverse mode, by `func.grad`."""
    return func.grad(f)(p, x)


def vjp(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """First derivative in reverse mode, by `func.vjp`."""
    out, back, *_ = func.vjp(lambda p: f(p, x), p)
    return back(torch.ones_like(out))[0]


def jvp(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """First derivative in forward mode, of this rank's loss only."""
    return func.jvp(lambda p: f(p, x), (p,), (v,))[1]


def forward_over_reverse(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """A Hessian-vector product: jvp of grad."""
    return func.jvp(lambda p: func.grad(f)(p, x), (p,), (v,))[1]


def reverse_over_reverse(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """A Hessian-vector product: grad of <grad, v>."""
    return func.grad(lambda p: dot(func.grad(f)(p, x), v))(p)


def third_order(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """The derivative of a Hessian-vector product along v."""
    return func.jvp(lambda p: reverse_over_reverse(f, p, x, v), (p,), (v,))[1]


def per_sample(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """Gradients of every row: vmap of grad."""
    return func.vmap(func.grad(f), (None, 0))(p, x)


def several_tangents(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """Hessian-vector products of three tangents at once: vmap of jvp of grad."""
    tangents = tree.map(lambda t: torch.stack([t, -2 * t, t.sin()]), v)
    return func.vmap(lambda v: forward_over_reverse(f, p, x, v))(tangents)


def double_backward(f: Loss, p: Any, x: torch.Tensor, v: Any) -> Any:
    """A Hessian-vector product by plain autograd."""
    leaves, spec = tree.flatten(tree.map(lambda t: t.detach().requires_grad_(), p))
    grads = torch.autograd.grad(f(tree.unflatten(spec, leaves), x), leaves, create_graph=True)
    return tree.unflatten(spec, torch.autograd.grad(dot(list(grads), v), leaves))


PROGRAMS: dict[str, Callable[..., Any]] = {
    "gradient: `grad`": grad,
    "gradient: `vjp`": vjp,
    "directional derivative: `jvp`": jvp,
    "Hessian-vector product: `jvp` of `grad`": forward_over_reverse,
    "Hessian-vector product: `grad` of ⟨`grad`, v⟩": reverse_over_reverse,
    "Hessian-vector product: double backward": double_backward,
    "per-sample gradients: `vmap` of `grad`": per_sample,
}

MORE = {**PROGRAMS, "third order": third_order, "`vmap` of `jvp` of `grad`": several_tangents}
