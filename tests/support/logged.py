"""Ranks that log which collectives start and end, and when."""

from typing import Any

import torch

from fshard.comm.mesh import Grid
from fshard.comm.ranks import Call

Event = tuple[str, str, str]  # what happens, to which collective, of which unit


class _Watched:
    """An exchange that says when it is waited for."""

    def __init__(self, inner: Any, log: list[Event], kind: str, label: str):
        self._inner, self._log, self._event = inner, log, ("wait", kind, label)
        self.done = inner.done

    def wait(self) -> Any:
        self._log.append(self._event)
        return self._inner.wait()


class _Ranks:
    """Ranks that say when a gather or a reduction starts."""

    inner: Any
    log: list[Event]

    def __init__(self, inner: Any, log: list[Event]):
        self.__dict__.update(vars(inner), inner=inner, log=log)
        self.built_in = None

    @property
    def whole(self) -> Any:
        return self

    def _begin(self, exchange: Any, call: Call) -> _Watched:
        kind, label = call.kind, call.label
        self.log.append(("start", kind, label))
        return _Watched(exchange, self.log, kind, label)

    def all_gather(self, *args: Any) -> _Watched:
        return self._begin(self.inner.all_gather(*args), args[-1])

    def reduce_scatter(self, *args: Any) -> _Watched:
        return self._begin(self.inner.reduce_scatter(*args), args[-1])

    def all_reduce(self, *args: Any) -> _Watched:
        return self._begin(self.inner.all_reduce(*args), args[-1])

    def empty(self, *args: Any) -> Any:
        return self.inner.empty(*args)

    def exchange(self, *args: Any) -> Any:
        return self.inner.exchange(*args)


class Logged(Grid):
    """A simulated mesh whose collectives are written to a log: when each starts, and when it is waited for."""

    def __init__(self, mesh: Any):
        self.__dict__.update(vars(mesh))
        self._mesh, self.log = mesh, list[Event]()

    def ranks(self, axis: str) -> Any:
        """Those of the mesh, that write."""
        return _Ranks(self._mesh.ranks(axis), self.log)


class Mark(torch.autograd.Function):
    """The identity, that writes to a log in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[Event], name: str) -> torch.Tensor:
        ctx.log, ctx.name = log, name
        log.append(("use", "forward", name))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.log.append(("use", "backward", ctx.name))
        return grad, None, None


def at(log: list[Event], *event: str) -> list[int]:
    """Where an event is in a log."""
    return [i for i, one in enumerate(log) if one == event]
