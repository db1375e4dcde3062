"""Run what a newcomer runs first: the program of README.md, then an import of every module of the package.

`make newest` and `make versions` run it.
"""

import importlib
import pkgutil
import re
from pathlib import Path

import torch

import fshard
from fshard.cli.doctor import TESTED

README = Path(__file__).parents[1] / "README.md"


def remark(version: str) -> str:
    """What to do about a torch that is not the newest of docs/limits.md; "" for that one."""
    here, newest = ([int(n) for n in text.split(".")[:2]] for text in (version, TESTED[1]))
    named = f"docs/limits.md names {TESTED[1]} as the newest"
    if here < newest:
        return f"NOT THE NEWEST: this is torch {version}; {named}. Run `make newest` where pip finds it"
    return f"NEW: this is torch {version}; {named}. Run `make versions` with it" if here > newest else ""


def main() -> None:
    """Raise what README's program or an import raises; print the versions and `remark`."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL))
    exec(compile(code, str(README), "exec"), {})
    names = [module.name for module in pkgutil.walk_packages(fshard.__path__, "fshard.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(f"README.md and {len(names)} modules: fshard {fshard.__version__}, torch {torch.__version__}")
    print(remark(torch.__version__))


if __name__ == "__main__":
    main()
