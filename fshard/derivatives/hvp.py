"""Hessian-vector products of losses of sharded parameters.

Note [Reverse over forward]
    The loss runs in forward mode along the tangent v. The directional derivative <gradient, v> is then differentiated
    like the loss of a step, and its gradient is the product. Forward mode is torch.func.jvp, so a loss may use other
    transforms inside. Tangents belong to the level of this jvp, even if a unit is touched inside another transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual

from ..core import func_levels, tree
from ..core.losses import Mean, added, read_loss, terms_of
from ..core.tracing import RERUN
from ..core.tree import Tree
from ..grad.autograd import SavedTensor
from ..grad.grad import check_loss, check_sharded, later_grads, run_loss
from ..grad.tape import Tape, UnitLeaves
from ..grad.travel import Gradients
from ..sharding.schedule import schedule
from ..sharding.sharded import Sharded
from .elementary import Elementary


@dataclass(frozen=True)
class _OfTangents:
    saved: object  # by `pack` of the tangents' tape


class _Duals(Tape):
    def __init__(self, params: Sharded, tangents: Sharded, into: Gradients, beside: Sequence[Sharded]):
        super().__init__(params, into, beside)
        self._tangents = Tape(tangents, chain=self.chain, index=2 + len(beside))
        self._levels: Sequence[object] = ()  # of torch.func around the tangents, innermost first

    @property
    def _followers(self) -> list[Tape]:
        return [*super()._followers, self._tangents]

    def view(self) -> Tree:
        """Return the tape itself: `hvp` calls `duals` inside the jvp."""
        return self

    def duals(self) -> Tree:
        """Return parameters with tangents of the current torch.func level."""
        with func_levels.aside() as levels:
            self._levels = levels
        return super().view()

    def touch(self, unit: int) -> UnitLeaves:
        if (reads := RERUN.get()) is not None:
            return reads.unit(self, unit)
        leaves, tangents = list(super().touch(unit)), self._tangents.touch(unit)
        trained = schedule(self._params.view).entries[unit].trained
        # gradients on: a leaf read under no_grad may be used after the block
        with func_levels.again(self._levels), torch.enable_grad():
            for number, tangent in zip(trained, tangents, strict=True):
                leaves[number] = make_dual(leaves[number], tangent)
        return leaves

    def pack(self, x: Tensor) -> object:
        saved = super().pack(x)
        return _OfTangents(self._tangents.pack(x)) if isinstance(saved, SavedTensor) else saved

    def unpack(self, saved: object) -> Tensor:
        return self._tangents.unpack(saved.saved) if isinstance(saved, _OfTangents) else super().unpack(saved)


def hvp(loss_fn: Callable[..., Tree]) -> Callable[..., Sharded]:
    """Return `fn(params, v, *args, **kwargs) -> product`: the Hessian of the loss over all ranks, times `v`.

    `loss_fn(params, *args, **kwargs)` is a loss as in `value_and_grad`. `params` and `v` are `Sharded` of one plan, `v`
    cut like the parameters or like gradients; the product is cut like gradients, so it can be the next `v`.

    Touching a unit gathers the unit and its tangent, and the backward gathers both again. Operators of the loss need
    forward derivatives (for attention: sdpa_kernel(SDPBackend.MATH)). LayerNorm is computed from other operators.

    ValueError for other operators with wrong second derivatives in torch (BatchNorm in training, det, solve), for a `v`
    of another plan, for a count that depends on parameters, and if `param_wire` would round the tangent.

    >>> params, v = (shard_of(torch.tensor(x)) for x in ([1.0, 2.0], [1.0, 0.0]))
    >>> gather_params(hvp(lambda w: (w ** 3).sum())(params, v))
    tensor([6., 0.])

    Source: Pearlmutter, Fast exact multiplication by the Hessian, 1994.
    """
    check_loss(loss_fn)

    def along(tape: _Duals, *args: Tree, **kwargs: Tree) -> Tree:
        returned: list[tuple[Tree, type]] = []

        def totals(_: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
            with Elementary():
                returned.append(read_loss(loss_fn(tape.duals(), *args, **kwargs)))
            terms = terms_of(returned[-1][0])
            # counts as aux: torch.func unwraps aux
            return tuple(x.total for x in terms), [x.count for x in terms if _has_tensor(x)]

        # jvp only opens a level of forward mode: the tangents come from the tape
        number = torch.zeros((), dtype=torch.float32, device="cpu")
        # totals of the loss's terms, and their derivatives along v: 0-d
        values, changes, counts = torch.func.jvp(totals, (number,), (number,), has_aux=True)  # type: ignore[misc]
        ((loss, kind),) = returned
        # a linear loss has product zero: its change must still depend on the parameters
        changes = [c if c.requires_grad else c + 0 * value for value, c in zip(values, changes, strict=True)]
        if kind is Tensor:
            return changes[0]
        remaining = iter(counts)
        terms = [replace(x, total=change) for x, change in zip(terms_of(loss), changes, strict=True)]
        return added([replace(x, count=_constant_count(next(remaining))) if _has_tensor(x) else x for x in terms])

    def fn(params: Sharded, v: Sharded, /, *args: Tree, **kwargs: Tree) -> Sharded:
        params, v = check_sharded(params), check_sharded(v)
        _check_tangent(params, v)
        product = later_grads(params, params.plan.grads_over)
        into = Gradients(product) if params.plan.axes else Gradients(None, product)
        tape = _Duals(params, v.trainable, into, tree.nodes((args, kwargs), Sharded))
        run_loss(along, params, (args, kwargs), into, tape=tape)
        return product.whole()

    return fn


def _has_tensor(x: Tree) -> bool:
    return isinstance(x, Mean) and isinstance(x.count, Tensor)


def _constant_count(count: Tensor) -> Tensor:
    """ValueError if the count has a derivative: the product would lack it."""
    if count.requires_grad:
        raise ValueError(
            "hvp: the count of the loss's fshard.Mean depends on parameters: detach it, or return fshard.Sum"
        )
    return count


def _check_tangent(params: Sharded, v: Sharded) -> None:
    plan = params.plan
    if v.plan != plan:
        raise ValueError(f"hvp: v was made for other parameters: expected {plan.first_difference(v.plan)}")
    if not set(params.trainable.view.kinds) <= set(v.view.kinds):
        raise ValueError(
            "hvp: v has not all trainable leaves: expected a Sharded like the parameters, or like gradients"
        )
    if plan.param_wire is not None:
        raise ValueError(f"hvp: {plan.param_wire} would round the tangent on its way: use a plan without param_wire")
