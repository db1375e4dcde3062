"""What autograd saves of gathered parameters, and what a loss is handed of them: views of every kind, in every mode."""

import pytest
from support.saved import FROZEN, LOSSES, differences, zoo_params
from support.worlds import simulated


@pytest.mark.parametrize("shard", [2, 1, 3])
def test_saved_views_come_back_as_they_were(shard: int) -> None:
    """A saved view of a gathered buffer would come back with other elements, strides or bits."""
    for found in simulated(differences, LOSSES, zoo_params(), FROZEN, ["zoo"], shard=shard):
        assert not found
