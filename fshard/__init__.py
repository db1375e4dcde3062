"""fshard: functional sharding for PyTorch. A training step is a pure function over trees of parameters."""

from . import (
    collectives,
    comm,
    loss_scale,
    operators,  # noqa: F401  # the nodes of graphs
    optim,
    reduction,
    testing,
    tree,
    wire,
)
from .abstract import AbstractMesh
from .check import check
from .collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, vary
from .comm import MismatchError
from .data import join_batches
from .grad import Mean, Sum, reduce_grads, value, value_and_grad
from .hvp import hvp
from .jit import jit
from .loss_scale import DynamicLossScale, NoLossScale, StaticLossScale, nonfinite_leaves, select
from .norms import global_norm
from .parts import Unreduced
from .plan import Plan, make_plan
from .precision import Policy
from .record import tally
from .shard import Sharded, gather_params, shard_params
from .trace import TraceError, abstract
from .train import TrainState, init_state, train_step
from .tree import DonatedError
from .zero import zero

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
    "comm",
    "gather_params",
    "global_norm",
    "hvp",
    "init_state",
    "jit",
    "join_batches",
    "loss_scale",
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
