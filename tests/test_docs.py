"""What the documents show runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path) -> None:
    """Its blocks, one after the other."""
    scope: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_and_tests_a_page_names_exist(page: Path) -> None:
    """Links to files, and the tests of the table of parity."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    file = ""
    for named, test, short in re.findall(r"`(?:(test_\w+\.py)::)?(?:(test_\w+)|\.\.\._(\w+))`", text):
        file = named or file  # the end of a name, and one without a file, are of the file that was named last
        name = test or rf"test_(\w+_)?{short}"
        assert re.search(rf"def {name}\(", (ROOT / "tests" / file).read_text()), (file, name)
