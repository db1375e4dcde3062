"""Ranks that do different things, fail or die: an error on every rank that is left, and no process stays behind."""

import os
from functools import partial
from unittest import mock

import faults
import pytest
import torch
from faults import ALIVE, PLACES, Fault
from worlds import fates, gloo, simulated

import fshard
from fshard import host, optim

# how many random faults; `FSHARD_FAULTS=50` tries more of them than there is time for every day
NUM = int(os.environ.get("FSHARD_FAULTS", "3"))


def names_both(text: str, fault: Fault) -> bool:
    """A sentence has the rank at fault, another, what each did, and both lines of the user's."""
    other = min({*range(fault.size)} - {fault.rank})
    said = [part for part in text.split("; ") if "faults.py:" in part]
    return len(said) == 2 and all(any(f"rank {r} " in part for part in said) for r in (fault.rank, other))


@pytest.mark.parametrize("over", ["host", "gloo"])
def test_a_fault_is_an_error_on_every_rank(over: str) -> None:
    """Each kind at each place, in one world, which goes on as if nothing had been; by two ways between ranks."""
    ranks = fates(faults.in_a_row, over, ALIVE)
    assert [rank.error for rank in ranks] == [None, None]
    for number, rank in enumerate(ranks):
        texts, as_before = rank.value
        assert as_before
        for fault, text in zip(ALIVE, texts, strict=True):
            if fault.kind == "raise" and fault.rank == number:
                assert text == "ValueError: boom", fault
                continue
            assert text.startswith("MismatchError: "), (fault, text)
            assert names_both(text, fault), (fault, text)
            if fault.kind == "raise":
                assert f"rank {fault.rank} raised ValueError: boom at" in text, text
            elif fault.kind == "return":
                assert f"rank {fault.rank} has returned, having last called" in text, text
            else:
                assert "All ranks must call the same collectives in the same order." in text, text


def ended_well(fault: Fault) -> None:
    """Every rank that is left has an error that names a call, or is the one that raised; no exit code is zero."""
    for number, rank in enumerate(fates(faults.fatal, fault, shard=fault.size)):
        if number == fault.rank and fault.kind == "kill":
            assert (rank.error, rank.exitcode) == (None, -9), fault
        elif number == fault.rank and fault.kind == "raise":
            assert (rank.error, rank.exitcode) == ("ValueError: boom", 1), fault
        else:
            assert rank.exitcode == 1, (fault, rank)
            assert (rank.error or "").startswith("MismatchError: "), (fault, rank)
            assert "axis='shard'" in rank.error, (fault, rank)
            gone = f"rank {fault.rank} " if fault.over == "host" else "a peer has gone"
            assert fault.kind != "kill" or fault.checked or gone in rank.error, (fault, rank)


@pytest.mark.parametrize("over", ["host", "gloo"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed(place: str, over: str) -> None:
    """Without a check: the others hear of it from the connection."""
    ended_well(Fault("kill", place, 1, over, 2, checked=False))


@pytest.mark.parametrize("seed", range(NUM))
def test_a_random_fault(seed: int) -> None:
    """Kinds, places, ranks, worlds and ways, in processes of their own."""
    ended_well(faults.drawn(seed))
