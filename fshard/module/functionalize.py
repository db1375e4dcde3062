"""`functionalize`: a torch.nn.Module as a function of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..comm.mesh import AnyMesh
from ..core import tree
from ..core.arguments import check_flags, expect, wrong
from ..core.losses import running
from ..core.tree import Tree
from ..layout.pieces import Parts
from ..plan.plan import Plan
from ..plan.precision import Policy, SomePolicy
from ..sharding.sharded import Sharded
from ..state.initial import init_params
from ..state.names import Rename
from .casts import explain
from .checks import check_parameters
from .copies import Copies
from .current import Calls, ModuleCall
from .initialize import Initializer
from .leaves import Leaves, leaves_like
from .skeleton import Stand, in_tree_order, nested, stands_for, ties
from .state_dict import StateDict
from .submodules import Which, policy_for, units_of


class ModuleFunction:
    """A module as a pure function: `apply(params, buffers, *args, **kwargs) -> (out, buffers)`.

    Made by `functionalize`.

    - `params`: a tree of tensors, or the parameters of a loss; the first read of a leaf by a submodule gathers the
      leaf's unit
    - `buffers`: never changed; a call returns new buffers, or the same tensor for each buffer not read by the module

    Threads may call one function at the same time. Each thread keeps a copy of the module, with attributes (not
    buffers) assigned by a forward. For activation checkpointing, the function keeps weak references to calls with a
    living graph.
    """

    def __init__(self, copies: Copies, training: bool, calls: Calls, params: tree.Spec, buffers: tree.Spec):
        self._copies, self._training, self._calls = copies, training, calls
        self._skeleton, self._params, self._buffers = copies.skeleton, params, buffers
        self.__wrapped__ = copies.skeleton  # `compiler/captures.py` reads this attribute

    def __call__(self, params: Tree, buffers: Tree, /, *args: Tree, **kwargs: Tree) -> tuple[Tree, Tree]:
        """The output of the module, and its buffers afterwards."""
        name = self._calls.name
        if isinstance(params, Parts):
            expected = "the parameters that a loss is given, or whole ones"
            remedy = "Call it in a loss or fshard.predict(lambda p, x: apply(p, buffers, x)[0])(params, x)"
            remedy = "Pass it to the step as one more argument, and the loss gets it" if running() else remedy
            raise TypeError(f"{name}: {wrong('params', params, expected, remedy)}")
        leaves = Leaves(params, self._params, f"{name}: params")
        call, versions = ModuleCall(leaves, self._listed(buffers)), leaves.versions()
        leaves.remark(self._copies.modes[self._training])
        if self._training and self._copies.tracks and (loss := running()):
            loss.lost.append(name)
        module = self._copies.copy_for(call, self._training)
        with self._calls.during(call):
            try:
                out = module(*args, **kwargs)
            except RuntimeError as error:
                explain(error, name, module)
                raise
            replaced = self._replaced(module) if call.put else {}
        self._check_unwritten(call, versions)
        after = call.new_buffers(self._calls.ties, replaced)
        self._copies.check(module, (params, args, kwargs), (out, after))
        call.stay_alive_with((out, after))
        return out, tree.unflatten(self._buffers, after)

    def _replaced(self, module: nn.Module) -> dict[int, Tensor]:
        """Return, by number, the tensors that the forward assigned to buffers."""
        now, paths = dict(module.named_buffers(remove_duplicate=False)), tree.leaf_paths(self._buffers)
        new = {i: now[path] for i, path in enumerate(paths) if path in now and not isinstance(now[path], Stand)}
        for i, first in enumerate(self._calls.ties):
            if new.get(i) is not new.get(first):
                raise ValueError(
                    f"{self._calls.name}: buffers {paths[first]!r} and {paths[i]!r} are one tensor in the module, and "
                    "its forward set one of them to another: set both, or write to it in place"
                )
        return new

    def _check_unwritten(self, call: ModuleCall, before: list[int | None]) -> None:
        """ValueError if the forward set parameters, or wrote to leaves not gathered; a tape checks the others."""
        done, after = [("set", path) for path in call.replaced()], call.params.versions()
        if after != before:  # making paths takes longer than a small module's forward
            named = zip(tree.leaf_paths(self._params), before, after, strict=True)
            done += [("wrote to", path) for path, first, last in named if first != last]
        for did, path in done:
            raise ValueError(
                f"{self._calls.name}: the module {did} its parameter {path!r} in its forward, which is the caller's "
                "tensor: return new values, or make the parameter a buffer"
            )

    def _listed(self, buffers: Tree) -> list[Tensor]:
        return leaves_like(f"{self._calls.name}: buffers", self._buffers, buffers)

    @property
    def eval(self) -> ModuleFunction:
        """The same function in evaluation mode: no dropout; running statistics are used, not changed."""
        return ModuleFunction(self._copies, False, self._calls, self._params, self._buffers)

    def units(self, *which: type | str | int | Callable[[str, nn.Module], bool]) -> list[str]:
        """The paths of submodules, for `make_plan(units=)`.

        Each argument of `which` is a class of submodules, a pattern of their paths (`*`: one component, `**`: any
        number), a predicate `(path, submodule) -> bool`, or a number of elements. A number selects submodules with at
        least so many elements, without the elements of units inside. Submodules without parameters are left out.
        ValueError if an argument selects nothing.
        """
        return units_of(self._skeleton, which)

    def init(self, plan: Plan, seed: int = 0) -> Sharded:
        """Make parameters on a plan, as `init_params` does, with the module's own initialization.

        The module may be on meta. Each submodule is made once, with only its own parameters in memory: its
        `reset_parameters` initializes them, then the module's `_init_weights` (as in transformers). Random numbers come
        from `seed` and the submodule's path. ValueError if neither method sets a parameter,
        or if a constructor of the module has set it to other values, as far as values show.
        """
        if plan.spec != self._params:
            expected = tree.unflatten(self._params, [0] * self._params.num_leaves)
            got = tree.unflatten(plan.spec, [0] * plan.spec.num_leaves)
            raise ValueError(f"{self._calls.name}: init: a plan of other parameters: {tree.difference(expected, got)}")
        return init_params(plan, Initializer(self._skeleton, seed, plan.device, self._copies.own), seed)

    def init_buffers(self, device: torch.device | str = "cpu", seed: int = 0) -> Tree:
        """Make buffers on `device`, also for a module on meta, as `init` makes parameters from the same `seed`."""
        names = tree.leaf_paths(self._buffers)
        made = Initializer(self._skeleton, seed, torch.device(device), self._copies.own)
        return tree.unflatten(self._buffers, [made.buffer(name) for name in names])

    def state_dict(
        self, params: Sharded, buffers: Tree, rank: int | None = None, dtensors: bool = False
    ) -> dict[str, Tensor]:
        """The module's own state dict, for `module.load_state_dict`: parameters and persistent buffers.

        `params` and `buffers` as in a call; each rank returns its own buffers. `rank` and `dtensors` as for
        `fshard.state_dict`. Extra state of submodules (`get_extra_state`) is left out. Dual: `load_state_dict`.
        """
        names = StateDict(self._skeleton, self._params, self._buffers)
        return names.write(params, self._listed(buffers), rank, dtensors)

    def load_state_dict(
        self,
        params: Sharded,
        buffers: Tree,
        mapping: Mapping[str, Tensor],
        rename: Rename | None = None,
        src: int | None = None,
        strict: bool = True,
    ) -> tuple[Sharded, Tree]:
        """New parameters and buffers, with the values of a module's state dict.

        `mapping`, `rename`, `src` and `strict` as for `fshard.load_state_dict`. Buffers that the module does not save
        stay as they are. Dual: `state_dict`.
        """
        names = StateDict(self._skeleton, self._params, self._buffers)
        return names.read(params, self._listed(buffers), mapping, rename, src, strict)

    def persistent(self, buffers: Tree) -> dict[str, Tensor]:
        """The buffers that the module saves (`persistent` of `register_buffer`), by dotted name."""
        return StateDict(self._skeleton, self._params, self._buffers).kept(self._listed(buffers))

    def policy(self, policy: SomePolicy = None, cast: Which | Sequence[Which] = ()) -> Policy:
        """A policy for `make_plan(policy=)` that computes batch norms in float32, like their running statistics.

        The result is `policy` with one more override for each parameter of batch norms, after the overrides of
        `policy`. `cast` selects submodules, as `units` does or by paths. Each selected submodule casts its floating
        arguments to its dtype of computation, even arguments made inside the forward (`cast_forward_inputs` of FSDP).

        >>> import torch, fshard
        >>> apply, _, _ = fshard.module.functionalize(torch.nn.Sequential(torch.nn.BatchNorm1d(2, bias=False)))
        >>> apply.policy("compute=bf16")
        Policy('compute=bf16; 0.weight: compute=f32,reduce=f32')
        """
        which, made = cast if isinstance(cast, list | tuple) else [cast], policy_for(self._skeleton, policy)
        return replace(made, cast_at=(*made.cast_at, *self.units(*which)))

    def split(self, mesh: AnyMesh, axis: str = "tensor", experts: str | None = None) -> dict[str, tuple[str, int, int]]:
        """Return (axis, dim, blocks) of leaves split by styles (`functionalize(parallel=)`), for `make_plan(split=)`.

        `experts`: another axis for whole experts (`grouped_gemm`). Attentions are split by whole heads: heads of keys
        that do not divide stay whole; if query heads do not, all. ValueError if the mesh lacks an axis.

        >>> import torch, fshard
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> apply, *_ = fshard.module.functionalize(module, parallel={"0": "colwise", "2": "rowwise"})
        >>> apply.split(fshard.AbstractMesh(shard=2, tensor=2))
        {'0.weight': ('tensor', 0, 1), '0.bias': ('tensor', 0, 1), '2.weight': ('tensor', 1, 1)}
        """
        parallel = self._copies.parallel
        return {} if parallel is None else parallel.split(mesh, axis, experts)

    @property
    def frozen(self) -> list[str]:
        """The paths of the parameters that require no gradient, for `make_plan(frozen=)`."""
        named = self._skeleton.named_parameters(remove_duplicate=False)
        return [name for name, x in named if not x.requires_grad]


def functionalize(
    module: nn.Module, sync_batch_norm: bool = False, parallel: Mapping[str, str] | None = None
) -> tuple[ModuleFunction, dict[str, Any], dict[str, Any]]:
    """`(apply, params, buffers)`: a module as a function, and its parameters and buffers as nested dicts.

    `apply(params, buffers, *args, **kwargs)` returns `(out, buffers)`. The dicts nest like the submodules, and
    hold the module's own tensors; a tied parameter is one tensor under each of its names. `apply` works on a copy of
    the `module` without tensors, and neither changes nor uses the module itself.

    With `sync_batch_norm`, batch norms take mean and variance over all ranks of the parameters' mesh;
    torch.nn.SyncBatchNorm always does so.

    `parallel` maps patterns of submodules or parameters to styles, as transformers' `model.tp_plan`; the last pattern
    counts. A style acts in calls with a plan that splits leaves of its submodule (`apply.split`).

    TypeError if `module` is not a module, or cannot be copied, or is of another kind than its style; ValueError for
    lazy modules that never ran, unknown styles, and parts without a style.

    >>> import torch, fshard
    >>> apply, params, buffers = fshard.module.functionalize(torch.nn.Linear(2, 1))
    >>> sorted(params), buffers
    (['bias', 'weight'], {})
    >>> grads = torch.func.grad(lambda p: apply(p, buffers, torch.ones(3, 2))[0].sum())(params)
    >>> grads["weight"]
    tensor([[3., 3.]])
    """
    expect("functionalize: module", module, isinstance(module, nn.Module), "a torch.nn.Module")
    check_flags(sync_batch_norm=sync_batch_norm)
    params = in_tree_order(dict(module.named_parameters(remove_duplicate=False)))
    buffers = in_tree_order(dict(module.named_buffers(remove_duplicate=False)))
    for path, x in (params | buffers).items():
        if is_lazy(x):
            raise ValueError(f"functionalize: {path!r} has no shape yet: run the module once")
    check_parameters(params)
    calls = Calls(type(module).__name__, ties(buffers))
    copies = Copies(module, stands_for(params, buffers, calls), params, calls, sync_batch_norm, parallel)
    trees = nested(params), nested(buffers)
    return ModuleFunction(copies, True, calls, *(tree.flatten(x)[1] for x in trees)), *trees
