"""The tests that a release of torch may break, as arguments of pytest: those that docs/architecture.md names.

`python tools/torch_tests.py` prints them; `make versions` runs them.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SECTION = "## Private torch API"


def named(page: str) -> list[str]:
    """The tests that the tables of the section name, each once: `test_file.py::test_name`, or `test_name[case]`."""
    return list(dict.fromkeys(re.findall(r"`(test_\w+\.py::test_\w+(?:\[[^`]+\])?)`", page.partition(SECTION)[2])))


def arguments(page: str) -> list[str]:
    """The tests with the paths of their files. Raises KeyError for a file that is not there."""
    files = {path.name: path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    return [f"{files[file]}::{name}" for file, name in (test.split("::") for test in named(page))]


if __name__ == "__main__":
    print(*arguments(PAGE.read_text()))
