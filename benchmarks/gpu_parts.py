"""The parts of `make gpu`, each in a process: `python benchmarks/gpu_parts.py PART FOLDER SECONDS`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import (
    CUDA,
    DEVICE,
    FROZEN,
    KINDS,
    OPTIMIZERS,
    alternatives,
    batch,
    frozen,
    loss,
    same,
    start,
    trained,
)
from gpu_primitives import of_one_rank
from gpu_rows import FAKE, ROOT, Rows
from gpu_steps import correct, near, waits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import optim, tree
from fshard.comm.mesh import Mesh, mesh_device
from fshard.comm.process_groups import GroupRanks
from fshard.core.tree import Tree
from fshard.testing import World, scheduler
from fshard.testing.world import _SimulatedRanks

NO_GPU = "no GPU"
_LONGEST = 60  # seconds that a rank has for all kinds of steps
WITHOUT_STUB = ("bits", "tests", "late", "nccl")
# the files with tests marked `cuda`
MARKED = (
    "tests/plan/test_offload.py",
    "tests/checkpoint/test_checkpoint_devices.py",
    "tests/testing/test_generators.py",
    "tests/watch/test_guard.py",
)


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


def tests(rows: Rows, mesh: DeviceMesh) -> None:
    """Run the tests that are marked `cuda`; other files need packages that a machine with a GPU may lack."""
    if not CUDA or importlib.util.find_spec("pytest") is None:
        return rows.add("marked cuda", "skipped", NO_GPU if not CUDA else "no pytest: name a folder with its wheel")
    # conftest.py needs packages that a machine with a GPU may lack
    command = [sys.executable, "-m", "pytest", "--noconftest", "-m", "cuda", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=-p no:logging"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # not the plugins that a machine happens to have
    done = subprocess.run([*command, *MARKED], cwd=ROOT, env=alone, capture_output=True, text=True)
    print(done.stdout, done.stderr, file=sys.stderr)  # for the log
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    rows.add("marked cuda", "right" if done.returncode == 0 else "failed", " ".join(last))


def values(rows: Rows, mesh: DeviceMesh) -> None:
    """Compare optimizers, policies and kinds of steps with the CPU's, with warnings as errors; rows of odd sizes."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    for name, kind in alternatives():
        rows.check(name, lambda kind=kind: _as_on_cpus(mesh, kind))  # type: ignore[misc]
    for name in OPTIMIZERS:
        for dtype in (torch.float32, torch.bfloat16):
            rows.check(f"optimizer {name}, odd rows of {dtype}", partial(_odd_rows, mesh, name, dtype))
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


def _as_on_cpus(mesh: DeviceMesh, kind: dict[str, Any]) -> str:
    """How a kind of steps differs from the CPU's, as text; empty if it is close."""
    expected = World(1).run(lambda cpu: trained(cpu, **kind))[0]
    # Adam moves a bias that was zero by the sign of its gradient, which rounding to 16 bits turns round here and there
    return near(trained(mesh, **kind), expected, 5e-2 if "policy" in kind.get("plan", ()) else 1e-3)


ODD = (1, 3, 1023, 2**20 + 1 if CUDA else 1025)  # elements: kernels take several at once


def _odd_rows(mesh: DeviceMesh, name: str, dtype: torch.dtype) -> str:
    """How two updates of rows of odd lengths differ from the CPU's, as text; empty if they are close."""

    def updated(mesh: DeviceMesh | Mesh) -> Tree:
        draw, device = torch.Generator().manual_seed(2), mesh_device(mesh)
        names = {1: "embed", 3: "three"} | {n: f"rows.{n}" for n in ODD[2:]}  # `labels` has a rule for "embed"
        # small parameters, so that updates are more than rounding
        drawn = ({names[n]: torch.randn(n, generator=draw) * size for n in ODD} for size in (1e-3, 1, 1))
        trees = [tree.map(lambda x: x.to(device, dtype), x) for x in drawn]
        plan = fshard.make_plan(trees[0], mesh, units=["*"])
        params, *grads = (fshard.shard_params(x, plan) for x in trees)
        tx = OPTIMIZERS[name]()
        state = tx.init(params)
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = optim.apply_updates(params, updates)
        # beside what they were: a difference relative to a parameter that became zero says nothing
        return tree.map(lambda x, y: torch.stack([x, y]), fshard.gather_params(params), trees[0])

    return near(updated(mesh), World(1).run(updated)[0], 1e-2 if dtype == torch.bfloat16 else 1e-5)


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


def bits(rows: Rows, mesh: DeviceMesh) -> None:
    """Compare bits: of the device and the CPU, of 1 and 4 ranks, and masks of dropout in graphs and eager steps."""

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


def late(rows: Rows, mesh: DeviceMesh) -> None:
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


def collectives(rows: Rows, mesh: DeviceMesh) -> None:
    """Call the backend's own collectives on one rank, which else sends nothing: NCCL's, gloo's without a GPU."""
    group: Any = mesh.get_group("shard")  # torch's stubs lack the number of its calls
    ranks = GroupRanks("shard", group, DEVICE)
    ranks.built_in, ranks._in_pairs = group, False
    of_one_rank(rows, ranks, group._get_sequence_number_for_group)


def nccl(rows: Rows, mesh: DeviceMesh) -> None:
    """Compare processes with NCCL (gloo without a GPU), several on one GPU, with simulated ranks, to the bit."""
    for size in (4, 2) if CUDA else (2,):  # two were seen to be right
        name, ranks = f"{'nccl' if CUDA else 'gloo'} of {size} ranks", []
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                str(ROOT / "benchmarks" / "gpu_ranks.py"),
                folder,
                str(rows.out),
                name,
                str(size),
            ]
            for rank in range(size):
                # each rank claims to be on its own host, because NCCL refuses two ranks of one host on one GPU
                own = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
                env = {**os.environ, **own}
                ranks.append(subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE, text=True))
            rows.check(name, lambda ranks=ranks: _ended(ranks))  # type: ignore[misc]


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
    from gpu_several import several
    from gpu_speed import OF_PART, SYSTEMS, ceilings, speed, system, without_kernels

    part, out, seconds = sys.argv[1:]
    parts: dict[str, Callable[[Rows, DeviceMesh], None]] = {"ceilings": ceilings, "correct": correct, "waits": waits}
    parts |= {"collectives": collectives, "values": values, "bits": bits, "tests": tests, "late": late, "nccl": nccl}
    parts |= {"several": several, **dict.fromkeys(OF_PART, speed)}
    parts |= {name: partial(system, name=name) for name in SYSTEMS}
    of = {name: part for part, names in OF_PART.items() for name in names}
    rows = Rows(of.get(part, part), Path(out), float(seconds))
    if FAKE:
        without_kernels()
    if FAKE and part in WITHOUT_STUB:
        rows.add("the whole part", "skipped", "a stub: operators of other threads and processes have no values")
    elif part in SYSTEMS:
        rows.attempt(part, partial(parts[part], rows, one_rank()))
    else:
        parts[part](rows, one_rank())
    sys.stdout.flush()
    os._exit(0)  # a process that used FSDP2 may abort at its regular end (torch 2.13)


if __name__ == "__main__":
    main()
