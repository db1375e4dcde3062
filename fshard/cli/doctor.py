"""Check a host for common faults: versions, networks and limits, and run a step on two processes.

  fshard doctor                            # this host
  fshard doctor --endpoint host1:29500     # one of several hosts; give torchrun the same endpoint
  srun fshard doctor --endpoint $HEAD:29500

Names, interfaces and the rendezvous are checked if the job has several hosts: with --endpoint, or by the environment of
torchrun, Slurm or SkyPilot.

Exit status: 0: no fault; 1: a fault; 2: an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import fshard

from ..files.foreign import require
from ..hosts.rendezvous import address_of
from . import self_test
from .output import FAULT, Line, report
from .traps import TRAPS, Advice, Facts, several_hosts

TESTED = ("2.11", "2.15")  # the oldest and the newest torch in the table of docs/limits.md
_SELF_TEST = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", self_test.__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="where the ranks of several hosts meet")


def run(args: argparse.Namespace) -> int:
    return report(_doctor_lines(facts_here(os.environ, args.endpoint)), args.json)


def _doctor_lines(facts: Facts) -> Iterator[Line]:
    for name, version in versions().items():
        yield Line(f"{name:18} {version}", {"check": name, "ok": True, "found": version, "do": ""})
    if not facts.several:
        yield Line("one host: for a job of several give --endpoint HOST:PORT")
    for name, trap in TRAPS.items():
        yield from (_line(name, *finding) for finding in list(trap(facts)) or [Advice()])
    yield _line("two processes", two_processes(), "what is wrong above may explain it")


def _line(name: str, wrong: str, do: str) -> Line:
    if not wrong:
        return Line(f"{name:18} ok", {"check": name, "ok": True, "found": "", "do": ""})
    return Line(f"{name:18} {wrong}\n{'':15} -> {do}", {"check": name, "ok": False, "found": wrong, "do": do}, FAULT)


def versions() -> dict[str, str]:
    here = {"python": platform.python_version(), "torch": torch.__version__ + untested(torch.__version__)}
    here |= {"optree": importlib.metadata.version("optree"), "fshard": fshard.__version__}
    here["backends"] = ", ".join(name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        here |= {"CUDA": str(torch.version.cuda), "NCCL": nccl, "GPUs": ", ".join(names)}
    return here


def untested(version: str) -> str:
    """Return a remark if fshard was not tested with this version of torch, else ""."""
    first, last, here = ([int(n) for n in text.split(".")[:2]] for text in (*TESTED, version))
    return "" if first <= here <= last else f" (fshard was tested with {TESTED[0]} to {TESTED[1]})"


def facts_here(env: Mapping[str, str], given: str | None) -> Facts:
    """Return the facts of this host. Raises ValueError for an endpoint without a port."""
    endpoint, several = endpoint_of(env, given), given is not None or several_hosts(env)
    name = socket.gethostname()
    return Facts(
        env=env,
        several=several,
        name=name,
        addresses=_addresses(name),
        interfaces=_interfaces(),
        shm=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        memlock=_soft_limit(resource.RLIMIT_MEMLOCK),
        files=_soft_limit(resource.RLIMIT_NOFILE),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        gpus=torch.cuda.device_count(),
        endpoint=endpoint,
        port=_port(endpoint) if endpoint and several else "",
    )


def endpoint_of(env: Mapping[str, str], given: str | None) -> tuple[str, int] | None:
    """Return (host, port) of the rendezvous: as given, or from the environment of torchrun or torch."""
    text = given or env.get("PET_RDZV_ENDPOINT", "")
    for prefix in ("PET_", ""):
        if not text and f"{prefix}MASTER_ADDR" in env:
            text = f"{env[f'{prefix}MASTER_ADDR']}:{env.get(f'{prefix}MASTER_PORT', '29500')}"
    if not text:
        return None
    host, _, port = text.rpartition(":")
    require(host and port.isdigit(), f"--endpoint {text}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _addresses(host: str) -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}))
    return ()


def _interfaces() -> dict[str, str]:
    addresses = {}
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # an interface without address
            addresses[name] = address_of(name)
    return addresses


def _soft_limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _port(endpoint: tuple[str, int]) -> str:
    """Return the result of connecting: "open", "refused" (nobody listens, as before a job), or an error's text."""
    try:
        socket.create_connection(endpoint, timeout=5).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError as failure:
        return str(failure)
    return "open"


def two_processes() -> str:
    """Return the error of a step on two processes of this host, or "" if the step succeeds."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PET_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *_SELF_TEST]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            _, said = run.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            run.terminate()  # not `kill`: torchrun must end its processes, in sessions of their own
            with suppress(subprocess.TimeoutExpired):
                run.communicate(timeout=60)
            run.kill()
            return "a step did not end within 120 s"
    errors = [line for line in said.splitlines() if "Error" in line or "differs" in line]
    return f"a step failed: {errors[0] if errors else said[-500:]}" if run.returncode else ""
