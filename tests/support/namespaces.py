"""Two network namespaces that are hosts: each has an address, a name of its own and a file /etc/hosts."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ADDRESSES = {"IPv4": ("10.77.0.1", "10.77.0.2"), "IPv6": ("fd77::1", "fd77::2")}
ETC = Path("/etc/netns")  # where files of a namespace are; `ip netns exec` is not used: it hides /sys/fs/cgroup


@contextmanager
def two_hosts(kind: str = "IPv4", own_name: str = "") -> Iterator[list[str]]:
    """The names of two hosts that a cable connects; skips the test where the machine allows no namespaces.

    With `own_name` a host's own name has this address, as many systems write 127.0.1.1.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip, to make network namespaces")
    names = [f"fshard-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            (ETC / name).mkdir(parents=True)
            known = {n: own_name if own_name and n == name else a for n, a in zip(names, ADDRESSES[kind], strict=True)}
            lines = [f"{address} {n}" for n, address in {"localhost": "127.0.0.1", **known}.items()]
            (ETC / name / "hosts").write_text("\n".join(lines) + "\n")
            (ETC / name / "nsswitch.conf").write_text("hosts: files\n")  # a question to DNS would wait for seconds
        for command in _commands(names, ADDRESSES[kind], "/64 nodad" if kind == "IPv6" else "/24"):
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: ip {command}: {done.stderr}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(ETC / name, ignore_errors=True)


def _commands(names: Sequence[str], addresses: Sequence[str], width: str) -> list[str]:
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
    for name, address in zip(names, addresses, strict=True):
        commands += [f"-n {name} addr add {address}{width} dev cable"]
        commands += [f"-n {name} link set {device} up" for device in ("lo", "cable")]
    return commands


def on(host: str, *command: str) -> list[str]:
    """The command that runs another one on a host."""
    mounts = " && ".join(f'mount --bind "{ETC}/$0/{file}" /etc/{file}' for file in ("hosts", "nsswitch.conf"))
    named = ("unshare", "--uts", "--mount", "sh", "-c", f'hostname "$0" && {mounts} && exec "$@"', host)
    return ["nsenter", f"--net=/run/netns/{host}", *named, *command]
