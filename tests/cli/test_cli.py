"""The command `fshard`: what docs/cli.md shows is what it prints; plans by import path and of files; errors; JSON."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fshard.__main__
import fshard_command
from fshard.cli.main import COMMANDS, main
from fshard.cli.output import say

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
CONSOLE = re.compile(r"(?ms)^```console\n(.*?)^```")
MODEL = """
import torch
def build():
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))})
    model["head"] = torch.nn.Linear(8, 3).requires_grad_(False)
    return model
def tree(): return {"w": torch.empty(1 << 50)}
def number(): return 3
def pair(model, batch): return 3
def asks(model, batch): return torch.ones(()) * batch.sum().item()
def make(mesh): return 3
def broken(): raise ValueError("two\\nlines")
"""


def shown(page: str) -> str:
    """The page with the outputs of its commands as they are now; they run in the working directory."""
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    Path("my_model.py").write_text(block)
    scope: dict[str, Any] = {}
    exec(block, scope)
    scope["train"]()
    return CONSOLE.sub(lambda found: f"```console\n{printed(found[1])}```", page)


def printed(block: str) -> str:
    """The commands of a block, each with what it prints."""
    lines = []
    for command in re.findall(r"(?m)^\$ fshard (.*)$", block):
        ours, _, others = command.partition(" | ")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(shlex.split(ours)) == 0
        pipe = subprocess.run(
            others or "cat", shell=True, input=out.getvalue(), capture_output=True, text=True, check=True
        )
        lines += [f"$ fshard {command}", pipe.stdout]
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_model", None)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """The exit status of a command, and what it prints."""
    status = main(args)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_page_shows_what_commands_print(here):
    """Readers would see other tables than they get: write the page anew with python tests/cli/test_cli.py."""
    page = PAGE.read_text()
    assert len(CONSOLE.findall(page)) == 4
    assert shown(page) == page


def test_a_plan_of_a_module(here, capsys):
    """The bytes of a rank would not be those of the plan and of the state that a rank makes."""
    (here / "my_model.py").write_text(MODEL)
    args = ["plan", "my_model:build", "--units", "layers.*", "--mesh", "replicate=2", "shard=4", "--params-over"]
    status, out, err = run(capsys, *args, "--json")
    said = json.loads(out)
    assert (status, err, said["mesh"]) == (0, "", {"replicate": 2, "shard": 4})
    assert (said["params_over"], said["grads_over"], said["state_over"]) == ([], ["shard"], ["shard"])
    blocks, head = said["units"]
    assert (blocks["unit"], blocks["count"], blocks["leaves"], blocks["elements"]) == ("layers.0 ... 3", 4, 8, 288)
    padded = 4 * 96 * 4  # 72 elements are padded to a multiple of 8 ranks times 16 bytes
    assert blocks["bytes_of_rank"] == {"parameters": padded, "gradients": padded // 4, "state": padded // 4}
    assert (head["kind"], [*head["bytes_of_rank"]]) == ("float32 frozen", ["parameters"])
    whole = padded + head["bytes"]
    moments = 2 * padded // 4
    assert said["bytes_of_rank"] == {"parameters": whole, "gradients": padded // 4, "optimizer_state": moments + 4}
    assert main(args) == 0
    assert "optimizer state 772 B\n" in capsys.readouterr().out
    assert run(capsys, *args, "--optimizer", "sgd", "--json")[1].count('"optimizer_state": 4}') == 1


def test_a_plan_of_files_reads_headers_alone(here, capsys):
    """A file whose data is larger than the disk could not be planned for, or the plan would be of other tensors."""
    tensors = {"a.0.w": torch.ones(6, 4), "a.1.w": torch.ones(6, 4), "n": torch.ones(3, dtype=torch.int64)}
    save_file(tensors, "x.safetensors")
    header = Path("x.safetensors").read_bytes()[: -2 * 96 - 24]
    with open("model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * 96 + 24)  # of zeros, which are not read
    status, out, _ = run(capsys, "plan", ".", "--units", "a.*", "--mesh", "shard=2", "--json")
    assert status == 0
    rows = json.loads(out)["units"]
    assert [(row["unit"], row["leaves"], row["kind"]) for row in rows] == [
        ("(first)", 1, "int64 frozen"),  # a file has large elements first
        ("a.0 ... 1", 2, "float32"),
    ]


def test_a_model_that_no_host_has_room_for(here, capsys):
    """A model of petabytes would be made, or its numbers would be cut off."""
    (here / "my_model.py").write_text(MODEL)
    status, out, _ = run(capsys, "plan", "my_model:tree", "--mesh", "shard=1024")
    assert status == 0
    assert "(root)  4.00 PiB    4.00 TiB   4.00 TiB  4.00 TiB\n" in out


def test_what_a_step_of_a_module_needs(here, capsys):
    """The step of another model or batch would be estimated, or its figures be missing in the JSON."""
    (here / "my_model.py").write_text(STEP)
    args = ["plan", "my_model:build", "--mesh", "shard=2", "--batch", "x=6x8", "n=6:int64", "--loss", "my_model:loss"]
    status, out, _ = run(capsys, *args, "--capacity", "1", "--json")
    said = json.loads(out)
    assert (status, said["fits"]) == (0, "likely")
    arguments = next(row for row in said["estimate"]["memory"] if row["purpose"] == "arguments")
    assert arguments["resident"] == 6 * 8 * 4 + 6 * 8 + 16  # the number of steps and the seed, too
    assert {row["kind"] for row in said["estimate"]["traffic"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    status, out, _ = run(capsys, *args)
    assert "largest at the peak" in out
    tree = [*args[:1], "my_model:tree", *args[2:-1], "my_model:loss_of_a_tree"]
    assert json.loads(run(capsys, *tree, "--json")[1])["estimate"]["peak"]["bytes"] > 0


STEP = """
import torch
def build(): return torch.nn.Linear(8, 3)
def loss(model, batch): return (model(batch["x"]).sum(1) * batch["n"]).mean()
def tree(): return {"w": torch.empty(8, 3)}
def loss_of_a_tree(params, batch): return (batch["x"] @ params["w"]).square().mean()
"""
ERRORS = {
    "a batch without a loss": (
        ["plan", "my_model:build", "--batch", "3"],
        "fshard plan: --batch and --loss: expected both, of which a step is made, or neither",
    ),
    "a capacity without a batch": (
        ["plan", "my_model:build", "--capacity", "80"],
        "or neither; --capacity needs it",
    ),
    **{
        f"a capacity of {number}": (
            ["plan", "my_model:build", "--batch", "3", "--loss", "my_model:pair", "--capacity", number],
            f"fshard plan: --capacity {number}: expected a number of GiB above 0",
        )
        for number in ("0", "nan", "inf")
    },
    "a loss that asks for a value": (
        ["plan", "my_model:build", "--batch", "3x4", "--loss", "my_model:asks"],
        "fshard plan: jit: the function asks for the value of a tensor",
    ),
    "a batch of words": (
        ["plan", "my_model:build", "--batch", "3xa", "--loss", "my_model:pair"],
        "fshard plan: --batch 3xa: expected sizes and a dtype, as in 4x2049:int64",
    ),
    "a batch of two without names": (
        ["plan", "my_model:build", "--batch", "3", "4", "--loss", "my_model:pair"],
        "fshard plan: --batch 3 4: expected one tensor, or several with names that differ",
    ),
    "nothing there": (["plan", "nothing"], "fshard plan: nothing: expected MODULE:FUNCTION, or the path of a file"),
    "no module": (["plan", "no_such:build"], "fshard plan: model no_such:build: expected MODULE:FUNCTION"),
    "no tree": (["plan", "my_model:number"], "fshard plan: leaf '': expected a tensor, got int"),
    "an error of two lines": (["plan", "my_model:broken"], "fshard plan: two lines"),
    "mesh": (["plan", "my_model:build", "--mesh", "shard"], "fshard plan: --mesh shard: expected the name of an axis"),
    "units": (["plan", "my_model:build", "--units", "x"], "fshard plan: units: the pattern 'x' matches nothing"),
    "no checkpoint": (["inspect", "."], ": there is no checkpoint, nor a part of one\n"),
    "no recording": (["replay", ".", "--step", "my_model:make"], "expected recorded steps"),
    "a model of a mesh": (
        ["plan", "my_model:make"],
        "fshard plan: model my_model:make: expected a function without arguments: missing a required argument: 'mesh'",
    ),
    "a replay of nothing": (
        ["replay", ".", "--step", "my_model:build"],
        "fshard replay: --step my_model:build: expected a function of the mesh: too many positional arguments",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_one_line_on_stderr(error, here, capsys):
    """A script would take an error for output, or the status for success; a person would see a traceback."""
    (here / "my_model.py").write_text(MODEL)
    args, text = ERRORS[error]
    status, out, err = run(capsys, *args)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert text in err


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command(command, capsys):
    """Help would have no example, or not say what an exit status means."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert f"\n  fshard {command} " in text
    assert "\nExit status: 0" in text
    assert "--json" in text


def test_the_version(capsys, monkeypatch):
    """A report of an error would not say of which versions, or a narrow terminal break the line."""
    monkeypatch.setenv("COLUMNS", "20")
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"fshard {fshard.__version__}, torch {torch.__version__}\n")


INTERRUPTED = "raise KeyboardInterrupt\n"  # no signal: jobs in the background ignore SIGINT
SCRIPT = ("-c", "import sys; from fshard_command import main; sys.exit(main())")  # as pip writes it


# `python -m` imports the package, and so torch, before any code of the command runs
@pytest.mark.parametrize(
    ("module", "how"),
    [
        ("torch", SCRIPT),
        pytest.param("my_model", SCRIPT),
        pytest.param("my_model", ("-m", "fshard")),
    ],
)
def test_an_interrupt_is_one_line(module, how, here):
    """Ctrl-C would print the imports of torch, or look like an error of the command."""
    (here / f"{module}.py").write_text(INTERRUPTED)
    command = [sys.executable, *how, "plan", "my_model:build"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, ROOT)))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=here, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_command_and_the_module_are_one():
    """`fshard` would be another program than `python -m fshard`, or there would be none."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["fshard"]
    assert script == f"{fshard_command.__name__}:{fshard_command.main.__name__}"
    assert fshard.__main__.main is fshard_command.main
    done = subprocess.run([sys.executable, "-m", "fshard"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.splitlines()[0][:13]) == (2, "usage: fshard")
    assert Path(fshard.__file__).parent == ROOT / "fshard"


if __name__ == "__main__":
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PAGE.write_text(shown(text))


@pytest.mark.parametrize("colour", ["", "red", "yellow"])
def test_names_are_printed_as_they_are(colour, capsys, monkeypatch):
    """A leaf of the name "x:smile:" would be another one on a terminal, and "[red]" nothing."""
    monkeypatch.setenv("COLUMNS", "20")
    text = "leaf x:smile: [red] [/] \\[b] **w** a/b.py:12 'q' 3.5 http://x" * 3
    say(text, colour)
    assert capsys.readouterr().out == f"{text}\n"
