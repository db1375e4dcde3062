"""A pass over a graph that lends the memory of collectives: peers read it, instead of a copy of it.

Note [Lending in a graph]
    Peers read lent memory when they wait, and that may be later than this rank's wait (Note [Lent memory] in
    `comm/ranks.py`). A compiler uses memory for other values after the last reader. So each lent buffer gets one reader
    more: `fshard.settle`, which waits until all peers have read the buffer. Wherever a compiler puts this node, it uses
    the memory after it alone. The result of the node is returned by the graph, so no compiler drops the node.

    Ranks that wait for each other must not do so in different orders. So memory is lent only in graphs in which each
    collective has a label: all ranks read their results in the same order (Note [What a pass must keep] in
    `passes.py`). A rank settles what it gathered after the last reader, and what it reduced as soon as it has the
    sum. All ranks must run the graph: a rank that runs the same step eagerly reads in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from .dataflow import REDUCTIONS, call, gathers, is_call, is_fixed, writes
from .inspect import arguments, starts, values


def settle(graph: fx.Graph) -> None:
    """Lend the buffers of units, on CPUs, where nothing writes to them after they are sent."""
    if any(map(is_fixed, starts(graph))):
        return
    output, tokens = graph.output_node(), list[fx.Node]()
    for made, buffer, start, place in [*_gathered(graph), *_reduced(graph)]:
        if values(buffer)[0].device.type == "cpu":
            made.update_kwarg("settled", True)
            by_name = arguments(start)
            with graph.inserting_before(place):
                tokens.append(call(graph, torch.ops.fshard.settle.default, buffer, by_name["mesh"], by_name["axis"]))
    output.args = ([*output.args[0], *tokens],)  # type: ignore[misc]  # the outputs are a list


# The node that allocates a buffer, the buffer, the start of its collective, and the node before which it is settled.
_Lent = tuple[fx.Node, fx.Node, fx.Node, fx.Node]


def _gathered(graph: fx.Graph) -> Iterator[_Lent]:
    """Yield the gathered buffers that may be lent."""
    for gather in gathers(graph):
        kept = not gather.readers or gather.readers[-1].op == "output" or any(map(writes, gather.readers))
        if arguments(gather.start)["lent"] and not kept:
            buffer = next(x for x in gather.views if is_call(x, "getitem") and x.args == (gather.start, 0))
            yield gather.start, buffer, gather.start, gather.readers[-1].next


def _reduced(graph: fx.Graph) -> Iterator[_Lent]:
    """Yield the buffers that are reduced and may be lent: those that only `put` writes to, before they are sent."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for start in [node for node in order if is_call(node, *REDUCTIONS)]:
        room = arguments(start)["x"]
        (wait,) = (user for user in start.users if is_call(user, "fshard.wait"))
        is_ours = is_call(room, "fshard.room") and arguments(room)["lent"]
        others = [user for user in room.users if user not in (start, wait)]
        if is_ours and all(is_call(user, "fshard.put") and order[user] < order[start] for user in others):
            yield room, room, start, wait.next
