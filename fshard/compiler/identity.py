"""A compiled function's identity: named texts, the same in another process with the same function.

Note [What another process compares]
    Inside a process, fshard finds a graph by values and objects (Note [What a graph depends on] in `signature.py`).
    Another process has other objects, so each value becomes text:
    - numbers and strings as they are;
    - tensors by shape, strides, dtype and device;
    - functions and classes by name; functions of the user also by a digest of their code;
    - containers and objects by their state for `pickle`; objects of the user's classes also by all attributes;
    - an object inside itself by a number, so cycles end;
    - libraries by the versions of Python, torch and fshard.

    fshard compares texts and never unpickles them. A function that reads an object without a text (a lock, a file, a
    generator) cannot be saved.
"""

from __future__ import annotations

import copyreg
import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, partial, singledispatchmethod
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes, ReferenceType, WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from ..comm.consensus import first_unlike_line
from ..comm.mesh import Mesh, axis_sizes, is_mesh, mesh_device, present, process_rank, rank_in
from ..core import tree
from ..core.storage import Source
from .captures import LIBRARIES, Capture, captures, is_of_library, variables
from .signature import Ambient, Signature, TensorKey, key_of, parts, words_of_key
from .trace import resolved

Texts = dict[str, str]

_SIMPLE = {int, float, bool, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout}
_SIMPLE |= {torch.memory_format, torch.Size, torch.finfo, torch.iinfo, range, slice}
_LONG = 1000  # characters; a longer text is cut, and gets a digest
# prefixes of environment variables read by Inductor, Triton and g++
_VARIABLES = ("TORCHINDUCTOR_", "TORCH_COMPILE_", "CXX", "CPATH", "TRITON_")
_NO_MATTER = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"}


@dataclass(frozen=True)
class FunctionIdentity:
    """A function as named texts, comparable between processes.

    - `where`: versions, machine and settings.
    - `code`: digests of the user's functions.
    - `what`: arguments and variables.
    - `unknown`: the first value without a text, or "".
    """

    where: Texts
    code: Texts
    what: Texts
    unknown: str = ""

    def texts(self) -> dict[str, Texts]:
        return {"where": self.where, "code": self.code, "what": self.what}

    def differences(self, texts: Mapping[str, Texts]) -> list[str]:
        none, pairs = "not there", [(texts[part], now) for part, now in self.texts().items()]
        named = [(x, was.get(x, none), now.get(x, none)) for was, now in pairs for x in dict.fromkeys((*now, *was))]
        return [first_unlike_line(was, now, f"{name} was {{}}, is {{}}") for name, was, now in named if was != now]


def identity_of(fn: object, called: Signature, options: object) -> FunctionIdentity:
    writer, what, tensors = _Writer([*called.grids.values()]), {"jit's options": str(options)}, list[Tensor]()
    for variable in (x for x in captures(fn) if not (x.is_code or x.is_part)):  # an object's text has its parts
        _add(what, variable.name, writer.read(variable, variable.name))
        tensors += variable.tensors()
    first: dict[int, int] = {}
    what["which captured tensors are one"] = str([first.setdefault(id(x), i) for i, x in enumerate(tensors)])
    for name, text in _of_arguments(called, writer):
        _add(what, name, text)
    what["the function"], code = writer.named("the function", fn), Texts()
    for function in writer.functions:
        _add(code, f"the code of {function.__qualname__}", _digest_of_code(function.__code__))
    return FunctionIdentity(_machine(called), code, what, writer.unknown)


def structure(spec: tree.Spec) -> str:
    """Return the text of a tree structure. Unlike ==, texts tell 1 from True."""
    return _Writer(()).text(spec)


def _add(texts: Texts, name: str, text: str) -> None:
    """Add a text, joined to an earlier text of its name: two closures of one function have one name."""
    texts[name] = f"{texts[name]}, {text}" if name in texts else text


def _of_arguments(called: Signature, writer: _Writer) -> Iterator[tuple[str, str]]:
    for path, key in zip(tree.leaf_paths(called.spec), called.kinds, strict=True):
        is_simple = isinstance(key, TensorKey) or key[0] in _SIMPLE
        yield f"argument {path!r}", words_of_key(key) if is_simple else writer.named(f"argument {path!r}", key)
    yield "the structure of the arguments", writer.named("the arguments", called.spec)
    yield "which arguments are one", str(called.trained)
    grids = [*map(called.grids.__getitem__, filter(None, called.meshes))]
    # without a mesh, name the process: each process has its own program
    yield "the meshes of the arguments", writer.text(grids) if grids else f"none, process {process_rank()}"
    yield "the processes of the mesh", _short(str(grids[0].likeness if grids else ()))
    for name, value in zip(Ambient._fields, called.ambient, strict=True):
        yield f"torch's {name.replace('_', ' ')}", str(value)


def _machine(called: Signature) -> Texts:
    devices = {k.device for k in called.kinds if isinstance(k, TensorKey) and k.device.type == "cuda"}
    variables = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES) and k not in _NO_MATTER}
    return {
        "fshard": _digest_of_package(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "Python": platform.python_version(),
        "the machine": platform.machine(),
        "the processor": _processor(),
        "the number of threads": str(torch.get_num_threads()),
        "Inductor's settings": _changed_settings(bool(variables)),
        "the environment": str(sorted(variables.items())),
        "the accelerator": str(sorted(_accelerator(device) for device in devices)),
    }


def _changed_settings(by_variables: bool) -> str:
    """Return Inductor's changed settings. Its import takes seconds; before, only environment variables change any."""
    if "torch._inductor.config" not in sys.modules and not by_variables:
        return "{}"
    from torch._inductor import config

    # Private API: torch shows defaults in no public way (test_artifact.py fails if torch changes this).
    now, default_of = config.get_config_copy(), config._config  # type: ignore[attr-defined]
    return str({name: now[name] for name in sorted(now) if now[name] != default_of[name].default})


def _accelerator(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.major}.{properties.minor}, {properties.multi_processor_count}"


@cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{torch.backends.cpu.get_cpu_capability()} {model} {_short_sha(' '.join(sorted(features.split())))}"


@cache
def _digest_of_package() -> str:
    """Digest fshard's files: in development, files change and the version does not."""
    root = Path(__file__).parents[1]
    return _short_sha(*(f"{path.relative_to(root)} {path.read_text()}" for path in sorted(root.rglob("*.py"))))


def _short_sha(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


def _digest_of_code(code: CodeType) -> str:
    numbers = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    # the order of a set of strings changes with the process
    plain = [sorted(map(repr, x)) if isinstance(x, frozenset) else x for x in code.co_consts]
    constants = [_digest_of_code(x) if isinstance(x, CodeType) else repr(x) for x in plain]
    return _short_sha(code.co_code.hex(), str(numbers), str(names), code.co_exceptiontable.hex(), *constants)


class _Writer:
    """A writer of texts that are equal in all processes."""

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self.unknown, self.functions = "", list[FunctionType]()  # functions: the user's
        self._meshes = [mesh.likeness for mesh in meshes]
        self._texts: dict[int, tuple[object, str]] = {}  # by id: (object, text); a live object keeps its id
        self._around: list[object] = []  # objects being written, outermost first

    def named(self, name: str, x: object) -> str:
        try:
            return self.text(x)
        except Exception:  # an object's methods may raise any error
            self.unknown = self.unknown or f"{name} has a {_name(type([x, *self._around][-1]))}"
            self._around = []
            return "?"

    def read(self, variable: Capture, name: str = "") -> str:
        value = variable.read()
        if isinstance(value, ModuleType) and (variable.by_name or is_of_library(value)):
            return f"module {value.__name__}"
        return self.named(name, value) if name else self.text(value)

    def text(self, x: object) -> str:
        if type(x) in _SIMPLE:
            return _short(repr(x))
        if id(x) not in self._texts:
            self._around.append(x)
            self._texts[id(x)] = x, f"^{len(self._texts)}"  # for references from inside the object
            self._texts[id(x)] = x, _short(self._written(x) + self._own(x))
            self._around.pop()
        return self._texts[id(x)][1]

    def _apart(self, x: object) -> str:
        """Return a set item's text. Other items' texts refer to no object in it, because their order varies."""
        before, text = len(self._texts), self.text(x)
        while len(self._texts) > before:
            self._texts.popitem()
        return text

    def _all(self, values: Iterable[object]) -> str:
        return ", ".join(map(self.text, values))

    def _own(self, x: object) -> str:
        """Write all attributes of an object of the user's class: `pickle` may leave some out."""
        return "" if isinstance(x, type) or is_of_library(type(x)) else self.text(object.__getstate__(x))

    def _written(self, x: Any) -> str:
        if type(x) in ProxyTypes:
            return f"weak {self.text(x.__repr__.__self__)}"
        if isinstance(x, Tensor):
            if type(x).__module__.startswith("fshard.module."):  # it stands for a parameter, without memory
                return f"{_name(type(x))} {self.text(vars(x))}"
            form = words_of_key(key_of(resolved(x))) if x.layout is torch.strided else f"{x.layout} {x.dtype}"
            return f"{_name(type(x))} {form} {self.text(vars(x))}"
        if type(x) in (bytes, bytearray):
            return f"{_name(type(x))} of {len(x)} bytes {hashlib.sha256(x).hexdigest()[:16]}"
        if is_mesh(x):
            return self._mesh(x)
        if isinstance(x, tree.Spec):
            return self.text(x.__getstate__()[0])  # type: ignore[index]  # a tuple
        if type(x) is dict:
            return f"{{{', '.join(f'{self.text(k)}: {self.text(v)}' for k, v in x.items())}}}"
        if type(x) in (list, tuple):
            return f"{type(x).__name__} [{self._all(x)}]"
        if isinstance(x, set | frozenset):
            # objects hashed by identity have another order in each process
            if any(y.__hash__() == object.__hash__(y) for y in x):
                raise TypeError("a set of objects")
            return f"{self.text(type(x))} {{{', '.join(sorted(map(self._apart, x)))}}}"
        return self._object(x)

    def _object(self, x: object) -> str:
        if isinstance(x, FunctionType):
            return self._function(x)
        if isinstance(x, type):
            return self._class(x)
        if isinstance(x, ModuleType):
            return self._module(x)
        if type(x).__module__ == "torch._ops":
            return str(x)
        if isinstance(x, ReferenceType):
            # no graph reads a tensor through a weak reference
            return f"weak {'' if isinstance(x(), Tensor) else self.text(x())}"
        if isinstance(x, WeakKeyDictionary | WeakValueDictionary):
            # entries with a class or an object of fshard as key are caches of `singledispatch` and of plans
            kept = {k: v for k, v in x.items() if not (isinstance(k, type) or type(k).__module__.startswith("fshard."))}
            return f"weak {self.text(kept)}"
        if names := _parts_of(x):
            return f"{self.text(type(x))} of {self._all(getattr(x, name) for name in names)}"
        if is_dataclass(x) and type(x).__module__.startswith("fshard."):
            # fields only: other attributes are caches
            return f"{_name(type(x))} {self.text({field.name: getattr(x, field.name, None) for field in fields(x)})}"
        return self._saved(x)

    def _function(self, x: FunctionType) -> str:
        read = [f"{variable.name}: {self.read(variable)}" for variable in variables(x) if not variable.is_code]
        code = ""
        if not x.__code__.co_filename.startswith(LIBRARIES):
            self.functions.append(x)
            code = _digest_of_code(x.__code__)
        return f"{x.__module__}.{x.__qualname__} {code} {read} {self.text(vars(x)) if vars(x) else ''}"

    def _class(self, x: type) -> str:
        if is_of_library(x):
            return _name(x)
        inside = [f"{name}: {self.text(value)}" for name, value in [*vars(x).items()] if _says(name, value)]
        of = "" if is_of_library(type(x)) else self.text(type(x))
        notes = [dict(field.metadata) for field in fields(x)] if is_dataclass(x) else []
        return f"{_name(x)} {of} ({self._all(x.__bases__)}) {inside} {self.text(notes)}"

    def _module(self, x: ModuleType) -> str:
        if is_of_library(x):
            return f"module {x.__name__}"
        values = {name: value for name, value in vars(x).items() if name[:2] != "__"}
        return f"module {x.__name__} {self.text(values)}"

    def _mesh(self, x: Mesh) -> str:
        # each rank of the first mesh has its own program; a trace fixes the rank on another mesh
        likeness = present(x).likeness
        number = self._meshes.index(likeness) if likeness in self._meshes else -1
        at = f", rank {rank_in(x)} of {likeness}" if number else ""
        return f"mesh {number} {axis_sizes(x)} on {mesh_device(x).type}{at}"

    def _saved(self, x: object) -> str:
        saved = None if is_dataclass(x) else parts(x)
        if saved is None:
            saved = copyreg.dispatch_table.get(type(x), lambda y: y.__reduce_ex__(4))(x)
        if isinstance(saved, str):
            module = getattr(x, "__module__", "")
            if is_of_library(type(x)) and getattr(sys.modules.get(module), saved, None) is not x:
                raise TypeError("a name that does not lead to it")
            return f"{module}.{saved}"
        inside = [list(part) if isinstance(part, Iterator) else part for part in saved]
        return f"{self.text(type(x))} {self._all(inside)}"


def _parts_of(x: object) -> tuple[str, ...]:
    """Return the names of attributes written in place of `pickle`'s state."""
    of_ours = ("run", "__wrapped__") if type(x).__module__.startswith("fshard.") else ()
    of_kinds: list[tuple[type | tuple[type, ...], tuple[str, ...]]] = [
        (MethodType, ("__func__", "__self__")),
        ((staticmethod, classmethod), ("__func__",)),
        (partial, ("func", "args", "keywords", "__dict__")),
        (property, ("fget", "fset")),
        ((cached_property, singledispatchmethod), ("func", "dispatcher")),
        (type(_processor), ("__wrapped__",)),  # made by `cache`
        (Source, ("static",)),
        (object, of_ours),
    ]
    names = next(names for kinds, names in of_kinds if isinstance(x, kinds))
    return tuple(name for name in names if hasattr(x, name))


# attributes that Python adds to a class
_KEPT = {"__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__firstlineno__"}
_KEPT |= {"__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "__abstractmethods__"}
_KEPT |= {"__orig_bases__", "__parameters__", "__type_params__", "__slotnames__"}
_KEPT |= {"__annotate__", "__annotate_func__", "__annotations_cache__"}
# different in each process: attrs' hash, and objects that pydantic makes from compared fields
_KEPT |= {"__hash__", "__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__"}


def _says(name: str, value: object) -> bool:
    return name not in _KEPT and type(value).__module__ != "_abc" and not isinstance(value, MemberDescriptorType)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG // 2]}... ({_short_sha(text)})"
