"""What Inductor makes of a step for GPUs that are not there: `make fakegpu` runs this file.

It runs on the stub, alone, with a log (check.py says how). Inductor and Triton generate code as for an H100; compiled
kernels compute nothing. The order of collectives is read off the generated code, and what a CUDA graph captures off
the log as well.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from gpu_cases import batch, loss, params
from recorder import mark
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard import optim, tree
from fshard.compiler.lowered import Options, loaded
from fshard.compiler.program import Program
from fshard.compiler.signature import flat_call

TX = optim.adamw(1e-3)
CALL = re.compile(r"(?:(\w+) = )?torch\.ops\.fshard\.(\w+)\.default\((.*)\)")
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:.*torch.jit.script")


@pytest.fixture(scope="module", autouse=True)
def _caches() -> Iterator[None]:
    """Inductor compiles anew: its caches do not ask for the tags of operators. Triton's cache is used."""
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(scope="module")
def begun() -> Iterator[Any]:
    """A function that makes a state of three blocks, on rank 0 of 8.

    Its collectives end when the host waits, which it does not while it compiles: no time is too long.
    """
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=8, timeout=timedelta(days=1))
    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("shard",))
    whole = params(layers=3)
    plan = fshard.make_plan(whole, mesh, units=["blocks.*"], bucket=0)
    yield lambda: fshard.init_state(fshard.shard_params(whole, plan), TX)
    torch.cuda.synchronize()
    dist.destroy_process_group()


class Run(NamedTuple):
    """A compiled step: the code that runs, and of each run the addresses of the state and the lines of the log."""

    code: str
    addresses: list[list[int]]
    logs: list[list[str]]


def lines_since(words: str) -> list[str]:
    """The lines of the log after a mark."""
    lines = Path(os.environ["FAKEGPU_LOG"]).read_text().splitlines()
    return lines[lines.index(words) + 1 :]


def tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor)]


def ran(step: Any, state: Any, name: str, steps: int = 4, keep: Any = lambda state: state) -> Run:
    """Compile and run a step."""
    tokens, addresses, logs, code = batch(0), [], [], ""
    for number in range(steps):
        mark(f"{name} {number}")
        if number:
            state, _ = step(keep(state), tokens)
        else:
            (state, _), codes = run_and_get_code(step, state, tokens)
            code = "\n".join(codes)
        logs.append(lines_since(f"{name} {number}"))
        addresses.append([x.data_ptr() for x in tensors(state)])
    return Run(code, addresses, logs)


@pytest.fixture(scope="module")
def jitted(begun: Any) -> Run:
    """A jitted step: its driver, and the code of its regions."""
    state, step = begun(), fshard.jit(fshard.train_step(loss, TX, reduction="fast"), donate=True, bucket=0)
    compiled, codes = run_and_get_code(lambda: step.lower(state, batch(0)).compile())
    return ran(compiled, state, "jit")._replace(code="\n".join([compiled.as_text(), *codes]))


@pytest.fixture(scope="module")
def donated(begun: Any) -> Run:
    """A jitted step whose parts between collectives are CUDA graphs."""
    step = fshard.train_step(loss, TX, reduction="fast")
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        return ran(fshard.jit(step, donate=True, bucket=0), begun(), "donated")


@pytest.fixture(scope="module")
def captured(begun: Any) -> Run:
    step = fshard.train_step(loss, TX, reduction="fast")

    def cloned(state: Any) -> Any:  # a graph's results are overwritten when it runs again
        return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)

    return ran(torch.compile(step, fullgraph=True, mode="reduce-overhead"), begun(), "captured", keep=cloned)


class Call(NamedTuple):
    """A call of one of fshard's operators in generated code."""

    line: int
    operator: str
    result: str | None
    arguments: str

    @property
    def buffer(self) -> str:
        """The buffer that a wait waits for."""
        return self.arguments.split(",")[0]


def code_of(run: Run) -> list[str]:
    """The lines of the driver, and of the regions after it."""
    lines = run.code.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.lstrip().startswith("def forward(")) :]


def calls(lines: Sequence[str]) -> list[Call]:
    """What generated code calls of fshard, in order."""
    found = ((number, CALL.search(line)) for number, line in enumerate(lines))
    return [Call(number, hit[2], hit[1], hit[3]) for number, hit in found if hit]


def gathers(lines: Sequence[str]) -> list[tuple[str, int, int, str]]:
    """The unit of each gather, the lines where it starts and is waited for, and its buffer.

    A buffer that nothing waits for in place is waited for at the end.
    """
    every, made = calls(lines), {}
    for call in every:
        if call.operator == "all_gather":
            made[call.result] = call
    names = {hit[2]: hit[1] for hit in (re.search(r"(\w+) = (\w+)\[0\]", line) for line in lines) if hit}
    waits = {call.buffer: call.line for call in every if call.operator == "wait"}
    units = {result: re.findall(r"'([^']*)'", call.arguments)[2] for result, call in made.items()}
    return [(units[r], call.line, waits.get(names[r], len(lines)), names[r]) for r, call in made.items()]


def test_units_are_gathered_in_order_and_again(jitted: Run) -> None:
    blocks = [f"blocks.{number}" for number in range(3)]
    assert [unit for unit, *_ in gathers(code_of(jitted))] == ["(first)", *blocks, "(last)", *reversed(blocks)]


def test_a_gather_starts_one_unit_ahead(jitted: Run) -> None:
    """After the wait for the unit before, and before the first kernel that reads that unit."""
    lines = code_of(jitted)
    every = gathers(lines)
    for (unit, _, waited, buffer), (_, start, *_) in pairwise(every):
        if unit != "(last)":  # the backward begins with it: the next gather starts when the loss is there
            assert waited < start < first_use(lines, buffer), unit


def first_use(lines: Sequence[str], buffer: str) -> int:
    """The line of the first call of a region that reads a buffer."""
    return next(number for number, line in enumerate(lines) if re.search(rf"boxed\(.*\b{buffer}\b", line))


def test_waits_come_before_uses(jitted: Run) -> None:
    lines = code_of(jitted)
    assert all(start < waited < first_use(lines, buffer) for _, start, waited, buffer in gathers(lines))


def test_what_is_sent_and_received_is_aligned(jitted: Run) -> None:
    """Kernels read 16 bytes at once, NCCL's and Inductor's."""
    places = re.findall(r"(?:send|receive)=(0x\w+)", "\n".join(jitted.logs[-1]))
    assert places
    assert [place for place in places if int(place, 16) % 16] == []


def test_each_step_starts_the_same_kernels(jitted: Run) -> None:
    """Nothing is compiled, allocated or measured after the second step, and the host waits for nothing."""
    words = [[line.split()[0] for line in log] for log in jitted.logs[2:]]
    later = [[word for word in log if word not in ("given", "back")] for log in words]  # of torch's allocator
    assert later[0] == later[1]
    assert not {"malloc", "sync"} & {*later[0]}


def test_what_is_loaded_starts_the_same_kernels(begun: Any, jitted: Run) -> None:
    """A program is made of texts, and of kernels if it was saved after its first call."""
    state, step = begun(), fshard.jit(fshard.train_step(loss, TX, reduction="fast"), donate=True, bucket=0)
    lowered = step.lower(state, batch(0))
    made = lowered.program()
    leaves, _ = flat_call((state, batch(0)), {})
    same = Program(json.loads(json.dumps(made.head)), made.parts)
    again = loaded(same, leaves, lowered.interface.signature, [], Options(donate=True))
    logs = ran(again, state, "loaded").logs
    words = [[line.split()[0] for line in run[-1]] for run in (jitted.logs, logs)]
    assert [word for word in words[0] if word != "given"] == [word for word in words[1] if word != "given"]


STEP = """
import json, sys, torch, triton, fshard
from torch._dynamo.utils import counters

def step(state, x):
    w = state["w"] * 0.9 + x
    return {"w": w}, torch.softmax(w, 1).square().mean()

found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
run = fshard.jit(step, donate=True, artifact=sys.argv[1])
state, x = {"w": torch.ones(2048, 4096, device="cuda")}, torch.ones(4096, device="cuda")
state, _ = run(state, x)
measured = counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"]
reserved = torch.cuda.memory_reserved()
torch.cuda.reset_peak_memory_stats()
run(state, x)
peak = torch.cuda.max_memory_allocated()
print(json.dumps([len(found) - sum(found), sum(found), measured, max(reserved, torch.cuda.memory_reserved()) / peak]))
"""


def test_a_file_has_kernels(tmp_path: Path) -> None:
    """Each process compiles and measures them again, and what measuring took stays reserved."""

    def ran_in(caches: str) -> list[float]:
        folders = {"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/{caches}/i", "TRITON_CACHE_DIR": f"{tmp_path}/{caches}/t"}
        log = str(tmp_path / "log")  # opening it empties it
        env = {**os.environ, **folders, "TORCHINDUCTOR_COMPILE_THREADS": "1", "FAKEGPU_LOG": log}
        command = [sys.executable, "-c", STEP, str(tmp_path / "step")]
        return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)

    compiled, _, measured, of_peak = ran_in("first")
    assert compiled > measured > 1
    assert of_peak <= 1.1
    compiled, found, measured, of_peak = ran_in("second")
    assert (compiled, measured) == (0, 0)
    assert found
    assert of_peak <= 1.1


def test_number_of_kernels(jitted: Run) -> None:
    """Of torch 2.13's Inductor, for three blocks: more of them would be something that is not fused any more.

    As one graph the step has 44: what is before and after a collective cannot be fused.
    """
    assert sum(line.startswith("kernel") and line.endswith("of a module") for line in jitted.logs[-1]) <= 60


def test_donated_state_stays_where_it_is(jitted: Run) -> None:
    """What a CUDA graph of the whole step needs of its inputs and outputs."""
    assert all(addresses == jitted.addresses[0] for addresses in jitted.addresses)


def captured_collectives(logs: Sequence[list[str]]) -> list[str]:
    """The collectives between begin and end of captures; AssertionError if nothing was captured."""
    inside, bad, captures = False, list[str](), 0
    for line in (line for log in logs for line in log):
        captures += line.startswith("capture begin")
        inside = line.startswith("capture begin") or (inside and not line.startswith("capture end"))
        bad += [line] if inside and line.startswith("nccl") else []
    assert captures, "no graph was captured"
    return bad


def test_no_collective_is_in_a_cuda_graph(captured: Run) -> None:
    assert captured_collectives(captured.logs) == []


def test_parts_between_collectives_are_graphs(captured: Run) -> None:
    """In the last step each graph is launched once, and no kernel of Inductor's runs by itself."""
    last = captured.logs[-1]
    assert sum(line.startswith("graph") for line in last) == captured.code.count("\ndef partition_")
    assert [line for line in last if line.startswith("kernel") and line.endswith("of a module")] == []


def test_gathered_units_are_not_copied(donated: Run) -> None:
    """Each has the same address in every step, in the memory of the CUDA graph that reads it."""
    logs = ["\n".join(log) for log in donated.logs[2:]]
    first, second = (re.findall(r"kind=all_gather .*type=f32 .*receive=(\w+)", log) for log in logs)
    assert first == second != []
    assert sum(int(n) for n in re.findall(r"^copy .* n=(\d+)", logs[-1], re.MULTILINE)) < 64


def test_a_donated_state_beside_cuda_graphs(donated: Run) -> None:
    """The state needs no copy. Inductor captures all but the two parts that write to it, which are inputs to it."""
    assert captured_collectives(donated.logs) == []
    assert all(addresses == donated.addresses[0] for addresses in donated.addresses)
    parts = donated.code.count("\ndef partition_")
    assert [sum(line.startswith("graph") for line in log) for log in donated.logs[2:]] == [parts - 2] * 2


@pytest.mark.parametrize("tagged", [True, False])
def test_the_tag_keeps_collectives_out_of_graphs(begun: Any, monkeypatch: pytest.MonkeyPatch, tagged: bool) -> None:
    if not tagged:
        monkeypatch.setattr("torch._inductor.scheduler.is_cudagraph_unsafe_op", lambda node: False)
    mesh = begun().params.mesh
    step = fshard.jit(lambda x: fshard.all_gather(x * 2, mesh, "shard") + 1)
    for number in range(3):
        mark(f"tagged {tagged} {number}")
        refused = (
            nullcontext() if tagged else suppress(AssertionError, RuntimeError)
        )  # Inductor's, once the capture is over
        with torch._inductor.config.patch({"triton.cudagraphs": True}), refused:
            step(torch.ones(64, device="cuda"))
    assert bool(captured_collectives([lines_since(f"tagged {tagged} 0")])) == (not tagged)
