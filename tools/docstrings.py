"""Docstrings as the API pages of the site show them: examples as blocks of code, public names as links.

An extension of griffe, which reads the sources for these pages; `mkdocs.yml` names it.
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

EXAMPLE = r"((?:^|(?<=\n))>>> .*(?:\n.+)*)"  # up to an empty line
NAME = r"`(?:fshard\.)?([a-z]\w*(?:\.\w+)*|[A-Z]\w+)`"


def public(module: griffe.Module) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """Public functions and classes by name, also those of public modules inside: these come first."""
    members = [(name, module[name]) for name in module.exports or module.functions if not name.startswith("_")]
    # griffe takes `from .oracle import oracle` for the module
    members = [(name, x.members.get(name, x) if x.is_module else x) for name, x in members]
    for name, member in sorted(members, key=lambda item: not item[1].is_module):
        if member.is_module:
            yield from ((f"{name}.{path}", x) for path, x in public(member))
        else:
            yield name, member


def objects(x: griffe.Object) -> Iterator[griffe.Object]:
    """An object and all that is defined inside."""
    yield x
    for member in x.members.values():
        if not member.is_alias:
            yield from objects(member)


def known(x: griffe.Object) -> set[str]:
    """What a name in the docstring of `x` means first: itself, its parameters and its members."""
    around = [x, x.parent] if x.parent and x.parent.is_class else [x]
    return {name for y in around for name in (y.name, *y.members, *(p.name for p in getattr(y, "parameters", ())))}


def page(text: str, paths: dict[str, str]) -> str:
    """A docstring in Markdown."""

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}][{paths[match[1]]}]" if match[1] in paths else match[0]

    parts = re.split(EXAMPLE, text)
    parts[::2] = [re.sub(NAME, link, part) for part in parts[::2]]
    parts[1::2] = [f"```pycon\n{part}\n```" for part in parts[1::2]]
    return "".join(parts)


class Docstrings(griffe.Extension):
    """Rewrite the docstrings of a package."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        paths, own = dict[str, str](), dict[str, dict[str, str]]()  # by name; the same by module that defines them
        for name, member in public(pkg):
            short = name.rpartition(".")[2]
            paths |= {name: member.path, short: member.path}
            own.setdefault(member.canonical_path.rpartition(".")[0], {})[short] = member.path
        for x in objects(pkg):
            if x.docstring and not x.is_module:
                here = paths | own.get(x.module.path, {})
                x.docstring.value = page(x.docstring.value, {name: here[name] for name in here.keys() - known(x)})
