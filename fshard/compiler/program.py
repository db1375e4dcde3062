"""A compiled function as data for another process.

Note [A program]
    A program is Inductor's output: code of the driver and of each distinct region as text, and loops of all regions as
    libraries. A region's text has only the statements a call needs, so a region of loops and torch operators imports
    nothing of Inductor. Meshes have other names in another process, so the driver calls them `mesh_0`, `mesh_1`, in the
    order of the arguments. The result's structure is stored as subtrees of the arguments and Python's containers.
    Nothing is pickled, but loading a program runs its code.

Note [Kernels of a program]
    A program has the configuration that Inductor chose for each Triton kernel, and its binary, as files. Loading puts
    missing files into the caches of Inductor and Triton, which find them by digests of source, versions and options.
    So nothing is compiled or measured again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from ..comm.mesh import MESHES, Mesh
from ..core import tree
from ..core.storage import as_bytes, from_bytes
from ..core.tracing import Marked
from ..core.tree import Tree
from ..files.index import Json
from ..graph.inspect import arguments, operator
from .donate import Input
from .identity import structure
from .loops import libraries, load
from .regions import Region, boxed, driver
from .trace import Output, Trace

Scope = dict[str, Any]  # the names of a text that was run
InnerCompile = Callable[..., object]  # in place of Inductor's `compile_fx_inner`
CompileRegion = Callable[[fx.GraphModule, InnerCompile], Callable[..., Sequence[Tensor]]]

_CONTAINER_KINDS: dict[str, Callable[..., Tree]] = {kind.__name__: kind for kind in (dict, list, tuple, OrderedDict)}
_DRIVER_NAMES = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan"), "boxed": boxed}
_BINARIES = (".cubin", ".hsaco", ".json")  # as under TRITON_STORE_BINARY_ONLY
_LIST = "__grp__"  # begins the name of Triton's list of a kernel's files
_PREFIX = f"{boxed.__module__.replace('.', '_')}_"  # torch.fx puts it before names of `regions`
_MESH = re.compile(r"'mesh_(\d+) of the arguments'")


class UnsavableError(TypeError):
    """Raised if a function cannot be saved for another process."""


@dataclass(frozen=True)
class Program:
    """A compiled function as data (Note [A program]): `head` describes it, `parts` has bytes by digest."""

    head: Json
    parts: Mapping[str, bytes]


class _Parts(dict[str, bytes]):
    def put(self, data: bytes) -> str:
        digest = digest_of(data)
        self[digest] = data
        return digest


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def program_of(
    traced: Trace,
    nodes: Sequence[fx.Node | Region],
    compile: CompileRegion,
    meshes: Sequence[Mesh],
    leaves: Sequence[object],
    captured: Sequence[int],
) -> Program:
    """Compile a graph, cut into `nodes`, as a program. `compile(region, inner)` lets Inductor compile one region.

    `captured`: positions in `captures(fn)` of the variables with input tensors.
    """
    wrappers, parts = list[Any](), _Parts()
    calls = _compiled_regions(traced.module, nodes, compile, wrappers)
    texts = [_needed_source(wrapper.source_code) for wrapper in wrappers]
    paths, places = libraries([(kinds, source) for _, loops in texts for _, kinds, source in loops])
    remaining, constants = iter(places), [x.target for x in calls.graph.nodes if x.op == "get_attr"]
    head = {
        "driver": parts.put(_driver_text(calls, meshes).encode()),
        "regions": [
            {
                "text": parts.put(text.encode()),
                "loops": {name: next(remaining) for name, *_ in loops},
                "aligned": [*wrapper.inputs_to_check],
                "written": [*wrapper.mutated_input_idxs],
            }
            for (text, loops), wrapper in zip(texts, wrappers, strict=True)
        ],
        "libraries": [parts.put(Path(path).read_bytes()) for path in paths],
        "constants": {name: _constant(getattr(calls, str(name)), parts) for name in constants},
        "kernels": {},
        "captured": [*captured],
        "result": _result(traced, leaves),
    }
    return Program(head, parts)


def _compiled_regions(
    module: fx.GraphModule, nodes: Sequence[fx.Node | Region], compile: CompileRegion, wrappers: list[Any]
) -> fx.GraphModule:
    """Return the driver. Append Inductor's result for each region to `wrappers`."""
    # Private API (test_artifact.py): Inductor's results are not public. AOTAutograd's cache would bypass `inner`.
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx_inner

    def inner(graph: fx.GraphModule, inputs: Sequence[Tensor], **settings: Any) -> object:
        wrappers.append(compile_fx_inner(graph, inputs, **settings))
        ends.append(_num_ends(graph))
        return wrappers[-1]

    def compiled(region: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
        expected, before = _num_ends(region), len(ends)
        fn = compile(region, inner)
        # AOTAutograd may add outputs, as for written inputs; a program lacks the code that removes them
        if ends[before:] != [expected] or wrappers[-1].constants:
            raise UnsavableError("jit: artifact: Inductor compiled a part of the graph in another form than it has")
        return fn

    ends = list[tuple[int, int]]()
    with config.patch(enable_autograd_cache=False):
        return driver(module, nodes, compiled)


def _num_ends(graph: fx.GraphModule) -> tuple[int, int]:
    nodes = graph.graph.nodes
    return sum(node.op == "placeholder" for node in nodes), sum(len(n.args[0]) for n in nodes if n.op == "output")


def _driver_text(calls: fx.GraphModule, meshes: Sequence[Mesh]) -> str:
    for node in calls.graph.nodes:
        if operator(node).startswith("fshard.") and "mesh" in (named := arguments(node)):
            likeness = MESHES.find(named["mesh"]).likeness  # equal for a mesh and its twin with shared memory
            numbers = [number for number, mesh in enumerate(meshes) if mesh.likeness == likeness]
            if not numbers:
                raise UnsavableError("jit: artifact: the function communicates on a mesh that no argument lies on")
            number = f"mesh_{numbers[0]} of the arguments"
            node.args = tuple(number if x is named["mesh"] else x for x in node.args)
    code = calls.graph.python_code("self")
    text, values = _MESH.sub(r"mesh_\1", code.src), dict(code.globals)
    for name in [name for name in values if name.startswith(_PREFIX)]:
        text = re.sub(rf"\b{name}\b", name.removeprefix(_PREFIX), text)
        values.pop(name)
    called = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    if others := [name for name in values if name in called and name not in _DRIVER_NAMES]:
        raise UnsavableError(f"jit: artifact: the graph calls {others[0]}, which has no name in another process")
    return text


def _needed_source(source: str) -> tuple[str, list[tuple[str, list[str], str]]]:
    """Return the statements of an Inductor wrapper's source that a call needs, and its loops: name, types, source."""
    body, kept, loops = ast.parse(source).body, list[ast.stmt](), list[tuple[str, list[str], str]]()
    for statement in body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(attr="cpp_pybinding"), [kinds, text])):
                loops.append((name, ast.literal_eval(kinds), ast.literal_eval(text)))
            case ast.ImportFrom(names=[ast.alias("extern_kernels")]) if _are_torchs(body):
                kept.append(ast.parse("extern_kernels = torch").body[0])
            case _:
                kept.append(statement)
    names, before = {"call"}, -1
    while len(names) > before:
        before = len(names)
        for statement in kept:
            if names & _bound(statement):
                names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return ast.unparse(ast.Module([x for x in kept if names & _bound(x)], [])), loops


def _bound(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Import(names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.FunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.Assign(targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def _are_torchs(body: Iterable[ast.stmt]) -> bool:
    """Return True if all called `extern_kernels` are torch's functions of the same names."""
    from torch._inductor.select_algorithm import extern_kernels

    nodes = [node for x in body for node in ast.walk(x) if isinstance(node, ast.Attribute)]
    names = {x.attr for x in nodes if isinstance(x.value, ast.Name) and x.value.id == "extern_kernels"}
    return all(getattr(torch, name, None) is getattr(extern_kernels, name) for name in names)


def _constant(x: Tensor, parts: _Parts) -> Json:
    data = as_bytes(x.detach().cpu().contiguous()).numpy().tobytes()
    return [str(x.dtype).removeprefix("torch."), [*x.shape], str(x.device), parts.put(data)]


def load_program(program: Program, meshes: Sequence[str]) -> tuple[Callable[..., Sequence[Tensor]], str, list[Scope]]:
    """Return the function, the driver's text and the regions' scopes."""
    head, parts = program.head, program.parts
    _write_kernels(program)
    with tempfile.TemporaryDirectory() as folder:  # a loaded library needs no file
        paths = [Path(folder) / f"{number}.so" for number in range(len(head["libraries"]))]
        for path, digest in zip(paths, head["libraries"], strict=True):
            path.write_bytes(parts[digest])
        scopes = [_region_scope(region, parts, paths) for region in head["regions"]]
    for scope in scopes:  # all kernels are submitted
        if "async_compile" in scope:
            scope["async_compile"].wait(scope)
    regions = [_aligned(scope["call"], region) for scope, region in zip(scopes, head["regions"], strict=True)]
    constants = {}
    for name, (dtype, shape, device, digest) in head["constants"].items():
        data = torch.empty(len(parts[digest]), dtype=torch.uint8, device="cpu")
        if parts[digest]:  # `frombuffer` refuses empty buffers
            data = torch.frombuffer(bytearray(parts[digest]), dtype=torch.uint8)
        constants[name] = from_bytes(data, getattr(torch, dtype)).view(shape).to(device)
    names: Scope = {**_DRIVER_NAMES, **{f"region_{n}": fn for n, fn in enumerate(regions)}}
    names |= {f"mesh_{n}": name for n, name in enumerate(meshes)}
    text = parts[head["driver"]].decode()
    exec(text, names)
    forward, constants_of = names["forward"], SimpleNamespace(**constants)
    return lambda *inputs: forward(constants_of, *inputs), text, scopes


def _region_scope(region: Json, parts: Mapping[str, bytes], paths: Sequence[Path]) -> Scope:
    scope: Scope = {name: load(loop, str(paths[number])) for name, (number, loop) in region["loops"].items()}
    exec(parts[region["text"]].decode(), scope)
    return scope


def _aligned(call: Callable[..., Sequence[Tensor]], region: Json) -> Callable[..., Sequence[Tensor]]:
    if not region["aligned"]:
        return call
    # Private API: Inductor's function aligns inputs to 16 bytes, as GPU kernels expect.
    from torch._inductor.utils import align_inputs_from_check_idxs

    written: Any = {*region["written"]}
    return align_inputs_from_check_idxs(call, region["aligned"], written)


def with_kernels(program: Program, scopes: Iterable[Scope]) -> Program:
    """Add the files of the kernels in the regions' scopes (Note [Kernels of a program])."""
    values = [value for scope in scopes if "async_compile" in scope for value in scope.values()]
    files = {name: data for value in values for name, data in _kernel_files(value)}
    parts = _Parts(program.parts)
    kernels = program.head["kernels"] | {name: parts.put(data) for name, data in files.items()}
    return Program({**program.head, "kernels": kernels}, parts)


def _kernel_files(kernel: object) -> Iterator[tuple[str, bytes]]:
    # Private API (test_artifact.py): torch's own bundles are made before it chooses.
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if not isinstance(kernel, CachingAutotuner) or len(kernel.launchers) != 1:  # not chosen yet
        return
    choice = getattr(getattr(kernel.save_cache_hook, "__self__", None), "local_cache", None)  # (cache, path)
    names = ["/".join(Path(choice[1]).parts[-2:])] if choice else []
    folder = f"{kernel.triton_meta['device']}/{kernel.launchers[0].cache_hash}"
    names += [f"{folder}/{file.name}" for file in sorted(_cached(f"{folder}/").iterdir()) if file.suffix in _BINARIES]
    for name in names:
        if (path := _cached(name)).exists():
            yield name, _listed_in(Path(), name, path.read_bytes())


def _write_kernels(program: Program) -> None:
    # last the list, by which Triton takes a kernel for whole
    for name, digest in sorted(program.head["kernels"].items(), key=lambda item: _LIST in item[0]):
        from torch._inductor.codecache import write_atomic

        if not (path := _cached(name)).exists():
            write_atomic(str(path), _listed_in(path.parent, name, program.parts[digest]), make_dirs=True)


def _cached(name: str) -> Path:
    """Return a file's path in Triton's cache of a device, or in Inductor's."""
    from torch._inductor.runtime.runtime_utils import cache_dir, triton_cache_dir

    *device, folder, file = name.split("/")
    return Path(triton_cache_dir(int(device[0])) if device else cache_dir(), folder, file)


def _listed_in(folder: Path, name: str, data: bytes) -> bytes:
    if _LIST not in name:
        return data
    return json.dumps({"child_paths": {file: str(folder / file) for file in json.loads(data)["child_paths"]}}).encode()


def result_of(program: Program, leaves: Sequence[object], spec: tree.Spec) -> tuple[tree.Spec, tuple[object, ...]]:
    subtrees = [node for _, node, _ in tree.walk(spec)]

    def read(told: Json) -> Tree:
        match told:
            case {"argument": number}:
                return tree.unflatten(subtrees[number], [*map(read, told["leaves"])])
            case {"kind": kind, "names": names}:
                children = [*map(read, told["children"])]
                pairs = zip(names, children, strict=True)
                return _CONTAINER_KINDS[kind](children if kind in ("list", "tuple") else pairs)
            case {"module": module, "class": name}:
                kind, children = _named_tuple(module, name), [*map(read, told["children"])]
                return kind(*children) if hasattr(kind, "_fields") else kind(children)
            case ["output", number, name]:
                kinds: list[type[Tensor]] = [Tensor, *Marked.__subclasses__()]
                return Output(number, next(kind for kind in kinds if kind.__name__ == name))
            case ["input", number]:
                return Input(number)
            case ["leaf", number]:
                return leaves[number]
            case ["torch", name]:
                return getattr(torch, name)
            case ["device", name]:
                return torch.device(name)
            case ["complex", text]:
                return complex(text)
        return told

    results, out_spec = tree.flatten(read(program.head["result"]))
    return out_spec, tuple(results)


def _named_tuple(module: str, name: str) -> Callable[..., Tree]:
    """Find the class of a named tuple. Raises TypeError for any other object: a program may call no other."""
    kind: object = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    fields = hasattr(kind, "_fields") or hasattr(kind, "n_fields")  # torch's named tuples, as `topk` returns
    if not (isinstance(kind, type) and issubclass(kind, tuple) and fields):
        raise TypeError(f"expected a named tuple, got {kind!r}")
    return kind


def _result(traced: Trace, leaves: Sequence[object]) -> Json:
    subtrees = [node for _, node, _ in tree.walk(traced.spec)]
    numbers = {structure(node): number for number, node in reversed([*enumerate(subtrees)]) if not node.is_leaf()}
    places = {id(leaf): number for number, leaf in enumerate(leaves)}

    def told(x: object, path: tuple[str, ...]) -> Json:
        (children, _), text = tree.opened(x), structure(tree.flatten(x)[1])
        if text in numbers:
            return {"argument": numbers[text], "leaves": [told(leaf, path) for leaf in tree.leaves(x)]}
        kind, simple = type(x), (bool, int, float, str, type(None))
        if kind in simple:
            return x
        if children is None:
            return _leaf(x, places, path)
        inside = [told(child, (*path, str(name))) for name, child in children]
        if _is_found(kind):
            return {"module": kind.__module__, "class": kind.__qualname__, "children": inside}
        names = [name for name, _ in children]
        if kind in _CONTAINER_KINDS.values() and {*map(type, names)} <= {str, int}:
            return {"kind": kind.__name__, "names": names, "children": inside}
        raise _no_result(x, path, "whose structure no argument has")

    return told(tree.unflatten(traced.out_spec, traced.results), ())


def _is_found(kind: type) -> bool:
    try:
        return _named_tuple(kind.__module__, kind.__qualname__) is kind
    except TypeError:
        return False


def _leaf(x: object, places: Mapping[int, int], path: Sequence[str]) -> Json:
    if isinstance(x, Output):
        return ["output", x.number, x.kind.__name__]
    if isinstance(x, Input):
        return ["input", x.number]
    if isinstance(x, torch.dtype | torch.layout | torch.memory_format):
        return ["torch", str(x).removeprefix("torch.")]
    if isinstance(x, torch.device):
        return ["device", str(x)]
    if type(x) is complex:
        return ["complex", repr(x)]
    if id(x) in places:
        return ["leaf", places[id(x)]]
    raise _no_result(x, path, "which is no argument")


def _no_result(x: object, path: Sequence[str], what: str) -> UnsavableError:
    return UnsavableError(
        f"jit: artifact: the result has at {'.'.join(path)!r} a {type(x).__qualname__}, {what}: give back parts of the "
        "arguments, dicts, lists, named tuples, tensors, numbers and strings"
    )
