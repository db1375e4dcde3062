"""Frequent mistakes on clusters: pure functions of facts about a host, for `fshard doctor`."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

SMALL_SHM = 1 << 30  # bytes
FEW_FILES = 4096
# launchers' environment variables with a job's number of hosts
HOSTS = ("PET_NNODES", "GROUP_WORLD_SIZE", "SLURM_NNODES", "SKYPILOT_NUM_NODES")


class Facts(NamedTuple):
    """Facts about a host. `port`: the result of connecting to the rendezvous: "open", "refused", or an error's text."""

    env: Mapping[str, str]
    several: bool  # the job has several hosts
    name: str
    addresses: tuple[str, ...]  # of the host's own name
    interfaces: Mapping[str, str]  # addresses by name
    shm: int  # free bytes
    memlock: float  # bytes
    files: float
    infiniband: bool
    gpus: int
    endpoint: tuple[str, int] | None
    port: str


class Advice(NamedTuple):
    """A mistake and its remedy; both texts are empty if nothing is wrong."""

    wrong: str = ""
    do: str = ""


def several_hosts(env: Mapping[str, str]) -> bool:
    """Return True if a launcher's environment says that the job has several hosts. PET_NNODES may be a range."""
    counts = [env[name].rpartition(":")[2] for name in HOSTS if name in env]
    return any(count.isdigit() and int(count) > 1 for count in counts)


def is_loopback(host: str) -> bool:
    """Return True if a name or address is a loopback: each host reaches itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def worlds(facts: Facts) -> Iterator[Advice]:
    """Hosts of one job do not meet: each waits, or trains alone."""
    env, host = facts.env, (facts.endpoint or ("", 0))[0]
    head = "give all hosts the name of one: HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | sed -n 1p)"
    if facts.several and is_loopback(host):
        yield Advice(f"the rendezvous is at {host}: each host waits for itself, or trains alone", head)
    if facts.several and host and host == env.get("SLURM_LAUNCH_NODE_IPADDR"):
        yield Advice(f"the rendezvous is at SLURM_LAUNCH_NODE_IPADDR ({host}), the host where srun was called", head)
    tasks, size = env.get("SLURM_NTASKS"), env.get("WORLD_SIZE")
    if tasks and size and size != tasks and "TORCHELASTIC_RUN_ID" not in env:
        yield Advice(
            f"WORLD_SIZE is {size}, and Slurm started {tasks} tasks",
            "unset WORLD_SIZE and let torchrun set it, or set WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID",
        )
    if tasks and not size and int(tasks) > int(env.get("SLURM_NNODES", tasks)):
        yield Advice(
            f"{tasks} tasks on {env['SLURM_NNODES']} hosts: several torchrun of one host would be hosts of their own",
            "#SBATCH --ntasks-per-node=1, and torchrun --nproc-per-node=$SLURM_GPUS_ON_NODE",
        )


def own_name(facts: Facts) -> Iterator[Advice]:
    """The host's own name resolves to a loopback address."""
    if facts.several and "GLOO_SOCKET_IFNAME" not in facts.env and all(map(is_loopback, facts.addresses)):
        yield Advice(
            f"{facts.name} resolves to {', '.join(facts.addresses) or 'nothing'} here: gloo tells others that address",
            f"correct /etc/hosts, or export GLOO_SOCKET_IFNAME={_likely(facts)} (and torchrun --local-addr=ADDRESS)",
        )


def gloo_interface(facts: Facts) -> Iterator[Advice]:
    """GLOO_SOCKET_IFNAME names no interface of this host, or a loopback."""
    value = facts.env.get("GLOO_SOCKET_IFNAME", "")
    for name in value.split(",") if value else []:
        if name not in facts.interfaces:
            yield Advice(
                f"GLOO_SOCKET_IFNAME={value}: no interface {name!r} has an address here",
                f"name one of {', '.join(facts.interfaces)}, whole: `^lo` and prefixes are for NCCL",
            )
        elif facts.several and is_loopback(facts.interfaces[name]):
            yield Advice(f"GLOO_SOCKET_IFNAME={value}: a loopback", f"GLOO_SOCKET_IFNAME={_likely(facts)}")


def nccl_interface(facts: Facts) -> Iterator[Advice]:
    """NCCL may take an interface out of reach of other hosts."""
    value, names = facts.env.get("NCCL_SOCKET_IFNAME"), _outer(facts)
    if not facts.several or not facts.gpus:
        return
    if value is None and len(names) > 1:
        yield Advice(
            f"NCCL_SOCKET_IFNAME is not set, and NCCL may take any of {', '.join(names)}",
            f"export NCCL_SOCKET_IFNAME={_likely(facts)}, or that with which hosts reach each other",
        )
    elif value is not None and not any(_nccl_takes(value, name) for name in facts.interfaces):
        yield Advice(f"NCCL_SOCKET_IFNAME={value} fits no interface", f"name one of {', '.join(names)}")


def _nccl_takes(value: str, name: str) -> bool:
    """Return True if a NCCL_SOCKET_IFNAME admits an interface: prefixes, `=` before whole names, `^` to exclude."""
    parts = value.lstrip("^=").split(",")
    fits = name in parts if "=" in value[:2] else any(name.startswith(part) for part in parts)
    return fits != value.startswith("^")


def _outer(facts: Facts) -> list[str]:
    return [name for name, address in facts.interfaces.items() if not is_loopback(address)]


def _likely(facts: Facts) -> str:
    """Return the first interface with no name of a container or bridge."""
    real = [name for name in _outer(facts) if not name.startswith(("docker", "veth", "virbr", "br-", "cni"))]
    return next(iter(real), "INTERFACE")


def shared_memory(facts: Facts) -> Iterator[Advice]:
    """/dev/shm is too small for NCCL and the workers of a DataLoader."""
    if facts.shm < SMALL_SHM:
        yield Advice(
            f"/dev/shm has {facts.shm >> 20} MiB: NCCL, DataLoader's workers and gloo on one host use it",
            "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir of medium Memory at /dev/shm",
        )


def limits(facts: Facts) -> Iterator[Advice]:
    """The limits of locked memory and of open files are low."""
    if facts.infiniband and facts.memlock < float("inf"):
        yield Advice(
            f"ulimit -l is {int(facts.memlock) >> 10} KiB, and InfiniBand locks the memory that it sends",
            "docker run --ulimit memlock=-1; in Slurm LimitMEMLOCK=infinity for slurmd",
        )
    if facts.several and facts.files < FEW_FILES:
        yield Advice(
            f"ulimit -n is {int(facts.files)}: each rank has a socket for each other one",
            'ulimit -n "$(ulimit -Hn)" before torchrun',
        )


def rendezvous(facts: Facts) -> Iterator[Advice]:
    """The port of the rendezvous cannot be reached."""
    if facts.several and facts.endpoint is not None and facts.port not in ("open", "refused"):
        host, port = facts.endpoint
        yield Advice(
            f"{host}:{port} is not reached: {facts.port}",
            "all hosts must resolve the name, and reach that port and those above 1024 of each other (firewall)",
        )


TRAPS: dict[str, Callable[[Facts], Iterator[Advice]]] = {
    "one world": worlds,
    "own name": own_name,
    "gloo's interface": gloo_interface,
    "NCCL's interface": nccl_interface,
    "/dev/shm": shared_memory,
    "limits": limits,
    "rendezvous": rendezvous,
}
