"""Passes over the graph of a traced function. A pass changes the graph in place, and none of its values.

Note [Order of a graph]
    The order of nodes decides memory use and the overlap of collectives with computation. A step's graph has a good
    order; `regather` and `sink` reorder other graphs, such as the torch.func gradient of a loss that gathers all units
    first.

Note [What a pass must keep]
    1. Values: outputs have the same bits.
    2. Collectives: all ranks issue equal collectives in one order. A pass may drop, move and merge collectives with a
       label, such as gathers of units, because all ranks read the results in one order. The readers of a collective
       without a label may differ between ranks, so no pass moves or merges it, or orders others by these readers. A
       pass may move its wait, unless the wait starts the second stage of an all-reduce.
    3. Waits: every collective has one `fshard.wait`, before the first reader of its result.
    4. Writes: no node moves past a write to memory it reads, or past a reader of memory it writes to (`NodeIndex` of
       `dataflow.py`).
    5. Fake values: `call` and `copy` give each new node a fake tensor, `meta["val"]`; views share its storage.
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
    copy,
    gathers,
    has_effect,
    index,
    insert_copy,
    is_call,
    is_fixed,
    is_write,
    read_by,
    returns_place,
)
from .inspect import arguments, operator, starts, values
from .memory import storages_of


def _reaches_nothing(graph: fx.Graph) -> bool:
    """Return True if no parameter reaches the loss on this rank; peers still wait for this rank's gathers."""
    return any(is_call(node, "_assert_async") and NO_GRADIENT in node.args for node in graph.nodes)


def drop_dead(graph: fx.Graph) -> None:
    """Erase nodes without readers, and gathers of unused leaves unless `_reaches_nothing`."""
    _keep_reads_of_no_rows(graph)
    _drop_unread(graph)
    kept = _reaches_nothing(graph)
    # repeat: a dropped gather may have been the last reader of another gather
    while dead := [gather for gather in gathers(index(graph)) if not (gather.readers or gather.fixed or kept)]:
        for gather in dead:
            for node in (gather.wait, *reversed(gather.views), gather.ticket, gather.start):  # readers before values
                graph.erase_node(node)
        _drop_unread(graph)


def _keep_reads_of_no_rows(graph: fx.Graph) -> None:
    """Keep empty results of units gathered again: peers with rows may need theirs (gradient of `repeat`)."""
    if not any(x.numel() == 0 for node in graph.nodes if node.op == "placeholder" for x in values(node)):
        return
    gathered = set[str]()
    for gather in (each for each in gathers(index(graph)) if arguments(each.start)["lent"]):
        for reader in gather.readers if gather.unit in gathered else ():
            reader.meta["kept"] = all(x.numel() == 0 for x in values(reader))
        gathered.add(gather.unit)


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        is_kept = acts(node) or node.meta.get("kept", False)
        unread = node.op in ("call_function", "get_attr") and not node.users and not is_kept
        if unread and not is_call(node, "fshard.exchange"):  # peers wait for this rank's messages
            graph.erase_node(node)


def shorten(graph: fx.Graph) -> None:
    """Make each view of a gathered buffer one node. Let readers of a `detach` or a write read its argument instead.

    After a write, compilers recompute every view, and all parts of a split to get one.
    """
    for gather in gathers(index(graph)):
        buffer = next(x for x in gather.views if is_call(x, "getitem") and x.args == (gather.start, 0))  # (n,)
        (whole,) = values(buffer)
        for view in gather.views:
            value = view.meta["val"]
            is_tensor = isinstance(value, torch.Tensor) and value.dtype == whole.dtype
            # other views need more than shape, strides and offset
            if view is not buffer and is_tensor and not value.is_conj() and not value.is_neg():
                view.target, view.kwargs = torch.ops.aten.as_strided.default, {}
                view.args = (buffer, list(value.shape), list(value.stride()), value.storage_offset())
    for node in list(graph.nodes):
        if (written := returns_place(node)) or is_call(node, "detach", "alias"):
            # a region would return a write's result as a copy, without later writes
            also_results = written and node.args[0].op != "placeholder"
            node.replace_all_uses_with(node.args[0], lambda user, also=also_results: also or user.op != "output")
    _drop_unread(graph)


def fix_places(graph: fx.Graph) -> None:
    """Let each gather write to the previous CUDA graph's memory: later CUDA graphs read the result without a copy."""
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
    """Append one element of each unread result of a collective or another library's operator to the outputs.

    Compilers then keep the operator. Peers wait for a collective.
    """
    output, read = graph.output_node(), _read_storages(graph)
    if _reaches_nothing(graph):  # compilers drop a gather if only its shape is read
        read -= {next(storages_of(gather.start)) for gather in gathers(index(graph))}
    kept: list[fx.Node] = []
    for node in list(graph.nodes):
        if is_call(node, "_assert_async") and len(node.args) == 1:
            # compilers keep only the overload with a message
            node.target, node.args = torch.ops.aten._assert_async.msg, (*node.args, "a condition is false")
        elif is_call(node, "fshard.wait") and next(storages_of(arguments(node)["place"])) not in read:
            # an exchange without received elements needs no wait
            place, ticket, *_ = node.args
            kept.append(_element(graph, place, node) if _has_element(place) else ticket)
        elif node.op == "call_function" and not node.users and not has_effect(node) and acts(node):
            kept += [_element(graph, node, node)] if _has_element(node) else []
    output.args = ([*output.args[0], *kept],)  # type: ignore[misc]  # the outputs are a list


def _has_element(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() > 0


def chain_collectives(graph: fx.Graph) -> None:
    """If any collective has no label or is an exchange, pass every collective the previous collective's ticket.

    Without tickets, compilers order collectives by neighbouring nodes, which may differ between ranks.
    """
    all_starts = starts(graph)
    if any(is_fixed(start) or is_call(start, "fshard.exchange") for start in all_starts):
        for before, start in pairwise(all_starts):
            start.update_kwarg("after", _ticket_of(before))


def _ticket_of(start: fx.Node) -> fx.Node:
    if is_call(start, *PLACED):
        return start
    readers = [user for user in start.users if is_call(user, "getitem") and user.args[1] == 1]
    with start.graph.inserting_after(start):
        return readers[0] if readers else call(start.graph, python.getitem, start, 1)


def _element(graph: fx.Graph, x: fx.Node, after: fx.Node) -> fx.Node:
    with graph.inserting_before(after.next):
        for _ in range(values(x)[0].dim()):
            x = call(graph, torch.ops.aten.select.int, x, 0, 0)
        return call(graph, torch.ops.aten.clone.default, x)


def _read_storages(graph: fx.Graph) -> set[int]:
    """Return the storages of inputs and of read values. Waits and views read nothing, nor do unread copies."""
    read, copied = set[int](), dict[int, set[int]]()  # copied[s]: storages copied to s
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
    """Compute 0-d values before their pointwise readers: fused, a 0-d value would be computed for each element."""
    for node in [n for n in graph.nodes if _makes_scalars(n) and torch.Tag.pointwise in getattr(n.target, "tags", ())]:
        readers = [user for user in node.users if values(user) and not _makes_scalars(user)]
        if readers:
            with graph.inserting_after(node):
                number = insert_copy(graph, node)
            for reader in readers:
                reader.replace_input_with(node, number)


def _makes_scalars(node: fx.Node) -> bool:
    tensors = values(node)
    return node.op == "call_function" and bool(tensors) and all(x.dim() == 0 for x in tensors)


_Place = tuple[int, int]  # number of a node, side

# Sides of a node, in order: three before it, the node itself, after it.
_FIRST_START, _WAIT, _START, ITSELF, AFTER = range(-3, 2)


def arrange(graph: fx.Graph, places: Mapping[fx.Node, _Place], turns: Mapping[fx.Node, int]) -> None:
    keys = {node: (*places.get(node, (i, ITSELF)), turns.get(node, 0), i) for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    for node in sorted(keys, key=keys.__getitem__):
        if node.op not in ("placeholder", "output"):
            output.prepend(node)


def sink(graph: fx.Graph, in_flight: int = 0, ahead: int = 1) -> None:
    """Start each gather `ahead` units before its first reader, and wait right before the reader.

    With `in_flight`, gathers start earlier and reductions end later, each with up to `in_flight` bytes under way.
    """
    nodes, places, turns, last = index(graph), dict[fx.Node, _Place](), dict[fx.Node, int](), (-1, ITSELF)
    order, read = nodes.order, [gather for gather in gathers(nodes) if gather.readers]
    for gather in read:
        # the sent shard must not change before the wait
        sent = nodes.first_write([arguments(gather.start)["x"]], order[gather.start])
        places |= dict.fromkeys([gather.wait, *gather.views], (min(order[gather.readers[0]], sent), _WAIT))
    moved = [gather for gather in read if not gather.fixed]
    for turn, (gather, early) in enumerate(zip(moved, _early(moved, order, in_flight, ahead), strict=True), 1):
        shard, traced_at = arguments(gather.start)["x"], order[gather.start]  # shard: (n / W,)
        # The shard must have its traced value: start between the writes before and after the traced start.
        ready = max((nodes.last_write([shard], traced_at), AFTER), places.get(shard, (order[shard], ITSELF)))
        changed = (nodes.first_write([shard], traced_at), _FIRST_START)
        start = max(min(max(early, last), changed), ready)
        last = max(last, start)
        places |= dict.fromkeys([gather.start, gather.ticket], start)
        turns |= dict.fromkeys([gather.start, gather.ticket], turn)
    arrange(graph, places, turns)
    if in_flight:
        _delay(graph, in_flight)


def _heads(moved: Sequence[GatherNodes], order: Mapping[fx.Node, int]) -> list[int]:
    # no later than gathers after it
    return [*accumulate((order[gather.readers[0]] for gather in reversed(moved)), min)][::-1]


def _early(moved: Sequence[GatherNodes], order: Mapping[fx.Node, int], in_flight: int, ahead: int) -> Iterator[_Place]:
    """Yield each gather's start: before the first reader of the last gather of the unit `ahead` units back.

    With `in_flight`, the place may be earlier if gathers from there to this gather have at most `in_flight` bytes.
    """
    heads = _heads(moved, order)
    ends = list(accumulate((gather.nbytes for gather in moved), initial=0))  # ends[i]: bytes of gathers before i
    units = list(accumulate(a.unit != b.unit for a, b in pairwise([*moved[:1], *moved])))  # numbers of units, by gather
    for gather, head, unit in zip(moved, heads, units, strict=True):
        before = bisect_left(heads, head)  # number of gathers with an earlier first reader
        if not (before and (ahead or in_flight)):
            yield head, _FIRST_START
        else:
            earliest = bisect_left(ends, ends[before] + gather.nbytes - in_flight, 1, before)
            further = bisect(units, max(unit - ahead, 0)) if ahead > 1 else before
            yield heads[min(earliest, further) - 1], _START


def _delay(graph: fx.Graph, in_flight: int) -> None:
    nodes, places, total = index(graph), dict[fx.Node, _Place](), 0
    order = nodes.order
    # (wait, sent bytes) of each reduction under way
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
            places[wait] = (order[wait], ITSELF)
            continue
        # wait before the first reader of the result and the first write to the sent buffer
        sent: list[fx.Node] = arguments(wait)["sent"]
        needed = min(nodes.first_reader(wait), nodes.first_write(sent, order[wait]))
        places[wait] = max((order[wait], ITSELF), min(latest, (needed, _WAIT)))
    arrange(graph, places, {})


def _has_second_stage(start: fx.Node) -> bool:
    by_name = arguments(start)
    if not is_call(start, "fshard.all_reduce") or not is_fixed(start):
        return False
    return not is_direct(values(by_name["x"])[0], MESHES.find(by_name["mesh"]).size(by_name["axis"]), by_name["op"])


def regather(graph: fx.Graph, units: Iterable[str], lasting: Collection[str] = ENDS) -> None:
    """Free a unit's buffer, and gather it again, if another unit is gathered between two of the buffer's readers.

    A unit of `lasting` stays if it would be gathered more than twice (`Plan.lasting`).
    """
    wanted, nodes = set(units), index(graph)
    order, all_gathers = nodes.order, [gather for gather in gathers(nodes) if not gather.fixed]
    heads = _heads(all_gathers, order)
    for gather in (g for g in all_gathers if g.unit in wanted):
        chain = sorted([gather.start, gather.ticket, gather.wait, *gather.views], key=order.__getitem__)
        sent = [arguments(gather.start)["x"]]
        end = order[gather.readers[-1]] if gather.readers else 0
        if any(map(is_write, gather.readers)) or nodes.first_write(sent, order[gather.start]) < end:
            continue  # a second gather would have other values
        groups = _apart([order[reader] for reader in gather.readers], heads)
        if gather.unit in lasting and len(groups) > 2:
            continue
        for first, last in groups[1:]:
            _copy_before(graph, chain, gather.readers[first:last])


def _apart(readers: Sequence[int], heads: Sequence[int]) -> list[tuple[int, int]]:
    cuts = [i for i in range(1, len(readers)) if bisect(heads, readers[i - 1]) < bisect_left(heads, readers[i])]
    return list(pairwise([0, *cuts, len(readers)]))


def _copy_before(graph: fx.Graph, nodes: Iterable[fx.Node], readers: Sequence[fx.Node]) -> None:
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(readers[0]):
        for node in nodes:
            copies[node] = copy(graph, node, copies)
    for reader in readers:
        for node, new in copies.items():
            reader.replace_input_with(node, new)
