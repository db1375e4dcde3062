"""What ranks heard of a fault."""

import os
from typing import Any

from support.worlds import Fate

# The number of random faults; `FSHARD_FAULTS=50` tries more of them, which takes too long for every day.
NUM = int(os.environ.get("FSHARD_FAULTS", "3"))


def values(ranks: list[Fate]) -> list[Any]:
    """What ranks returned; none of them may have failed."""
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    return [rank.value for rank in ranks]
