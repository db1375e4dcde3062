"""`fshard.show`: what a plan, a state or a lowered step looks like."""

from __future__ import annotations

from ..compiler.lowered import Lowered
from ..core.arguments import wrong
from ..plan.owners import Picture
from ..plan.plan import Plan
from ..sharding.sharded import Sharded
from ..train.step import TrainState
from .charts import chart


def show(x: Plan | Sharded | TrainState | Lowered) -> Picture:
    """Return a picture: `print` shows it as text, a notebook draws it, `.svg()` returns it as the text of an SVG file.

    Of a plan, sharded parameters or a state: the ranks that hold each interval of each unit, and the bytes of it. Of
    a step, `fshard.show(fshard.jit(step).lower(...))`: the memory at each node of its graph by purpose, and
    its collectives, from the node that starts one to the node that waits for it; it is drawn by matplotlib. `.rows` has
    the numbers. TypeError for other values.

    >>> print(show(make_plan([torch.ones(4), torch.ones(4)], AbstractMesh(shard=2), units=["*"])))
    Plan on {'shard': 2}: leaves 2, elements 8
    params_over=shard grads_over=shard state_over=shard regather=True
    Bytes of a line's units, and of a rank; state: of one tensor (AdamW has two).
    unit         bytes  parameters  gradients  state
    0 ... 1 x 2   64 B        32 B       32 B   32 B
    """
    if isinstance(x, Lowered):
        return chart(x)
    if isinstance(x, Plan | Sharded | TrainState):
        return x.picture()
    raise TypeError(wrong("show: x", x, "a Plan, a Sharded, a TrainState, or what fshard.jit(step).lower(...) gives"))
