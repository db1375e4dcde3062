"""AdamW with 8-bit moments: a block of elements is stored as codes and one scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import tree
from ..core.arguments import check_hyperparams, check_whole
from ..core.scalars import Number
from ..core.storage import block_size
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parts, layout_of, without_padding
from ..update import kernels
from ..update.base import Needs, Transform, checked, start_count
from ..update.elementwise import Rate, adam_corrections, with_rate

_CACHED_CODES = 1 << 15  # elements; these and their codes fit a CPU's cache
Books = tuple[Tensor, Tensor]  # code books of the first and the second moment


class Quantised(NamedTuple):
    """A moment: codes of elements (uint8, code 0 is the value 0) and scales of blocks (float32)."""

    codes: Parts
    scales: Parts


class Adam8bitState(NamedTuple):
    """Number of updates made (float32, 0-d) and two moments."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu: Quantised
    nu: Quantised


def code_book(signed: bool) -> Tensor:
    """The 256 values of the codes, in [-1, 1] or [0, 1]; code 0 is zero.

    Dynamic tree quantisation: seven decades, each divided evenly, larger decades into more values.

    >>> code_book(signed=False)[[0, 255]]
    tensor([0., 1.])

    Source: Dettmers et al., 8-bit optimizers via block-wise quantization (2022).
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64, device="cpu")
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        values += [middles, -middles] if signed else [middles]
    book = torch.cat(values).sort().values
    return book.roll(-int((book == 0).nonzero())).float()


def encode(x: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """(n, block) -> nearest codes (n, block), and scales (n,), the blocks' largest magnitudes.

    >>> codes, scales = encode(torch.tensor([[0.0, 4.0]]), code_book(signed=False))
    >>> codes, scales
    (tensor([[  0, 255]], dtype=torch.uint8), tensor([4.]))
    """
    rising, order = book.to(x.device).sort()
    scales = x.abs().amax(1)
    shares = x / torch.where(scales > 0, scales, 1).unsqueeze(1)  # (n, block), in [-1, 1]
    # between two midpoints of neighbouring values, the value between these midpoints is nearest
    return order[torch.bucketize(shares, (rising[1:] + rising[:-1]) / 2)].to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, book: Tensor) -> Tensor:
    return book.to(codes.device)[codes.int()] * scales.unsqueeze(1)


def _of_codes(layout: Layout) -> Layout:
    leaves = tuple(replace(leaf, dtype=torch.uint8) for leaf in layout.leaves)
    return replace(layout, source=("codes", 1, layout.source), leaves=leaves, origin=None)


def _of_scales(layout: Layout, block: int) -> Layout:
    leaves = tuple(
        replace(leaf, dtype=torch.float32, shape=(-(-leaf.numel // block),), split=None) for leaf in layout.leaves
    )
    rows = tuple(replace(row, block=block) for row in layout.rows)
    return replace(layout, source=("scales", block, layout.source), leaves=leaves, rows=rows, origin=None)


def _check_blocks(layout: Layout, block: int) -> None:
    """ValueError if a block would lie in two leaves or on two ranks; on one rank, the check is the same."""
    numbers = [n for n in layout.numbers if layout.flat and layout.leaves[n].numel]
    in_tensor = Counter(layout.row_of[n].tensor for n in numbers)
    for number in numbers:
        row, leaf = layout.row_of[number], layout.leaves[number]
        if leaf.split is not None and leaf.split.order:  # other splits reorder elements, and so change blocks
            raise ValueError(
                f"adamw_8bit: leaf {leaf.path!r} is {leaf.split}: expected leaves that are split along dim 0 in one "
                "block, whose elements lie as in the whole leaf. Give this one another optimizer (optim.by_label)"
            )
        ragged = layout.packed and in_tensor[row.tensor] > 1 and layout.leaves[number].numel % block
        if ragged or row.step(number, layout.packed) % block:
            advice = f"lay parameters out with make_plan or zero and block={block}"
            if leaf.split is not None:
                advice += f", and split leaves whose parts begin at multiples of {block} elements"
            if layout.packed:  # rows have no padding between leaves
                advice += f", and label for it only leaves whose number of elements is a multiple of {block}"
            raise ValueError(
                f"adamw_8bit: leaf {layout.leaves[number].path!r}: a block of {block} elements would lie in two "
                f"leaves or on two ranks: {advice}"
            )


def _check_state(state: Adam8bitState, rows: Sequence[Tensor], block: int) -> None:
    old_block = state.mu.scales.layout.source[1]
    moment = zip(state.mu.codes.tensors, state.mu.scales.tensors, strict=True)
    sizes = [(row.numel(), -(-row.numel() // block)) for row in rows]
    if old_block != block or [(codes.numel(), scales.numel()) for codes, scales in moment] != sizes:
        raise ValueError(
            f"optim.adamw_8bit: the state was made with blocks of {old_block} elements, here of {block}, or for other "
            "parameters: make it with this optimizer's own init"
        )


def adamw_8bit(
    lr: Rate, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0.01, block: int = 256
) -> Transform:
    """AdamW with moments in 8 bits, in blocks of `block` elements of a leaf: 2 bytes for each element instead of 8.

    `lr`, `b1`, `b2`, `eps` and `weight_decay` as for `adamw`. Each update decodes the moments, makes AdamW's step in
    float32 and encodes the new moments. If parameters are sharded, the plan must not cut blocks:
    `make_plan(..., block=256)`. The result does not depend on the number of ranks. Unlike in the paper, a second moment
    above zero is never rounded to zero.

    >>> tx = adamw_8bit(0.1, weight_decay=0.0)
    >>> tx.update(torch.tensor([2.0]), tx.init(torch.tensor([1.0])), torch.tensor([1.0]))[0]
    tensor([-0.1000])

    Source: Dettmers et al., 8-bit optimizers via block-wise quantization (2022).
    """
    check_hyperparams("adamw_8bit", lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    check_whole("optim.adamw_8bit: block", block, what="a number of elements")
    numbers = [code_book(signed).tolist() for signed in (True, False)]
    plain = with_rate(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, decoupled=True)

    def init(params: Tree) -> Adam8bitState:
        layout, rows = layout_of(params), tree.leaves(params)
        _check_blocks(layout, block)

        def zero() -> Quantised:
            codes = [torch.zeros_like(row, dtype=torch.uint8) for row in rows]
            scales = [torch.zeros(-(-row.numel() // block), dtype=torch.float32, device=row.device) for row in rows]
            return Quantised(Parts(_of_codes(layout), codes), Parts(_of_scales(layout, block), scales))

        return Adam8bitState(start_count(params), zero(), zero())

    def update(grads: Tree, state: Adam8bitState, params: Tree = None, **extra: object) -> tuple[Tree, Adam8bitState]:
        _check_state(state, tree.leaves(params), block)
        constants = {**plain(state.count), **adam_corrections(state.count, b1, b2)}
        moments = [*state.mu, *state.nu]
        rows_of_grads = tree.leaves(without_padding(grads))  # a NaN in padding would set its block's scale
        columns = zip(tree.leaves(params), rows_of_grads, *(m.tensors for m in moments), strict=True)
        rows = [_update_row(constants, _books(numbers, p.device), block, p, *others) for p, *others in columns]
        updates = tree.unflatten(tree.flatten(grads)[1], [row[0] for row in rows])
        new_moments = [Parts(old.layout, [row[i + 1] for row in rows]) for i, old in enumerate(moments)]
        return updates, Adam8bitState(state.count + 1, Quantised(*new_moments[:2]), Quantised(*new_moments[2:]))

    needs = Needs("adamw_8bit", Adam8bitState, params=True, real=True)
    return checked(Transform(init, update, over="tree", draws=False), needs)


@cache
def _kept_books(device: torch.device) -> Books:
    return code_book(signed=True).to(device), code_book(signed=False).to(device)


def _books(numbers: Sequence[Sequence[float]], device: torch.device) -> Books:
    """The code books on a device, cached because a copy from the host would synchronize."""
    if not is_tracing() and not torch.compiler.is_dynamo_compiling():
        return _kept_books(device)
    # a graph must not capture a cached tensor; torch copies these constants to the device once, while tracing
    mu, nu = (torch.tensor(book, dtype=torch.float32, device=device) for book in numbers)
    return mu, nu


def _blocks(x: Tensor, block: int, chunk: int) -> tuple[Tensor, ...]:
    """Return stacks (at most `chunk`, block) of blocks; zeros pad the last block."""
    flat = x.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % block)).view(-1, block).split(chunk)


def _update_row(
    constants: kernels.Constants, books: Books, block: int, p: Tensor, g: Tensor, *moments: Tensor
) -> list[Tensor]:
    """The change of the parameter, then codes and scales of both moments."""
    chunk = max(1, block_size(p, _CACHED_CODES) // block)
    change: kernels.Reference = partial(kernels.by_adam, **kernels.constants_beside(constants, p))
    wide = [_blocks(x.float(), block, chunk) for x in (p, g)]
    codes = [_blocks(x, block, chunk) for x in moments[::2]]  # padded with code 0, the value 0
    scales = [x.split(chunk) for x in moments[1::2]]  # (at most `chunk`,) each
    results: list[list[Tensor]] = [[] for _ in range(5)]
    for p_part, g_part, mu, nu, mu_scale, nu_scale in zip(*wide, *codes, *scales, strict=True):
        old = decode(mu, mu_scale, books[0]), decode(nu, nu_scale, books[1])
        delta, new = change(p_part, g_part, old)
        # a second moment rounded to zero would make a step of mu / eps: code 1 is the least
        least = books[1][1] * new[1].amax(1, keepdim=True)
        pair = [*encode(new[0], books[0]), *encode(torch.where(new[1] > 0, new[1].maximum(least), new[1]), books[1])]
        for into, x in zip(results, (delta, *pair), strict=True):
            into.append(x)
    shapes = [p.shape, *(m.shape for m in moments)]
    dtypes = [p.dtype, *(m.dtype for m in moments)]
    flat = [torch.cat(xs).reshape(-1) for xs in results]
    return [x[: s.numel()].view(s).to(d) for x, s, d in zip(flat, shapes, dtypes, strict=True)]
