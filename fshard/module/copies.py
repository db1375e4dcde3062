"""The copies of a module for its calls: one for each thread, mode (training or evaluation), and set of casts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..core import func_levels, tree
from ..core.lazy import Branch
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..parallel.parallel import Parallel
from .batch_norm import BATCH_NORMS, average, synchronise
from .casts import Casts, cast_around, cast_paths, casts_of
from .checks import check_graph, check_memory, check_references, check_uncached, is_compiled
from .compiled import compile_again
from .current import Calls, ModuleCall
from .skeleton import Stand, copy_of, in_eval_mode, skeleton


def _mode(module: nn.Module, name: str) -> str:
    flags = bytes(part.training for part in module.modules())
    mode = "training" if all(flags) else f"training in part ({crc32(flags):08x})" if any(flags) else "evaluation"
    return f"{name} in {mode}"


class Copies:
    """Copies of a module without its tensors, each made when a call first needs it.

    A copy keeps attributes assigned by a forward, so each thread has its own copies. In a trace, each call gets a new
    copy, because the copy may keep fake tensors; also if a submodule in evaluation mode has its own `train()`, because
    the submodule may keep values of one call's parameters until `train()` is called.
    """

    def __init__(
        self,
        module: nn.Module,
        stands: Mapping[int, Stand],
        params: Mapping[str, Tensor],
        calls: Calls,
        sync_batch_norm: bool,
        parallel: Mapping[str, str] | None = None,
    ):
        check_memory(module, stands)
        # by mode, since calls in two modes may run at once; True: each submodule's mode in `functionalize`
        self._skeletons = {True: skeleton(module, stands), False: in_eval_mode(skeleton(module, stands))}
        self.modes = {training: _mode(part, calls.name) for training, part in self._skeletons.items()}
        check_references(self.skeleton, module)
        norms = [x for x in self.skeleton.modules() if isinstance(x, BATCH_NORMS)]
        self.tracks = any(x.training and x.track_running_stats for x in norms)
        idle = {mode: [x for x in copied.modules() if not x.training] for mode, copied in self._skeletons.items()}
        self._forgets = {mode: any(type(x).train is not nn.Module.train for x in part) for mode, part in idle.items()}
        self.own = {path: weakref.ref(x) for path, x in params.items()}
        self._parametrized = any(isinstance(part, ParametrizationList) for part in module.modules())
        self._calls = calls
        self._dtypes = [x.dtype for x in params.values()]
        self._synchronised = BATCH_NORMS if sync_batch_norm else nn.SyncBatchNorm
        self.parallel = None if parallel is None else Parallel(self.skeleton, params, parallel)
        self._casts: dict[object, Casts] = {}  # by dtypes and paths
        self._of_thread = threading.local()

    @property
    def skeleton(self) -> nn.Module:
        return self._skeletons[True]

    def copy_for(self, call: ModuleCall, training: bool) -> nn.Module:
        if self._parametrized:
            check_uncached(self._calls.name)
        casts = self._casts_of(call)
        if self.parallel is not None:
            call.along = self.parallel.along(call.params.homes(), call.params.shape)
        if is_tracing() or self._forgets[training]:
            return self._made(training, casts)
        copies: dict[tuple[bool, Casts], nn.Module] = vars(self._of_thread).setdefault("copies", {})
        if (training, casts) not in copies:
            copies[training, casts] = self._made(training, casts)
        return copies[training, casts]

    def check(self, copy: nn.Module, given: Tree, results: Tree) -> None:
        """ValueError if a copy's first call with autograd used the module's tensors, unless `given` has them."""
        checked: weakref.WeakSet[nn.Module] = vars(self._of_thread).setdefault("checked", weakref.WeakSet())
        if copy in checked or not torch.is_grad_enabled() or func_levels.inside():
            return
        paths = {id(x): path for path, ref in self.own.items() if (x := ref()) is not None}
        passed = [path for x in tree.tops(given, Branch) if (path := paths.pop(id(x), None)) is not None]
        check_graph(paths, given, results, self._calls.name)
        if not passed and not is_tracing():
            checked.add(copy)

    def _made(self, training: bool, casts: Casts) -> nn.Module:
        made = copy_of(self._skeletons[training], self._calls)
        for path, part in made.named_modules():
            if isinstance(part, self._synchronised):
                synchronise(part, path, self._calls)
            if isinstance(part, BATCH_NORMS) and is_tracing():
                average(part)
        if self.parallel is not None:
            self.parallel.install(made, self._calls.current)
        for path, dtype, around in casts:
            cast_around(made.get_submodule(path), dtype, around)
        for part in made.modules():
            if isinstance(part, ParametrizationList):
                part.register_forward_pre_hook(lambda *_: check_uncached(self._calls.name))
            if is_compiled(part):
                compile_again(part)
        return made

    def _casts_of(self, call: ModuleCall) -> Casts:
        dtypes, policy = call.params.dtypes(), call.params.policy
        unasked = policy.cast_inputs and [computed for _, computed in dtypes] != self._dtypes
        # if no parameter changes its dtype, the module casts only its inputs, and submodules only by `cast_at`
        paths = (*[""] * (policy.cast_inputs and (policy.compute is not None or policy.stores)),)
        paths += tuple(cast_paths(self.skeleton, policy, *call.params.place())) if policy.cast_at else ()
        if not unasked and not paths:
            return ()
        buffers = tuple(x.dtype for x in call.buffers)
        key = tuple(dtypes), buffers, policy.storage, policy.compute, paths, unasked
        if key not in self._casts:
            self._casts[key] = casts_of(self.skeleton, dtypes, buffers, policy, paths, unasked)
        return self._casts[key]
