"""The API pages of docs/ show every public name once, and its docstring says what a user must know."""

import ast
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fshard

pytestmark = pytest.mark.law

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"(?m)^::: (\S+)\n((?:    .*\n)*)", "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
)


def names_of(module: ModuleType) -> list[str]:
    """The public names of a module: `__all__`, or else the functions that it defines."""
    functions = [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
    return getattr(module, "__all__", [name for name in functions if not name.startswith("_")])


def public(module: ModuleType = fshard) -> Iterator[tuple[str, object]]:
    """Public functions and classes by name, also those of public modules inside."""
    for name in names_of(module):
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from public(value)
        else:
            yield f"{module.__name__}.{name}", value


def members(options: str) -> list[str]:
    """The methods that a block of a page shows, if it lists them."""
    return re.findall(r"\w+", (re.findall(r"members: \[(.*)\]", options) or [""])[0])


def test_every_public_name_is_on_one_page() -> None:
    """A public name would be on no page of the API, or on two, or a page would name what does not exist."""
    shown = Counter(id(pkgutil.resolve_name(path)) for path, _ in BLOCKS)
    wrong = [name for name, value in public() if shown[id(value)] != 1]
    assert not wrong, f"a page of docs/api/ must have, once: {', '.join(f'::: {name}' for name in wrong)}"
    assert max(shown.values()) == 1
    listed = [(path, name) for path, options in BLOCKS for name in members(options)]
    assert [f"{path}.{name}" for path, name in listed if not hasattr(pkgutil.resolve_name(path), name)] == []


def raised(fn: Callable[..., object]) -> set[str]:
    """The errors that a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def gaps(name: str, value: object, pages: str = "", given: bool = False) -> Iterator[str]:
    """What the docstring of a function or class lacks; `given` says that users get such objects, and make none."""
    text = inspect.getdoc(value) or ""
    if not text.partition("\n")[0].endswith((".", ":")):
        yield f"{name}: the first line of the docstring is no sentence"
    if inspect.isclass(value) and (given or issubclass(value, Exception) or getattr(value, "_is_protocol", False)):
        return
    parameters = {*inspect.signature(value).parameters} - {"args", "kwargs"}
    for parameter in sorted(parameters):
        if not re.search(rf"\b{parameter}\b", text):
            yield f"{name}: the docstring does not say what `{parameter}` is"
    if ">>>" not in text and not re.search(rf"\b{name.rpartition('.')[2]}\b", pages):
        yield f"{name}: no example, in the docstring or on a page"
    # an argument of a wrong type: docs/api/index.md says that for all
    for error in sorted(raised(value) - {"TypeError", "AssertionError"} if inspect.isfunction(value) else ()):
        if error not in text:
            yield f"{name}: the docstring does not say when {error} is raised"


def test_every_public_name_is_explained() -> None:
    """A reader of the API would not learn what an argument is, see no example, or meet an error that no page names."""
    texts = [page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    pages = "".join(block for text in texts for block in re.findall(r"(?ms)^```python\n(.*?)^```", text))
    given = {id(pkgutil.resolve_name(path)) for path, options in BLOCKS if "merge_init_into_class: false" in options}
    lacking = [gap for name, value in public() for gap in gaps(name, value, pages, id(value) in given)]
    assert not lacking, "\n".join(lacking)


def bare(x: int, step: int) -> None:
    """Of x"""
    raise ValueError(f"{x} {step}")


def explained(x: int, step: int) -> None:
    """Of `x`, in `step`. ValueError."""
    raise ValueError(f"{x} {step}")


@pytest.mark.parametrize(("fn", "number"), [(bare, 4), (explained, 1)])
def test_the_search_for_gaps_sees_each(fn: Callable[..., object], number: int) -> None:
    """The test above would pass with any docstring."""
    assert len(list(gaps(fn.__name__, fn))) == number
    assert not list(gaps("explained", explained, "explained(1, 2)"))


def test_every_public_name_has_a_type(tmp_path: Path) -> None:
    """A user's strict type checker or editor would not know what a function takes, or what it returns."""
    uses = [f"x{i} = {name}" for i, (name, _) in enumerate(public())]
    (tmp_path / "uses.py").write_text(
        "\n".join(["import fshard", "import fshard.checkpoint", "import fshard.testing", *uses])
    )
    config = {"typeCheckingMode": "strict", "include": ["uses.py"], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    checker = str(Path(sys.executable).with_name("basedpyright"))
    command = [checker, "--project", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("0 errors, 0 warnings"), done.stdout
    assert len(uses) > 100
