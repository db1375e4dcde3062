"""Which cases of tests are run, and the law on what they cost."""

from pathlib import Path

import costs
import drawn
import pytest

ROOT = Path(__file__).parents[2]
CASES = [*range(101)]
PLAIN = ("-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")


@pytest.mark.parametrize("rate", [0.07, 0.5, 1, 7.3, 40, 101, 1000])
def test_seeds_one_after_the_other_draw_every_case(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """A case that is never drawn is a test that cannot fail."""
    every, mean = list[int](), min(rate, len(CASES))
    for seed in range(int(len(CASES) / mean) + 1):
        monkeypatch.setenv(drawn.SEED, str(700_000 + seed))
        of_seed = drawn.drawn("a test", CASES, rate)
        assert of_seed == drawn.drawn("a test", CASES, rate)
        assert len(of_seed) in (int(mean), int(mean) + 1)
        every += of_seed
    assert {*every} == {*CASES}


TESTS = """
import pytest

def test_another():
    pass

{mark}
@pytest.mark.parametrize("x", range(28))
def test_it(x):
    pass
"""


# cases of 28 in 14 runs with 14 seeds: in `make test`, then in CI
@pytest.mark.parametrize(
    ("seconds", "law", "of_test", "of_ci"),
    [
        *((0.0, False, 14 * 28, 14 * 28), (0.02, False, 14 * 10, 14 * 28), (0.4, False, 7, 14 * 5)),
        *((0.4, True, 14 * 5, 14 * 28), (1.9, False, 1, 14 * 2), (3.0, False, 0, 14 * 2), (3.0, True, 0, 14 * 7)),
    ],
)
def test_a_test_is_drawn_by_what_it_costs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, seconds: float, law: bool, of_test: int, of_ci: int
) -> None:
    """Everyone who changes a line waits for it; a case that CI does not run in 14 days is one that nobody does."""
    pytester.makepyfile(test_a=TESTS.format(mark="@pytest.mark.law" * law))
    pytester.makeini("[pytest]\nmarkers =\n    law: first")
    monkeypatch.setattr(drawn, "COSTS", {"test_a.py::test_it": seconds})
    monkeypatch.setattr(drawn, "BUDGET", 0.2)
    monkeypatch.setattr(drawn, "CI_BUDGET", 2.0)
    items, _ = pytester.inline_genitems(*PLAIN)
    ran: dict[bool, list[str]] = {False: [], True: []}
    for ci, names in ran.items():
        monkeypatch.setenv("FSHARD_CI", "1") if ci else monkeypatch.delenv("FSHARD_CI", raising=False)
        for seed in range(drawn.SEEDS):
            monkeypatch.setenv(drawn.SEED, str(seed))
            chosen = items[:]
            drawn.pytest_collection_modifyitems(items[0].config, chosen)
            assert [x.name for x in chosen].index("test_another") == (len(chosen) - 1 if law else 0)
            names += [x.name for x in chosen if x.name != "test_another"]
    assert len(ran[False]) in (of_test, of_test + 1)
    assert len(ran[True]) == pytest.approx(of_ci, rel=0.3)
    assert len({*ran[True]}) == 28
    assert {*ran[False]} <= {*ran[True]}


@pytest.mark.parametrize("most", [0.0, 1e9])
def test_a_function_that_takes_too_much_fails_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    """Everyone who changes a line waits for it."""
    monkeypatch.setattr(costs, "MOST", most)
    monkeypatch.setattr(costs, "COSTS", {f"{pytester.path.name[:-1]}.py::test_known": 10.0})
    pytester.makeconftest(
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        item.user_properties.append(('in make test', 'marked' not in item.name))"
    )
    pytester.makepyfile(
        "".join(f"def {name}():\n    sum(range(10**6))\n" for name in ("test_it", "test_marked", "test_known"))
    )
    result = pytester.runpytest_inprocess("-p", "costs", *PLAIN, "--costs", "1")
    lines = "\n".join(result.outlines)
    assert result.ret == (1 if most == 0 else 0), lines
    assert ("test_it takes" in lines) == (most == 0)
    assert "test_marked takes" not in lines
    assert "test_known takes" not in lines
    assert "| all | 3 | 3 |" in lines


def test_costs_are_written(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is drawn would not be in the table, or a cheap one would."""
    table = pytester.path / "costs.json"
    monkeypatch.setattr(costs, "TABLE", table)
    monkeypatch.setattr(costs, "spent", iter([0.0, 1.0, 1.0, 1.1]).__next__)
    pytester.makepyfile("def test_it():\n    pass\n\n\ndef test_cheap():\n    pass")
    pytester.runpytest_inprocess("-p", "costs", *PLAIN, "--write-costs")
    assert [*drawn.read(table)] == ["test_costs_are_written.py::test_it"]


def test_the_table_names_tests_that_there_are() -> None:
    """A test that was renamed would be run in full by `make test`."""
    for name in drawn.COSTS:
        file, *_, function = name.split("::")
        text = (ROOT / file).read_text()
        assert f"def {function.split('.')[-1]}(" in text or f"class {function.split('.')[-1]}" in text, name
