"""The parts of `make gpu`, each run in a process: `python benchmarks/gpu_parts.py PART FILE` appends rows to FILE."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import CUDA, DEVICE, FROZEN, KINDS, OPTIMIZERS, alternatives, batch, frozen, loss, same, start, trained
from gpu_primitives import of_one_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import optim
from fshard.comm.mesh import Mesh
from fshard.comm.process_groups import GroupRanks
from fshard.core.tree import Tree
from fshard.testing import World, scheduler
from fshard.testing.world import _SimulatedRanks

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = "no GPU"
_LONGEST = 45  # seconds that a rank has for all kinds of steps


class Rows:
    """A file of result rows, each written at once: rows are not lost if a later case hangs."""

    def __init__(self, part: str, path: str):
        self.part, self._path = part, path

    def add(self, case: str, state: str, what: str = "", **more: Any) -> None:
        """Append a row; `state` is "right", "failed", "skipped" or "measured"."""
        with open(self._path, "a") as file:
            file.write(json.dumps({"part": self.part, "case": case, "state": state, "what": what, **more}) + "\n")

    def check(self, case: str, run: Callable[[], str | None]) -> None:
        """Run a case and append its row: right if `run` returns nothing, failed with the text or error otherwise."""
        try:
            wrong = run() or ""
        except Exception as failure:
            lines = [f for f in traceback.extract_tb(failure.__traceback__) if f"{os.sep}fshard{os.sep}" in f.filename]
            where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in lines[-2:]]
            wrong = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''} {where}"
        self.add(case, "failed" if wrong else "right", wrong)


def one_rank() -> DeviceMesh:
    """A mesh of this process alone: with NCCL if there is a GPU, otherwise with gloo."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    backend, device = ("nccl", DEVICE) if CUDA else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    return init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("shard",))


def world(size: int) -> World:
    """A world of `size` simulated ranks on the GPU, or on the CPU if there is no GPU."""
    return World(size, device=str(DEVICE))


def tests(rows: Rows) -> None:
    """Run the tests that are marked `cuda`."""
    if not CUDA or importlib.util.find_spec("pytest") is None:
        return rows.add("marked cuda", "skipped", NO_GPU if not CUDA else "no pytest: name a folder with its wheel")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = ran.stdout.strip().splitlines()[-1:]
    rows.add("marked cuda", "right" if ran.returncode == 0 else "failed", " ".join(last))


def crashes(rows: Rows) -> None:
    """Run steps of every kind with warnings as errors, frozen dtypes, deterministic algorithms and a default device."""
    mesh = one_rank()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
    for name, kind in alternatives():
        rows.check(name, lambda kind=kind: trained(mesh, **kind) and None)  # type: ignore[misc]
    for dtype in FROZEN:
        rows.check(f"a frozen leaf of {dtype}", lambda dtype=dtype: frozen(mesh, dtype))  # type: ignore[misc]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def twice(tx: Callable[[], optim.Transform]) -> str:
        return same(trained(mesh, tx), trained(mesh, tx))

    rows.check("the same bits twice, adafactor", lambda: twice(OPTIMIZERS["adafactor"]))
    torch.use_deterministic_algorithms(True)
    rows.check("deterministic algorithms, lamb", lambda: twice(OPTIMIZERS["lamb"]))
    torch.use_deterministic_algorithms(False)
    torch.set_default_device(DEVICE)
    rows.check("torch.set_default_device", lambda: trained(mesh) and None)
    torch.set_default_device(None)


def reads(rows: Rows) -> None:
    """Run steps in a mode of torch in which waits of the host for the device raise errors."""
    if not CUDA:
        return rows.add("set_sync_debug_mode", "skipped", f"{NO_GPU}: test_crossings.py counts without one")
    mesh = one_rank()
    kinds = {**KINDS, "scaled": {"scale": lambda: fshard.DynamicLossScale(8.0)}}
    kinds |= {f"optimizer {name}": {"tx": tx} for name, tx in OPTIMIZERS.items() if "torch" not in name}
    for name, kind in kinds.items():
        if name != "host":  # the host updates these rows itself, so it waits for their gradients
            rows.check(name, lambda kind=kind: _without_waiting(mesh, **kind))  # type: ignore[misc]


def _without_waiting(
    mesh: DeviceMesh | Mesh,
    tx: Any = lambda: optim.adamw(1e-3),
    scale: Any = lambda: None,
    plan: Any = None,
    **how: Any,
) -> None:
    transform, tokens = tx(), batch(0)
    how = {"reduction": "exact"} | how
    state, step = start(mesh, transform, scale(), plan), fshard.train_step(loss, transform, **how)
    state, _ = step(state, tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(state, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _exact(mesh: DeviceMesh | Mesh, device: torch.device) -> Tree:
    """Train with operations that have the same bits on any processor: sums, and products by powers of two."""
    generator = torch.Generator().manual_seed(1)
    whole = {"a": torch.randn(33, generator=generator), "b": torch.randn(5, 7, generator=generator)}
    whole = {name: x.to(device) for name, x in whole.items()}
    plan, tx = fshard.make_plan(whole, mesh, units=["a", "b"]), optim.sgd(0.5)
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)

    def total(p: Tree, x: Tree) -> fshard.Sum:
        return fshard.Sum((p["a"] * x["a"][0]).sum() + (p["b"] * x["b"][0]).sum())

    step = fshard.train_step(total, tx, reduction="exact")
    for i in range(3):
        generator = torch.Generator().manual_seed(10 * i + mesh.get_rank())
        x = {name: torch.randn(1, *y.shape, generator=generator).to(device) for name, y in whole.items()}
        state, _ = step(state, x)
    return fshard.gather_params(state.params)


def bits(rows: Rows) -> None:
    """Compare bits: of the device and the CPU, of 1 and 4 ranks, of graphs and eager steps (these nearly)."""

    def against_cpu() -> str:
        near = world(4).run(_exact, DEVICE)
        return same(near, World(4).run(_exact, torch.device("cpu")))

    def dropped(mesh: DeviceMesh | Mesh) -> Any:
        tokens = [batch(i, rows=8).chunk(mesh.size())[mesh.get_rank()] for i in range(2)]
        tx = optim.adamw(1e-3)
        state, step = start(mesh, tx), fshard.train_step(lambda p, x: loss(p, x, 0.1), tx, reduction="tree")
        for one in tokens:
            state, _ = step(state, one)
        return fshard.gather_params(state.params)

    rows.check("exact sums: the CPU's bits", against_cpu)
    rows.check("tree: the same bits on 1 and 4 ranks", lambda: same(world(1).run(dropped)[0], world(4).run(dropped)[3]))
    mesh = one_rank()
    plain = trained(mesh, clip_norm=0.1)
    for backend in ("eager", "aot_eager", *["inductor"] * CUDA):
        rows.check(f"jit {backend}", lambda b=backend: same(trained(mesh, jit=b, clip_norm=0.1), plain, exact=False))  # type: ignore[misc]

    def masks(jit: str | None) -> Any:
        return trained(mesh, jit=jit, fn=lambda p, x: loss(p, x, 0.5))

    rows.check("dropout in a graph", lambda: same(masks("eager"), masks(None), exact=False))


class _OnSide:
    """A collective of simulated ranks that behaves like NCCL's: late, on its own stream, and without host waits."""

    def __init__(self, places: Sequence[torch.Tensor], event: torch.cuda.Event, held: object):
        self._places, self._event, self._held = places, event, held

    def wait(self) -> Sequence[torch.Tensor]:
        """Let the computation's stream wait for the collective, and return the tensors received."""
        torch.cuda.current_stream().wait_event(self._event)
        self._held = None
        return self._places

    def done(self) -> None:
        """Do nothing: no memory is shared with other ranks."""


def _on_side_stream() -> Callable[..., Any]:
    """A replacement for `_SimulatedRanks._meet` that is late: memory used or freed too early gives wrong values."""
    side = torch.cuda.Stream()

    def meet(self: Any, call: Any, sends: Any, into: Any, act: Any) -> Any:
        def later(posts: Any) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), torch.no_grad():
                torch.cuda._sleep(2_000_000)  # about a millisecond
                act(posts)
                event = side.record_event()
            for one in posts:
                one.event = event

        post: Any = scheduler.Post(self._me, call, sends, into, later, sends)
        if self.size == 1:
            later([post])
            return _OnSide(post.places, post.event, (sends, into))
        return _OnSide(self._run.meet(self._group, post), post.event, (sends, into))

    return meet


def late(rows: Rows) -> None:
    """Compare steps with late collectives, which deliver when they are waited for, or (on a GPU) on a side stream."""
    plain, kinds = _SimulatedRanks._meet, KINDS if CUDA else {k: KINDS[k] for k in ("full", "donate", "int8")}
    for name, kind in kinds.items():
        job = lambda mesh, kind=kind: trained(mesh, **kind)  # noqa: E731
        expected = world(4).run(job)

        def at_the_wait(job: Any = job, expected: Tree = expected) -> str:
            return same(World(4, device=str(DEVICE), late=True).run(job), expected)

        rows.check(f"{name}, at the wait", at_the_wait)
        if not CUDA:
            continue
        torch.cuda.empty_cache()
        _SimulatedRanks._meet = _on_side_stream()  # type: ignore[method-assign]
        rows.check(f"{name}, on a stream", lambda job=job, e=expected: same(world(4).run(job), e))  # type: ignore[misc]
        _SimulatedRanks._meet = plain  # type: ignore[method-assign]


def collectives(rows: Rows) -> None:
    """Call the backend's own collectives on one rank, which else sends nothing: NCCL's, gloo's without a GPU."""
    mesh = one_rank()
    group: Any = mesh.get_group("shard")  # torch's stubs lack the number of its calls
    ranks = GroupRanks("shard", group, DEVICE)
    ranks.built_in, ranks._in_pairs = group, False
    of_one_rank(rows, ranks, group._get_sequence_number_for_group)


def nccl(rows: Rows) -> None:
    """Compare processes with NCCL (gloo without a GPU), several on one GPU, with simulated ranks, to the bit."""
    for size in (2, 4) if CUDA else (2,):
        name = f"{'nccl' if CUDA else 'gloo'} of {size} ranks"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "benchmarks" / "gpu_ranks.py"), folder, str(size)]
            ranks = []
            for rank in range(size):
                # each rank claims to be on its own host, because NCCL refuses two ranks of one host on one GPU
                own = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
                environment = {**os.environ, **own}
                ranks.append(
                    subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
                )
            rows.check(name, lambda ranks=ranks: _ended(ranks))  # type: ignore[misc]
            for line in (Path(folder) / "rows").read_text().splitlines() if (Path(folder) / "rows").exists() else []:
                row = json.loads(line)
                rows.add(f"{name}, {row['case']}", row["state"], row["what"])


def _ended(ranks: Sequence[Any]) -> str:
    """Wait for the ranks. Returns the last line of the first rank's errors; empty if no rank failed."""
    said = []
    for rank in ranks:
        try:
            _, errors = rank.communicate(timeout=_LONGEST)
        except subprocess.TimeoutExpired:
            for one in ranks:
                one.kill()
            _, errors = rank.communicate()
            errors += f"\nkilled after {_LONGEST} s"
        said += [] if rank.returncode == 0 else [errors.strip().splitlines()[-1:]]
    return " ".join(said[0]) if said else ""


def main() -> None:
    """Run the part that the arguments name, and end the process."""
    from gpu_speed import overlap, speed

    part, path = sys.argv[1:]
    parts = {"tests": tests, "crashes": crashes, "reads": reads, "bits": bits, "late": late, "nccl": nccl}
    {**parts, "collectives": collectives, "speed": speed, "overlap": overlap}[part](Rows(part, path))
    sys.stdout.flush()
    os._exit(0)  # a process that used FSDP2 may abort at its regular end (torch 2.13)


if __name__ == "__main__":
    main()
