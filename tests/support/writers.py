"""Programs that write in place to everything they may write to: results, and what is given to their own objects."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fshard
from fshard.comm.ranks import Pending
from fshard.core.tree import Tree
from fshard.update.base import Transform

Written = Callable[[], object]  # called after each write


@dataclass(frozen=True)
class Overwriting(fshard.reduction.Sums):
    """A reduction that waits, and then overwrites what it was given."""

    written: Written = print

    def _overwritten(self, x: Tensor, pending: Pending) -> Pending:
        total = pending.wait()
        x.fill_(-1)
        self.written()
        return Pending(None, lambda _: total)

    def reduce_scatter(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        """Reduce-scatter, then overwrite the input."""
        return self._overwritten(x, super().reduce_scatter(x, ranks, label, out))

    def all_reduce(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        """All-reduce, then overwrite the input."""
        return self._overwritten(x, super().all_reduce(x, ranks, label, out))


@dataclass(frozen=True)
class InPlace:
    """A wire that overwrites what it was given; with `direct` it sends the very tensor that it is given."""

    written: Written = field(default=print, compare=False, repr=False)
    direct: bool = False
    given: list[Tensor] = field(default_factory=list, compare=False, repr=False)
    arrived: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def encode(self, x: Tensor, sizes: Any) -> Tensor:
        """Send the values as they are."""
        if not self.direct:
            return x.clone()
        self.given.append(x)
        return x

    def decode(self, data: Tensor, sizes: Any) -> Tensor:
        """Decode a copy; overwrite everything when the parts of both ranks are decoded."""
        self.arrived.append(data)
        decoded = data.clone()
        if len(self.arrived) == 2:
            for part in self.given + self.arrived:
                part.fill_(-1)
            self.given.clear()
            self.arrived.clear()
            self.written()
        return decoded


def whole(numel: int) -> Tree:
    """Parameters of one leaf, of which every rank needs what the others have."""
    return {"w": torch.arange(numel, dtype=torch.float32) % 1000}


def sharded(mesh: Any, numel: int, **how: Any) -> fshard.Sharded:
    """The parameters, cut."""
    return fshard.shard_params(whole(numel), fshard.make_plan(whole(numel), mesh, **how))


def _taken(x: Tree, written: Written) -> Tensor:
    """A copy of a result that is overwritten."""
    copy = x["w"].clone()
    x["w"].fill_(-1)
    written()
    return copy


def _zero(mesh: Any) -> Transform:
    return fshard.zero(fshard.optim.sgd(0.5), mesh)


def zero_step(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite the parameters that ZeRO returned."""
    params, tx = whole(numel), _zero(mesh)
    return _taken(tx.step(params, tx.init(params), params)[0], written)


def zero_update(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite the updates that ZeRO returned."""
    params, tx = whole(numel), _zero(mesh)
    return _taken(tx.update(params, tx.init(params), params)[0], written)


def gathered(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite gathered parameters."""
    return _taken(fshard.gather_params(sharded(mesh, numel)), written)


def gathered_by_a_graph(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite what a graph has gathered and returned."""
    return _taken(fshard.jit(fshard.gather_params, backend="eager")(sharded(mesh, numel)), written)


def overwritten_in_a_graph(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite gathered parameters inside of a graph."""

    def fn(x: fshard.Sharded) -> Tensor:
        params = fshard.gather_params(x)
        copy: Tensor = params["w"].clone()
        params["w"].fill_(-1)
        return copy

    copy: Tensor = fshard.jit(fn, backend="eager")(sharded(mesh, numel))
    written()
    return copy


def returned_by_a_loss(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite the parameters that a loss returned beside its value."""
    evaluate = fshard.evaluate(lambda params: (params["w"][:5].sum(), dict(params)), has_aux=True)
    return _taken(evaluate(sharded(mesh, numel))[1], written)


def _gradient(mesh: Any, numel: int, params_over: Any, reduction: Any = "exact", **how: Any) -> Tensor:
    params = sharded(mesh, numel, params_over=params_over, **how)
    factor = whole(numel)["w"] + mesh.get_rank()
    _, grads = fshard.value_and_grad(lambda p: (p["w"] * factor).sum(), reduction=reduction)(params)
    return grads.tensors[0].clone()


def reduction(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite what a reduction was given, after its own wait."""
    return _gradient(mesh, numel, (), Overwriting(written=written))


def reduction_of_all(mesh: Any, numel: int, written: Written) -> Tensor:
    """The same of gradients that every rank has whole."""
    return _gradient(mesh, numel, (), Overwriting(written=written), grads_over=(), state_over=())


def wire_of_gradients(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite the gradients that a wire was given, and what it decoded."""
    return _gradient(mesh, numel, (), grad_wire=InPlace(written, direct=True))


def wire_of_parameters(mesh: Any, numel: int, written: Written) -> Tensor:
    """Overwrite the data that a wire decoded."""
    evaluate = fshard.evaluate(lambda params: params["w"].sum())
    value: Tensor = evaluate(sharded(mesh, numel, param_wire=InPlace(written)))
    return value


def wire_of_two_dtypes(mesh: Any, numel: int, written: Written) -> Tensor:
    """The same of parameters of two dtypes, which are gathered together."""
    params = {**whole(numel), "v": torch.ones(numel, dtype=torch.float64)}
    how: dict[str, Any] = {"param_wire": InPlace(written), "together": True}
    plan = fshard.make_plan(params, mesh, **how)
    evaluate = fshard.evaluate(lambda params: params["w"].sum() + params["v"].sum())
    value: Tensor = evaluate(fshard.shard_params(params, plan))
    return value


# each has one large collective, whose result or input it writes to
WRITERS: dict[str, Callable[[Any, int, Written], Tensor]] = {
    job.__name__: job
    for job in (
        zero_step,
        zero_update,
        gathered,
        gathered_by_a_graph,
        overwritten_in_a_graph,
        returned_by_a_loss,
        reduction,
        reduction_of_all,
        wire_of_gradients,
        wire_of_parameters,
        wire_of_two_dtypes,
    )
}
