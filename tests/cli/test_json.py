"""`--json` of every command: each line is one object, with the same keys everywhere, and numbers that are numbers."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fshard import checkpoint
from fshard.cli import doctor
from fshard.cli.main import COMMANDS, main

CODE = """
import torch
import fshard
from fshard.testing import observed, record

def build(): return torch.nn.ModuleDict({"A b": torch.nn.Linear(8, 3), "1": torch.nn.Linear(3, 8)})
def loss(model, batch): return (batch @ model["w"]).square().mean()
def tree(): return {"w": torch.empty(8, 3)}

def make(mesh, scale=1.0):
    params = {"A b": torch.linspace(-1, 1, 12), "1": [torch.ones(3)]}
    def loss_fn(params, x): return (params["A b"].sin() * x).sum() * scale + params["1"][0].sum()
    tx = fshard.optim.adamw(0.1)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units=["1.*"])), tx)
    return fshard.train_step(loss_fn, tx), state, torch.ones(12)

def other(mesh): return make(mesh, 2.0)

def write(name, scale=1.0, x=1.0):
    step, state, batch = make(None, scale)
    record(observed(step), name, steps={0})(state, batch * x)
"""
OVER = [word for what in ("params", "grads", "state") for word in (f"--{what}-over", "Axis")]
CHECKPOINTS = ("inspect", "run")
# a command with its arguments, and the exit status
CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "plan": (("plan", "my_code:build", "--units", "*", "--mesh", "Axis=2", *OVER), 0),
    "plan of a step": (("plan", "my_code:tree", "--batch", "6x8", "--loss", "my_code:loss", "--capacity", "1"), 0),
    "inspect": (CHECKPOINTS, 0),
    "inspect damage": (("inspect", "damaged"), 1),
    "inspect another format": (("inspect", "of_others"), 0),
    "inspect --step": ((*CHECKPOINTS, "--step", "1"), 0),
    "inspect --step damage": ((*CHECKPOINTS, "--step", "2"), 1),
    "inspect --verify": ((*CHECKPOINTS, "--verify"), 1),
    "inspect --verify damage": (("inspect", "damaged", "--verify"), 1),
    "inspect --against": ((*CHECKPOINTS, "--step", "1", "--against", "run", "--at", "3"), 1),
    "inspect --against itself": ((*CHECKPOINTS, "--step", "1", "--against", "run", "--at", "1"), 0),
    "replay": (("replay", "right", "--step", "my_code:make"), 0),
    "replay other bits": (("replay", "right", "--step", "my_code:other"), 1),
    "replay nan": (("replay", "nan", "--step", "my_code:make"), 3),
    "compare": (("compare", "right", "wrong"), 1),
    "compare the same": (("compare", "right", "right"), 0),
    "doctor": (("doctor",), 1),
}
OF_USERS = "mesh"  # the one key under which keys are names that users gave
ANY = {"value", "a", "b", "regather"}  # values of the user, and arguments of make_plan
TEXTS = {"name", "unit", "value", "a", "b", "checksum", "found"}  # names, values, digits and versions may be any text
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?( ?([kKMGTPE]i?)?[bB]| ?(ms|s|%)| [a-z()]+)?")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a module, checkpoints, of which some are damaged, and recordings."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "my_code.py").write_text(CODE)
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        exec(CODE, scope)
        for name, how in {"right": {}, "wrong": {"scale": 2.0}, "nan": {"x": float("nan")}}.items():
            scope["write"](name, **how)
        for step in (1, 2, 3):
            state = {"A b": torch.full((5,), 1.0 * step), "rate": float("nan") if step < 3 else 7, "run": "name"}
            checkpoint.save("run", state, step)
        Path("run/step-000000000001/left").write_bytes(b"123")
        Path("run/step-000000000004").mkdir()
        (file,) = Path("run/step-000000000002").glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        checkpoint.save("damaged", state, 1)
        Path("damaged/step-000000000001/index.json").write_text("{}")
        Path("of_others").mkdir()
        save_file({"w": torch.ones(3)}, "of_others/model.safetensors")
        patch.setattr(doctor, "two_processes", lambda: "a step failed")
        patch.setenv("GLOO_SOCKET_IFNAME", "nothing")
        yield folder
        sys.modules.pop("my_code", None)


@pytest.fixture
def said(here: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The objects that a case prints."""

    def run(case: str) -> list[dict[str, Any]]:
        args, status = CASES[case]
        assert main([*args, "--json"]) == status
        out, err = capsys.readouterr()
        assert err == ""
        return [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]

    return run


def items(x: object) -> Iterator[tuple[str, Any]]:
    """All keys of nested objects, with their values; of lists the elements."""
    if isinstance(x, dict):
        for key, value in x.items():
            yield key, value
            yield from items(value) if key != OF_USERS else ()
    elif isinstance(x, list):
        for value in x:
            yield from items(value)


def texts(key: str, value: object) -> list[str]:
    """The texts of a value."""
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, str) and key not in TEXTS]


@pytest.mark.parametrize("case", CASES)
def test_keys_are_names_and_numbers_are_numbers(case: str, said: Any) -> None:
    """A program would need to split words and units, or a line would be no JSON."""
    lines = said(case)
    assert lines
    assert all(isinstance(line, dict) for line in lines)
    pairs = [pair for line in lines for pair in items(line)]
    assert [key for key, _ in pairs if not re.fullmatch("[a-z][a-z0-9_]*", key)] == []
    assert {key for key, _ in pairs} & {"number", "num_ranks", "num_units", "nbytes"} == set()
    assert [text for pair in pairs for text in texts(*pair) if NUMBER.fullmatch(text)] == []


def test_a_key_has_one_type(said: Any) -> None:
    """One key would be a number in one command and a text in another one."""
    types: dict[str, set[type]] = {}
    for case in CASES:
        for line in said(case):
            for key, value in items(line):
                if value is not None and key not in ANY:
                    types.setdefault(key, set()).add(type(value))
    assert {key: kinds for key, kinds in types.items() if len(kinds) > 1} == {}
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    top = {key for case in CASES for line in said(case) for key in line}
    assert {key for key in top if f"`{key}`" not in page} == set()


def test_every_command_is_tried() -> None:
    """A new command would print what it likes."""
    assert {args[0] for args, _ in CASES.values()} == {*COMMANDS}
