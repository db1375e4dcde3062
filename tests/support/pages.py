"""The functions of a page of docs/, as a reader copies them."""

import ast
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def defined(page: str, *titles: str, **names: Any) -> dict[str, Any]:
    """What the first block of a page sets, and what some sections import and define; their programs are not run.

    The functions see `names` (a mesh, say) in place of what the page has.
    """
    first, *sections = re.split(r"(?m)^## ", (DOCS / page).read_text())
    by_title = {text.partition("\n")[0]: text for text in sections}
    scope: dict[str, Any] = {}
    exec(compile(_code(first), page, "exec"), scope)
    for title in titles:
        body: list[ast.stmt] = [x for x in ast.parse(_code(by_title[title])).body if isinstance(x, _DEFINITIONS)]
        exec(compile(ast.Module(body, []), page, "exec"), scope)
    scope.update(names)
    return scope


_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def _code(text: str) -> str:
    return "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
