"""The code that the documents show runs, and the files, tests and notes that they name exist."""

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fshard.testing import simulate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WITHOUT_PYTHON = {"architecture", "benchmarks", "comparison", "contributing", "examples"}
WITHOUT_PYTHON |= {"from_fsdp", "limits", "parity", "proof", "releases"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.law
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_python_of_a_page_runs(page: Path) -> None:
    """A page's Python blocks run one after the other without an error: otherwise readers would copy code that fails."""
    scope: dict[str, object] = {}
    text = page.read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python")  # the pattern takes every fence; what needs GPUs has "```py"
    # the examples of the API are in docstrings
    assert bool(blocks) == (page.stem not in WITHOUT_PYTHON and page.parent.name != "api")
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)


@pytest.mark.parametrize(("page", "name"), [("recipes.md", "direction"), ("several_modules.md", "average")])
def test_the_recipes_run_on_ranks(page: str, name: str) -> None:
    """The recipes run on several ranks as they stand: otherwise they would be recipes for one device."""
    code = "".join(BLOCK.findall((ROOT / "docs" / page).read_text()))
    assert code.count("mesh = None") == 1

    def on_a_rank(mesh: object) -> torch.Tensor:
        scope: dict[str, Any] = {"given": mesh}
        exec(compile(code.replace("mesh = None", "mesh = given"), page, "exec"), scope)
        return scope["tree"].dot(scope[name], scope[name])

    first, second = simulate(on_a_rank, shard=2)
    assert first == second


def test_the_tutorial_is_a_file_for_torchrun(tmp_path: Path) -> None:
    """The tutorial's blocks are one program, which goes on with two processes: otherwise who pastes them has none."""
    *blocks, calls, start = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
    assert "main(None" in calls
    (tmp_path / "tutorial.py").write_text("\n\n".join([*blocks, start]))
    printed = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]):
        command = [sys.executable, *launcher, "tutorial.py"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed += re.findall(r"epoch (\d): loss ([\d.]+), validation ([\d.]+)", done.stdout)
    assert [epoch for epoch, *_ in printed] == ["0", "1", "2", "3"]
    assert float(printed[-1][-1]) < 0.85 * float(printed[0][-1])


LINK = r"\]\(([^)#:]+)\)"
NAMED_TEST = r"`(?:(test_\w+\.py)::)?(?:(test_\w+)|\.\.\._(\w+))`"


def test_the_patterns_of_links_and_tests_match() -> None:
    """Links and names of tests are seen in every form: otherwise the test below would see none, and pass."""
    assert re.findall(LINK, "[worlds](worlds.md), [here](#part), [web](https://x.org/y)") == ["worlds.md"]
    named = [("test_a.py", "test_one", ""), ("", "test_two", ""), ("", "", "three")]
    assert re.findall(NAMED_TEST, "`test_a.py::test_one`, `test_two`, `..._three`") == named
    text = (ROOT / "docs" / "parity.md").read_text()
    assert re.findall(LINK, (ROOT / "README.md").read_text())
    assert {bool(file) for file, *_ in re.findall(NAMED_TEST, text)} == {False, True}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_files_and_tests_a_page_names_exist(page: Path) -> None:
    """Links to files and names of tests are right: otherwise a reader would follow a link to nothing."""
    text = page.read_text()
    for target in re.findall(LINK, text):
        path = Path(os.path.normpath(page.parent / target))
        assert path.exists(), target
        outside = page.parent != ROOT and ROOT / "docs" not in path.parents
        assert not outside, f"{target}: the site has no such page: name the file without a link"
    file = ""
    for named, test, short in re.findall(NAMED_TEST, text):
        file = named or file  # a test without a file is in the file that was named last
        name = test or rf"test_(\w+_)?{short}"
        (source,) = (ROOT / "tests").rglob(file)
        assert re.search(rf"def {name}\(", source.read_text()), (file, name)


# pages whose links still have names of files as text
FILE_AS_TEXT = r"\[`?[\w./-]+\.md`?\]\("


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_links_of_a_page_have_titles(page: Path) -> None:
    """A reader would see the name of a file in place of what a link leads to."""
    assert re.search(FILE_AS_TEXT, "see [worlds.md](worlds.md#part)")
    assert not re.search(FILE_AS_TEXT, "see [Worlds](worlds.md)")
    assert not re.findall(FILE_AS_TEXT, page.read_text())


INSTALL = r"pip install\s+[\"']?fshard\b"
RUN_BY_READERS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
RUN_BY_READERS += [
    file
    for folder in ("fshard", "examples", "tools", "benchmarks")
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in {".py", ".md", ".yaml", ".sh", ".ipynb"}
]


def test_nothing_is_installed_from_an_index() -> None:
    """A reader would run a command that fails, or installs what somebody else named fshard."""
    for text in ("`pip install fshard`", 'pip install "fshard[show]"', "pip install\nfshard[remote]"):
        assert re.search(INSTALL, text), text
    assert not re.search(INSTALL, 'pip install -e ".[show]"')
    wrong = [str(file.relative_to(ROOT)) for file in RUN_BY_READERS if re.search(INSTALL, file.read_text())]
    assert not wrong, wrong


# Markdown that GitHub shows, and the site does not
LOST = {
    "a list begins without an empty line before it": r"(?m)^[^\s\-|>#<\d].*\n- ",
    "what belongs to an item of a list is indented by fewer than 4 spaces": r"(?m)^\n {1,3}[^\s|]|^ {1,3}[-*] ",
    "code in a table begins with spaces: write &nbsp; before it": r"<br>` ",
}


def lost(text: str) -> dict[str, str]:
    """The first place of each kind that the site would show in another way."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    return {what: found[0] for what, pattern in LOST.items() if (found := re.search(pattern, prose))}


@pytest.mark.parametrize("page", PAGES[1:], ids=NAMES[1:])
def test_the_site_shows_lists_and_code_of_a_page(page: Path) -> None:
    """A list that GitHub shows would be a paragraph of dashes on the site, or lose its levels; code its indentation."""
    assert lost(page.read_text()) == {}


def test_what_the_site_does_not_show_is_seen() -> None:
    """The test above would pass with any page."""
    assert lost("One:\n\n- two,\n  three\n- four\n\n    five\n\n  | six |\n") == {}
    for text in ("One:\n- two\n", "- one\n  - two\n", "- one\n\n  two\n", "| `if a:`<br>`    b` |\n"):
        assert len(lost(text)) == 1, text


SOURCES = {path: path.read_text() for path in sorted((ROOT / "fshard").rglob("*.py"))}
FOLDERS = [ROOT / "fshard", *(path for path in (ROOT / "fshard").iterdir() if path.is_dir())]
TORCH = Path(torch.__file__).parent / "distributed"  # whose files docs/parity.md names
PLACES = [ROOT, *(ROOT / "tests").iterdir(), *(ROOT / name for name in ("benchmarks", "examples")), *FOLDERS, TORCH]


def joined(text: str) -> str:
    """The text in one line: line breaks, and the signs of comments after them, become spaces."""
    return re.sub(r"\s*\n\s*(# )?", " ", text)


def wrong_references(text: str, defined: dict[str, str]) -> Iterator[str]:
    """The files and notes that a text names and that do not exist; `defined` maps notes to modules."""
    text = joined(text)
    for name in re.findall(r"`([\w/]+\.py)\b", text):
        if not any((place / name).exists() for place in PLACES):
            yield f"`{name}`: no such file"
    for file, name in re.findall(r"`([\w/]+\.py)` `(?:\w+\.)*(\w+)`", text):
        if not any(re.search(rf"\b(def|class) {name}\b", x) for path, x in SOURCES.items() if str(path).endswith(file)):
            yield f"`{file}` `{name}`: no such function or class"
    # "Note [One] in `one.py`", "Notes [One] in `one.py`, [Two] in `two.py` and [Three] in `three.py`"
    for title, module in re.findall(r"\[([A-Z][^\]`]*|torch\.compile)\](?: in `([\w/]+)(?:\.py)?`)", text):
        if f"/{defined.get(title, '')}".removesuffix(".py").rpartition(f"/{module}")[1:] != (f"/{module}", ""):
            yield f"Note [{title}] in `{module}.py`: it is in {defined.get(title, 'no module')}"
    for title in re.findall(r"[Nn]ote \[([^\]]+)\]", text):
        if title not in defined:
            yield f"Note [{title}]: no module has it"


def notes() -> dict[str, str]:
    """The file of every note; a note begins with a line `Note [Title]` in a module's docstring."""
    found = {}
    for path, source in SOURCES.items():
        for title in re.findall(r"(?m)^Note \[(.+)\]$", ast.get_docstring(ast.parse(source)) or ""):
            assert title not in found, title
            found[title] = str(path.relative_to(ROOT))
    return found


def test_the_files_and_notes_that_texts_name_exist() -> None:
    """Files and notes that the texts name exist: otherwise "Note [Lines] in `compare_calls.py`" would lead nowhere."""
    defined, texts = notes(), SOURCES | {page: page.read_text() for page in PAGES}
    wrong = [f"{path.relative_to(ROOT)}: {x}" for path, text in texts.items() for x in wrong_references(text, defined)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Note [Lines] in `compare_calls.py`, `Plan` in `plan/plan.py`", 0),
        ("Notes [Lines] in `compare_calls`, [Anchors] in `autograd.py`", 0),
        ("Note [Lines]\n    # in `lines`", 1),
        ("Note [Lines] in `calls.py`", 2),
        ("Note [No such note]", 1),
        ("Notes [Anchors] in `autograd.py`, [Lines] in `tape.py`", 1),
        ("`knots.py`", 1),
        ("`plan/planning.py` `make_plan`, `comm/ranks.py` `Ranks.exchange`", 0),
        ("`plan/planning.py`\n  `make_plans`", 1),
    ],
)
def test_the_check_of_references_can_fail(text: str, wrong: int) -> None:
    """Wrong references in made-up texts are found: otherwise the test above would pass with any reference."""
    assert len(list(wrong_references(text, notes()))) == wrong


def test_the_search_needs_no_other_host() -> None:
    """Zensical's plugin `offline` would make every page load a script from another host, unless one has this name."""
    config = (ROOT / "mkdocs.yml").read_text()
    (script,) = re.findall(r"polyfills: \[(\S+)\]", config)
    assert "\n  - offline" in config
    assert Path(script).name == "iframe-worker.js"
    assert (ROOT / "docs" / script).is_file()


def test_the_picture_of_concepts_is_drawn() -> None:
    """The picture would differ from what python tools/pictures.py draws."""
    drawn = runpy.run_path(str(ROOT / "tools" / "pictures.py"))["concepts_picture"]()
    assert (ROOT / "docs" / "concepts.svg").read_text() == drawn
