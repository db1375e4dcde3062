"""Models of timm, which `make` installs in a folder of its own, together with the torchvision that timm imports.

The package index has torchvision built for CUDA alone. With a torch that is built for the CPU, torchvision cannot load
its operators, and its import fails because it adds to two of them that nobody has defined. Here they are defined
without a kernel. In the folder of the other packages torchvision would make transformers fail, which imports it if it
is there.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # the definitions last as long as this object


@contextmanager
def _folder_of_timm() -> Iterator[None]:
    """Imports find timm. Afterwards they do not: processes inherit the path, and import transformers first."""
    folder = str(Path(sys.prefix) / "timm")
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


with _folder_of_timm():
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm


def create(name: str, **config: Any) -> Any:
    """Make a model of timm with random weights."""
    return timm.create_model(name, **config)
