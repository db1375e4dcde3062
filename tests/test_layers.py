"""The shape of the package: imports only downward, one door for each outside thing, documented, small."""

import ast
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fshard

PACKAGE = Path(fshard.__file__).parent
SOURCES = {path.stem: path.read_text() for path in sorted(PACKAGE.glob("*.py"))}

# A module imports modules of the levels above its own line alone. A new file needs a place here.
LEVELS = [
    {"arguments", "tree", "record", "describe", "generators", "levels", "shared_memory", "scalars"},
    {"nodes", "precision", "compiling", "captures", "reading", "schedules", "abstract", "leaves"},
    {"kernels", "randomness", "bits", "footprint", "process_groups", "trace"},
    {"comm"},
    {
        *("dataflow", "collectives", "agree", "parts", "data", "claim", "wire", "reduction", "operators", "offload"),
        *("baton", "links", "late"),
    },
    {"meeting", "simulated", "move", "norms", "compare", "passes", "bucketing", "signature"},
    {"host", "transform", "lines", "writes", "anchors"},
    {"plan", "labels", "elementwise", "combine"},
    {"shard", "wholeleaf", "lbfgs", "quantised", "optim_state"},
    {"carry", "loss_scale", "adaptor", "owners", "check"},
    {"gradients", "buckets", "optim"},
    {"tape"},
    {"grad"},
    {"accumulate", "zero", "hvp"},
    {"train"},
    {"lowered", "oracle", "recording"},
    {"jit", "replay"},
    {"testing"},
]
TOP = {"__init__", "__main__", "strategies"}  # what users enter by may import everything

# Who may name what, in an import or as an attribute.
DOORS = {
    "optree": {"tree"},
    "torch.utils._pytree": {"tree", "compiling"},
    "torch._dynamo": {"compiling", "lowered"},
    "torch.library": {"operators"},
    "torch.utils._cxx_pytree": {"tree"},
    "torch.distributed": {"comm", "process_groups"},
    "torch.optim": {"kernels", "adaptor"},
    "torch.autograd.graph": {"tape"},
    "torch.multiprocessing": {"tape"},
    "socket": {"links", "meeting"},
    "mmap": {"shared_memory"},
    "threading": {"baton", "record"},
    "torch.nn.Module": set(),
    "torch.compile": set(),
    "torch.fx": {"trace", "reading", "footprint", "dataflow", "passes", "bucketing", "lowered", "jit"},
    "rich": {"__main__"},
    "hypothesis": {"strategies"},
    "pytest": set(),
    "argparse": {"__main__"},
    "matplotlib": {"footprint"},
    "numpy": set(),
}


def imported(source: str) -> Iterator[str]:
    """What a module imports from the package, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("fshard.")]
            yield from (name.split(".")[1] for name in names)
        elif isinstance(node, ast.ImportFrom):
            if (node.level, node.module) in ((1, None), (0, "fshard")):
                yield from (alias.name for alias in node.names)
            elif node.level == 1:
                yield node.module.split(".")[0]
            elif node.level == 0 and node.module.startswith("fshard."):
                yield node.module.split(".")[1]


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of a chain of attributes."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return None if before is None else f"{before}.{node.attr}"


@functools.cache
def named(source: str) -> set[str]:
    """The dotted names a module imports or uses, those it imported under another name spelt out."""
    tree, aliases, found = ast.parse(source), dict[str, str](), set[str]()
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
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name is not None:
            first, _, rest = name.partition(".")
            found.add(f"{aliases.get(first, first)}.{rest}")
    return found


def violations(sources: dict[str, str]) -> list[str]:
    """What breaks the layers or goes round a door."""
    level = {module: number for number, modules in enumerate(LEVELS) for module in modules}
    found = [f"{module} has no level" for module in sources if module not in level and module not in TOP]
    for module, source in sources.items():
        for other in sorted(set(imported(source))):
            if module in level and level.get(other, len(LEVELS)) >= level[module]:
                found.append(f"{module} imports {other}, which is not below it")
        for thing, doors in DOORS.items():
            if module not in doors and any(f"{name}.".startswith(f"{thing}.") for name in named(source)):
                found.append(f"{module} uses {thing}, which belongs to {sorted(doors)}")
    return found


def test_imports_go_only_downward_and_through_the_doors() -> None:
    """`LEVELS` and `DOORS`."""
    assert violations(SOURCES) == []


def test_the_levels_and_doors_are_those_there_are() -> None:
    """No level without its file, no door that nobody goes through, no file that nobody imports."""
    assert {module for modules in LEVELS for module in modules} == set(SOURCES) - TOP
    for thing, doors in DOORS.items():
        for module in doors:
            assert any(f"{name}.".startswith(f"{thing}.") for name in named(SOURCES[module])), (thing, module)
    assert {name for source in SOURCES.values() for name in imported(source)} >= set(SOURCES) - TOP


@pytest.mark.parametrize(
    ("module", "source", "what"),
    [
        ("tree", "from . import comm", "tree imports comm"),
        ("comm", "from .train import train_step", "comm imports train"),
        ("comm", "import fshard.plan", "comm imports plan"),
        ("plan", "def f():\n    from fshard import shard\n    return shard", "plan imports shard"),
        ("plan", "from fshard.shard import cut", "plan imports shard"),
        ("shard", "from . import shard", "shard imports shard"),
        ("tape", "from . import grad", "tape imports grad"),
        ("plan", "from . import __main__", "plan imports __main__"),
        ("misc", "", "misc has no level"),
        ("plan", "import optree", "plan uses optree"),
        ("plan", "import torch.distributed as dist", "plan uses torch.distributed"),
        ("plan", "import torch\nx = torch.distributed.get_rank()", "plan uses torch.distributed"),
        ("plan", "from torch import distributed as d", "plan uses torch.distributed"),
        ("plan", "from torch import autograd as a\nx = a.graph.saved_tensors_hooks", "plan uses torch.autograd.graph"),
        ("shard", "def f():\n    import numpy as np\n    return np", "shard uses numpy"),
    ],
)
def test_the_check_can_fail(module: str, source: str, what: str) -> None:
    """Made-up sources, each with one fault."""
    found = violations({module: source})
    assert len(found) == 1
    assert found[0].startswith(what)


def test_the_check_can_pass() -> None:
    """Made-up sources without one."""
    good = "import math\nimport torch\nfrom . import comm, tree\nfrom .comm import Mesh\nx = torch.autograd.grad"
    assert violations({"plan": good, "__init__": "from . import train"}) == []


ENTER = """
import sys, warnings
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
"""


def test_nothing_optional_is_needed() -> None:
    """`import fshard`, a plan and a step in a process without any optional package."""
    optional = ["rich", "matplotlib", "numpy", "hypothesis", "pytest", "torchopt", "pandas", "tensorboard"]
    run = subprocess.run([sys.executable, "-c", ENTER, *optional], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "3.0\n"


def definitions(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes, methods included, by their dotted names; those inside functions are theirs."""

    def inside(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield ".".join((*path, child.name)), child
            if isinstance(child, ast.ClassDef):
                yield from inside(child, (*path, child.name))

    return inside(ast.parse(source), ())


def test_what_is_public_is_documented() -> None:
    """Modules, functions, classes and methods whose names do not begin with an underscore."""
    bare = [module for module, source in SOURCES.items() if not ast.get_docstring(ast.parse(source))]
    for module, source in SOURCES.items():
        for name, node in definitions(source):
            private = any(part.startswith("_") for part in name.split("."))
            if not private and not ast.get_docstring(node):
                bare.append(f"{module}.{name}")
    assert bare == []


def test_every_public_name_is_there_and_documented() -> None:
    """`fshard.__all__`: sorted, complete, each with a docstring of its own."""
    assert fshard.__all__ == sorted(fshard.__all__)
    # where fshard is installed its plugin has pytest rewrite the package's assertions, with names of its own
    public = {name for name in vars(fshard) if not name.startswith(("_", "@"))} - set(SOURCES)
    assert public == set(fshard.__all__) - set(SOURCES)
    for name in fshard.__all__:
        text = inspect.getdoc(getattr(fshard, name))
        assert text, name
        assert not text.startswith(f"{name}("), f"{name}: the docstring that dataclass makes"


def test_public_functions_show_an_example() -> None:
    """Those a user calls: a docstring with a doctest (which the tests run)."""
    functions = [name for name in fshard.__all__ if inspect.isfunction(getattr(fshard, name))]
    assert [name for name in functions if ">>>" not in (inspect.getdoc(getattr(fshard, name)) or "")] == []


def test_files_and_functions_are_small() -> None:
    """450 lines, and 60 without the docstring."""
    for module, source in SOURCES.items():
        assert len(source.splitlines()) <= 450, module
        for name, node in definitions(source):
            if isinstance(node, ast.FunctionDef):
                text = node.body[0].end_lineno - node.body[0].lineno + 1 if ast.get_docstring(node) else 0
                assert node.end_lineno - node.lineno + 1 - text <= 60, f"{module}.{name}"
