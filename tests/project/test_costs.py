"""Which cases of tests are run, and the law on what they cost."""

import sys
from typing import Any

import costs
import pytest

chosen: Any = next(module for name, module in sys.modules.items() if name == "conftest")
CASES = [*range(101)]


@pytest.mark.parametrize("number", [1, 7, 8, 40, 101, 200])
def test_seeds_one_after_the_other_draw_every_case(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A case that is never drawn is a test that cannot fail."""
    drawn = []
    for seed in range(-(-len(CASES) // number)):
        monkeypatch.setenv(chosen.SEED, str(700_000 + seed))
        drawn.append(chosen._drawn("a test", CASES, number))
        assert drawn[-1] == chosen._drawn("a test", CASES, number)
    assert {case for cases in drawn for case in cases} == {*CASES}
    assert {len(cases) for cases in drawn} == {min(number, len(CASES))}


@pytest.mark.parametrize("most", [0.0, 1e9])
def test_a_function_that_takes_too_much_fails_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    """Everyone who changes a line waits for it."""
    monkeypatch.setattr(costs, "MOST", most)
    pytester.makeconftest(
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        item.user_properties.append(('in make test', 'marked' not in item.name))"
    )
    pytester.makepyfile("def test_it():\n    sum(range(10**6))\n\n\ndef test_marked():\n    sum(range(10**6))")
    result = pytester.runpytest_inprocess("-p", "costs", "-p", "no:cacheprovider", "-p", "no:xdist", "--costs", "1")
    lines = "\n".join(result.outlines)
    assert result.ret == (1 if most == 0 else 0), lines
    assert ("test_it takes" in lines) == (most == 0)
    assert "test_marked takes" not in lines
    assert "| all | 2 | 2 |" in lines
