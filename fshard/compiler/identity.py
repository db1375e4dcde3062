"""What must be the same in another process, so that a compiled function may be used there: as named texts.

Note [What another process compares]
    In one process a graph is found by values and objects (Note [What a graph depends on]). In another process the
    objects are others, so each is written as text: numbers and strings as they are; tensors by shape, strides, dtype
    and device; functions and classes by name, and by a digest of their code if they are the user's; containers and
    objects by what `pickle` would save of them. Nothing is unpickled: texts are compared. A function that reads what
    has no such text (a lock, a file, a generator) cannot be saved. Of libraries the versions of Python, torch and
    fshard are compared.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from numbers import Number
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..comm.consensus import first_difference
from ..comm.mesh import MESHES, axis_sizes, is_mesh, mesh_device, rank_in
from ..core import tree
from ..core.arguments import NOT_THE_USER
from ..core.storage import Source
from .captures import captures, is_of_library
from .signature import Ambient, Key, Signature, TensorKey, key_of, parts, words

Texts = dict[str, str]

_SIMPLE = (Number, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...))
_LONG = 1000  # characters, of a text that is compared by its digest
# environment variables that Inductor and g++ read
_VARIABLES = ("TORCHINDUCTOR_", "TORCH_COMPILE_", "CXX", "CPATH", "TRITON_")
_NO_MATTER = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"}


@dataclass(frozen=True)
class Identity:
    """A function as another process knows it, by named texts.

    `where` is what all its programs have in common: versions, machine, settings, code. `what` are the arguments and the
    values that it reads. `unknown` names the first value that has no text; "" if there is none.
    """

    where: Texts
    what: Texts
    unknown: str = ""

    def difference(self, where: Mapping[str, str], what: Mapping[str, str]) -> str:
        """Describe the first difference from the texts of another one; "" if there is none."""
        pairs = [(was, now) for was, now in ((where, self.where), (what, self.what)) if was != now]
        for was, now in pairs:
            for name in dict.fromkeys((*now, *was)):
                if was.get(name) != now.get(name):
                    before, after = was.get(name, "not there"), now.get(name, "not there")
                    return first_difference(before, after, f"{name} was {{}}, is {{}}")
        return ""


def identity(fn: object, called: Signature, options: object) -> Identity:
    """The texts of a function that is called with arguments of a signature, compiled with these options."""
    writer, seen, what = _Writer(called.meshes), dict[int, object](), Texts()
    what["the function"] = writer.named("the function", fn)
    waiting, tensors = [fn], list[Tensor]()
    while waiting:
        for variable in captures(waiting.pop(), seen):
            _add(what, variable.name, writer.named(variable.name, variable.read()))
            tensors += variable.tensors()
        waiting, writer.met = [x for x in writer.met if id(x) not in seen], []
        seen |= {id(x): x for x in waiting if not isinstance(x, FunctionType)}
    first: dict[int, int] = {}
    what["which captured tensors are one"] = str([first.setdefault(id(x), i) for i, x in enumerate(tensors)])
    what |= _of_arguments(called, writer)
    where = {**_machine(called), "jit's options": str(options)}
    for function in seen.values():
        if isinstance(function, FunctionType) and _is_users(function):
            _add(where, f"the code of {function.__qualname__}", _digest_of_code(function.__code__))
    return Identity(where, what, writer.unknown)


def _add(texts: Texts, name: str, text: str) -> None:
    """Add a text; several of one name, as of two closures of one function, are one text."""
    texts[name] = f"{texts[name]}, {text}" if name in texts else text


def _of_arguments(called: Signature, writer: _Writer) -> Texts:
    paths = zip(tree.paths(called.spec), called.kinds, strict=True)
    texts = {f"argument {path!r}": _told(k, writer) for path, k in paths}
    texts["the structure of the arguments"] = writer.named("the arguments", called.spec)
    texts["which arguments are one"] = str(called.trained)
    texts["the meshes of the arguments"] = writer.text([MESHES.find(name) for name in called.meshes if name])
    named = zip(Ambient._fields, called.ambient, strict=True)
    return texts | {f"torch's {name.replace('_', ' ')}": str(value) for name, value in named}


def _told(key: TensorKey | Key, writer: _Writer) -> str:
    return words(key) if isinstance(key, TensorKey) or issubclass(key[0], Number) else writer.text(key)


def _machine(called: Signature) -> Texts:
    devices = {k.device for k in called.kinds if isinstance(k, TensorKey) and k.device.type == "cuda"}
    variables = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES) and k not in _NO_MATTER}
    return {
        "fshard": _digest_of_package(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "Python": platform.python_version(),
        "the processor": _processor(),
        "the number of threads": str(torch.get_num_threads()),
        "Inductor's settings": _settings(bool(variables)),
        "the environment": str(sorted(variables.items())),
        "the accelerator": str(sorted(_accelerator(device) for device in devices)),
    }


def _settings(by_variables: bool) -> str:
    """Inductor's settings that are not its defaults. To import it takes seconds: until then nobody has changed one."""
    if "torch._inductor.config" not in sys.modules and not by_variables:
        return "{}"
    from torch._inductor import config

    # private: there is no public way to ask for a default (test_artifact.py notices when it goes)
    now, default_of = config.get_config_copy(), config._config  # type: ignore[attr-defined]
    return str({name: now[name] for name in sorted(now) if now[name] != default_of[name].default})


def _accelerator(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.major}.{properties.minor}, {properties.multi_processor_count}"


@cache
def _processor() -> str:
    """The machine and the features of its processor, for which g++ compiles."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    compiler = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{compiler} {model} {_digest(' '.join(sorted(features.split())))}"


@cache
def _digest_of_package() -> str:
    """A digest of fshard's own files: a version stays the same while somebody works on it."""
    root = Path(__file__).parents[1]
    return _digest(*(f"{path.relative_to(root)} {path.read_text()}" for path in sorted(root.rglob("*.py"))))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


def _is_users(fn: FunctionType) -> bool:
    module = sys.modules.get(fn.__module__ or "")
    return not (fn.__code__.co_filename.startswith(NOT_THE_USER) or (module is not None and is_of_library(module)))


def _digest_of_code(code: CodeType) -> str:
    """A digest of what code does: instructions, constants and names, and no line numbers."""
    numbers = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return _digest(code.co_code.hex(), str(numbers), str(names), code.co_exceptiontable.hex(), *_constants(code))


def _constants(code: CodeType) -> Iterator[str]:
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield _digest_of_code(x)
        else:  # a set of strings has another order in each process
            yield repr(sorted(map(repr, x)) if isinstance(x, frozenset) else x)


class _Writer:
    """Writes values as texts, which are equal in another process if the values are the same there."""

    def __init__(self, meshes: Sequence[str]) -> None:
        self.unknown, self.met = "", list[object]()  # functions and classes of the user
        self._meshes = meshes
        self._texts: dict[int, tuple[object, str]] = {}  # with the object, so that no later one gets its id
        self._around: list[object] = []  # the objects around the one that is written

    def named(self, name: str, x: object) -> str:
        """The text of a value; if it has none, `name` is told in `unknown`."""
        try:
            return self.text(x)
        except Exception:  # whatever an object raises that is asked for what it has, or cannot be saved
            self.unknown = self.unknown or f"{name} has a {_name(type(self._around[-1]))}"
            self._around = []
            return "?"

    def text(self, x: Any) -> str:
        """The text of a value; of a long one its begin and a digest."""
        if isinstance(x, _SIMPLE):
            return _short(f"{_name(type(x))} {x!r}" if type(x) not in (int, float, bool, str) else repr(x))
        around = [*map(id, self._around)]
        if id(x) in around:  # what contains itself
            return f"^{len(around) - around.index(id(x))}"
        if id(x) not in self._texts:
            self._around.append(x)
            self._texts[id(x)] = x, _short(self._written(x))
            self._around.pop()
        return self._texts[id(x)][1]

    def _written(self, x: Any) -> str:
        if isinstance(x, Tensor):
            return f"a tensor {words(key_of(x))}" if x.layout is torch.strided else f"{x.layout} {x.shape} {x.dtype}"
        if isinstance(x, bytes | bytearray):
            return f"{len(x)} bytes {hashlib.sha256(x).hexdigest()[:16]}"
        if is_mesh(x):
            return self._mesh(x)
        if isinstance(x, ModuleType | MemberDescriptorType):
            return f"{type(x).__name__} {x.__name__}"
        if isinstance(x, tree.Spec):
            return self._structure(tree.unflatten(x, range(x.num_leaves)))
        if isinstance(x, FunctionType | type):
            return self._code(x)
        if type(x) is dict:
            return f"{{{', '.join(f'{self.text(k)}: {self.text(v)}' for k, v in x.items())}}}"
        if type(x) in (list, tuple, set, frozenset):
            texts = map(self.text, x)
            return f"{_name(type(x))} [{', '.join(sorted(texts) if isinstance(x, set | frozenset) else texts)}]"
        if inside := [self.text(getattr(x, attribute)) for attribute in self._wrapped(x)]:
            return f"{_name(type(x))} of {', '.join(inside)}"
        if is_dataclass(x):  # the fields alone: what an object remembers is this process's
            return f"{_name(type(x))} {self.text({field.name: getattr(x, field.name, None) for field in fields(x)})}"
        return self._saved(x)

    def _mesh(self, x: Any) -> str:
        # a rank of the first mesh finds its own program; its place on another one is part of what was traced
        number = self._meshes.index(name) if (name := MESHES.of(x)) in self._meshes else len(self._meshes)
        at = f", rank {rank_in(x)}" if number else ""
        return f"mesh {number} {axis_sizes(x)} on {mesh_device(x).type}{at}"

    def _wrapped(self, x: object) -> Iterator[str]:
        """The attributes of an object that has a function, instead of what `pickle` would save."""
        if isinstance(x, MethodType):
            yield from ("__func__", "__self__")
        elif isinstance(x, staticmethod | classmethod):
            yield "__func__"
        elif isinstance(x, property | cached_property):
            yield "fget" if isinstance(x, property) else "func"
        elif isinstance(x, Source):
            yield "static"
        elif type(x).__module__.startswith("fshard."):
            yield from (name for name in ("run", "__wrapped__") if hasattr(x, name))

    def _code(self, x: FunctionType | type) -> str:
        name = f"{x.__module__}.{x.__qualname__}"
        if isinstance(x, FunctionType):
            if not _is_users(x):
                return name
            self.met.append(x)
            return f"{name} {_digest_of_code(x.__code__)}"
        if is_of_library(x):
            return name
        self.met.append(x)
        bases = [*map(self.text, x.__bases__)]
        inside = [f"{k}: {self.text(v)}" for k, v in vars(x).items() if isinstance(v, FunctionType) or _says(k, v)]
        return f"{name} {bases} {inside}"

    def _saved(self, x: Any) -> str:
        """What `pickle` would save of an object, or an error."""
        saved = parts(x)
        if saved is None:
            saved = x.__reduce_ex__(4)
        if isinstance(saved, str):
            return f"{getattr(x, '__module__', '')}.{saved}"
        inside = [list(part) if isinstance(part, Iterator) else part for part in saved]
        return f"{self.text(type(x))} {' '.join(map(self.text, inside))}"

    def _structure(self, x: Any) -> str:
        """The text of a tree's structure: types, names of children, and what nodes carry beside them."""
        children, carried = tree.opened(x)
        if children is None:
            return "*"
        inside = ", ".join(f"{self.text(name)}: {self._structure(child)}" for name, child in children)
        beside = "" if type(x) in (dict, list, tuple) else f" with {self.text(carried)}"
        return f"{_name(type(x))}{beside} ({inside})"


def _says(name: str, value: object) -> bool:
    """Whether an attribute of a class is part of its code: not what Python keeps there."""
    return not name.startswith("__") and type(value).__module__ != "_abc"


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG // 2]}... ({_digest(text)})"
