"""The pages for people who come from elsewhere name all that they have there."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.amp import GradScaler
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp import ShardingStrategy as Strategy
from torch.nn.parallel import DistributedDataParallel

DOCS = Path(__file__).parents[2] / "docs"
LEFT_OUT = {"self", "module", "params", "device", "defaults", "check_reduction", "kwargs"}


def arguments(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments."""
    return [name for name in inspect.signature(fn).parameters if name not in LEFT_OUT and not name.startswith("_")]


def methods(cls: type) -> list[str]:
    """The public methods that a class defines."""
    return [name for name in vars(cls) if not name.startswith("_")]


ASKED = {
    "from_fsdp.md": [
        *arguments(fully_shard),
        *methods(FSDPModule),
        *arguments(MixedPrecisionPolicy),
        *arguments(FullyShardedDataParallel),
        *(name for name in Strategy.__members__),
        *(name for name in arguments(MixedPrecision) if name != "cast_root_forward_inputs"),
    ],
    "from_ddp.md": [
        *arguments(DistributedDataParallel),
        *arguments(GradScaler),
        *("optimizer_class", "parameters_as_bucket_view", "overlap_with_ddp", "ZeroRedundancyOptimizer"),
        *("no_sync", "Join", "register_comm_hook", "consolidate_state_dict", "add_param_group"),
    ],
}


@pytest.mark.parametrize("page", ASKED)
def test_a_page_names_every_argument(page: str) -> None:
    """A reader would find no counterpart of what their script passes."""
    text = (DOCS / page).read_text()
    missing = [name for name in ASKED[page] if not re.search(rf"\b{name}\b", text)]
    assert not missing, missing


@pytest.mark.parametrize("page", sorted(DOCS.glob("from_*.md")), ids=lambda page: page.name)
def test_a_page_says_of_each_row_what_is_here(page: Path) -> None:
    """A row of a table would have no counterpart, or a pipe in it would break the table."""
    for table in re.findall(r"(?m)(?:^\|.*\n)+", page.read_text()):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}
        assert all(cell.strip() for row in rows[2:] for cell in row[1:])
