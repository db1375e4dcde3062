"""Operators with wrong second derivatives in torch: `hvp` computes layer norm from other operators, or raises.

Note [Second derivatives that torch lacks]
    For some operators, torch's directional derivative reads values saved by the forward: the mean and rstd of
    layer_norm and batch_norm, the decomposition in det and linalg.solve. Saved values carry no derivative, so second
    derivatives silently lack terms. So `hvp` computes a loss's layer_norm from other operators (transformers need
    layer_norm), and raises for the others. A function mode sees calls from Python, but none inside graphs compiled
    earlier. test_elementary.py fails when torch mends an operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..core.tracing import Args, Kwargs, Operator

_Outputs = Tensor | tuple[Tensor, ...]
aten = torch.ops.aten  # graphs call these
_LAYER_NORMS = {
    *(functional.layer_norm, torch.layer_norm, aten.layer_norm, aten.layer_norm.default),
    *(torch.native_layer_norm, aten.native_layer_norm, aten.native_layer_norm.default),
}
_WRONG = re.compile(
    r"(layer|instance)_norm|batch_norm(?!.*no_training)|(linalg_|^)(det|slogdet|logdet|solve)$"
    r"|linalg_(solve_ex|tensorsolve|householder)|orgqr|cholesky_inverse"
)
# norms that use running statistics if their sixth argument is False
_OF_STATISTICS = ("batch_norm", "native_batch_norm", "instance_norm")


class Elementary(TorchFunctionMode):
    """See Note [Second derivatives that torch lacks]."""

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if func in _LAYER_NORMS:
            return _layer_norm(func, *args, **(kwargs or {}))
        name, options = str(getattr(func, "__name__", "")).partition(".")[0], kwargs or {}
        module = str(getattr(func, "__module__", None))
        others = module.startswith("torch._ops.") and module != "torch._ops.aten"  # another library's operators
        product = name.startswith("scatter_reduce") and "prod" in (*args[3:4], options.get("reduce"))
        if not others and (product or _WRONG.search(name)) and not _uses_running_statistics(name, args, options):
            raise ValueError(
                f"hvp: the second derivatives of {name}{' with prod' * product} are wrong in torch: compute it from "
                "other operators in the loss"
            )
        return func(*args, **options)


def _uses_running_statistics(name: str, args: Sequence[object], options: Mapping[str, object]) -> bool:
    """True if a norm uses running statistics, and so is linear in its input."""
    default = options.get("training", options.get("use_input_stats", name == "instance_norm"))
    return name in _OF_STATISTICS and not [*args[5:6], default][0]


def _layer_norm(
    func: Callable[..., _Outputs],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> _Outputs:
    # torch's layer norm checks arguments, and gives dtype and statistics
    with torch.no_grad():
        values = [None if x is None else x.detach() for x in (weight, bias)]
        torchs = func(input.detach(), normalized_shape, *values, eps)
    dims = list(range(-len(normalized_shape), 0))
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input  # as torch's kernels do
    x = x - x.mean(dims, keepdim=True)
    x = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight
    x = x if bias is None else x + bias
    if isinstance(torchs, Tensor):
        return x.to(torchs.dtype).contiguous()
    return x.to(torchs[0].dtype).contiguous(), *torchs[1:]
