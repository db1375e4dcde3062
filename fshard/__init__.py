"""fshard: functional sharding for PyTorch. A training step is a pure function over trees of parameters."""

import importlib
from typing import TYPE_CHECKING

from . import collectives, module, optim, random, reduction, tree, wire
from .comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, shift
from .comm.consensus import close, closing
from .comm.mesh import AbstractMesh, rank_and_size
from .comm.ranks import MismatchError
from .core.losses import Mean, Sum
from .core.storage import DonatedError
from .derivatives.hvp import hvp
from .derivatives.remat import remat
from .grad.grad import evaluate, predict, reduce_grads, value_and_grad
from .graph import operators as _operators  # noqa: F401  # defines operators for graphs
from .hosts.check import check
from .plan.plan import Plan
from .plan.planning import make_plan
from .plan.precision import Policy
from .sharding.sharded import Sharded, gather_params, shard_params
from .state.initial import init_params
from .state.params import load_state_dict, state_dict
from .train.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale, select
from .train.step import TrainState, init_state, train_step
from .zero_optimizer.zero import zero

if TYPE_CHECKING:
    from . import checkpoint, elastic, testing
    from .compiler.jit import jit
    from .compiler.trace import TraceError, eval_shape
    from .graph.scan import scan
    from .pictures.show import show
    from .planner.estimate import estimate
    from .watch.guard import guard

__version__ = "0.2.0"

__all__ = [
    "AbstractMesh",
    "DonatedError",
    "DynamicLossScale",
    "Mean",
    "MismatchError",
    "NoLossScale",
    "Plan",
    "Policy",
    "Sharded",
    "StaticLossScale",
    "Sum",
    "TraceError",
    "TrainState",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check",
    "checkpoint",
    "close",
    "closing",
    "collectives",
    "elastic",
    "estimate",
    "eval_shape",
    "evaluate",
    "gather_params",
    "guard",
    "hvp",
    "init_params",
    "init_state",
    "jit",
    "load_state_dict",
    "make_plan",
    "module",
    "optim",
    "predict",
    "random",
    "rank_and_size",
    "reduce_grads",
    "reduce_scatter",
    "reduction",
    "remat",
    "scan",
    "select",
    "shard_params",
    "shift",
    "show",
    "state_dict",
    "testing",
    "train_step",
    "tree",
    "value_and_grad",
    "wire",
    "zero",
]

# names imported at first use: the compiler's imports from torch take half a second
_LAZY = {
    "TraceError": "compiler.trace",
    "estimate": "planner.estimate",
    "eval_shape": "compiler.trace",
    "guard": "watch.guard",
    "jit": "compiler.jit",
    "scan": "graph.scan",
    "show": "pictures.show",
}


def __getattr__(name: str) -> object:
    if name in ("checkpoint", "elastic", "testing"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
