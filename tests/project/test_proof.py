"""Cells of docs/proof.md: programs in fshard end where plain torch ends."""

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from support.benchmarks import benchmarks  # noqa: F401  # a fixture
from support.worlds import gloo

PROGRAMS = ["latent_diffusion", "grpo_lora", "vqgan", "dlrm", "mae_vit", "flow", "ppo", "fixed_point", "gauss_newton"]
WAYS = ["one device", "2 ranks", "3 ranks", "4 ranks", "2 x 2", "resumed, 2 to 3 ranks"]
MOST = 1e-11  # in float64

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_where_plain_torch_ends(name: str, way: str) -> None:
    """fshard would train a program otherwise than plain torch, or otherwise after it was resumed."""
    import proof

    assert max(proof.difference(rank, proof.plain(name)) for rank in proof.endings(name, way)) < MOST


def trained_in_a_process(mesh: Any, folder: str) -> list[Any]:
    """Endings of all programs in this process, a rank."""
    sys.path.insert(0, folder)
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's first use of jvp warns
    import proof

    return [proof.trained(mesh, name) for name in PROGRAMS]


def test_programs_in_processes() -> None:
    """A program would end elsewhere in processes than in plain torch."""
    import proof

    for rank in gloo(trained_in_a_process, str(proof.PAGE.parents[1] / "benchmarks")):
        assert max(proof.difference(end, proof.plain(name)) for end, name in zip(rank, PROGRAMS, strict=True)) < MOST


def of_one_rank(count: Any) -> Callable[[Any], Any]:
    """Return a `mean` that gives every rank the same weight."""
    return lambda rows: count(rows.mean(), 1)


@pytest.mark.parametrize("name", ["dlrm", "vqgan", "ppo"])
def test_a_wrong_mean_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference would be small for a program that averages ranks with unequal numbers of rows alike."""
    import proof

    import fshard

    program = proof.program_of(name)
    monkeypatch.setattr(program, "mean", of_one_rank(fshard.Mean))
    assert max(proof.difference(rank, proof.plain(name)) for rank in proof.endings(name, "2 ranks")) > 1e-6


def test_other_parameters_are_an_error() -> None:
    """A parameter that one of the endings lacks, or that is NaN, would not be compared."""
    import proof

    losses, params = proof.plain("flow")
    with pytest.raises(ValueError, match=r"other names or shapes: \[\('more', 4\)\]"):
        proof.difference((losses, params | {"more": losses}), (losses, params))
    broken = {path: x * float("nan") if "enter" in path else x for path, x in params.items()}
    assert proof.difference((losses, broken), (losses, params)) == float("inf")


def test_the_page_has_every_program_and_way() -> None:
    """The table would lack a program or a way, or show a difference that is none of rounding."""
    import page
    import proof

    text = proof.PAGE.read_text()
    table = text.partition(proof.BEGIN)[2].partition(page.END)[0]
    assert list(proof.PROGRAMS) == PROGRAMS == re.findall(r"^\| `(\w+)`:", table, re.MULTILINE)
    assert [way for way in proof.WAYS if way != "2 gloo processes"] == WAYS
    assert f"| program | {' | '.join(proof.WAYS)} |" in table
    cells = [float(cell) for cell in re.findall(r"\de-\d+", table)]
    assert len(cells) == len(PROGRAMS) * len(proof.WAYS)
    assert max(cells) < MOST
