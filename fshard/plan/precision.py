"""`Policy`: the dtypes in which parameters are stored, computed with, reduced and returned."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import check_flags, check_word, shown, wrong
from ..core.patterns import matches
from ..core.tree import Tree

Dtype = torch.dtype | str | None
WherePolicy = str | Callable[[str, Tree], bool]
_SHORT = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_NAMES = {dtype: name for name, dtype in _SHORT.items()}


@dataclass(frozen=True)
class Policy:
    """The dtypes of a plan's floating leaves: `make_plan(params, mesh, policy="storage=f32,compute=bf16,reduce=f32")`.

    - `storage`: the dtype of shards, optimizer state and gradients. Default: each leaf's own dtype.
    - `compute`: the dtype of gathered leaves and of the computation: the shard is cast, then gathered. Default:
      `storage`.
    - `reduce`: the dtype of sent gradients (sums are taken in float32 at least). Default: `compute`.
    - `grads`: the dtype of reduced gradients until the update. Default: `storage`.
    - `output`: the dtype of the loss over all ranks, and of floating tensors in an aux. Totals and counts are not cast.
      Default: float32 at least for a loss; an aux keeps its dtypes.
    - `buffers`: the dtype of `policy.cast(buffers, "buffers")` (running statistics, say).
    - `cast_inputs`: if True, a module casts floating tensors among its arguments to `compute` (`functionalize`).
      Arguments of a loss function, such as the batch, keep their dtypes: cast them in the loss with `x.to(w.dtype)`.
    - `cast_at`: paths of submodules that cast their floating inputs when they are called (`apply.policy(cast=)`).
    - `overrides`: other dtypes for some leaves, as pairs (leaves, policy). A pattern, several patterns, or a predicate
      `(path, subtree) -> bool` selects the leaves. The first pair that selects a leaf counts. A policy's own overrides
      and `cast_at` have paths below its pattern. A module has the policy of the first pattern, without `**`, that
      selects it or a subtree around it.

    A dtype may be a name: f64, f32, bf16, f16, or torch's name. Integer leaves stay as they are.

    >>> Policy.parse("compute=bf16; **.norm: compute=f32")
    Policy('compute=bf16; **.norm: compute=f32')
    >>> Policy(compute="bf16", overrides=[(["norm", "head"], "compute=f32")])
    Policy('compute=bf16; norm: compute=f32; head: compute=f32')

    Source: jmp (DeepMind, 2021); Micikevicius et al., Mixed precision training (2018).
    """

    storage: Dtype = None
    compute: Dtype = None
    reduce: Dtype = None
    output: Dtype = None
    buffers: Dtype = None
    grads: Dtype = None
    cast_inputs: bool = True
    cast_at: tuple[str, ...] = ()
    overrides: tuple[tuple[WherePolicy, Policy], ...] = ()

    def __post_init__(self) -> None:
        for name in _DTYPES:
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        check_flags(**{"policy: cast_inputs": self.cast_inputs})
        if not isinstance(self.cast_at, list | tuple) or not all(isinstance(path, str) for path in self.cast_at):
            raise TypeError(wrong("policy: cast_at", self.cast_at, "paths of submodules, as apply.units gives them"))
        object.__setattr__(self, "cast_at", tuple(self.cast_at))
        overrides = self.overrides.items() if isinstance(self.overrides, Mapping) else self.overrides
        if not _are_pairs(overrides):
            expected = "pairs of a pattern, several patterns, or a predicate, and a policy, or a dict of such"
            raise TypeError(wrong("policy: overrides", self.overrides, expected))
        pairs = [(selector, policy_of(policy)) for where, policy in overrides for selector in _each(where)]
        below = [f"{where}.{path}" for where, policy in pairs for path in policy.cast_at]
        object.__setattr__(self, "cast_at", (*self.cast_at, *below))
        object.__setattr__(self, "overrides", tuple(new for pair in pairs for new in _with_inner(self, *pair)))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy from text: `name=dtype`, separated by commas; overrides, `pattern: ...`, by semicolons."""
        if not isinstance(text, str):
            raise TypeError(f"Policy.parse: {wrong('text', text, 'words such as compute=bf16')}")
        first, *override_texts = text.split(";")
        overrides = []
        for override in override_texts:
            pattern, colon, words = override.partition(":")
            if not colon:
                raise ValueError(f"policy: {override.strip()!r}: expected 'pattern: name=dtype, ...' after a semicolon")
            overrides.append((pattern.strip(), cls.parse(words)))
        dtypes, cast_inputs, cast_at = _parsed_settings(first)
        return cls(**dtypes, cast_inputs=cast_inputs, cast_at=cast_at, overrides=tuple(overrides))

    def __str__(self) -> str:
        words = [f"{name}={_dtype_name(getattr(self, name))}" for name in _DTYPES if getattr(self, name) is not None]
        words += ["cast_inputs=no"] * (not self.cast_inputs)
        words += [f"cast_at={' '.join(self.cast_at)}"] if self.cast_at else []
        return "; ".join([",".join(words), *(f"{where}: {policy}" for where, policy in self.named().overrides)])

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"

    def named(self) -> Policy:
        """Return the policy with names in place of predicates, for comparison between ranks and for pickle."""
        pairs = tuple((str(getattr(where, "__name__", where)), policy) for where, policy in self.overrides)
        return replace(self, overrides=pairs)

    @property
    def stores(self) -> bool:
        """True if this policy or an override gives `storage`."""
        return self.storage is not None or any(policy.stores for _, policy in self.overrides)

    def over(self, other: Policy) -> Policy:
        """Return this policy without overrides, with missing dtypes from `other`."""
        dtypes = {name: getattr(self, name) or getattr(other, name) for name in _DTYPES}
        return Policy(**dtypes, cast_inputs=self.cast_inputs and other.cast_inputs)

    def of(self, place: tuple[str, ...], names: Container[str]) -> tuple[Policy, bool]:
        """Return the policy of the module at `place`, and True if an override selects it: paths are then in the module.

        `names`: of all subtrees, by `names_in`.

        >>> Policy.parse("a: compute=bf16; a.norm: compute=f32; b: compute=f16").of(("a",), {"a", "a.norm", "b"})
        (Policy('compute=bf16; norm: compute=f32'), True)
        """
        pairs = [(where, policy, _rest(str(where), place, names)) for where, policy in self.overrides]
        around = [place[:n] for n in range(1, len(place) + 1)]
        selecting = [policy for where, policy, _ in pairs if any(_rest(str(where), top, names) == "" for top in around)]
        if not selecting:
            inside = ((where, policy) for where, policy, rest in pairs if rest is not None or "**" in str(where))
            return replace(self, cast_at=self.casts_beside(place, names), overrides=tuple(inside)), False
        cast_at = tuple(filter(None, (_rest(path, place, names) for path in self.cast_at)))
        return replace(
            selecting[0].over(self), cast_at=cast_at, overrides=tuple((x, policy) for _, policy, x in pairs if x)
        ), True

    def casts_beside(self, place: tuple[str, ...], names: Container[str]) -> tuple[str, ...]:
        """Return `cast_at` without the paths that overrides gave to modules elsewhere."""
        tops = tuple(f"{where}." for where, _ in self.overrides)
        return tuple(x for x in self.cast_at if not x.startswith(tops) or _rest(x, place, names) is not None)

    def cast(self, x: Tree, to: str) -> Tree:
        """Cast the real floating tensors of a tree to the dtype named `to` ("compute", say); other leaves stay.

        >>> Policy(compute="bf16").cast({"x": torch.ones(1), "n": torch.tensor(1)}, "compute")
        {'x': tensor([1.], dtype=torch.bfloat16), 'n': tensor(1)}
        """
        check_word("policy.cast: to", to, _DTYPES)
        dtype = getattr(self, to)
        if dtype is None:
            return x
        return tree.map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, x)


SomePolicy = Policy | str | Mapping[str, Policy | str] | None
_YES, _NO = ("yes", "true", "True", "1"), ("no", "false", "False", "0")
_DTYPES = [f.name for f in fields(Policy) if f.name not in ("cast_inputs", "cast_at", "overrides")]


def _each(where: WherePolicy | list[str] | tuple[str, ...]) -> Sequence[WherePolicy]:
    return [*where] if isinstance(where, list | tuple) else [where]


def _with_inner(outer: Policy, where: WherePolicy, policy: Policy) -> Iterator[tuple[WherePolicy, Policy]]:
    """Yield (pattern, policy without overrides): first the overrides of `policy`, with paths below `where`."""
    if policy.output not in (None, outer.output):
        raise ValueError(
            f"policy: {where!r}: output={policy.output} is the dtype of the loss, one for all leaves: give "
            "Policy(output=..., overrides=...)"
        )
    patterns = [inner for inner, _ in policy.overrides]
    if not all(isinstance(x, str) for x in [where, *patterns]) and (patterns or policy.cast_at):
        raise TypeError(f"policy: {where!r}: expected patterns above and in a policy with paths of its own: {policy}")
    if policy.cast_at and "**" in str(where):
        raise ValueError(f"policy: {where!r}: cast_at: expected a pattern of modules without `**`")
    for inner, override in policy.overrides:
        yield f"{where}.{inner}", override.over(policy)
    yield where, replace(policy, cast_at=(), overrides=())


def _rest(pattern: str, place: tuple[str, ...], names: Container[str]) -> str | None:
    """Return the part of a pattern below `place`; None if its beginning, without `**`, is no pattern of `place`."""
    at, parts = ".".join(place), pattern.split(".")
    if not place or f"{pattern}.".startswith(f"{at}."):
        return pattern[len(at) :].removeprefix(".")
    first, rest = parts[: len(place)], parts[len(place) :]
    fits = pattern not in names and "**" not in first and matches(place, ".".join(first), names)
    return ".".join(rest) if fits else None


def _are_pairs(x: object) -> bool:
    if isinstance(x, str) or not isinstance(x, Iterable):
        return False
    return all(isinstance(pair, tuple) and len(pair) == 2 for pair in x)


def _parsed_settings(text: str) -> tuple[dict[str, str], bool, tuple[str, ...]]:
    settings: dict[str, str] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, value = (x.strip() for x in (*word.partition("=")[::2],))
        if name not in (known := (*_DTYPES, "cast_inputs", "cast_at")) or not value:
            raise ValueError(
                f"policy: {word!r}: expected one of {', '.join(known)}, as in 'compute=bf16'; leaves follow a semicolon"
            )
        settings[name] = value
    cast_inputs, cast_at = settings.pop("cast_inputs", "yes"), settings.pop("cast_at", "")
    check_word("policy: cast_inputs", cast_inputs, (*_YES, *_NO))
    return settings, cast_inputs in _YES, tuple(cast_at.split())


def _dtype(field: str, value: Dtype) -> torch.dtype | None:
    if value is None:
        return None
    dtype = (_SHORT.get(value) or getattr(torch, value, None)) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"policy: {field}={value!r} is not a floating dtype: expected {', '.join(_SHORT)}, or torch's name of one"
        )
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def policy_of(policy: SomePolicy) -> Policy:
    """Make a policy of text, of a dict of policies by their subtrees, or of None.

    >>> policy_of("compute=bf16").compute
    torch.bfloat16
    """
    if isinstance(policy, str):
        return Policy.parse(policy)
    if isinstance(policy, Mapping):
        return Policy(overrides=tuple((path, policy_of(of)) for path, of in policy.items()))
    if policy is None or isinstance(policy, Policy):
        return policy or Policy()
    raise TypeError(
        f"policy: expected a Policy, words such as 'compute=bf16', or a dict of these by subtrees, got {shown(policy)}"
    )


@dataclass(frozen=True)
class Precision:
    """The dtypes of one leaf."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grads: torch.dtype

    @property
    def itemsize(self) -> int:
        """The bytes of the narrowest dtype."""
        return min(dtype.itemsize for dtype in vars(self).values())

    @property
    def brief(self) -> str:
        """The dtypes of storage and computation: "f32", "f32/bf16"."""
        return "/".join(map(_dtype_name, dict.fromkeys((self.storage, self.compute))))

    def __str__(self) -> str:
        words = [str(self.storage).removeprefix("torch.")]
        words += [f"computed in {_dtype_name(self.compute)}"] * (self.compute != self.storage)
        words += [f"reduced in {_dtype_name(self.reduce)}"] * (self.reduce != self.compute)
        words += [f"gradients in {_dtype_name(self.grads)}"] * (self.grads != self.storage)
        return ", ".join(words)


def precision(dtype: torch.dtype, policy: Policy) -> Precision:
    """Return a leaf's dtypes. Only real floating leaves follow the policy."""
    if not dtype.is_floating_point:
        return Precision(dtype, dtype, dtype, dtype)
    storage = _or_default(policy.storage, dtype)
    compute = _or_default(policy.compute, storage)
    return Precision(storage, compute, _or_default(policy.reduce, compute), _or_default(policy.grads, storage))


def _or_default(dtype: Dtype, default: torch.dtype) -> torch.dtype:
    # `Policy.__post_init__` has turned names into dtypes
    return dtype if isinstance(dtype, torch.dtype) else default


def precisions(dtypes: Sequence[torch.dtype], chosen: Sequence[Policy | None], policy: Policy) -> list[Precision]:
    return [
        precision(dtype, policy if override is None else override.over(policy))
        for dtype, override in zip(dtypes, chosen, strict=True)
    ]
