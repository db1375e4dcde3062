"""The lines of the user's code in a stack of frames or a traceback."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from types import FrameType

import torch

# prefixes of the names of files that are not the user's: fshard, torch, and generated code
NOT_THE_USER = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    "<eval_with_key>",
    "<frozen ",
    "<string>",
    os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_")),
)


def call_site(frame: FrameType | None = None) -> str:
    """Return "file:line" of the innermost frame of the user's code, from `frame` outwards."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def frame_of(failure: BaseException) -> traceback.FrameSummary:
    """Return the innermost frame of the user's code that an exception passed through, else the innermost of all."""
    frames = traceback.extract_tb(failure.__traceback__)
    users = [f for f in frames if not f.filename.startswith(NOT_THE_USER) and "site-packages" not in f.filename]
    return (users or list(frames))[-1]
