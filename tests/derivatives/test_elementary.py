"""Products with the Hessians of single operators, compared with torch's jvp of grad: no other order is always right."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.models import rand
from support.steps import QUIET, apart
from support.worlds import simulated
from torch import Tensor, nn, ops
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

import fshard
from fshard.derivatives.elementary import Elementary

pytestmark = pytest.mark.filterwarnings(QUIET)
EYE = torch.eye(4, dtype=torch.float64)
INDEX = torch.tensor([[0, 1, 1, 2, 3, 3]] * 4)


def params() -> Any:
    """A matrix, and two vectors to scale and shift by."""
    return {"w": rand(4, 6, seed=1), "s": rand(6, seed=2).abs() + 0.5, "t": rand(6, seed=3)}


def data(rank: int) -> Tensor:
    """What a rank multiplies the matrix by."""
    return rand(4, 6, seed=10 + rank).abs() + 0.5


def square(h: Tensor) -> Tensor:
    """A matrix (4, 4) that can be inverted, neither symmetric nor triangular."""
    return h[:, :4] + 3 * EYE


def spd(h: Tensor) -> Tensor:
    """A symmetric positive definite matrix (4, 4)."""
    return h @ h.mT + EYE


def batch_norm(h: Tensor, p: Any, training: bool) -> Tensor:
    """With running statistics."""
    return F.batch_norm(h, torch.zeros_like(p["s"]).detach(), data(7)[0], p["s"], p["t"], training)


def attention(h: Tensor, p: Any) -> Tensor:
    """One head of causal attention."""
    score = (h * p["s"]) @ (h + p["t"]).mT
    return score.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf")).softmax(-1) @ h


def scaled_dot(h: Tensor, p: Any) -> Tensor:
    """torch's attention, in the kernel that has forward derivatives."""
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(h[None, None], (h * p["s"])[None, None], (h + p["t"])[None, None])


def module(made: nn.Module, x: Tensor, p: Any) -> Tensor:
    """A module of two parameters as a function."""
    count = made.weight.numel()
    return functional_call(made, {"weight": p["s"][:count], "bias": p["t"][:count]}, x)


SCHEMA = "(Tensor x) -> Tensor"
F64 = {"dtype": torch.float64}
# By name: what is made of h = x * w (4, 6) and of the parameters.
NORMS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "layer_norm": lambda h, p: F.layer_norm(h, (6,), p["s"], p["t"]),
    "layer_norm of torch": lambda h, p: torch.layer_norm(h, (4, 6)),
    "layer_norm without bias": lambda h, p: F.layer_norm(input=h, normalized_shape=(6,), weight=p["s"], eps=0.1),
    "LayerNorm": lambda h, p: module(nn.LayerNorm(6, **F64), h, p),
    "native_layer_norm": lambda h, p: torch.native_layer_norm(h, (6,), p["s"], p["t"], 1e-5)[0],
    "layer_norm of aten": lambda h, p: ops.aten.layer_norm.default(h, (6,), p["s"], p["t"]),
    "native_layer_norm of aten": lambda h, p: ops.aten.native_layer_norm(h, (6,), p["s"], None, 1e-5)[0],
    "batch_norm in eval": lambda h, p: batch_norm(h, p, False),
    "batch_norm of torch in eval": lambda h, p: torch.batch_norm(
        h, p["s"], p["t"], data(7)[1], data(7)[0], momentum=0.1, eps=1e-5, cudnn_enabled=False, training=False
    ),
    "BatchNorm1d in eval": lambda h, p: module(nn.BatchNorm1d(6, **F64).eval(), h, p),
    "instance_norm by running statistics": lambda h, p: F.instance_norm(
        h.view(2, 2, 6), data(7)[0, :2], data(7)[1, :2], p["s"][:2], use_input_stats=False
    ),
    "layer_norm in vmap": lambda h, p: vmap(lambda row: F.layer_norm(row, (6,), p["s"], p["t"]))(h),
}
OTHERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "group_norm": lambda h, p: F.group_norm(h.view(2, 2, 6), 2, p["s"][:2], p["t"][:2]),
    "rms_norm": lambda h, p: F.rms_norm(h, (6,), p["s"]),
    "local_response_norm": lambda h, p: F.local_response_norm(h[None], 2),
    "normalize": lambda h, p: F.normalize(h, dim=1) * p["s"],
    "softmax": lambda h, p: (h * p["s"]).softmax(-1),
    "log_softmax": lambda h, p: (h * p["s"]).log_softmax(0),
    "attention": attention,
    "scaled_dot": scaled_dot,
    "gelu": lambda h, p: F.gelu(h + p["t"]),
    "gelu by tanh": lambda h, p: F.gelu(h + p["t"], approximate="tanh"),
    "silu": lambda h, p: F.silu(h + p["t"]),
    "mish": lambda h, p: F.mish(h + p["t"]),
    "softplus": lambda h, p: F.softplus(h * p["s"]),
    "elu": lambda h, p: F.elu(h * p["s"]),
    "conv1d": lambda h, p: F.conv1d(h[None], p["t"].view(1, 1, 6).expand(2, 4, 6) * p["s"], padding=2),
    "conv2d": lambda h, p: F.conv2d(h[None, None], p["t"].view(1, 1, 2, 3)),
    "embedding": lambda h, p: F.embedding(torch.tensor([0, 2, 2]), h) * p["s"],
    "cross_entropy": lambda h, p: F.cross_entropy(h * p["s"], torch.tensor([0, 5, 2, 2]), reduction="none"),
    "binary_cross_entropy": lambda h, p: F.binary_cross_entropy_with_logits(h + p["t"], data(5).cos().square()),
    "kl_div": lambda h, p: F.kl_div(h.log_softmax(-1), p["t"].softmax(-1).expand(4, 6), reduction="none"),
    "smooth_l1": lambda h, p: F.smooth_l1_loss(h, p["t"].expand(4, 6), reduction="none"),
    "logsumexp": lambda h, p: (h * p["s"]).logsumexp(-1),
    "cumsum": lambda h, p: (h * p["s"]).cumsum(1),
    "cumprod": lambda h, p: (h * p["s"]).cumprod(1),
    "logcumsumexp": lambda h, p: (h + p["t"]).logcumsumexp(1),
    "prod": lambda h, p: (h + p["t"]).prod(0),
    "matmul": lambda h, p: (h * p["s"]) @ h.mT,
    "einsum": lambda h, p: torch.einsum("ij,kj,j->ik", h, h, p["s"]),
    "linear": lambda h, p: F.linear(h, h, p["t"][:4]),
    "bilinear": lambda h, p: F.bilinear(h, h, torch.outer(p["s"], p["t"])[None]),
    "std": lambda h, p: (h * p["s"]).std(0),
    "var": lambda h, p: (h + p["t"]).var(1),
    "vector_norm": lambda h, p: torch.linalg.vector_norm(h + p["t"], dim=1),
    "scatter_reduce": lambda h, p: h.scatter_reduce(1, INDEX, h * p["s"], "mean"),
    "sort": lambda h, p: (h * p["s"]).sort(1).values,
    "max_pool": lambda h, p: F.max_pool1d(h[None] * p["s"], 2),
    "inv": lambda h, p: torch.linalg.inv(square(h)),
    "lu_solve": lambda h, p: torch.linalg.lu_solve(*torch.linalg.lu_factor(square(h)), h),
    "cholesky": lambda h, p: torch.linalg.cholesky(spd(h)),
    "eigvalsh": lambda h, p: torch.linalg.eigvalsh(spd(h)),
    "svdvals": lambda h, p: torch.linalg.svdvals(h),
    "qr": lambda h, p: torch.linalg.qr(square(h))[1],
    "pinv": lambda h, p: torch.linalg.pinv(h),
    "matrix_exp": lambda h, p: torch.matrix_exp(h[:, :4]),
}
ALL = {**NORMS, **OTHERS}
REFUSED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "batch_norm": lambda h, p: batch_norm(h, p, True),
    "batch_norm of torch": lambda h, p: torch.batch_norm(
        h.view(2, 2, 6), p["s"][:2], p["t"][:2], None, None, True, 0.1, 1e-5, False
    ),
    "native_batch_norm": lambda h, p: torch.native_batch_norm(h, p["s"], p["t"], None, None, True, 0.1, 1e-5)[0],
    "batch_norm of aten": lambda h, p: ops.aten.batch_norm(h, None, p["t"], None, None, True, 0.1, 1e-5, False),
    "batch_norm of a module": lambda h, p: module(nn.BatchNorm2d(2, **F64), h.view(2, 2, 2, 3), p),
    "batch_norm by keyword": lambda h, p: F.batch_norm(h, None, None, training=True),
    "instance_norm": lambda h, p: F.instance_norm(h.view(2, 2, 6), weight=p["s"][:2], bias=p["t"][:2]),
    "instance_norm of torch": lambda h, p: torch.instance_norm(
        h.view(2, 2, 6), p["s"][:2], None, None, None, use_input_stats=True, momentum=0.1, eps=1e-5, cudnn_enabled=False
    ),
    "instance_norm of a module": lambda h, p: nn.InstanceNorm1d(2, **F64)(h.view(2, 2, 6)),
    "solve": lambda h, p: torch.linalg.solve(square(h), h),
    "det": lambda h, p: torch.linalg.det(A=square(h)),
    "det of a tensor": lambda h, p: square(h).det(),
    "slogdet": lambda h, p: torch.slogdet(square(h)).logabsdet,
    "slogdet of aten": lambda h, p: ops.aten.slogdet.default(square(h))[1],
    "logdet": lambda h, p: spd(h).logdet(),
    "householder_product": lambda h, p: torch.linalg.householder_product(square(h), p["s"][:4]),
    "solve_ex": lambda h, p: torch.linalg.solve_ex(square(h), h)[0],
    "tensorsolve": lambda h, p: torch.linalg.tensorsolve(square(h).view(2, 2, 4), p["s"][:4].view(2, 2)),
    "cholesky_inverse": lambda h, p: torch.cholesky_inverse(square(h).tril()),
    "scatter_reduce": lambda h, p: h.scatter_reduce(1, INDEX, h * p["s"], reduce="prod"),
    "_native_batch_norm_legit": lambda h, p: ops.aten._native_batch_norm_legit.no_stats(
        h, p["s"], p["t"], True, 0.1, 1e-5
    )[0],
}


def loss(f: Callable[[Tensor, Any], Tensor], p: Any, x: Tensor) -> Tensor:
    """A loss that is linear in no element of what the operator returns."""
    out = f(x * p["w"], p)
    return (out * (1 + torch.arange(out.numel(), dtype=out.dtype).view(out.shape) / 3)).sin().sum()


def tangent() -> Any:
    """A direction."""
    return fshard.tree.map(lambda x: x.flip(0).cos(), params())


def expected(f: Callable[[Tensor, Any], Tensor], ranks: int) -> Any:
    """The sum of torch's products over the ranks, forward over reverse."""
    products = [jvp(grad(partial(loss, f)), (params(), data(r)), (tangent(), 0 * data(r)))[1] for r in range(ranks)]
    return fshard.tree.map(lambda *xs: torch.stack(xs).sum(0), *products)


def product(mesh: Any, f: Callable[[Tensor, Any], Tensor], jitted: bool = False) -> Any:
    """The gathered product of `hvp`."""
    plan = fshard.make_plan(params(), mesh)
    v = fshard.shard_params(tangent(), plan)
    fn = fshard.hvp(lambda p, x: fshard.Sum(loss(f, p, x)))
    fn = fshard.jit(fn, backend="eager") if jitted else fn
    return fshard.gather_params(fn(fshard.shard_params(params(), plan), v, data(mesh.get_rank() if mesh else 0)))


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """Layer normalization without torch's."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def torchs(x: Tensor, weight: Tensor) -> Tensor:
    """Layer normalization by torch."""
    return F.layer_norm(x, (6,), weight)


def along(norm: Callable[[Tensor, Tensor], Tensor], h: Tensor, p: Any) -> Tensor:
    """A derivative of a norm in a direction, inside a loss."""
    return jvp(lambda x: norm(x, p["s"]), (h,), (p["t"].expand(4, 6),))[1]


def slope(norm: Callable[[Tensor, Tensor], Tensor], h: Tensor, p: Any) -> Tensor:
    """A gradient of a norm, inside a loss."""
    return grad(lambda x: (norm(x, p["s"]) * p["t"]).sin().sum())(h)


def close(a: Any, b: Any) -> bool:
    """Whether two trees agree to 1e-10 of the largest element."""
    return apart(a, b) < 1e-10 * max(1.0, *(float(x.abs().max()) for x in fshard.tree.leaves(b)))


@pytest.mark.parametrize("name", ALL)
def test_products_of_operators(name: str) -> None:
    """`hvp` of a loss with any of these operators is right: otherwise curvature would be silently wrong."""
    assert close(product(None, ALL[name]), expected(ALL[name], 1))


@pytest.mark.parametrize("name", ALL)
def test_products_of_operators_over_ranks(name: str) -> None:
    """Two ranks with different data add up to the same products: otherwise sharding would alter an operator."""
    wanted = expected(ALL[name], 2)
    assert all(close(found, wanted) for found in simulated(product, ALL[name], shard=2))


@pytest.mark.parametrize("inside", [along, slope])
def test_derivatives_inside_a_loss(inside: Callable[..., Tensor]) -> None:
    """Derivatives inside a loss are right too: otherwise `hvp` of a physics-informed loss would be silently wrong."""
    assert close(product(None, partial(inside, torchs)), expected(partial(inside, by_hand), 1))


@pytest.mark.parametrize("name", NORMS)
def test_values_are_those_of_torch(name: str) -> None:
    """What is made of other operators has torch's values: otherwise `hvp` would be of another loss."""
    h = data(0) * params()["w"]
    wanted = ALL[name](h, params())
    with Elementary():
        found = ALL[name](h, params())
    assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
    assert apart(found, wanted) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_are_those_of_torch(dtype: torch.dtype) -> None:
    """Norms of few bits are computed in float32 and rounded once: otherwise `hvp` would lose the small differences."""
    x = (100 + rand(4, 6, seed=1)).to(dtype).T.contiguous().T
    wanted = F.layer_norm(x, (6,), params()["s"].float(), params()["t"].float())
    with Elementary():
        found = F.layer_norm(x, (6,), params()["s"].float(), params()["t"].float())
    assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
    assert apart(found, wanted) < (2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_operators_that_are_refused(name: str) -> None:
    """The other operators with wrong second derivatives are errors that name them: otherwise they would be silent."""
    plan = fshard.make_plan(params())
    sharded = fshard.shard_params(params(), plan)
    with pytest.raises(ValueError, match=f"hvp: the second derivatives of .*{name.split()[0]}.* are wrong in torch"):
        fshard.hvp(partial(loss, REFUSED[name]))(sharded, sharded, data(0))


def test_operators_of_other_libraries_are_let_through() -> None:
    """A user's operator with the name of one of torch's is called: otherwise a right loss would be refused."""
    mine = torch.library.custom_op(
        "fshard_test_elementary::batch_norm", lambda x: 2 * x, mutates_args=(), schema=SCHEMA
    )
    with Elementary():
        assert torch.equal(mine(torch.ones(2)), 2 * torch.ones(2))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: F.layer_norm(p["w"], (5,)), "normalized_shape"),
        (lambda p: F.layer_norm(p["w"], (6,), p["w"][:, :1].expand(4, 6)[:, :3]), "weight"),
    ],
)
def test_wrong_arguments_are_torchs_errors(call: Callable[[Any], Tensor], said: str) -> None:
    """Arguments that torch refuses stay refused, in its words: otherwise `hvp` would broadcast them silently."""
    sharded = fshard.shard_params(params(), fshard.make_plan(params()))
    with pytest.raises((RuntimeError, ValueError), match=said):
        fshard.hvp(lambda p: call(p).sum())(sharded, sharded)


def test_as_a_graph() -> None:
    """A jitted product has the same operators: otherwise compiling would bring the wrong derivatives back."""
    f = ALL["layer_norm"]
    assert close(product(None, f, jitted=True), expected(f, 1))


@pytest.mark.parametrize("name", ["layer_norm", *REFUSED])
def test_torch_is_still_wrong(name: str) -> None:
    """When torch mends an operator, elementary.py can let it go: without this test nobody would notice."""
    fn = partial(loss, {**ALL, **REFUSED}[name])
    p, x, v = params(), data(0), tangent()
    right = jvp(grad(fn), (p, x), (v, 0 * x))[1]
    reverse_over_forward = grad(lambda p: jvp(fn, (p, x), (v, 0 * x))[1])(p)
    words = f"torch mends {name}: remove it from fshard/derivatives/elementary.py"
    assert apart(reverse_over_forward, right) > 1e-4, words
