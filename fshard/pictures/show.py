"""`fshard.show`: a picture of a plan, a state or a lowered step."""

from __future__ import annotations

from ..compiler.lowered import Lowered
from ..core.arguments import wrong
from ..plan.owners import Picture
from ..plan.plan import Plan
from ..sharding.sharded import Sharded
from ..train.step import TrainState
from .charts import chart


def show(x: Plan | Sharded | TrainState | Lowered) -> Picture:
    """Return a picture: `print` shows text, a notebook draws the picture, `.svg()` returns an SVG file as text.

    - For a plan, sharded parameters or a state: the ranks with each interval of each unit, and the interval's bytes.
    - For a step, `fshard.show(fshard.jit(step).lower(...))`: memory by purpose at each node of the graph, and
      collectives from their start to their wait, drawn by matplotlib.

    `.rows` has the numbers. Raises TypeError for other values of `x`.

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
