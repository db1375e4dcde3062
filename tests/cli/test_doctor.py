"""`fshard doctor`: each trap is found by facts that have it, and by no others; a step runs on two processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.namespaces import on, two_hosts
from support.worlds import simulated

from fshard.cli import doctor, self_test
from fshard.cli.main import main
from fshard.cli.traps import TRAPS, Facts

# a host of a job of two, on which nothing is wrong
GOOD = Facts(
    env={},
    several=True,
    name="host1",
    addresses=("10.0.0.1",),
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    shm=1 << 34,
    memlock=float("inf"),
    files=1 << 20,
    infiniband=True,
    gpus=8,
    endpoint=("host1", 29500),
    port="open",
)
SLURM = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
DOCKER = {**GOOD.interfaces, "docker0": "172.17.0.1"}

# the trap, the facts that differ, and whether it is found
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("one world", {"endpoint": ("localhost", 29500)}, True),
    ("one world", {"endpoint": ("127.0.1.1", 29500)}, True),
    ("one world", {"endpoint": ("::1", 29500)}, True),
    ("one world", {"endpoint": ("localhost", 29500), "several": False}, False),
    ("one world", {"endpoint": ("10.0.0.9", 1), "env": SLURM | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}}, True),
    ("one world", {"env": SLURM | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}}, False),
    ("one world", {"env": SLURM | {"WORLD_SIZE": "16"}}, True),
    ("one world", {"env": SLURM | {"WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"}}, False),
    ("one world", {"env": {"SLURM_NTASKS": "16", "SLURM_NNODES": "2"}}, True),
    ("one world", {"env": {"SLURM_NTASKS": "16", "SLURM_NNODES": "2", "WORLD_SIZE": "16"}}, False),
    ("own name", {"addresses": ("127.0.1.1",)}, True),
    ("own name", {"addresses": ()}, True),
    ("own name", {"addresses": ("127.0.1.1", "10.0.0.1")}, False),
    ("own name", {"addresses": ("127.0.1.1",), "env": {"GLOO_SOCKET_IFNAME": "eth0"}}, False),
    ("own name", {"addresses": ("127.0.1.1",), "several": False}, False),
    ("gloo's interface", {"env": {"GLOO_SOCKET_IFNAME": "^lo,docker"}}, True),
    ("gloo's interface", {"env": {"GLOO_SOCKET_IFNAME": "eth"}, "several": False}, True),
    ("gloo's interface", {"env": {"GLOO_SOCKET_IFNAME": "lo"}}, True),
    ("gloo's interface", {"env": {"GLOO_SOCKET_IFNAME": "lo"}, "several": False}, False),
    ("gloo's interface", {"env": {"GLOO_SOCKET_IFNAME": "eth0"}}, False),
    ("NCCL's interface", {"interfaces": DOCKER}, True),
    ("NCCL's interface", {"interfaces": DOCKER, "gpus": 0}, False),
    ("NCCL's interface", {"interfaces": DOCKER, "several": False}, False),
    ("NCCL's interface", {"interfaces": DOCKER, "env": {"NCCL_SOCKET_IFNAME": "eth"}}, False),
    ("NCCL's interface", {"interfaces": DOCKER, "env": {"NCCL_SOCKET_IFNAME": "^lo,docker"}}, False),
    ("NCCL's interface", {"interfaces": DOCKER, "env": {"NCCL_SOCKET_IFNAME": "=eth"}}, True),
    ("NCCL's interface", {"interfaces": DOCKER, "env": {"NCCL_SOCKET_IFNAME": "=eth0"}}, False),
    ("NCCL's interface", {"interfaces": DOCKER, "env": {"NCCL_SOCKET_IFNAME": "ib"}}, True),
    ("/dev/shm", {"shm": 64 << 20}, True),
    ("limits", {"memlock": 8 << 20}, True),
    ("limits", {"memlock": 8 << 20, "infiniband": False}, False),
    ("limits", {"files": 1024}, True),
    ("limits", {"files": 1024, "several": False}, False),
    ("rendezvous", {"port": "timed out"}, True),
    ("rendezvous", {"port": "refused"}, False),
    ("rendezvous", {"port": "", "several": False}, False),
]


@pytest.mark.parametrize(("name", "facts", "expected"), CASES)
def test_a_trap_is_found_where_it_is(name: str, facts: dict[str, Any], expected: bool) -> None:
    """A job would hang, or the doctor would blame what is right."""
    found = {trap: [*find(GOOD._replace(**facts))] for trap, find in TRAPS.items()}
    assert {trap for trap, findings in found.items() if findings} == ({name} if expected else set())
    assert all(finding.wrong and finding.do for findings in found.values() for finding in findings)


def test_the_likely_interface_is_the_network() -> None:
    """The remedy would name the interface that is wrong."""
    (finding,) = TRAPS["NCCL's interface"](GOOD._replace(interfaces={"docker0": "172.17.0.1", **GOOD.interfaces}))
    assert "export NCCL_SOCKET_IFNAME=eth0," in finding.do


@pytest.mark.parametrize(
    ("env", "given", "endpoint"),
    [
        ({}, None, None),
        ({}, "host1:29500", ("host1", 29500)),
        ({}, "[fd77::1]:29500", ("fd77::1", 29500)),
        ({"PET_RDZV_ENDPOINT": "host2:1", "MASTER_ADDR": "host3"}, None, ("host2", 1)),
        ({"PET_MASTER_ADDR": "host2", "PET_MASTER_PORT": "2"}, None, ("host2", 2)),
        ({"MASTER_ADDR": "host3"}, None, ("host3", 29500)),
        ({"MASTER_ADDR": "host3"}, "host4:4", ("host4", 4)),
    ],
)
def test_where_ranks_meet(env: dict[str, str], given: str | None, endpoint: object) -> None:
    """The doctor would look at another place than the job."""
    assert doctor.endpoint_of(env, given) == endpoint


@pytest.mark.parametrize(
    ("env", "several"),
    [({}, False), ({"PET_NNODES": "1:4"}, True), ({"SLURM_NNODES": "1"}, False), ({"GROUP_WORLD_SIZE": "2"}, True)],
)
def test_how_many_hosts_a_job_has(env: dict[str, str], several: bool) -> None:
    """A host alone would be told to open ports, or a host of a job would not."""
    assert doctor.facts_here(env, None).several == several


def test_an_endpoint_without_a_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor would look at a port that nobody meant."""
    assert main(["doctor", "--endpoint", "host1"]) == 2
    assert capsys.readouterr().err == "fshard doctor: --endpoint host1: expected HOST:PORT\n"


def test_what_is_wrong_here_is_printed_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs would not see that something is wrong, or people not what to do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing")
    monkeypatch.setattr(doctor, "two_processes", lambda: "")
    assert main(["doctor", "--json"]) == 1
    rows = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [name for name, row in rows.items() if not row["ok"]] == ["gloo's interface"]
    assert rows["gloo's interface"]["do"].startswith("name one of lo")
    assert {"python", "torch", "optree", "fshard", "backends", "two processes"} < rows.keys()
    assert main(["doctor"]) == 1
    assert "GLOO_SOCKET_IFNAME=nothing: no interface 'nothing' has an address here\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "tested"), [("2.10.1", False), ("2.11.0+cu130", True), ("2.15.0", True), ("2.16.0a0+git1", False)]
)
def test_a_torch_that_nobody_tested_is_named(version: str, tested: bool) -> None:
    """Users of a torch that came out after fshard would not learn that nobody has tried the two together."""
    assert doctor.untested(version) == ("" if tested else " (fshard was tested with 2.11 to 2.15)")


def test_the_tested_versions_are_those_of_the_page() -> None:
    """The command would name other versions than the page that says what was tested."""
    root = Path(__file__).parents[2]
    rows = re.findall(r"^\| (2\.\d+)\.\d+ \|", (root / "docs" / "limits.md").read_text(), re.MULTILINE)
    assert (rows[0], rows[-1]) == doctor.TESTED
    (newest,) = re.findall(r"^TORCH \?= (2\.\d+)\.\d+$", (root / "Makefile").read_text(), re.MULTILINE)
    assert newest == rows[-1]


def test_two_processes_run_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor would call a good host ill, or one well on which processes cannot talk."""
    assert doctor.two_processes() == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing")
    assert "nothing" in doctor.two_processes()


def test_nothing_is_left_of_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor would leave two processes behind, for ever, on the host that is ill."""
    (tmp_path / "hang.py").write_text(
        "import os, pathlib, signal, sys\n"
        "path = pathlib.Path(__file__).parent / os.environ['RANK']\n"
        "os.mkfifo(path)\n"
        "path.write_text(str(os.getpid()))\n"  # waits for the reader
        "signal.pause()\n"
    )
    numbers, communicate = list[int](), subprocess.Popen.communicate

    def times_out(run: Any, *args: Any, timeout: float) -> Any:
        if timeout < 120:  # after the end
            return communicate(run, *args, timeout=timeout)
        ranks = [tmp_path / str(rank) for rank in range(2)]
        while not all(path.exists() for path in ranks):
            os.sched_yield()
        numbers.extend(int(path.read_text()) for path in ranks)
        raise subprocess.TimeoutExpired("torchrun", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", times_out)
    monkeypatch.setattr(doctor, "_SELF_TEST", (*doctor._SELF_TEST[:-2], str(tmp_path / "hang.py")))
    assert doctor.two_processes() == "a step did not end within 120 s"
    assert [number for number in numbers if Path(f"/proc/{number}").exists()] == []


def test_a_step_has_the_bits_of_one_device() -> None:
    """The self-test would compare a step with something else."""
    rows = torch.linspace(0, 1, 128).view(16, 8)
    first, second = simulated(lambda mesh: self_test.stepped(mesh, rows.chunk(2)[mesh.get_local_rank("shard")]))
    assert torch.equal(first, self_test.stepped(None, rows))
    assert torch.equal(first, second)


FOUND = """
import os, sys
from fshard.cli import doctor, traps
for endpoint in sys.argv[1:]:
    facts = doctor.facts_here(os.environ, endpoint)._replace(shm=1 << 40, files=1 << 20)
    print(*(name for name, trap in traps.TRAPS.items() if [*trap(facts)]), sep=", ")
"""


@pytest.mark.parametrize("own", ["", "127.0.1.1"])
def test_the_facts_of_one_of_two_hosts(own: str) -> None:
    """Facts of a real host would be read wrongly: its name, its interfaces, and a rendezvous that it does not reach."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with two_hosts(own_name=own) as names:
        command = on(names[0], sys.executable, "-c", FOUND, f"{names[1]}:29500", "10.77.0.3:29500")
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    expected = ["own name\n", "own name, rendezvous\n"] if own else ["\n", "rendezvous\n"]
    assert done.stdout == "".join(expected), done.stderr
