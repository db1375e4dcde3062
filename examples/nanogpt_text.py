"""The text of `nanogpt.py`: files, their split into training and validation, and windows of it."""

import hashlib
import random
import sysconfig
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_SHARE = 20  # one byte in 20 is for validation
# Tables of character encodings and help texts are not code, and near copies would be in both parts of the split.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

Batch = dict[str, Tensor]


def find_files(data: Path | None) -> list[tuple[str, Path]]:
    """The files to read, each with its name relative to the folder; without one, the standard library's source."""
    root = data or Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        return [(root.name, root)]
    skipped, files = set() if data else SKIPPED, root.rglob("*" if data else "*.py")
    named = [(path.relative_to(root), path) for path in files if path.is_file()]
    return [
        (name.as_posix(), path)
        for name, path in named
        if not any(part.startswith(".") or part in skipped for part in name.parts)
    ]


def split(files: Sequence[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Split into training and validation text: whole files, ordered by a hash of their names. A single file is cut."""
    texts = [text for _, text in sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).digest())]
    total = sum(map(len, texts))
    if len(texts) == 1:
        cut = total - total // VALIDATION_SHARE
        return texts[0][:cut], texts[0][cut:]
    num = 1 + sum(end * VALIDATION_SHARE < total for end in accumulate(map(len, texts)))
    num = min(num, len(texts) - 1)
    return b"".join(texts[num:]), b"".join(texts[:num])


def read_text(data: Path | None, context: int, most: int) -> tuple[bytes, bytes]:
    """Training text, and at most so many bytes of validation text in whole windows. ValueError for too little text."""
    files = [(name, text) for name, path in find_files(data) if (text := path.read_bytes())]
    text, valid = split(files) if files else (b"", b"")
    if min(len(text), len(valid)) <= context:
        raise ValueError(
            f"--data {data}: {len(text)} bytes for training and {len(valid)} for validation, and each part needs more "
            f"than the {context} of --context"
        )
    return text, valid[: min(most, len(valid)) // context * context]


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_windows(text: Tensor, context: int, seed: int, step: int, rows: range) -> Batch:
    """Rows of the batch of a step: (rows, context) tokens, and what follows each of them.

    Seed, step and row alone decide a window. So there is no position in the data to save, and it does not matter which
    rank has the row.
    """
    starts = [random.Random(f"{seed} {step} {row}").randrange(len(text) - context) for row in rows]
    windows = text[torch.tensor(starts)[:, None] + torch.arange(context + 1)].long()
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def all_windows(text: bytes, context: int) -> Batch:
    """All windows of a text: every byte is a target once. The input before the first byte is a newline."""
    tokens, targets = (as_tensor(t).long().view(-1, context) for t in (b"\n" + text[:-1], text))
    return {"tokens": tokens, "targets": targets}
