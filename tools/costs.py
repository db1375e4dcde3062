"""Processor seconds of tests, by function and by folder, and the law on them: a pytest plugin (CONTRIBUTING.md).

`--costs 20` prints them, `--write-costs` writes those of a case into tests/costs.json, by which cases are drawn.

The seconds of a case are those of its process, of the processes that it has waited for, and of its gloo ranks.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver

import psutil
import pytest
from drawn import BUDGET, CASES, COSTS, IN_TEST, TABLE, function

MOST = 2.0  # seconds of a function in `make test`, all its cases together
MARGIN = 5.0  # by this factor a machine may be slower; what a function imports first is its own, too
SHARE = 0.02  # of all seconds: a machine that is slower still is so for all
_BEFORE = pytest.StashKey[float]()


def spent() -> float:
    """Processor seconds of this process, and of all that it and the server of its gloo ranks have waited for.

    Those of the server itself, which imports torch once, are no test's.
    """
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return sum(os.times()[:4]) + (sum(psutil.Process(server).cpu_times()[2:4]) if server else 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note the seconds of before."""
    item.stash[_BEFORE] = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Give a case's seconds to its report."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("seconds", spent() - item.stash[_BEFORE]))


class Costs:
    """What all cases of each function have taken: a plugin of the process that prints."""

    def __init__(self, shown: int, writes: bool):
        self.shown, self.writes = shown, writes
        self.seconds, self.cases, self.in_test = Counter[str](), Counter[str](), Counter[str]()
        self.of = dict[str, int]()  # cases that a function has

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a case."""
        if report.when == "teardown":
            properties, name = dict(report.user_properties), function(report.nodeid)
            seconds = float(str(properties["seconds"]))
            self.seconds[name] += seconds
            self.cases[name] += 1
            self.in_test[name] += seconds * bool(properties.get(IN_TEST))
            self.of[name] = int(str(properties.get(CASES, 1)))

    def too_dear(self) -> list[str]:
        """A line for each function that takes too much of `make test`, and more than its cases were known to take."""
        limit = max(MOST * MARGIN, SHARE * self.in_test.total())
        return [
            f"{name} takes {seconds:.1f} s of a processor in `make test`, and may take {MOST:.0f} s (here, with a "
            f"margin, {limit:.0f} s): renew tests/costs.json with `make costs` (CONTRIBUTING.md)"
            for name, seconds in self.in_test.most_common()
            if seconds > limit + MARGIN * COSTS.get(name, 0.0) * self.cases[name]
        ]

    def of_a_case(self) -> dict[str, float]:
        """Seconds of a case, of the functions from which `make test` draws."""
        means = {name: seconds / self.cases[name] for name, seconds in sorted(self.seconds.items())}
        return {name: round(mean, 3) for name, mean in means.items() if mean * self.of[name] > BUDGET}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The law fails a run in which nothing else does."""
        if session.exitstatus == pytest.ExitCode.OK and self.too_dear():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.writes:
            TABLE.write_text(json.dumps(self.of_a_case(), indent=0) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what broke the law, and the table if asked."""
        for line in [*self.too_dear(), *(self.table() if self.shown else ())]:
            terminalreporter.write_line(line)

    def table(self) -> Iterator[str]:
        """Lines of Markdown: folders, then the dearest functions."""
        rows = dict[str, list[float]]()  # functions, cases, seconds in `make test`, and all of them
        for test, seconds in self.seconds.items():
            row = (1, self.cases[test], self.in_test[test], seconds)
            for name in ("all", "/".join(test.split("::")[0].split("/")[:2]), test):
                rows[name] = [a + b for a, b in zip(rows.get(name, [0] * 4), row, strict=True)]
        ranked = sorted(rows, key=lambda name: -rows[name][3])
        yield "| folder | functions | cases | processor seconds in `make test` | in this run |\n|---|---|---|---|---|"
        names = [name for name in ranked if "::" not in name] + [name for name in ranked if "::" in name][: self.shown]
        for name in names:
            functions, cases, in_test, seconds = rows[name]
            yield f"| {name} | {functions} | {cases} | {in_test:.1f} | {seconds:.1f} |"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that print and write."""
    parser.addoption("--costs", type=int, default=0, metavar="N", help="print processor seconds of folders and N tests")
    parser.addoption("--write-costs", action="store_true", help="write tests/costs.json")


def pytest_configure(config: pytest.Config) -> None:
    """Count where results are printed: not in a worker of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.option.costs, config.option.write_costs))
