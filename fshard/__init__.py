"""fshard: functional sharding for PyTorch. A training step is a pure function over trees of parameters."""

from . import collectives, optim, reduction, testing, tree, wire
from .comm.check import check
from .comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, vary
from .comm.log import tally
from .comm.mesh import AbstractMesh
from .comm.ranks import MismatchError
from .compiler.jit import jit
from .compiler.trace import TraceError, abstract
from .core.donation import DonatedError
from .layout.norms import global_norm
from .layout.pieces import Unreduced
from .sharding.grad import Mean, Sum, reduce_grads, value, value_and_grad
from .sharding.hvp import hvp
from .sharding.plan import Plan, make_plan
from .sharding.precision import Policy
from .sharding.sharded import Sharded, gather_params, shard_params
from .train.data import join_batches
from .train.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale, nonfinite_leaves, select
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
    "Unreduced",
    "abstract",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check",
    "collectives",
    "gather_params",
    "global_norm",
    "hvp",
    "init_state",
    "jit",
    "join_batches",
    "make_plan",
    "nonfinite_leaves",
    "optim",
    "reduce_grads",
    "reduce_scatter",
    "reduction",
    "select",
    "shard_params",
    "tally",
    "testing",
    "train_step",
    "tree",
    "value",
    "value_and_grad",
    "vary",
    "wire",
    "zero",
]
