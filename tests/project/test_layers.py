"""The shape of the package: imports follow the folders, few modules use outside things, all is documented and small."""

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fshard

pytestmark = pytest.mark.law

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fshard"
PAGE = ROOT / "docs" / "architecture.md"


def module(path: Path) -> str:
    """The name of a file: `comm.mesh` for fshard/comm/mesh.py, `comm` for fshard/comm/__init__.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


parsed = functools.cache(ast.parse)
SOURCES = {module(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

# Which folders a folder may import from; inside a folder, imports must have no cycle. Modules that are in no folder
# are the entry points of users: they may import everything, and no module imports them.
FOLDERS = {
    "core": set(),
    "files": {"core"},
    "comm": {"core"},
    "hosts": {"core", "comm"},
    "layout": {"core", "comm"},
    "whole": {"core", "comm", "layout"},
    "plan": {"core", "comm", "hosts", "layout"},
    "sharding": {"core", "comm", "layout", "whole", "plan"},
    "grad": {"core", "comm", "layout", "plan", "sharding"},
    "update": {"core", "comm", "layout", "whole"},
    "derivatives": {"core", "comm", "layout", "plan", "sharding", "grad"},
    "state": {"core", "comm", "layout", "whole", "plan", "sharding", "update"},
    "zero_optimizer": {"core", "comm", "hosts", "layout", "whole", "plan", "sharding", "update"},
    "train": {"core", "comm", "hosts", "layout", "plan", "sharding", "grad", "update"},
    "optim": {"core", "comm", "layout", "whole", "update", "state"},
    "graph": {"core", "comm", "plan"},
    "compiler": {"core", "files", "comm", "hosts", "layout", "plan", "sharding", "graph"},
    "parallel": {"core", "comm", "plan"},
    "module": {"core", "comm", "layout", "plan", "sharding", "state", "parallel"},
    "checkpoint": {"core", "files", "comm", "layout", "plan", "sharding", "state"},
    "elastic": {"core", "files", "comm", "layout", "whole", "plan", "checkpoint"},
    "watch": {"core", "files", "comm", "layout", "plan", "sharding", "grad", "train"},
    "testing": {"core", "comm", "layout", "plan", "sharding", "grad", "update", "optim", "state", "train", "watch"},
    "planner": {"core", "plan", "sharding", "train", "graph", "compiler"},
    "pictures": {"core", "plan", "sharding", "train", "graph", "compiler"},
    "cli": {
        *("core", "files", "comm", "hosts", "plan", "sharding", "optim", "train", "compiler", "module"),
        *("planner", "checkpoint", "watch", "testing"),
    },
}

# Which modules may name an outside thing, in an import or as an attribute.
DOORS = {
    "optree": {"core.tree"},
    "torch.utils._pytree": {"core.tree", "train.dynamo"},
    "torch._dynamo": {"train.dynamo", "compiler.lowered", "compiler.trace"},
    "torch.library": {"core.tracing"},
    "torch.ops.fshard": {
        "core.storage",
        "layout.row",
        "core.tracing",
        "core.random",
        "comm.announce",
        "graph.*",
    },
    "torch.utils._cxx_pytree": {"core.tree"},
    "torch.distributed": {
        *("state.dtensors", "comm.mesh", "comm.primitives", "comm.process_groups"),
        *("cli.doctor", "cli.self_test", "elastic.meeting", "elastic.rounds"),
    },
    "torch.optim": {"update.kernels", "optim.torch_optim"},
    "torch.autograd.graph": {"grad.tape", "graph.replay"},
    "torch.multiprocessing": {"grad.autograd"},
    "socket": {"hosts.links", "hosts.rendezvous", "elastic.meeting", "cli.doctor"},
    "mmap": {"hosts.links"},
    "fsspec": {"files.remote"},
    "threading": {
        *("testing.scheduler", "comm.announce", "comm.process_groups", "module.*"),
        *("checkpoint.saving", "checkpoint.writing", "compiler.loops", "core.random"),
    },
    "torch.nn.Module": {"module.*", "parallel.*", "cli.plan"},
    "torch.compile": set(),
    "torch.fx": {"graph.*", "compiler.*", "core.tracing", "planner.estimate"},
    "rich": {"cli.output"},
    "hypothesis": set(),
    "pytest": set(),
    "argparse": {"cli.*"},
    "matplotlib": {"pictures.charts"},
    "numpy": set(),
    "safetensors": set(),
}


def folder(name: str) -> str:
    """The folder of a module; "" for a module that is in none."""
    return name.partition(".")[0] if name.partition(".")[0] in FOLDERS else ""


def imported(name: str, source: str) -> Iterator[tuple[str, str]]:
    """What a module imports from the package, also inside functions: pairs of a module and a name in it."""
    package = name.split(".") if name in FOLDERS else name.split(".")[:-1]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("fshard.")]
            yield from ((other.partition(".")[2], "") for other in names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            rest = (node.module or "").split(".") if node.module else []
            if not node.level:
                if rest[0] != "fshard":
                    continue
                rest = rest[1:]
            base = ".".join([*start, *rest])
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield (inner, "") if inner in SOURCES else (base, alias.name)


def step(node: ast.AST) -> tuple[ast.AST, str] | None:
    """What an attribute is read of, and its name, also of `getattr(x, "name")`; None for other expressions."""
    match node:
        case ast.Attribute(value=value, attr=name):
            return value, name
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            return value, name
    return None


def dotted(node: ast.AST) -> str | None:
    """The text `a.b.c` of a chain of attributes; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    value, name = step(node) or (None, "")
    before = None if value is None else dotted(value)
    return None if before is None else f"{before}.{name}"


@functools.cache
def named(source: str) -> set[str]:
    """The dotted names that a module imports or uses, with `import ... as` and `name = a.b` resolved."""
    tree, aliases, found = parsed(source), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(alias.name)
                if alias.asname:
                    aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def resolved(name: str) -> str:
        first, dot, rest = name.partition(".")
        return f"{aliases.get(first, first)}{dot}{rest}"

    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=alias)], value=value) if step(value) and (name := dotted(value)):
                aliases[alias] = resolved(name)
    return found | {resolved(name) for node in ast.walk(tree) if step(node) and (name := dotted(node))}


def uses(source: str, thing: str) -> bool:
    """Whether a module names an outside thing."""
    return any(f"{name}.".startswith(f"{thing}.") for name in named(source))


def is_door(name: str, doors: set[str]) -> bool:
    """Whether a module may name a thing; `compiler.*` are all modules of the folder."""
    return name in doors or f"{folder(name)}.*" in doors


def violations(sources: dict[str, str]) -> list[str]:
    """Imports against the folders' rules, imports of private names, and outside things in other modules."""
    found = []
    for name, source in sources.items():
        for other, what in sorted(set(imported(name, source))):
            here, there = folder(name), folder(other)
            if here and there != here and there not in FOLDERS[here]:
                found.append(f"{name} imports {other}, which {here} may not")
            if other != name and any(part.startswith("_") for part in [*other.split("."), what] if part != "__main__"):
                found.append(f"{name} imports {other}.{what}, which is private")
        for thing, doors in DOORS.items():
            if not is_door(name, doors) and uses(source, thing):
                found.append(f"{name} uses {thing}, which belongs to {sorted(doors)}")
    return found


def cycle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a cycle; [] if there are none."""
    graph = {name: {other for other, _ in imported(name, source)} for name, source in sources.items()}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_imports_follow_the_folders_and_go_through_the_doors() -> None:
    """Imports follow `FOLDERS` and `DOORS`: otherwise a change in one folder could break any other one."""
    assert violations(SOURCES) == []


def test_no_modules_import_each_other() -> None:
    """No modules import each other in a cycle: otherwise `import fshard` would depend on which module comes first."""
    assert cycle({name: source for name, source in SOURCES.items() if folder(name) and name not in FOLDERS}) == []


def test_the_folders_and_doors_are_those_there_are() -> None:
    """Every folder has a rule, and every door and file is used: otherwise dead code and old rules would stay."""
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(FOLDERS)
    for thing, doors in DOORS.items():
        for door in doors:
            assert any(is_door(name, {door}) and uses(SOURCES[name], thing) for name in SOURCES), (thing, door)
    entered = {other for name, source in SOURCES.items() for other, _ in imported(name, source)}
    entered.add("cli.main")  # by fshard_command.py, outside of the package
    assert {name for name in SOURCES if folder(name)} - entered <= {*FOLDERS}


@pytest.mark.parametrize(
    ("name", "source", "what"),
    [
        ("core.tree", "from ..comm import mesh", "core.tree imports comm.mesh"),
        ("comm.mesh", "from ..train.step import train_step", "comm.mesh imports train.step"),
        ("comm.mesh", "import fshard.plan.plan", "comm.mesh imports plan.plan"),
        (
            "layout.norms",
            "def f():\n    from fshard.sharding import plan\n    return plan",
            "layout.norms imports sharding",
        ),
        ("train.step", "from ..compiler.jit import jit", "train.step imports compiler.jit"),
        ("update.base", "from ..plan import plan", "update.base imports plan.plan"),
        ("compiler.jit", "from ..optim.base import Transform", "compiler.jit imports optim.base"),
        ("plan.plan", "from .. import wire", "plan.plan imports wire"),
        ("plan.plan", "from .tape import _pack", "plan.plan imports plan.tape._pack, which is private"),
        ("plan.plan", "import optree", "plan.plan uses optree"),
        ("plan.plan", "import torch.distributed as dist", "plan.plan uses torch.distributed"),
        ("plan.plan", "import torch\nx = torch.distributed.get_rank()", "plan.plan uses torch.distributed"),
        ("plan.plan", "from torch import distributed as d", "plan.plan uses torch.distributed"),
        ("train.step", "import torch\nx = torch.ops.fshard.put", "train.step uses torch.ops.fshard"),
        (
            "plan.plan",
            "from torch import autograd as a\nx = a.graph.saved_tensors_hooks",
            "plan.plan uses torch",
        ),
        ("plan.plan", "def f():\n    import numpy as np\n    return np", "plan.plan uses numpy"),
    ],
)
def test_the_check_can_fail(name: str, source: str, what: str) -> None:
    """Each fault in a made-up source is found: otherwise the test of imports would pass with wrong imports."""
    found = violations({name: source})
    assert len(found) == 1
    assert found[0].startswith(what)


def test_the_check_of_cycles_can_fail() -> None:
    """Two modules that import each other are found: otherwise the test of cycles would pass with cycles."""
    both = {"comm.mesh": "from . import ranks", "comm.ranks": "def f():\n    from .mesh import Mesh\n    return Mesh"}
    assert set(cycle(both)) == {"comm.mesh", "comm.ranks"}


def test_the_check_can_pass() -> None:
    """Made-up sources without a fault pass: otherwise the tests above would pass for a check that always fails."""
    good = "import math\nimport torch\nfrom ..core import tree\nfrom ..comm.mesh import Mesh\nx = torch.autograd.grad"
    assert violations({"plan.plan": good, "__init__": "from .train import step"}) == []


ENTER = """
import sys, tempfile, warnings
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"no {name} here", name=name)
sys.meta_path.insert(0, Without())
import torch  # which warns that there is no numpy
warnings.simplefilter("error")
import fshard
assert not set(sys.argv[1:]) & {name.split(".")[0] for name in sys.modules}
params = {"w": torch.ones(3)}
state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), fshard.optim.adamw(0.1))
state, metrics = fshard.train_step(lambda p, x: (p["w"] * x).sum(), fshard.optim.adamw(0.1))(state, torch.ones(1, 3))
print(metrics["loss"].item())
with tempfile.TemporaryDirectory() as folder:
    fshard.checkpoint.save_safetensors(folder, state.params)
    fshard.checkpoint.load_safetensors(folder, state.params.plan)
"""


def test_nothing_optional_is_needed() -> None:
    """A step runs without any optional package: otherwise users would have to install numpy, pytest or rich."""
    optional = [
        "rich",
        "matplotlib",
        "numpy",
        "hypothesis",
        "pytest",
        "torchopt",
        "pandas",
        "tensorboard",
        "safetensors",
        "fsspec",
    ]
    run = subprocess.run([sys.executable, "-c", ENTER, *optional], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "3.0\n"


LAZY = """
import sys
import fshard
lazy = ("fshard.compiler", "fshard.testing", "fshard.watch", "fshard.checkpoint", "fshard.elastic")
assert not [name for name in sys.modules if name.startswith(lazy)]
print(fshard.jit.__name__, fshard.TraceError.__name__, fshard.checkpoint.__name__, fshard.testing.simulate.__name__)
"""


def test_what_a_plain_step_does_not_need_is_imported_when_it_is_used() -> None:
    """`import fshard` would take half a second longer than it must, in each process of a run."""
    run = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert run.stdout == "jit TraceError fshard.checkpoint simulate\n", run.stderr


def definitions(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and methods by dotted names, without those that are nested in functions."""

    def inside(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield ".".join((*path, child.name)), child
            if isinstance(child, ast.ClassDef):
                yield from inside(child, (*path, child.name))

    return inside(parsed(source), ())


def test_modules_and_classes_are_documented() -> None:
    """Every module and public class has a docstring: otherwise a reader would have to guess what it is for.

    Functions of the package's own files need none where name and types say it.
    """
    bare = [module for module, source in SOURCES.items() if not ast.get_docstring(parsed(source))]
    for module, source in SOURCES.items():
        for name, node in definitions(source):
            private = any(part.startswith("_") for part in name.split("."))
            if isinstance(node, ast.ClassDef) and not private and not ast.get_docstring(node):
                bare.append(f"{module}.{name}")
    assert bare == []


def members(thing: object) -> dict[str, str | None]:
    """The docstrings of what a class of ours defines for users, by name."""
    own = vars(thing) if inspect.isclass(thing) and thing.__module__.startswith("fshard") else {}
    callables = {k: x for k, x in own.items() if not k.startswith("_") and (callable(x) or isinstance(x, property))}
    return {name: inspect.getdoc(x) for name, x in callables.items()}


def test_what_users_call_on_a_value_is_documented() -> None:
    """Every method and property of a public class has a docstring: otherwise `help` would be silent."""
    groups = [getattr(fshard, name) for name in GROUPS]
    public = [getattr(group, name) for group in (fshard, *groups) for name in group.__all__]
    assert [(x, name) for x in public for name, doc in members(x).items() if not doc] == []
    assert any(members(x) for x in public)


def test_every_public_name_is_there_and_documented() -> None:
    """`fshard.__all__` is sorted, complete and documented: otherwise `help(fshard)` would not explain some name."""
    assert fshard.__all__ == sorted(fshard.__all__)
    # if fshard is installed as a pytest plugin, pytest rewrites its assertions and adds names that begin with @
    public = {name for name in dir(fshard) if not name.startswith(("_", "@"))} - set(SOURCES)
    public -= {"TYPE_CHECKING", "importlib"}
    assert public == set(fshard.__all__) - set(SOURCES)
    for name in fshard.__all__:
        text = inspect.getdoc(getattr(fshard, name))
        assert text, name
        assert not text.startswith(f"{name}("), f"{name}: the docstring that dataclass makes"


GROUPS = ["checkpoint", "collectives", "elastic", "module", "optim", "random", "reduction", "testing", "tree", "wire"]


@pytest.mark.parametrize("name", GROUPS)
def test_every_name_of_a_group_is_there_and_documented(name: str) -> None:
    """Every name of a group such as `fshard.optim` has a docstring: otherwise `help(fshard.optim.x)` would be empty."""
    group = getattr(fshard, name)
    assert group.__all__ == sorted(group.__all__)
    assert [x for x in group.__all__ if not inspect.getdoc(getattr(group, x))] == []


def test_a_newcomer_finds_few_names_and_each_means_one_thing() -> None:
    """There are at most 43 public names, and none is a module too: otherwise newcomers would lose their way."""
    assert {name for name in fshard.__all__ if inspect.ismodule(getattr(fshard, name))} == set(GROUPS)
    assert len(fshard.__all__) - len(GROUPS) <= 45
    assert not (set(fshard.__all__) - set(GROUPS)) & set(SOURCES)


# Names that say nothing of what they hold.
PRONOUNS = {"found", "held", "mine", "one", "own"}


def twins(sources: dict[str, str]) -> set[str]:
    """The names that several classes have."""
    names = [node.name for x in sources.values() for node in parsed(x).body if isinstance(node, ast.ClassDef)]
    return {name for name, times in Counter(names).items() if times > 1}


def test_a_class_has_a_name_of_its_own() -> None:
    """Where two classes have one name, a reader who meets both takes one for the other."""
    assert twins(SOURCES) == set()
    assert twins({"a": "class A: ...", "b": "class A: ...\nclass B: ..."}) == {"A"}


# Where a lock is taken, and why nothing waits for ranks inside of it.
LOCKS = {
    "core.random": "operators are registered",
    "comm.process_groups": "one thread is noted",
    "compiler.loops": "Inductor compiles loops",
    "testing.scheduler": "it is the lock by which ranks take turns",
}


def locked(sources: dict[str, str]) -> set[str]:
    """The modules that take a lock of all threads, as functools.cached_property does before Python 3.12."""
    return {
        name for name, x in sources.items() if re.search(r"@(functools\.)?cached_property|\b(R?Lock|Condition)\(", x)
    }


def test_nothing_waits_for_ranks_under_a_lock() -> None:
    """Simulated ranks are threads: the others would wait for the lock for ever, and the one that has it for them."""
    assert locked(SOURCES) == {*LOCKS}, "use core.tracing.memo; give a reason for another lock"
    assert locked({"a": "@cached_property", "b": "_LOCK = threading.RLock()", "c": "@memo", "d": "block()"}) == {
        "a",
        "b",
    }


# Where a set of identities is kept, and what keeps the objects alive: otherwise others get their identities.
IDENTITIES = {
    "graph.replay": "the list of leaves",
    "graph.memory": "the list of storages",
    "train.describe": "the object that is described",
    "module.submodules": "the module",
    "module.checks": "the module",
    "compiler.trace": "the arguments",
}


def of_identities(sources: dict[str, str]) -> set[str]:
    """The modules with sets of identities; a dict has room for the object, or for a weak reference to it."""
    return {name for name, x in sources.items() if re.search(r"\badd\(id\(|\{id\([^:{}]* for ", x)}


def test_an_identity_is_that_of_an_object_that_lives() -> None:
    """The identity of a tensor that is gone is soon that of another one."""
    assert of_identities(SOURCES) == {*IDENTITIES}, "keep the objects, or weak references to them; else give a reason"
    assert of_identities({"a": "x.add(id(y))", "b": "{id(y) for y in z}", "c": "{id(y): y for y in z}"}) == {"a", "b"}


def pronouns(source: str) -> list[str]:
    """The pronouns that functions of a module assign to."""
    functions = [node for _, node in definitions(source) if isinstance(node, ast.FunctionDef)]
    names = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Name)]
    return [node.id for node in names if isinstance(node.ctx, ast.Store) and node.id in PRONOUNS]


def test_locals_say_what_they_hold() -> None:
    """No function assigns to `found`, `own` and the like: otherwise a reader would have to look up what they hold."""
    assert {name: words for name, source in SOURCES.items() if (words := pronouns(source))} == {}
    assert pronouns("def f():\n    found = [own for own in ()]\n    return found") == ["found", "own"]


def test_public_functions_show_an_example() -> None:
    """Every public function has a doctest: otherwise users would have to find out from its types how to call it."""
    functions = [name for name in fshard.__all__ if inspect.isfunction(getattr(fshard, name))]
    assert [name for name in functions if ">>>" not in (inspect.getdoc(getattr(fshard, name)) or "")] == []


@pytest.mark.parametrize("name", ["make_plan", "train_step"])
def test_options_are_lists(name: str) -> None:
    """The docstring lists every option of a function once: otherwise users would not learn of an option."""
    items = re.findall(r"^- ((?:`\w+`(?:, )?)+): ", inspect.getdoc(getattr(fshard, name)) or "", re.MULTILINE)
    options = inspect.signature(getattr(fshard, name)).parameters.values()
    assert sorted(re.findall(r"\w+", " ".join(items))) == sorted(x.name for x in options if x.kind is x.KEYWORD_ONLY)


def test_files_and_functions_are_small() -> None:
    """Folders have at most 12 files, files 500 lines, functions 60: otherwise a reader could not understand one."""
    for name in FOLDERS:
        assert len([x for x in SOURCES if folder(x) == name and x != name]) <= 12, name
    for module, source in SOURCES.items():
        assert len(source.splitlines()) <= 500, module
        for name, node in definitions(source):
            if isinstance(node, ast.FunctionDef):
                text = node.body[0].end_lineno - node.body[0].lineno + 1 if ast.get_docstring(node) else 0
                assert node.end_lineno - node.lineno + 1 - text <= 60, f"{module}.{name}"


PYTHONS = {"_asdict", "_replace", "_like"}  # methods of every NamedTuple, and a suffix of operators' names
PLAIN = {"__name__", "__file__", "__version__", "__module__"}  # what a thing has however it is made


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with an underscore.

    Of Python's `__x__` those count that are read of a thing of torch, and tell how it is made: `torch.f.__code__`.
    """
    dunders = {part for part in name.split(".") if part.startswith("__") and part.endswith("__")}
    is_theirs = name.partition(".")[0] in {"torch", "optree"}
    return bool(is_theirs and dunders - PLAIN) or any(x.startswith("_") for x in {*name.split(".")} - dunders)


def defined(source: str) -> set[str]:
    """The names that a module defines or assigns, attributes and string keys included."""
    nodes = list(ast.walk(parsed(source)))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return names | {getattr(node, "id", "") or getattr(node, "attr", "") for node in stored}


def private_names(source: str, own: set[str]) -> set[str]:
    """The private names of others in a module: `torch._x.y`, attributes `_x` of objects, names `_x` in strings.

    `own` are the names that the package itself defines.
    """
    outside = {name for name in named(source) if is_private(name)}
    outside = {name for name in outside if name.partition(".")[0] in {"torch", "optree", *sys.stdlib_module_names}}
    parts = {part for name in outside for part in name.split(".")}
    found = {name for name in outside if not any(other.startswith(f"{name}.") for other in outside)}
    for node in ast.walk(parsed(source)):
        word = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(word, str) and word.isidentifier() and is_private(word) and word not in own | parts | PYTHONS:
            found.add(word)
    return {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}


def is_covered(name: str, row: str) -> bool:
    """Whether a row's `torch._x` or `Tensor._x` is the name, or contains the name."""
    return f"{name}.".startswith(f"{row}.") or (row.partition(".")[0] != "torch" and name == row.rpartition(".")[2])


def unlisted(sources: dict[str, str], table: str) -> list[str]:
    """Private names that the table of docs/architecture.md does not list, and rows that list unused names."""
    own = set[str]().union(*map(defined, sources.values()))
    used = {module: private_names(source, own) for module, source in sources.items()}
    lines = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")] for line in lines]
    rows = [[[x for x in what if is_private(x)], where, tests] for what, where, tests in rows]
    faults = []
    for module, names in used.items():
        listed = [row for what, where, _ in rows for row in what if f"{module.replace('.', '/')}.py" in where]
        faults += [f"no row has {x} of {module}" for x in sorted(names) if not any(is_covered(x, r) for r in listed)]
    for what, where, tests in rows:
        found = {path: used.get(path.removesuffix(".py").replace("/", "."), set()) for path in where}
        everywhere = set[str]().union(*found.values())
        faults += [f"{row} is in none of {where}" for row in what if not any(is_covered(x, row) for x in everywhere)]
        for path, names in found.items():
            if what and not any(is_covered(x, row) for x in names for row in what):
                faults.append(f"{path} has none of {what}")
        if not any("::test_" in test for test in tests):
            faults.append(f"no test notices when {what or where} goes")
    return faults


def test_the_table_of_private_names_is_complete() -> None:
    """All private names of torch are listed, each with a test: otherwise a release of torch could remove one unseen."""
    table = PAGE.read_text().partition("## Private torch API")[2]
    faults = unlisted(SOURCES, table)
    assert not faults, "\n".join(['section "Private torch API" of docs/architecture.md:', *faults])


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\nx = torch._foreach_add_", "torch._foreach_add_"),
        ("import torch\nx = torch._C.y.z", "torch._C.y.z"),
        ("from torch._dynamo import lookup_backend", "torch._dynamo.lookup_backend"),
        ("from torch import _ops as o\nx = o.OpOverload", "torch._ops.OpOverload"),
        ("x = f(y)._cdata", "_cdata"),
        ("x = f(y)._cdata\nz['_cdata'] = x", "_cdata"),
        (
            "import torch\nX = torch.autograd.Function.apply.__func__.__code__",
            "torch.autograd.Function.apply.__func__.__code__",
        ),
        ("from torch import Tensor as T\ndef f(x): return T.data.__get__(x)", "torch.Tensor.data.__get__"),
        ("import torch\nx = getattr(torch.add, '__wrapped__', None)", "torch.add.__wrapped__"),
        ("import torch\nf = torch.add\nx = f.__self__", "torch.add.__self__"),
        ("import torch\nc = torch._C\nx = c.y.z", "torch._C.y.z"),
        ("x = '_to_copy'", "_to_copy"),
    ],
)
def test_the_check_of_private_names_can_fail(source: str, what: str) -> None:
    """A private name with no row, or a wrong row, is found: otherwise the test of the table would pass without rows."""
    row = "| `{}` (why) | `core/made.py` | `test_layers.py::test_x` |"
    assert unlisted({"core.made": source}, "") == [f"no row has {what} of core.made"]
    assert unlisted({"core.made": source}, row.format(what)) == []
    assert len(unlisted({"core.made": source}, row.format("torch._other"))) == 3
    assert unlisted({"core.made": source}, row.format(what).replace("::test_x", ""))[0].startswith("no test notices")


def test_tests_lie_in_the_folders_of_the_house_and_import_no_other_test() -> None:
    """A newcomer looks for the tests of a folder in the folder of its name, and what tests share in tests/support."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        folder = path.relative_to(ROOT / "tests").parts[0]
        assert folder in {*FOLDERS, "project", "support"}, path
        assert path.name.startswith("test_") != (folder == "support"), path
        assert not re.search(r"(?m)^\s*(from|import) (\w+\.)?test_", path.read_text()), path


def test_every_test_says_what_it_is_for() -> None:
    """Every test has a docstring: otherwise whoever sees a test fail would have to guess what is wrong."""
    files = {path.name: parsed(path.read_text()) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    functions = [(file, x) for file, page in files.items() for x in page.body if isinstance(x, ast.FunctionDef)]
    bare = [f"{file}::{x.name}" for file, x in functions if x.name.startswith("test_") and not ast.get_docstring(x)]
    assert bare == []


def first_line(source: str) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(parsed(source)) or "").partition("\n")[0]


def files_section() -> str:
    """Section "Files" of docs/architecture.md: the folders, and the first line of every docstring."""
    picture = ["```", "fshard/"]
    for name, others in FOLDERS.items():
        picture.append(f"  {name + '/':17}{first_line(SOURCES[name])}")
        picture.append(
            f"{'':19}imports: {', '.join(other for other in FOLDERS if other in others) or 'nothing of ours'}"
        )
    parts = ["\n".join([*picture, "```"])]
    for name in ["", *FOLDERS]:
        modules = sorted(m for m in SOURCES if folder(m) == name and m not in ("__init__", *FOLDERS))
        title = f"### `{name}/`" if name else "### What users import and run"
        parts += [title, "\n".join(f"- `{m.rpartition('.')[2]}.py`: {first_line(SOURCES[m])}" for m in modules)]
    return "\n\n".join(parts) + "\n"


def with_files(page: str) -> str:
    """The page with a new section "Files", from its first code block on."""
    return re.sub(r"(?s)(\n## Files\n.*?\n\n)```.*?(?=\n## )", lambda found: found[1] + files_section(), page, count=1)


def test_the_page_lists_all_files() -> None:
    """docs/architecture.md lists every file with its purpose: otherwise readers would look for files that moved."""
    assert PAGE.read_text() == with_files(PAGE.read_text()), "write it anew: python tests/project/test_layers.py"


if __name__ == "__main__":
    PAGE.write_text(with_files(PAGE.read_text()))
