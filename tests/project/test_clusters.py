"""The scripts of examples/clusters and docs/launch.md: those that can run here run; the others have what they need."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.namespaces import ADDRESSES, on, two_hosts
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "clusters"
PAGE = ROOT / "docs" / "launch.md"
ENVIRONMENT = os.environ | {
    **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HOSTS": "2", "RANKS": "1"},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
# what takes a minute, and packages that a clone does not install
BY_HAND = pytest.mark.skipif("FSHARD_CLUSTERS" not in os.environ, reason="docs/launch.md says how to run it")


def started(command: list[str], **more: str) -> subprocess.Popen[str]:
    """A command that has been started in the clone."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT | more, **pipes)


def losses(text: str) -> list[tuple[str, str]]:
    """The hosts and the steps of the lines that train.py prints."""
    return re.findall(r"2 ranks on \[(.*)\]: steps (\d+ to \d+), loss \d\.\d+", text)


def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    """The command of the page would start no job, or each host a job of its own."""
    with two_hosts() as names:
        command = [str(SCRIPTS / "torchrun.sh"), f"--out={tmp_path}", "--steps=10"]
        runs = [started(on(name, *command), HEAD=names[0]) for name in names]
        texts = [run.communicate(timeout=120)[0] for run in runs]
    assert losses("".join(texts)) == [(f"'{names[0]}', '{names[1]}'", "0 to 10")], texts


# --- Slurm (apt-get install slurm-wlm munge)

SLURM = """
ClusterName=fshard
SlurmctldHost={names[0]}({addresses[0]})
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
GresTypes=gpu
NodeName={names[0]} NodeAddr={addresses[0]} CPUs=2 Gres=gpu:1
NodeName={names[1]} NodeAddr={addresses[1]} CPUs=2 Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Two hosts with Slurm's daemons, and the environment of its commands."""
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o400)
    files = [f"--{name}={tmp_path}/munge.{end}" for name, end in {"key-file": "key", "socket": "sock"}.items()]
    files += [f"--{name}-file={tmp_path}/munge.{name}" for name in ("pid", "log", "seed")]
    with ExitStack() as stack:
        names = stack.enter_context(two_hosts())
        settings = SLURM.format(names=names, addresses=ADDRESSES["IPv4"], folder=tmp_path)
        (tmp_path / "slurm.conf").write_text(settings)
        (tmp_path / "gres.conf").write_text("Name=gpu File=/dev/null\n")  # stands for a GPU
        more = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
        daemons = [["munged", "--foreground", "--force", *files], on(names[0], "slurmctld", "-D", "-c")]
        for command in (*daemons, *(on(name, "slurmd", "-D") for name in names)):
            log = stack.enter_context((tmp_path / "daemons.log").open("a"))
            daemon = subprocess.Popen(command, env=ENVIRONMENT | more, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        yield names, more


@BY_HAND
def test_slurm_on_two_hosts(slurm: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    """Slurm would refuse the script, or it would start two jobs of one host each."""
    names, more = slurm
    sizes = ["--gpus-per-node=1", "--cpus-per-task=1", f"--output={tmp_path}/out", "--wait"]
    command = on(names[0], "sbatch", *sizes, str(SCRIPTS / "slurm.sh"), "--steps=10")
    said = started(command, OUT=str(tmp_path / "run"), **more).communicate(timeout=60)[0]
    assert losses((tmp_path / "out").read_text()) == [(f"'{names[0]}', '{names[1]}'", "0 to 10")], said


# --- Ray (pip install ray[train])


@BY_HAND
def test_ray_with_two_workers(tmp_path: Path) -> None:
    """Ray's workers would not find each other, or a second run would begin anew."""
    for steps, first in (("10", "0"), ("20", "10")):
        command = [sys.executable, str(SCRIPTS / "ray_train.py"), f"--storage={tmp_path}", f"--steps={steps}"]
        text = started(command).communicate(timeout=300)[0]
        assert {steps for _, steps in losses(text)} == {f"{first} to {steps}"}, text


# --- Scripts that cannot run here, and the page


# commands in place of those of a cluster: torchrun prints its arguments
STUBS = {"torchrun": """printf '%s\\n' "$@" """, "srun": 'shift; exec "$@"', "scontrol": "echo host1; echo host2"}
VARIABLES = {
    "torchrun.sh": {"HEAD": "host1", "HOSTS": "2", "RANKS": "8"},
    "slurm.sh": {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "OUT": "/shared/run"}
    | dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID"), "x"),
    "skypilot.yaml": {
        **{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        "SKYPILOT_NODE_IPS": "host1\nhost2",
    },
}


def told(name: str, folder: Path, **more: str) -> Any:
    """The arguments that a script gives to torchrun."""
    for command, script in STUBS.items():
        (folder / command).write_text(f"#!/bin/sh\n{script}\n")
        (folder / command).chmod(0o755)
    text = (SCRIPTS / name).read_text()
    command = ["bash", "-c", yaml.safe_load(text)["run"]] if name.endswith("yaml") else ["bash", str(SCRIPTS / name)]
    env = VARIABLES[name] | more | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return get_args_parser().parse_args(done.stdout.splitlines())


@pytest.mark.parametrize("name", VARIABLES)
def test_a_script_tells_torchrun_where_the_hosts_meet(name: str, tmp_path: Path) -> None:
    """A launcher would stop at a typing error or an unset variable, or each host would wait for itself."""
    given = told(name, tmp_path)
    assert (given.nnodes, given.nproc_per_node) == ("2", "8")
    assert (given.rdzv_backend, given.rdzv_endpoint) == ("c10d", "host1:29500")
    assert (ROOT / given.training_script).samefile(SCRIPTS / "train.py")


def test_two_jobs_of_one_host_do_not_meet(tmp_path: Path) -> None:
    """A second job would join the first, or its store could not listen."""
    jobs = [told("torchrun.sh", tmp_path, **more) for more in ({}, {"PORT": "29501"})]
    assert [job.rdzv_endpoint for job in jobs] == ["host1:29500", "host1:29501"]
    assert len({job.rdzv_id for job in jobs}) == 2


def test_a_job_that_slurm_starts_again_keeps_its_output() -> None:
    """The output from before the failure, with its reason, would be overwritten."""
    lines = (SCRIPTS / "slurm.sh").read_text().splitlines()
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= {*lines}


def test_the_job_saves_its_last_step_also_to_a_url() -> None:
    """Steps after the last multiple of ten would be lost, and a URL would be a folder "s3:"."""
    code = (
        f"import runpy, sys, fshard\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        "sys.argv[1:] = ['--out', 'memory://run', '--steps', '3']\n"
        f"runpy.run_path({str(SCRIPTS / 'train.py')!r}, run_name='__main__')\n"
        "print(fshard.checkpoint.steps('memory://run'))"
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    text = started([sys.executable, "-c", code], **alone).communicate(timeout=120)[0]
    assert text.endswith("[3]\n"), text


def test_the_train_job_starts_torchrun_and_has_shared_memory() -> None:
    """Pods would have 64 MiB of /dev/shm, or mount a volume that is not there, or that one host alone may have."""
    claim, whole = yaml.safe_load_all((SCRIPTS / "trainjob.yaml").read_text())
    spec = whole["spec"]
    assert spec["trainer"]["command"][:2] == ["torchrun", "train.py"]
    assert spec["trainer"]["numProcPerNode"] == spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    volumes, (container,) = {volume["name"]: volume for volume in pod["volumes"]}, pod["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert job["name"] == container["name"] == "node", "as the runtime torch-distributed names them"
    assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def with_scripts(page: str) -> str:
    """The page with each script in the block after the line that names it."""

    def shown(match: re.Match[str]) -> str:
        return f"{match[1]}{(SCRIPTS / match[2]).read_text()}```\n"

    return re.sub(r"(?ms)^(`examples/clusters/([\w.]+)`\n\n```\w+\n).*?^```\n", shown, page)


def test_the_page_shows_the_scripts() -> None:
    """The page would show other scripts than those that were tried."""
    page = PAGE.read_text()
    assert page == with_scripts(page), "write it anew: python tests/project/test_clusters.py"
    assert sum((SCRIPTS / name).read_text() in page for name in os.listdir(SCRIPTS) if name != "__pycache__") == 5


if __name__ == "__main__":
    PAGE.write_text(with_scripts(PAGE.read_text()))
