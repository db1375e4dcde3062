"""What works through a shard in blocks takes those of a CPU's cache there, and elsewhere ones that fill a device.

Tensors on `meta` stand for those of an accelerator: they have a size, take every operator, and are on no CPU.
"""

from typing import Any

import pytest
import torch
from support.optimizers import TRANSFORMS
from torch.utils._python_dispatch import TorchDispatchMode

from fshard import optim, tree
from fshard.core.storage import block_size
from fshard.layout import norms
from fshard.layout.layout import Leaf
from fshard.layout.row import put
from fshard.optim.matrix import Factors

LARGE = 1 << 24
NUMEL = 2 * LARGE + 5  # three blocks
# Those that run one formula for each element, in blocks; the others are chains of transformations.
BLOCKED = [
    name
    for name, make in TRANSFORMS.items()
    if make().elementwise and make().views and name not in ("add_decayed_weights", "clip", "ema")
]


class Seen(TorchDispatchMode):
    """The operators that ran, the elements of the largest tensor that one of them made, and arguments of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest, self.foreach = 0, 0, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.foreach += [args[:2]] if "_foreach_" in str(func) else []
        views = func.is_view or func._schema.is_mutable
        made = [] if views else [x for x in tree.leaves([out]) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *(x.numel() for x in made)])
        return out


@pytest.mark.parametrize("name", BLOCKED)
def test_an_update_makes_no_tensor_as_large_as_a_shard(name):
    """An update would need temporaries as large as the parameters, or a launch of many kernels."""
    tx = TRANSFORMS[name]()
    params, grads = (torch.empty(NUMEL, device="meta") for _ in range(2))
    state, found_inf = tx.init(params), torch.zeros((), device="meta")
    with Seen() as seen:
        tx.step(grads, state, params, found_inf, donate=True)
    assert seen.largest <= LARGE
    assert seen.calls < 3 * 60


def test_a_fused_update_computes_nothing_besides():
    """A GPU would start six kernels more in every update, for bias corrections that the fused kernel makes itself."""
    tx, params = optim.adamw(0.1), torch.ones(64)
    state, found_inf = tx.init(params), torch.zeros(())
    with Seen() as seen:
        tx.step(params, state, params, found_inf, donate=True)
    assert seen.calls <= 7


def test_eight_bits_take_few_operators_for_each_block():
    """An update with 8-bit moments would spend its time starting operators."""
    tx, params = optim.adamw_8bit(0.1), torch.empty(NUMEL, device="meta")
    state = tx.init(params)
    with Seen() as seen:
        tx.update(params, state, params)
    assert seen.calls < 3 * 120


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_long_rows_are_as_right_as_those_of_short_ones(p, dtype):
    """On CPUs torch sums powers in a few floats, which lose small addends: norms of long rows would be too small."""
    x = torch.full(((1 << 22) + 3,), 0.9, dtype=dtype)
    expected = x[0].double() * x.numel() ** (1 / p)
    for found in (norms.global_norm(x, p), norms.leaf_norms([x], p)[0]):
        assert abs(found.double() / expected - 1) < 1e-4, found


@pytest.mark.parametrize("name", ["global_norm", "leaf_norms", "gram"])
def test_exact_norms_take_few_operators_for_each_block(name):
    """An exact norm would spend its time starting operators."""
    x = torch.empty(NUMEL, device="meta")
    with Seen() as seen:
        norms.gram([x, x]) if name == "gram" else getattr(norms, name)(x, exact=True)
    assert seen.calls < 3 * 40


def test_a_block_stays_in_the_cache_of_a_cpu():
    """A CPU would read every block from memory several times, or a GPU start a kernel for each."""
    assert block_size(torch.empty(0), 64) == 64
    assert block_size(torch.empty(0, device="meta"), 64) == LARGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("starts", [[0, 6, 8], [3, 10, 20]])
def test_tensors_are_put_by_one_operator(dtype, starts):
    """Copying the gradients of a unit would start a kernel for each leaf, leave a gap unzeroed, or add wrongly."""
    parts = [torch.randn(2, 3).T, torch.randn(()).expand(2), torch.randn(1)]
    for add in (False, True):
        place = torch.full((25,), 7.0, dtype=dtype)
        expected = place.clone() if add else torch.zeros_like(place)
        for part, start in zip(parts, starts, strict=True):
            expected[start : start + part.numel()] += part.reshape(-1)
        with Seen() as seen:
            put(place, parts, starts, add)
        assert torch.equal(place, expected)
        views, gaps = 2 * len(parts), 0 if add else len(parts) + 1
        unlike = 2  # the strides of two parts
        assert seen.calls <= views + 1 + unlike + gaps + bool(gaps)
    put(place, [], [])
    assert not place.any()


@pytest.mark.parametrize("add", [False, True])
def test_one_part_of_other_strides_does_not_slow_the_others(add):
    """On a GPU torch would start a kernel for each gradient of a unit with one channels-last convolution."""
    parts = [torch.ones(5), torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.ones(2, 3)]
    with Seen() as seen:
        put(torch.zeros(80), parts, [0, 8, 60], add)
    into, copied = seen.foreach[0]
    assert [x.stride() for x in into] == [x.stride() for x in copied] == [(1,), (3, 1)]


@pytest.mark.parametrize(("matrices", "n"), [(1, 4), (3, 1), (4, 3)])
def test_rows_are_added_to_their_matrices_wherever_they_are_cut(matrices, n):
    """Adafactor's column sums would be wrong where a shard begins or ends inside a matrix."""
    leaf = Leaf("w", (matrices, n, 2), torch.float64)
    for first in range(matrices * n):
        for last in range(first, matrices * n + 1):
            rows = torch.randint(9, (last - first, 2)).double()
            sums, expected = torch.ones(2, matrices, 2, dtype=torch.float64)
            Factors(leaf, n, 2).add_by_matrix(sums, rows, first)
            assert torch.equal(sums, expected.index_add(0, torch.arange(first, last) // n, rows))
