"""Whether ranks have the same: digests compared, and where texts begin to differ."""

from __future__ import annotations

from itertools import zip_longest

import torch

from .comm import Mesh, MismatchError, Ranks, all_gather, all_reduce, along, axis_sizes


def check_same(mesh: Mesh, digest: str, describe: str, what: str) -> None:
    """Raise `MismatchError` on every rank if `digest` differs on any; lines of `describe` say where it begins to."""
    if getattr(mesh, "abstract", False):
        return
    digests = _texts(digest, mesh)
    other = next((i for i, one in enumerate(digests) if one != digests[0]), None)
    if other is None:
        return
    texts = _texts(describe, mesh)
    sentence = f"rank 0 has {{}}; rank {other} has {{}}"
    raise MismatchError(
        f"{what} differs between ranks: {first_difference(texts[0], texts[other], sentence)}. "
        "Build the same tree, in the same order, on all of them."
    )


def _texts(text: str, mesh: Mesh) -> list[str]:
    """Every rank's text, in rank order."""
    data, end = text.encode(), b"\x1e"
    for axis in reversed(axis_sizes(mesh)):
        data = end.join(rows_of_bytes(data, along(mesh, axis)))
    return [row.decode() for row in data.split(end)]


def rows_of_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Every rank's bytes."""
    length = all_reduce(torch.tensor([len(data)], device=ranks.device), ranks, "bytes", op="max").wait()
    x = torch.frombuffer(bytearray(data.ljust(int(length), b"\0")), dtype=torch.uint8).to(ranks.device)
    rows = all_gather(x, ranks, "bytes").wait().view(ranks.size, -1).cpu()
    return [bytes(row.tolist()).rstrip(b"\0") for row in rows]


def first_difference(a: str, b: str, sentence: str) -> str:
    """The first lines in which two descriptions differ, put into a sentence with two holes."""
    end = "nothing more"
    pairs = zip_longest(a.splitlines(), b.splitlines(), fillvalue=end)
    return sentence.format(*next(((x, y) for x, y in pairs if x != y), (end, end)))
