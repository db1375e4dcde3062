"""Names of leaves in state dicts and files, and their names in a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..core.arguments import check_function, shown
from ..core.differences import listed

Rename = Callable[[str], str | None] | Mapping[str, str | None]


def renamed(names: Iterable[str], rename: Rename | None = None) -> dict[str, str]:
    """Map the plan's names to the given `names`, in the order of `names`.

    `rename` is a function from a name to the plan's name, or a dict of changed names; None leaves a name out.
    ValueError if two names become one, and for unknown names in the dict.

    >>> renamed(["module.w", "module.step"], lambda name: name.removeprefix("module.") if "step" not in name else None)
    {'w': 'module.w'}
    """
    by_name = origins(names, rename)
    for new, (name, *others) in by_name.items():
        if others:
            raise ValueError(f"rename: {name!r} and {others[0]!r} are both called {new!r}: leave one out (None)")
    return {new: name for new, (name,) in by_name.items()}


def origins(names: Iterable[str], rename: Rename | None = None, others: Iterable[str] = ()) -> dict[str, list[str]]:
    """As `renamed`, but several names may become one: map each of the plan's names to a list.

    A dict `rename` may also change names in `others`.

    >>> origins(["a.step", "b.step"], lambda name: "step")
    {'step': ['a.step', 'b.step']}
    """
    names = [*names]
    if isinstance(rename, Mapping):
        changes, known = rename, {*names, *others}
        if unknown := [name for name in changes if name not in known]:
            raise ValueError(
                f"rename: it has {len(unknown)} names that are not there: {listed(unknown)}; "
                f"there are {listed([*names, *others]) or 'none'}"
            )
        rename = lambda name: changes.get(name, name)  # noqa: E731
    if rename is not None:
        check_function("rename", rename, "a dict, or fn(name) -> the plan's name, or None to leave it out")
    by_name: dict[str, list[str]] = {}
    for name in names:
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"rename: of {name!r}: expected a name, or None to leave it out, got {shown(new)}")
        by_name.setdefault(new, []).append(name)
    return by_name
