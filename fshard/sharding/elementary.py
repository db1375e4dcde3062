"""Operators whose second derivatives are wrong in torch: a loss of `hvp` computes them from others, or not at all.

Note [Second derivatives that torch lacks]
    `hvp` differentiates a directional derivative. torch's directional derivatives of some operators read what the
    operator saved: the mean and rstd of layer_norm and batch_norm, the decomposition in det and linalg.solve. These
    saved values carry no derivative, so the second derivative lacks terms, and torch says nothing. Inside a loss of
    `hvp`, these operators are therefore made of others, whose derivatives are right to any order. Rarer ones are
    errors. A function mode sees the calls of Python, in modules and under other transforms too. It does not see what
    a graph that was compiled before runs. test_elementary.py fails when torch mends one of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_WRONG = re.compile(
    r"(layer|instance)_norm|batch_norm(?!.*no_training)|linalg_(det|slogdet|solve_ex|tensorsolve|householder)"
    r"|orgqr|cholesky_inverse"
)
_ATEN = "torch._ops.aten"  # the module of the operators that graphs call
_Outputs = Tensor | tuple[Tensor, ...]


class Elementary(TorchFunctionMode):
    """While it is active, operators whose second derivatives are wrong are made of others, or are errors."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func`, or what computes the same with derivatives that are right."""
        name, options = str(getattr(func, "__name__", "")).partition(".")[0], kwargs or {}
        other = _MADE.get(_public(func, name))
        if other is not None:
            return other(func, *args, **options)
        module = str(getattr(func, "__module__", None))
        others = module.startswith("torch._ops.") and module != _ATEN  # operators of other libraries
        product = name.startswith("scatter_reduce") and "prod" in (*args[3:4], options.get("reduce"))
        if not others and (product or _WRONG.search(name)):
            raise ValueError(
                f"hvp: the second derivatives of {name}{' with prod' * product} are wrong in torch, and it is not one "
                "of those that hvp computes from other operators: do so in the loss"
            )
        return func(*args, **options)


def _public(func: object, name: str) -> object:
    """Torch's function for an operator of aten, which has the same arguments; other functions as they are."""
    if getattr(func, "__module__", None) != _ATEN:
        return func
    return getattr(torch, name, None) or getattr(torch.linalg, name.removeprefix("linalg_"), func)


def _normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """`x` with mean 0 and variance 1 over dims, in float32 at least."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # as in torch's kernels
    centred = wide - wide.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """`x * weight + bias`, both seen in a shape that broadcasts."""
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _values(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _as_torchs(x: Tensor, torchs: _Outputs) -> _Outputs:
    """`x` in the dtype of torch's result, contiguous as it; with the statistics that torch returned beside it."""
    if isinstance(torchs, Tensor):
        return x.to(torchs.dtype).contiguous()
    return x.to(torchs[0].dtype).contiguous(), *torchs[1:]


def _layer_norm(
    func: Callable[..., _Outputs],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> _Outputs:
    # torch's own runs as well, on the values alone: it checks the arguments, and tells the dtype of the result
    with torch.no_grad():
        torchs = func(input.detach(), normalized_shape, _values(weight), _values(bias), eps)
    dims = range(-len(normalized_shape), 0)
    return _as_torchs(_scaled(_normalized(input, list(dims), eps), weight, bias, list(normalized_shape)), torchs)


def _norm_of_channels(
    func: Callable[..., _Outputs],
    first: int,
    flag: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    **options: Any,
) -> _Outputs:
    """Normalize input (N, C, ...): over the batch and what follows the channels (first=0), or only what follows (2).

    Torch's own `func` checks the arguments, and updates running statistics, which have no derivatives. Where the option
    `flag` is off it normalizes by these, and has the right derivatives.
    """
    if not options[flag]:
        return func(input=input, weight=weight, bias=bias, **options)
    with torch.no_grad():
        torchs = func(input=input.detach(), weight=_values(weight), bias=_values(bias), **options)
    dims, shape = [dim for dim in range(first, input.dim()) if dim != 1], [-1] + [1] * (input.dim() - 2)
    return _as_torchs(_scaled(_normalized(input, dims, options["eps"]), weight, bias, shape), torchs)


def _functional_norm(first: int, flag: str) -> Callable[..., _Outputs]:
    """functional.batch_norm (first=0) or functional.instance_norm (2), in the order of their arguments."""

    def norm(func: Callable[..., Tensor], *args: Any, **named: Any) -> _Outputs:
        bound = inspect.signature(func).bind(*args, **named)
        bound.apply_defaults()
        return _norm_of_channels(func, first, flag, **bound.arguments)

    return norm


def _aten_norm(first: int, flag: str) -> Callable[..., _Outputs]:
    """torch.batch_norm (first=0) or torch.instance_norm (2), in the order of aten's arguments."""
    names = ("input", "weight", "bias", "running_mean", "running_var", flag, "momentum", "eps", "cudnn_enabled")

    def norm(func: Callable[..., _Outputs], *args: Any, **named: Any) -> _Outputs:
        return _norm_of_channels(func, first, flag, **dict(zip(names, args, strict=False)), **named)

    return norm


def _solve(func: Callable[..., Tensor], A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    is_vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and A.shape[:-1] == B.shape)  # torch's rule
    x = torch.linalg.lu_solve(*torch.linalg.lu_factor(A), B.unsqueeze(-1) if is_vector else B, left=left)
    return x.squeeze(-1) if is_vector else x


def _diagonal(a: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal (..., n) of U, and the sign (...) of the permutation, in the LU decomposition of `a`."""
    lu, pivots = torch.linalg.lu_factor(a)
    swaps = (pivots != torch.arange(1, a.shape[-1] + 1, dtype=pivots.dtype, device=a.device)).sum(-1)
    return lu.diagonal(dim1=-2, dim2=-1), (1 - swaps % 2 * 2).to(a.dtype)


def _det(func: Callable[..., Tensor], *a: Tensor, **named: Tensor) -> Tensor:
    diagonal, sign = _diagonal(*a, *named.values())  # one argument, to which torch's three functions give other names
    return diagonal.prod(-1) * sign


def _slogdet(func: Callable[..., object], *a: Tensor, **named: Tensor) -> torch.return_types.slogdet:
    diagonal, sign = _diagonal(*a, *named.values())
    return torch.return_types.slogdet((diagonal.sgn().prod(-1) * sign, diagonal.abs().log().sum(-1)))


def _logdet(func: Callable[..., Tensor], *a: Tensor, **named: Tensor) -> Tensor:
    sign, log = _slogdet(func, *a, **named)
    return log + sign.log()  # nan where the determinant is negative, as torch's


_MADE: Mapping[object, Callable[..., object]] = {
    **dict.fromkeys((functional.layer_norm, torch.layer_norm, torch.native_layer_norm), _layer_norm),
    **dict.fromkeys((torch.batch_norm, torch.native_batch_norm), _aten_norm(0, "training")),
    functional.batch_norm: _functional_norm(0, "training"),
    functional.instance_norm: _functional_norm(2, "use_input_stats"),
    torch.instance_norm: _aten_norm(2, "use_input_stats"),
    torch.linalg.solve: _solve,
    **dict.fromkeys((torch.det, torch.linalg.det, Tensor.det), _det),
    **dict.fromkeys((torch.slogdet, torch.linalg.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
}
