"""How much prose stands in a folder: words of docstrings and comments for each line of code, and how many are relative.

`python tools/words.py fshard/*` prints a row for each.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

from sizes import code_lines, documented

RELATIVE = re.compile(r"\b(that|which|what|whose|whom|those)\b")
QUESTION = re.compile(r"(What|Which|Where|How|Whether|Who|Of|That|Those)\b")
EXAMPLE = re.compile(r"(?s)>>>.*?(\n\n|\Z)")
ORDERS = ("#!", "# type", "# noqa")  # comments for programs


class Words(NamedTuple):
    """The prose of a few files."""

    a_line: float  # words for each line of code
    relative: float  # words in 100
    questions: int  # docstrings that begin with a question word


def comments(source: str) -> list[str]:
    """All comments of a file, for people."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [x.string for x in tokens if x.type == tokenize.COMMENT]
    return [x.lstrip("# ") for x in found if not x.startswith(ORDERS)]


def page(text: str) -> str:
    """A page of the docs without its blocks of code."""
    return re.sub(r"(?ms)^ *```.*?^ *```", "", text)


def relative(text: str) -> float:
    """Relative words in 100."""
    return 100 * len(RELATIVE.findall(text)) / max(1, len(text.split()))


def counted(files: list[Path]) -> Words:
    """The prose of these files; examples are code."""
    sources = [path.read_text() for path in files]
    documents = [ast.get_docstring(x) or "" for source in sources for x in documented(source)]
    text = "\n".join([*(EXAMPLE.sub("", x) for x in documents), *(x for y in sources for x in comments(y))])
    lines = sum(len(code_lines(source)) for source in sources)
    return Words(len(text.split()) / max(1, lines), relative(text), sum(map(bool, map(QUESTION.match, documents))))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        words = counted(sorted(path.rglob("*.py")) if path.is_dir() else [path])
        a_line, relative_words = f"{words.a_line:5.2f} words a line", f"{words.relative:5.2f} relative in 100"
        print(f"{name:28} {a_line} {relative_words} {words.questions:3} questions")
