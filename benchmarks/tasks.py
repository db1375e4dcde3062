"""A model of the benchmarks: pure functions, and a module for the reference systems that calls the same functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Tree = dict[str, Any]
Part = Callable[[Any, Tensor], Tensor]
LR = 1e-3  # of AdamW in all systems


@dataclass(frozen=True)
class Task:
    """A model: functions that make parameters, compute the loss and draw a batch.

    `repeated` is the path of its list of repeated parts, each a unit; `part` computes one of them. `build` makes a
    module that computes the same loss, where this is not to be a `Reference`. `peer` is a function of
    `jax_networks.py` with its arguments, that makes the same loss for JAX; None where there is none. `name` and `tiny`
    are the arguments of `models.py` `task_of` that made the task.
    """

    init: Callable[[], Tree]
    loss: Callable[[Any, Any], Tensor]
    batch: Callable[[torch.Generator], Any]
    repeated: str
    part: Part | None = None
    build: Callable[[], nn.Module] | None = None
    peer: tuple[str, Mapping[str, int]] | None = None
    name: str = ""
    tiny: bool = False

    @property
    def backend(self) -> str:
        """The backend of torch.compile: Inductor's compiler takes too long for tests."""
        return "aot_eager" if self.tiny else "inductor"

    @property
    def units(self) -> list[str]:
        """The patterns of units for `make_plan`."""
        return [f"{self.repeated}.*"]

    @property
    def bucket(self) -> int:
        """The bytes up to which neighbouring units are joined: T has a hundred of 16 KiB."""
        return 1 << 20 if self.name == "T" else 0

    def module(self) -> nn.Module:
        """A module whose forward computes the loss of a batch, with the numbers of `init`."""
        return self.build() if self.build else Reference(self, self.init())

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The repeated parts of `module`."""
        parts = module.get_submodule(self.repeated)
        assert isinstance(parts, nn.ModuleList)
        return list(parts)


def call(part: Part, p: Any, x: Tensor) -> Tensor:
    """A repeated part: the module's forward if `p` is one, so that wrappers of modules see it, else `part(p, x)`."""
    return p(x) if isinstance(p, nn.Module) else part(p, x)


class _Node(nn.Module):
    """A tree of parameters as a module that is indexed like the tree."""

    def __init__(self, p: Tree):
        super().__init__()
        for name, value in p.items():
            if isinstance(value, Tensor):
                self.register_parameter(name, nn.Parameter(value))
            else:
                parts = nn.ModuleList(map(_Node, value)) if isinstance(value, list) else _Node(value)
                self.add_module(name, parts)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class _Part(_Node):
    """One repeated part as a module that calls the same function."""

    def __init__(self, part: Part, p: Tree):
        super().__init__(p)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self, x)


class Reference(_Node):
    """A task as a module, which FSDP2 and DistributedDataParallel can wrap: its forward computes the task's loss."""

    def __init__(self, task: Task, params: Tree):
        super().__init__({name: value for name, value in params.items() if name != task.repeated})
        assert task.part
        self.loss = task.loss
        self.add_module(task.repeated, nn.ModuleList(_Part(task.part, p) for p in params[task.repeated]))

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self, batch)
