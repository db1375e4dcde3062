"""Names the examples in docstrings may use; which cases of slow tests are run."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fshard

# By the name of its entry point: where that is installed as well, pytest sees that it has it.
pytest_plugins = ["pytester", "pytest_fshard"]


def shard_of(params: Any) -> fshard.Sharded:
    """A tree on one device, sharded."""
    return fshard.shard_params(params, fshard.make_plan(params))


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, Any]) -> None:
    for module in (fshard.optim, fshard):
        doctest_namespace.update({name: getattr(module, name) for name in module.__all__})
    doctest_namespace.update(torch=torch, shard_of=shard_of)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As in processes of tests; and small tensors are no work for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Of these, which take the most time, every third case is run, or all with FSHARD_ALL=1.
SLOW = {
    "test_200_steps_follow_grad_scaler",
    "test_a_step_under_torch_compile",
    "test_every_kind_of_step",
    "test_steps_with_much_in_flight_are_right",
    "test_training_equals_the_unsharded_oracle",
    "test_what_is_read_late_is_gathered_again",
    "test_where_leaves_lie_changes_no_bit",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out two of three cases of slow tests, unless one is asked for by its name."""
    if os.environ.get("FSHARD_ALL") or any("::" in arg for arg in config.args) or config.option.keyword:
        return
    counts = Counter[str]()
    left_out = []
    for item in items:
        name = getattr(item, "originalname", "")
        if name in SLOW:
            counts[name] += 1
            if counts[name] % 3 != 1:
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
