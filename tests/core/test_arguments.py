"""Where the user's code is: what errors say of it."""

import sys
from types import SimpleNamespace

import pytest
import torch

import fshard
from fshard.testing import World


@pytest.mark.parametrize("cell", [("Cell", "In[5]"), None], ids=["a cell", "a module"])
def test_an_error_names_the_cell_of_a_notebook(monkeypatch, cell):
    """In a notebook an error would name a temporary file, with a number that no reader can find again."""
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=lambda file: cell if file == __file__ else None))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    def on_a_rank(mesh):
        if mesh.get_rank() == 0:
            fshard.all_reduce(torch.ones(2), mesh, "shard")

    with pytest.raises(fshard.MismatchError) as error:
        World(shard=2).run(on_a_rank)
    line = on_a_rank.__code__.co_firstlineno + 2
    assert f"all_reduce(float32[2], axis='shard') at {'Cell In[5]' if cell else __file__}:{line}" in str(error.value)


def test_ipython_that_is_only_imported_changes_nothing(monkeypatch):
    """A program that imports IPython, and is no notebook, would get no error with its line."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    with pytest.raises(fshard.MismatchError, match=r"test_arguments\.py:\d+"):
        World(shard=2).run(lambda mesh: mesh.get_rank() or fshard.all_reduce(torch.ones(2), mesh, "shard"))
