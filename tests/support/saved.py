"""What differs between what autograd saved and what came back."""

from collections.abc import Callable
from typing import Any

import torch

import fshard
from fshard.core import tree


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random numbers from a seed of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def zoo_params() -> dict[str, Any]:
    """Units of several dtypes and odd sizes, some leaves frozen; `after` follows, so that a unit is let go of."""
    unit = {
        "w": randn(5, 4, seed=1),
        "z": randn(4, 4, seed=2, dtype=torch.complex128),
        "single": randn(7, 2, seed=3, dtype=torch.float32),
        "bits": torch.arange(1, 49, dtype=torch.uint8),
        "packed": randn(4, 4, seed=4, dtype=torch.complex64),
        "half": randn(3, 4, seed=5, dtype=torch.bfloat16),
    }
    return {"first": randn(3, seed=6), "zoo": unit, "after": randn(4, seed=7)}


FROZEN = ["zoo.packed"]


class Scaled(torch.autograd.Function):
    """x * w, with w saved by autograd, or kept as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, saved: bool) -> torch.Tensor:
        ctx.save_for_backward(*((x, w) if saved else (x,)))
        ctx.w = None if saved else w
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *rest = ctx.saved_tensors
        w = rest[0] if rest else ctx.w
        return grad * w, (grad * x).sum(0), None


def _half(u: Any) -> torch.Tensor:
    return u["bits"].view(torch.float16).nan_to_num(0, 0, 0).clamp(-4, 4)


# u: the unit; x: (3, 4), real, requires a gradient; c: the same, complex
VIEWS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": lambda u, x, c: x * u["w"][0],
    "transposed": lambda u, x, c: x @ u["w"].t(),
    "conjugated": lambda u, x, c: c * u["z"].conj()[0],
    "hermitian": lambda u, x, c: c @ u["z"].mH,
    "conjugated twice": lambda u, x, c: c @ u["z"].conj().t().conj(),
    "real part": lambda u, x, c: x * u["z"].real[1],
    "imaginary part": lambda u, x, c: x * u["z"].imag[1],
    "negated": lambda u, x, c: x * u["z"].conj().imag[2],
    "negated and transposed": lambda u, x, c: x @ u["z"].conj().imag.t()[:, 1:3],
    "as real": lambda u, x, c: x * torch.view_as_real(u["z"])[:, 0, 1],
    "as complex": lambda u, x, c: c * torch.view_as_complex(u["single"].view(7, 2).contiguous())[:4],
    "frozen complex": lambda u, x, c: c * u["packed"].conj()[1],
    "frozen, as real": lambda u, x, c: x * u["packed"].view(torch.float32)[0, :4],
    "bytes as halves": lambda u, x, c: x * _half(u)[:4].double(),
    "bytes as halves, saved": lambda u, x, c: x.half() * u["bits"][8:24].view(torch.float16)[4:].clamp(-4, 4),
    "bytes as halves, saved as they are": lambda u, x, c: (x.half() * 1e-3) * u["bits"].view(torch.float16)[:4],
    "bytes as doubles": lambda u, x, c: x * u["bits"][8:40].view(torch.float64),
    "halves as bytes": lambda u, x, c: x[:, 0] * u["half"].detach().view(torch.uint8)[:, 1],
    "strided": lambda u, x, c: x[:, :2] * u["w"][1, ::2],
    "overlapping": lambda u, x, c: x[:, :3] * u["w"].as_strided((3, 3), (1, 2), u["w"].storage_offset() + 3),
    "at an offset": lambda u, x, c: x[:, 1:3] * u["w"][2:4, 1:3].diagonal(),
    "split": lambda u, x, c: x[:, :2] * u["w"].split(2, dim=1)[1][3],
    "unbound": lambda u, x, c: x * u["w"].unbind(0)[4],
    "expanded": lambda u, x, c: x * u["w"][:1].expand(3, 4),
    "unfolded": lambda u, x, c: x[:, :2] * u["w"].unfold(1, 2, 1)[0, 1],
    "movedim": lambda u, x, c: x * u["single"].view(7, 2, 1).movedim(0, 2)[0, 0, :4],
    "half": lambda u, x, c: x.bfloat16() * u["half"],
    "half, transposed": lambda u, x, c: x.bfloat16() @ u["half"].t(),
    "a function that saves it": lambda u, x, c: Scaled.apply(x, u["w"][0], True),
    "a function that keeps it": lambda u, x, c: Scaled.apply(x, u["w"][0], False),
    "a function that saves a conjugate": lambda u, x, c: Scaled.apply(c, u["z"].conj()[0], True),
}


def zoo(p: Any, x: torch.Tensor, names: list[str]) -> fshard.Sum:
    """Several views of one unit, another unit after it."""
    x = x * p["first"][:, None].sin()
    c = torch.complex(x, x.cos())
    total = x.new_zeros(())
    for name in names:
        y = VIEWS[name](p["zoo"], x, c)
        total = total + (y.abs().square() if y.is_complex() else y.double().sin()).sum()
    return fshard.Sum(total + (x * p["after"]).sin().sum())


def plain(loss: Any, params: Any, frozen: list[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients in plain torch, by path: zeros for what is not used."""
    flat, spec = tree.flatten(params)
    own = {path: leaf.clone() for path, leaf in zip(tree.leaf_paths(spec), flat, strict=True)}
    trained = {k: v.requires_grad_() for k, v in own.items() if k not in frozen and v.dtype != torch.uint8}
    out = loss(tree.unflatten(spec, list(own.values())), x).total
    grads = torch.autograd.grad(out, list(trained.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(trained, grads, strict=True))


STRATEGIES: dict[str, dict[str, Any]] = {
    "regather": {},
    "together": {"together": True},
    "keep": {"regather": False},
    "whole": {"params_over": (), "grads_over": (), "state_over": ()},
}


def differences(mesh: Any, losses: dict[str, Any], params: Any, frozen: list[str], units: Any) -> list[Any]:
    """Where this rank's own gradients, under any strategy, are not to the bit those of plain torch on its data."""
    x, found = randn(3, 4, seed=100 + mesh.get_rank()), []
    for strategy, more in STRATEGIES.items():
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=units, frozen=frozen, **more))
        for name, loss in losses.items():
            _, grads = fshard.value_and_grad(loss, reduce=False)(sharded, x)
            whole, spec = tree.flatten(fshard.gather_params(grads.local))
            expected = plain(loss, params, frozen, x)
            assert set(tree.leaf_paths(spec)) == set(expected)
            for path, grad in zip(tree.leaf_paths(spec), whole, strict=True):
                if not torch.equal(grad, expected[path]) or grad.dtype != expected[path].dtype:
                    found.append((strategy, name, path, grad, expected[path]))
    return found


LOSSES: dict[str, Any] = {name: (lambda p, x, name=name: zoo(p, x, [name])) for name in VIEWS}
LOSSES["all at once"] = lambda p, x: zoo(p, x, list(VIEWS))


def all_differences(mesh: Any) -> list[Any]:
    """Of all views in one loss (test_tape.py runs this in processes)."""
    return differences(mesh, {"all": LOSSES["all at once"]}, zoo_params(), FROZEN, ["zoo"])
