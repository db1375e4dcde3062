"""fshard: functional sharding for PyTorch. A training step is a pure function over trees of parameters."""

from . import checkpoint, collectives, module, optim, reduction, testing, tree, wire
from .comm.check import check
from .comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from .comm.mesh import AbstractMesh
from .comm.ranks import MismatchError
from .compiler.jit import jit
from .compiler.trace import TraceError, eval_shape
from .core.donation import DonatedError
from .core.losses import Mean, Sum
from .sharding.grad import evaluate, reduce_grads, value_and_grad
from .sharding.hvp import hvp
from .sharding.initial import init_params
from .sharding.plan import Plan
from .sharding.planning import make_plan
from .sharding.precision import Policy
from .sharding.sharded import Sharded, gather_params, shard_params
from .sharding.state_dict import load_state_dict, state_dict
from .train.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale, select
from .train.step import TrainState, init_state, train_step
from .zero_optimizer.zero import zero

__version__ = "0.1.0"

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
    "collectives",
    "eval_shape",
    "evaluate",
    "gather_params",
    "hvp",
    "init_params",
    "init_state",
    "jit",
    "load_state_dict",
    "make_plan",
    "module",
    "optim",
    "reduce_grads",
    "reduce_scatter",
    "reduction",
    "select",
    "shard_params",
    "state_dict",
    "testing",
    "train_step",
    "tree",
    "value_and_grad",
    "wire",
    "zero",
]
