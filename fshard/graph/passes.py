"""Passes over the graph of a traced function: each changes the graph in place, and no value that it computes.

Note [Order of a graph]
    A graph runs in the order of its nodes. So the order decides which values are in memory at the same time, and which
    collectives overlap with which computation. A step gathers a unit when it is touched, and again in its backward, so
    its graph is in a good order from the start. Other functions (a torch.func gradient of a loss that gathers all
    units at its beginning) are brought into such an order by `regather` and `sink`.

Note [What a pass must keep]
    1. The values: the outputs have the same bits.
    2. The collectives: all ranks still issue the same ones in the same order. What a pass drops, moves or merges
       depends on the graph of one rank, so this may be done to labelled collectives alone, such as gathers of a plan's
       units: all ranks read their results in the same order. What a rank does with the result of a collective without
       a label may depend on the rank. So this collective stays, where it is and by itself, and no other is moved
       because of its readers. Its wait may move, unless it starts the second stage of an all-reduce.
    3. Every collective has one `fshard.wait`, before the first node that reads its result.
    4. Writes: a node does not move past a write to memory that it reads, nor past a reader of memory that it writes to.
       `NodeIndex` of `dataflow.py` answers where such writes are.
    5. Fake values: each new node has `meta["val"]`, with the storages that it would have (`call` and `copy` see to it).
"""

from __future__ import annotations

import operator as python
from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import fx

from ..comm.mesh import MESHES
from ..comm.primitives import is_direct
from ..core.losses import NO_GRADIENT
from ..plan.units import ENDS
from .dataflow import (
    PLACED,
    REDUCTIONS,
    VIEWS,
    GatherNodes,
    acts,
    call,
    copied,
    copy,
    gathers,
    has_effect,
    index,
    is_call,
    is_fixed,
    read_by,
    returns_place,
    writes,
)
from .inspect import arguments, operator, starts, values
from .memory import storages_of

_get, _as_strided = python.getitem, torch.ops.aten.as_strided.default


def _reaches_nothing(graph: fx.Graph) -> bool:
    """True if no parameter reaches the loss on this rank, whose peers wait for its gathers all the same."""
    return any(is_call(node, "_assert_async") and NO_GRADIENT in node.args for node in graph.nodes)


def drop_dead(graph: fx.Graph) -> None:
    """Erase nodes that nothing reads, and gathers of leaves that are not used, except `_reaches_nothing`."""
    _drop_unread(graph)
    kept = _reaches_nothing(graph)
    # in a loop, because what a dropped gather sent may have been the last reader of another gather
    while dead := [gather for gather in gathers(index(graph)) if not (gather.readers or gather.fixed or kept)]:
        for gather in dead:
            for node in (gather.wait, *reversed(gather.views), gather.ticket, gather.start):  # readers before values
                graph.erase_node(node)
        _drop_unread(graph)


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):  # backwards, so that what only an erased node read is erased, too
        unread = node.op in ("call_function", "get_attr") and not node.users and not acts(node)
        if unread and not is_call(node, "fshard.exchange"):  # peers wait for what this rank sends
            graph.erase_node(node)


def shorten(graph: fx.Graph) -> None:
    """Make each view of a gathered buffer one node, and read no value by another name (`detach`, a write's result).

    A compiler works out the views of a buffer anew wherever it was written to: with a split of n parts, all n parts for
    each of them.
    """
    for gather in gathers(index(graph)):
        buffer = next(x for x in gather.views if is_call(x, "getitem") and x.args == (gather.start, 0))  # (n,)
        (whole,) = values(buffer)
        for view in gather.views:
            value = view.meta["val"]
            is_tensor = isinstance(value, torch.Tensor) and value.dtype == whole.dtype
            # else it is not determined by its shape, strides and offset
            if view is not buffer and is_tensor and not value.is_conj() and not value.is_neg():
                view.target, view.kwargs = _as_strided, {}
                view.args = (buffer, list(value.shape), list(value.stride()), value.storage_offset())
    for node in list(graph.nodes):
        if (written := returns_place(node)) or is_call(node, "detach", "alias"):
            # a result of a write is its place: as a result of a region it would be a copy, which later writes miss
            also_results = written and node.args[0].op != "placeholder"
            node.replace_all_uses_with(node.args[0], lambda user, also=also_results: also or user.op != "output")
    _drop_unread(graph)


def fix_places(graph: fx.Graph) -> None:
    """Let each gather fill memory that the computation before it allocates, as a part of a CUDA graph.

    So the memory has the same address in each run, and the graphs that read it do not copy it first.
    """
    before = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if is_call(node, "fshard.all_gather"):
            _fix_place(graph, node, before)
        elif node.op == "placeholder" or not (operator(node).startswith("fshard.") or is_call(node, *VIEWS)):
            before = node


def _fix_place(graph: fx.Graph, start: fx.Node, before: fx.Node) -> None:
    (whole, _), by_name = values(start), arguments(start)
    with graph.inserting_after(before):
        place = graph.call_function(torch.ops.fshard.place.default, (list(whole.shape), whole.dtype, whole.device))
    place.meta["val"] = whole
    sent = [by_name[name] for name in ("x", "mesh", "axis", "label", "nbytes")]
    with graph.inserting_before(start):
        new = call(graph, torch.ops.fshard.all_gather_into.default, place, *sent)
    new.update_kwarg("after", by_name.get("after"))
    for part in list(start.users):
        part.replace_all_uses_with(place if part.args[1] == 0 else new)
        graph.erase_node(part)
    graph.erase_node(start)


def keep_unread(graph: fx.Graph) -> None:
    """Keep a compiler from dropping what must run though nothing reads its result: return one element of the result.

    These are collectives (peers wait for them) and operators of other libraries (they may have side effects). A caller
    of the graph reads only the outputs that it knows, which come first.
    """
    output, read = graph.output_node(), _read_storages(graph)
    if _reaches_nothing(graph):  # a compiler drops what is read for its shape alone
        read -= {next(storages_of(gather.start)) for gather in gathers(index(graph))}
    kept: list[fx.Node] = []
    for node in list(graph.nodes):
        if is_call(node, "_assert_async") and len(node.args) == 1:
            # of the two overloads, compilers know of this one alone that it must run
            node.target, node.args = torch.ops.aten._assert_async.msg, (*node.args, "a condition is false")
        elif is_call(node, "fshard.wait") and next(storages_of(arguments(node)["place"])) not in read:
            # an exchange that receives nothing has no element, and does not need its wait
            place, ticket, *_ = node.args
            kept.append(_element(graph, place, node) if _has_element(place) else ticket)
        elif node.op == "call_function" and not node.users and not has_effect(node) and acts(node):
            kept += [_element(graph, node, node)] if _has_element(node) else []
    output.args = ([*output.args[0], *kept],)  # type: ignore[misc]  # the outputs are a list


def _has_element(node: fx.Node) -> bool:
    """Whether the value of a node is one tensor, with elements."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() > 0


def chain(graph: fx.Graph) -> None:
    """Give each collective the ticket of the one before, if one has no label or is an exchange: this fixes their order.

    A compiler orders independent nodes by what is around them, which here may differ between ranks; a rank to which
    leaves are only sent by an exchange has it depend on nothing.
    """
    all_starts = starts(graph)
    if any(is_fixed(start) or is_call(start, "fshard.exchange") for start in all_starts):
        for before, start in pairwise(all_starts):
            start.update_kwarg("after", _ticket_of(before))


def _ticket_of(start: fx.Node) -> fx.Node:
    """Return the node of the ticket that a start gives: itself, or its second result, made if nobody reads it."""
    if is_call(start, *PLACED):
        return start
    readers = [user for user in start.users if is_call(user, "getitem") and user.args[1] == 1]
    with start.graph.inserting_after(start):
        return readers[0] if readers else call(start.graph, _get, start, 1)


def _element(graph: fx.Graph, x: fx.Node, after: fx.Node) -> fx.Node:
    """Insert a copy of the first element of `x`, (), after a node."""
    with graph.inserting_before(after.next):
        for _ in range(values(x)[0].dim()):
            x = call(graph, torch.ops.aten.select.int, x, 0, 0)
        return call(graph, torch.ops.aten.clone.default, x)


def _read_storages(graph: fx.Graph) -> set[int]:
    """Return the storages that are read outside of their own collective, directly or through copies.

    The caller reads the inputs.
    """
    read, copied = set[int](), dict[int, set[int]]()  # copied: the storages that are copied to a storage
    for node in graph.nodes:
        if node.op == "placeholder":
            read |= set(storages_of(node))
        if is_call(node, "fshard.wait", *VIEWS):
            continue
        storages = {storage for source in read_by(node) for storage in storages_of(source)}
        if is_call(node, "copy_"):
            for storage in storages_of(node):
                copied.setdefault(storage, set()).update(storages)
        else:
            read |= storages
    unseen = list(read)
    while unseen:
        new = copied.get(unseen.pop(), set()) - read
        read |= new
        unseen += new
    return read


def materialize(graph: fx.Graph) -> None:
    """Compute 0-d values before the pointwise operators that read them: fused, they would be computed per element.

    The operator `fshard.materialize`, which a compiler cannot look into, keeps such a value from being fused.
    """
    for node in [n for n in graph.nodes if _is_number(n) and torch.Tag.pointwise in getattr(n.target, "tags", ())]:
        readers = [user for user in node.users if values(user) and not _is_number(user)]
        if readers:
            with graph.inserting_after(node):
                number = copied(graph, node)
            for reader in readers:
                reader.replace_input_with(node, number)


def _is_number(node: fx.Node) -> bool:
    tensors = values(node)
    return node.op == "call_function" and bool(tensors) and all(x.dim() == 0 for x in tensors)


# Where a node is moved to: the index of another node, and where beside that.
_Place = tuple[int, int]

# Beside a node, in this order: before it, from the first; the node itself; after it.
_FIRST_START, _WAIT, _START, _ITSELF, _AFTER = range(-3, 2)


def _arrange(graph: fx.Graph, places: Mapping[fx.Node, _Place]) -> None:
    """Move nodes to their places. Nodes without a place stay, and nodes with equal places keep their order."""
    keys = {node: (*places.get(node, (i, _ITSELF)), i) for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    for node in sorted(keys, key=keys.__getitem__):
        if node.op not in ("placeholder", "output"):
            output.prepend(node)


def sink(graph: fx.Graph, in_flight: int = 0, ahead: int = 1) -> None:
    """Move gathers: each starts `ahead` units before its first reader, and its wait is right before that reader.

    With `in_flight` a gather starts further ahead, as many units as have at most `in_flight` bytes together, and
    reductions are waited for as late as this number of bytes allows. A gather without a label starts where it did.
    """
    nodes, places = index(graph), dict[fx.Node, _Place]()
    order, read = nodes.order, [gather for gather in gathers(nodes) if gather.readers]
    for gather in read:
        # what is sent must have the same bits until the wait
        sent = nodes.first_write([arguments(gather.start)["x"]], order[gather.start])
        places |= dict.fromkeys([gather.wait, *gather.views], (min(order[gather.readers[0]], sent), _WAIT))
    moved = [gather for gather in read if not gather.fixed]
    for gather, early in zip(moved, _early(moved, order, in_flight, ahead), strict=True):
        shard, traced_at = arguments(gather.start)["x"], order[gather.start]  # shard: (n / W,)
        # The shard must have the value that it has where the gather was traced: the gather starts after the last write
        # to the shard before that point, and before the first write after it.
        ready = max((nodes.last_write([shard], traced_at), _AFTER), places.get(shard, (order[shard], _ITSELF)))
        changed = (nodes.first_write([shard], traced_at), _FIRST_START)
        start = max(min(early, changed), ready)
        places |= dict.fromkeys([gather.start, gather.ticket], start)
    _arrange(graph, places)
    if in_flight:
        _delay(graph, in_flight)


def _early(moved: Sequence[GatherNodes], order: Mapping[fx.Node, int], in_flight: int, ahead: int) -> Iterator[_Place]:
    """Yield the place where each gather starts: at the first reader of an earlier gather.

    That is the gather before, the last gather of the unit `ahead` units before, or with `in_flight` the earliest gather
    such that all gathers after it, up to this one, have at most `in_flight` bytes together. The first gather of a graph
    starts at its own first reader, and so do all if `ahead` is 0.
    """
    heads = [order[gather.readers[0]] for gather in moved]  # ascending
    ends = list(accumulate((gather.nbytes for gather in moved), initial=0))  # ends[i]: the bytes of all before gather i
    units = list(accumulate(a.unit != b.unit for a, b in pairwise([*moved[:1], *moved])))  # of each gather, by number
    for gather, head, unit in zip(moved, heads, units, strict=True):
        before = bisect_left(heads, head)  # the number of gathers with an earlier reader
        if not (before and (ahead or in_flight)):
            yield head, _FIRST_START
        else:
            earliest = bisect_left(ends, ends[before] + gather.nbytes - in_flight, 1, before)
            further = bisect(units, max(unit - ahead, 0)) if ahead > 1 else before
            yield heads[min(earliest, further) - 1], _START


def _delay(graph: fx.Graph, in_flight: int) -> None:
    """Move the waits of reductions: if those under way have more than `in_flight` bytes, the oldest is waited for."""
    nodes, places, total = index(graph), dict[fx.Node, _Place](), 0
    order = nodes.order
    # the wait of each reduction that is under way, and the bytes that this rank sends in it: `total` in all
    under_way: deque[tuple[fx.Node, int]] = deque()
    for start in (node for node in order if is_call(node, *REDUCTIONS)):
        (wait,) = (user for user in start.users if is_call(user, "fshard.wait"))
        under_way.append((wait, values(arguments(start)["x"])[0].nbytes))
        total += under_way[-1][1]
        while total > in_flight and len(under_way) > 1:
            oldest, nbytes = under_way.popleft()
            places[oldest], total = (order[start], _WAIT), total - nbytes
    places |= {wait: (len(order), _WAIT) for wait, _ in under_way}
    for wait, latest in places.items():
        if _has_second_stage(arguments(wait)["ticket"]):
            places[wait] = (order[wait], _ITSELF)
            continue
        # the wait must stay before the first node that reads the result, or that overwrites what is being sent
        sent: list[fx.Node] = arguments(wait)["sent"]
        needed = min(nodes.first_reader(wait), nodes.first_write(sent, order[wait]))
        places[wait] = max((order[wait], _ITSELF), min(latest, (needed, _WAIT)))
    _arrange(graph, places)


def _has_second_stage(start: fx.Node) -> bool:
    """Whether a reduction without a label starts a second collective when it is waited for."""
    by_name = arguments(start)
    if not is_call(start, "fshard.all_reduce") or not is_fixed(start):
        return False
    return not is_direct(values(by_name["x"])[0], MESHES.find(by_name["mesh"]).size(by_name["axis"]), by_name["op"])


def regather(graph: fx.Graph, units: Iterable[str], lasting: Collection[str] = ENDS) -> None:
    """Gather a buffer of these units again where it is read after another unit was gathered, instead of keeping it.

    A unit of `lasting` that would be gathered again more than once stays (`Plan.lasting`).
    """
    wanted, nodes = set(units), index(graph)
    order, all_gathers = nodes.order, [gather for gather in gathers(nodes) if not gather.fixed]
    heads = sorted({order[gather.readers[0]] for gather in all_gathers})
    for gather in (g for g in all_gathers if g.unit in wanted):
        chain = sorted([gather.start, gather.ticket, gather.wait, *gather.views], key=order.__getitem__)
        sent = [arguments(gather.start)["x"]]
        end = order[gather.readers[-1]] if gather.readers else 0
        if any(map(writes, gather.readers)) or nodes.first_write(sent, order[gather.start]) < end:
            continue  # a second gather would have other values
        groups = _apart([order[reader] for reader in gather.readers], heads)
        if gather.unit in lasting and len(groups) > 2:
            continue
        for first, last in groups[1:]:
            _copy_before(graph, chain, gather.readers[first:last])


def _apart(readers: Sequence[int], heads: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges of `readers` that no head separates. All are indices of nodes in the graph, in ascending order.

    A head is the first reader of some gather.
    """
    cuts = [i for i in range(1, len(readers)) if bisect(heads, readers[i - 1]) < bisect_left(heads, readers[i])]
    return list(pairwise([0, *cuts, len(readers)]))


def _copy_before(graph: fx.Graph, nodes: Iterable[fx.Node], readers: Sequence[fx.Node]) -> None:
    """Copy nodes to before the first of `readers`, which then read the copies."""
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(readers[0]):
        for node in nodes:
            copies[node] = copy(graph, node, copies)
    for reader in readers:
        for node, new in copies.items():
            reader.replace_input_with(node, new)
