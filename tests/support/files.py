"""What the tests of files share: names of leaves, and what the library of safetensors reads of a directory."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from fshard import tree


def plain(params: Any) -> dict[str, Tensor]:
    """The leaves of a tree by name, tied ones in each place."""
    return {name: x.detach() for name, x in zip(tree.paths(params), tree.leaves(params), strict=True)}


def saved(folder: Path) -> dict[str, Tensor]:
    """What the library reads of the files of a directory, by name; no tensor is in two files."""
    files = [load_file(path) for path in folder.glob("model*.safetensors")]
    assert sum(map(len, files)) == len({name for file in files for name in file})
    return dict(sorted(item for file in files for item in file.items()))
