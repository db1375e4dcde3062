"""The C++ loops of one graph, compiled as one file.

Note [Loops in one file]
    Inductor writes one file for each fused loop. g++ takes 0.6 s for an empty file and about 0.1 s more for a loop, so
    g++ dominates a graph's first step. fshard compiles all loops of a graph's regions as one file, each in a
    namespace, with Inductor's bindings and flags. Results have the same bits. torch caches the library as usual.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

Loop = Callable[..., None]

_ONE_AT_A_TIME = threading.RLock()
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?!include\b|pragma\b)", re.MULTILINE)
_INSTRUCTION_OF_FLAG = {
    "-mavx512vnni": "vpdpbusd %zmm0, %zmm0, %zmm0",
    "-mavx512bf16": "vcvtne2ps2bf16 %zmm0, %zmm0, %zmm0",
    "-mamx-tile": "tilezero %tmm0",
    "-mamx-bf16": "tdpbf16ps %tmm0, %tmm1, %tmm2",
    "-mamx-int8": "tdpbusd %tmm0, %tmm1, %tmm2",
    "-mamx-fp16": "tdpfp16ps %tmm0, %tmm1, %tmm2",
}


@contextmanager
def in_one_file(settings: Mapping[str, object]) -> Iterator[None]:
    """In a block, compile the loops of this thread's graphs as one file, with these Inductor settings."""
    from torch._inductor import config

    # locked: the block replaces torch's settings and methods in all threads
    with _ONE_AT_A_TIME, config.patch({**settings}), _shortened():
        yield from _collected()


@contextmanager
def _shortened() -> Iterator[None]:
    """In a block, answer two questions of Inductor sooner, with the same answers.

    Inductor asks whether the compiler knows an instruction, and compiles, links and loads a program: 0.5 s. Assembling
    the instruction takes 0.02 s. Inductor lets sympy simplify indices: 0.01 s each; a polynomial needs no simplifying,
    because Inductor simplifies the difference of two.
    """
    # Private API: without these names, torch answers (test_loops.py).
    try:
        from sympy import Expr
        from torch._inductor import sizevars
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.cpu_vec_isa import VecISA

        tried, simplified = VecISA.check_build, sizevars.simplify_index_in_vec_range
    except (ImportError, AttributeError):
        yield
        return

    def check_build(isa: VecISA, code: str) -> bool:
        flags = isa.build_arch_flags().split()
        lines = [line for flag, line in _INSTRUCTION_OF_FLAG.items() if flag in flags and "ATen" not in code]
        return bool(lines and _assembles(get_cpp_compiler(), flags, lines)) or tried(isa, code)

    def simplify(index: object, var: object, length: int) -> object:
        known = isinstance(index, Expr) and index.is_polynomial(*index.free_symbols)
        return index if known else simplified(index, var, length)

    places = (VecISA, "check_build", check_build), (sizevars, "simplify_index_in_vec_range", simplify)
    with patch.object(*places[0]), patch.object(*places[1]):
        yield


def _assembles(compiler: str, flags: Sequence[str], lines: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, *flags, "-x", "c++", "-c", "-", "-o", f"{folder}/out"]
        source = f'void f() {{ asm("{"; ".join(lines)}"); }}'
        return subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode == 0


def _collected() -> Iterator[None]:
    # Private API: Inductor has no public hook. Without these names, torch compiles each loop (test_loops.py fails).
    try:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import LambdaFuture

        alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    except (ImportError, AttributeError):
        yield
        return
    thread, files, waiting = threading.get_ident(), [_File()], list[Callable[[], object]]()

    def collected(compiler: AsyncCompile, argtypes: list[str], source: str) -> object:
        if threading.get_ident() != thread or _DIRECTIVE.search(source):
            return alone(compiler, argtypes, source)
        if files[-1].loops is not None:
            files.append(_File())
        return LambdaFuture(partial(files[-1].loop, files[-1].add(argtypes, source)))

    def put(compiler: AsyncCompile, scope: dict[str, object]) -> None:
        # with one compile thread, torch's `wait` leaves the futures in the scope
        scope.update({name: x.result() for name, x in scope.items() if isinstance(x, LambdaFuture)})
        wait(compiler, scope)

    def at_the_end(compiler: AsyncCompile, scope: dict[str, object]) -> None:
        if threading.get_ident() == thread:
            waiting.append(partial(put, compiler, scope))
        else:
            wait(compiler, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = collected, at_the_end  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = alone, wait  # type: ignore[method-assign]
    for put_into_scope in waiting:
        put_into_scope()


class _File:
    def __init__(self) -> None:
        self._sources: dict[tuple[tuple[str, ...], str], str] = {}  # names by (types, source)
        self.loops: dict[str, Loop] | None = None  # by name; None before compilation
        self.path = ""  # of the compiled library

    def add(self, argtypes: Sequence[str], source: str) -> str:
        return self._sources.setdefault((tuple(argtypes), source), f"kernel{len(self._sources) or ''}")

    def loop(self, name: str) -> Loop:
        if self.loops is None:
            self.loops = self._compiled()
        return self.loops[name]

    def _compiled(self) -> dict[str, Loop]:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        parts = [_loop_part(name, argtypes, source) for (argtypes, source), name in self._sources.items()]
        includes = dict.fromkeys(line.strip() for part in parts for line in _INCLUDE.findall(part))
        bodies = [f"namespace loop{n} {{\n{_INCLUDE.sub('', part)}\n}}\n" for n, part in enumerate(parts)]
        self.path = CppPythonBindingsCodeCache.load("\n".join([*includes, *bodies])).__file__
        return {name: load(name, self.path) for name in self._sources.values()}


def _loop_part(name: str, argtypes: Sequence[str], source: str) -> str:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    parsed = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {n})" for n, kind in enumerate(argtypes))
    call = Bindings.call_entry_function.format(parsed)
    known = {"arg_len": len(argtypes), "call_entry_func": call, "entry_func": name, "extra_parse_arg": ""}
    return source.replace('extern "C"', "static") + Bindings.suffix_template.format(**known)


def load(name: str, path: str) -> Loop:
    # Private API (test_loops.py): torch's bindings in the library call this address to find a tensor's memory.
    place = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(place)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def libraries(loops: Sequence[tuple[Sequence[str], str]]) -> tuple[list[str], list[tuple[int, str]]]:
    """Compile loops: (types of arguments, source). Return the libraries' paths, and (library, name) of each loop."""
    files, places = dict[str, _File](), list[tuple[int, str]]()
    for argtypes, source in loops:
        apart = source if _DIRECTIVE.search(source) else ""  # a macro could change other loops
        file = files.setdefault(apart, _File())
        places.append(([*files].index(apart), file.add(argtypes, source)))
    for file in files.values():
        file.loop("kernel")
    return [file.path for file in files.values()], places
