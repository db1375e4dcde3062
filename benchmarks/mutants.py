"""Small faults put into the sources, one at a time: which of them does no test notice? `make mutants`.

A sample of faults, with as many from each folder of `fshard/` as it has of all, is put into a copy of the repository.
Which tests run a line is learned once; a fault is tried on these, the fastest first, until one fails. Everything is
kept in one folder, and a run that was stopped goes on. The operators are mutmut's.
"""

import argparse
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--tb=line", "-rfE"]
STAGES = (
    (8.0, 4),
    (50.0, 25),
    (250.0, 80),
)  # seconds of tests, and files of tests: a fault is tried on some, then on more
# These look at the sources, or run programs of their own for minutes.
LEFT_OUT = {
    f"test_{name}.py"
    for name in ("benchmarks", "delayed", "docs", "elastic", "examples", "gallery", "layers", "nanogpt", "rounds")
}
OLD = 1577836800  # a time of change for sources without a fault, so that their byte code stays valid


# --- as a plugin of pytest: the lines that each test runs ---


class Lines:
    """Writes the seconds, the outcome and the lines of each test."""

    def __init__(self, out: str):
        import coverage

        self.measured = coverage.Coverage(data_file=None, include=[f"{os.getcwd()}/fshard/*"], config_file=False)
        self.measured.start()
        self.out, self.outcomes = open(out, "w"), dict[str, str]()  # noqa: SIM115

    def pytest_runtest_protocol(self, item: Any) -> None:
        """Forget what the test before has run."""
        for lines in self._data().values():
            lines.clear()
        self.began = time.time()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the outcome; after the last part of a test, write."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.when == "teardown":
            ran = {str(Path(file).relative_to(os.getcwd())): sorted(x) for file, x in self._data().items() if x}
            row = {"test": report.nodeid, "seconds": round(time.time() - self.began, 3), "lines": ran}
            print(json.dumps({**row, "outcome": self.outcomes.get(report.nodeid)}), file=self.out, flush=True)

    def _data(self) -> dict[str, set[int]]:
        # private: the public data are written to a file for each test, which takes longer than most tests
        return self.measured._collector.data


# --- pytest in forks of a process that has imported torch ---


def pytest_in_fork(tree: Path, args: list[str], log: Path, limit: float, lines: Path | None = None) -> int | str:
    """Run pytest; its exit status, or "timeout"."""
    import pytest

    began, child = time.time(), os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.modules["__main__"] = types.ModuleType("__main__")  # processes of tests would import this file
        os._exit(int(pytest.main([*PYTEST, *args], plugins=[Lines(str(lines))] if lines else [])))
    status: int | str = "timeout"
    while time.time() - began < limit:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what tests have left behind
    if status == "timeout":
        os.waitpid(child, 0)
    return status


# --- which tests run a line ---


class Test(NamedTuple):
    """A test, and how long it takes."""

    name: str
    seconds: float


class Map:
    """The tests that run each line."""

    def __init__(self, folder: Path):
        self.tests, self._ran = list[Test](), dict[tuple[str, int], int]()  # line -> bits of tests
        for path in sorted(folder.glob("*.jsonl")):
            for row in map(json.loads, path.read_text().splitlines()):
                if row["outcome"] != "passed":
                    continue
                bit = 1 << len(self.tests)
                self.tests.append(Test(row["test"], row["seconds"]))
                for file, lines in row["lines"].items():
                    for line in lines:
                        self._ran[file, line] = self._ran.get((file, line), 0) | bit

    def of(self, file: str, lines: range) -> list[Test]:
        """The tests that run one of these lines, the fastest first."""
        bits = 0
        for line in lines:
            bits |= self._ran.get((file, line), 0)
        return sorted((x for i, x in enumerate(self.tests) if bits >> i & 1), key=lambda x: x.seconds)


def learn(tree: Path, folder: Path) -> None:
    """Run every file of tests once."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [tree / "fshard", *sorted((tree / "tests").rglob("test_*.py"))]:
        out = folder / f"{path.stem}.jsonl"
        if path.name not in LEFT_OUT and not out.exists():
            part = out.with_suffix(".part")
            code = pytest_in_fork(tree, [str(path.relative_to(tree))], out.with_suffix(".log"), 3600, part)
            part.rename(out)
            print(f"{path.name}: {code}", flush=True)


def stages(tests: list[Test]) -> Iterator[list[str]]:
    """Few fast tests of few files, then more."""
    for seconds, files in STAGES:
        chosen, later, names, total = list[str](), list[Test](), set[str](), 0.0
        for test in tests:
            file = test.name.split("::")[0]
            if total + test.seconds <= seconds and (file in names or len(names) < files):
                chosen.append(test.name)
                names.add(file)
                total += test.seconds
            else:
                later.append(test)
        tests = later
        if chosen:
            yield sorted(chosen, key=lambda name: name.split("::")[0])


# --- faults ---


class Fault(NamedTuple):
    """A change of one file."""

    file: str
    number: int
    lines: range  # of the statement, or of the function if that is not measured by line
    diff: str
    code: str


def faults(tree: Path, file: str) -> dict[int, Callable[[], Fault]]:
    """The faults of a file that change more than a message, by number; each is made by a call."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
    from mutmut.mutation import file_mutation as by_mutmut
    from mutmut.mutation.pragma_handling import IgnoredCode

    class Visitor(by_mutmut.MutationVisitor):
        """Decorated functions have faults, too: here no function is called through another one."""

        def _skip_node_and_children(self, node: Any) -> bool:
            if isinstance(node, cst.FunctionDef):
                return node.name.value in by_mutmut.NEVER_MUTATE_FUNCTION_NAMES
            return bool(super()._skip_node_and_children(node))

    source = (tree / file).read_text()
    wrapper = MetadataWrapper(cst.parse_module(source))
    at, parents = wrapper.resolve(PositionProvider), wrapper.resolve(ParentNodeProvider)
    visitor = Visitor(by_mutmut.mutation_operators, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    text = wrapper.module.code_for_node

    def made(number: int, above: list[Any]) -> Fault:
        fault = visitor.mutations[number]
        found = next(x for x in above if isinstance(x, cst.SimpleStatementLine | cst.FunctionDef))
        # of a compound statement the line of the node itself; a signature runs at import, so any line of its function
        signature = any(isinstance(x, cst.Parameters) for x in above)
        span = at[found if signature or isinstance(found, cst.SimpleStatementLine) else above[0]]
        code = by_mutmut.deep_replace(wrapper.module, fault.original_node, fault.mutated_node).code
        lines = difflib.unified_diff(source.splitlines(), code.splitlines(), lineterm="", n=0)
        diff = "\n".join(x for x in lines if not x.startswith(("---", "+++")))
        return Fault(file, number, range(span.start.line + signature, span.end.line + 1), diff, code)

    found = dict[int, Callable[[], Fault]]()
    for number, fault in enumerate(visitor.mutations):
        above = [fault.original_node]
        while above[-1] in parents:
            above.append(parents[above[-1]])
        if isinstance(fault.contained_by_top_level_function, cst.FunctionDef) and not _is_message(above, text):
            found[number] = partial(made, number, above)
    return found


def _is_message(above: list[Any], text: Any) -> bool:
    """Whether a node is a part of a message: of an error, or a text with spaces."""
    kinds = [type(x).__name__ for x in above]
    texts = ("SimpleString", "FormattedString", "ConcatenatedString")
    return "Raise" in kinds or any(kind in texts and " " in text(x) for x, kind in zip(above, kinds, strict=True))


def sample(tree: Path, number: int, seed: int, wanted: list[str]) -> list[Fault]:
    """Faults chosen at random, from each folder as many as its share; any beginning of the list is such a sample."""
    patterns = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["mutmut"]["only_mutate"]
    files = [str(path.relative_to(tree)) for path in sorted((tree / "fshard").rglob("*.py"))]
    files = [x for x in files if any(fnmatch(x, p) for p in patterns) and any(fnmatch(x, p) for p in wanted)]
    draw, folders = random.Random(seed), dict[str, list[tuple[str, int]]]()
    for file in files:
        folders.setdefault(str(Path(file).parent), []).extend((file, i) for i in faults(tree, file))
    total, order = sum(map(len, folders.values())), list[tuple[float, str, int]]()
    for all_of_folder in folders.values():
        share = max(1, round(number * len(all_of_folder) / max(1, total)))
        chosen = draw.sample(all_of_folder, share)
        order += [((i + draw.random()) / share, *fault) for i, fault in enumerate(chosen)]
    made = dict[tuple[str, int], Fault]()
    for file in {file for _, file, _ in order}:
        of_file = faults(tree, file)
        made |= {(file, i): of_file[i]() for _, name, i in order if name == file}
    return [made[file, i] for _, file, i in sorted(order)]


def tried(tree: Path, fault: Fault, known: Map, log: Path) -> dict[str, Any]:
    """Put a fault into the tree and run tests until one fails; the row of the log."""
    path, tests = tree / fault.file, known.of(fault.file, fault.lines)
    seconds, began, by = {test.name: test.seconds for test in tests}, time.time(), ""
    original, ran = path.read_text(), 0
    try:
        path.write_text(fault.code)
        for names in stages(tests):
            limit = 60 + 5 * sum(seconds[name] for name in names)
            status, ran = pytest_in_fork(tree, ["-x", *names], log, limit), ran + len(names)
            if status != 0:
                named = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
                by = named.group(1) if named else str(status)
                break
    finally:
        path.write_text(original)
        os.utime(path, (OLD, OLD))
    verdict = "killed" if by else "survived" if tests else "no test runs it"
    head = {"file": fault.file, "number": fault.number, "verdict": verdict, "by": by, "tests": ran}
    return {**head, "seconds": round(time.time() - began, 1), "diff": fault.diff}


def copied(into: Path) -> Path:
    """A copy of the files of the repository, made once."""
    tree = into / "tree"
    if not tree.exists():
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
        for name in names.splitlines():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
            os.utime(tree / name, (OLD, OLD))
        (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def summary(rows: list[dict[str, Any]]) -> str:
    """The survivors, and the score by folder."""
    killed = Counter(str(Path(row["file"]).parent) for row in rows if row["verdict"] == "killed")
    total = Counter(str(Path(row["file"]).parent) for row in rows)
    lines = [f"{x['file']} {x['number']}: {x['verdict']}\n{x['diff']}" for x in rows if x["verdict"] != "killed"]
    lines += [f"{folder}: {killed[folder]} of {total[folder]} killed" for folder in sorted(total)]
    return "\n".join([*lines, f"all: {killed.total()} of {total.total()} killed"])


def main() -> None:
    """Learn which tests run which lines, try a sample of faults, and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=400, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", default=["*"], nargs="+", help="patterns, as 'fshard/sharding/*'")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants", help="where everything is kept")
    args = parser.parse_args()
    tree = copied(args.out.resolve())
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(tree))
    sys.path[:0] = [str(tree)]
    import torch
    import torch._dynamo  # imported once, not in every fork

    torch.set_num_threads(1)
    learn(tree, args.out / "map")
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # else a fault's byte code might stay
    known, log = Map(args.out / "map"), args.out / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(row["file"], row["number"]) for row in rows}
    for fault in sample(tree, args.number, args.seed, args.files):
        if (fault.file, fault.number) not in done:
            rows.append(tried(tree, fault, known, args.out / "last.log"))
            with open(log, "a") as file:
                print(json.dumps(rows[-1]), file=file)
            print({key: rows[-1][key] for key in ("file", "verdict", "by", "seconds")}, flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
