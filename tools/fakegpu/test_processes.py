"""Several processes on GPUs that are not there: values, what NCCL refuses, and fshard's own protection.

`make fakegpu` runs this file, with a Python whose torch is built for CUDA.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer

import pytest
from run import environment

HERE = Path(__file__).resolve().parent
BEFORE = {*os.listdir("/dev/shm")}


def ran(program: str, folder: Path, size: int = 2, **env: str) -> list[tuple[int, str]]:
    """Run a program on `size` processes. Returns the exit status and the words of each, errors after the rest.

    What rank 0 prints is shown at once.
    """
    command = [sys.executable, str(HERE / "processes.py"), program, str(folder)]
    env, begin = environment(FAKEGPU_POISON="1", **env), time.monotonic()
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(followed, [*command, str(rank), str(size)], env, rank == 0) for rank in range(size)]
        ended = [rank.result() for rank in ranks]
    print(f"{time.monotonic() - begin:.0f} s", end=" ", flush=True)
    return ended


def followed(command: Sequence[str], env: dict[str, str], show: bool) -> tuple[int, str]:
    """Run a process to its end, for 20 minutes at most. Returns its exit status and its words."""
    with tempfile.TemporaryFile("w+") as errors, Popen(command, env=env, stdout=PIPE, stderr=errors, text=True) as one:
        late, said = Timer(1200, one.kill), list[str]()
        late.start()
        for line in one.stdout or ():
            said.append(line)
            if show:
                print(f"    {line.strip()}", flush=True)
        one.wait()
        late.cancel()
        errors.seek(0)
        return one.returncode, "".join([*said, errors.read()])


def well(program: str, folder: Path, size: int = 2) -> list[list[str]]:
    """Run a program that must end well. Returns the lines of each rank."""
    ended = ran(program, folder, size, FAKEGPU_WAIT=os.environ.get("FAKEGPU_WAIT", "120"))
    assert [code for code, _ in ended] == [0] * size, ended
    return [words.splitlines() for _, words in ended]


def test_values(tmp_path: Path) -> None:
    """All collectives move and add up what they should."""
    well("numbers", tmp_path, 3)


def test_groups(tmp_path: Path) -> None:
    """Groups that are split from the first have the right ranks."""
    well("groups", tmp_path, 4)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("other_order", "rank 0 calls all_reduce by sum of 8 f32, root 0, rank 1 calls all_gather of 8 f32, root 0"),
        ("other_count", "rank 0 calls all_reduce by sum of 8 f32, root 0, rank 1 calls all_reduce by sum of 7 f32"),
        ("other_dtype", "rank 0 calls all_reduce by sum of 8 f32, root 0, rank 1 calls all_reduce by sum of 8 i32"),
        ("death", "rank 0 waits for rank 1, which is gone"),
    ],
    ids=["order", "count", "dtype", "death"],
)
def test_what_would_hang(program: str, words: str, tmp_path: Path) -> None:
    """Ranks that call other collectives end with an error that shows what both called."""
    code, said = ran(program, tmp_path, FAKEGPU_WAIT="3")[0]
    assert code == 1
    assert words in said
    assert "the last calls of rank 0:\n    communicator 1: all_reduce" in said
    assert "the last calls of rank 1:\n    communicator 1: all_reduce" in said


def test_two_communicators(tmp_path: Path) -> None:
    """An order that differs between communicators ends after a while; both logs show where each rank was."""
    for code, said in ran("two_communicators", tmp_path, FAKEGPU_WAIT="3"):
        assert code == 1
        assert "does not come: it has called something else, or waits elsewhere" in said
        _, *logs = said.split("fakegpu: ")[1].split("  the last calls of rank ")
        ends = {int(log[0]): [line for line in log.splitlines() if "communicator" in line][-1] for log in logs}
        assert "communicator 1: all_reduce" in ends[0]
        assert "communicator 2: all_reduce" in ends[1]


def test_a_message_of_another_size(tmp_path: Path) -> None:
    """A message is not cut off."""
    code, said = ran("other_message", tmp_path)[1]
    assert code == 1
    assert "receives 32 bytes of type 7, rank 0 sends 16 of type 7" in said


# NCCL adds in its own order, and the norm for `clip_norm` is added up in another one on GPUs
NOT_TO_THE_BIT = {"fast", "donate"}


def test_kinds_of_steps(tmp_path: Path) -> None:
    """Processes with ProcessGroupNCCL train as simulated ranks of CPUs do."""
    lines = [line.split("; ") for line in well("kinds", tmp_path)[0] if ";" in line]
    assert len(lines) >= 14
    assert [line for line in lines if line[1] != "right"] == []
    assert {name for name, _, exactly in lines if exactly != "to the bit"} <= NOT_TO_THE_BIT


def test_kinds_of_steps_on_two_axes(tmp_path: Path) -> None:
    """Four processes, as two replicas of two ranks: each has two communicators, whose order all must share."""
    lines = [line.split("; ") for line in well("two_axes", tmp_path, 4)[0] if ";" in line]
    assert len(lines) >= 31
    assert [line for line in lines if line[1] != "right"] == []
    assert {name for name, _, exactly in lines if exactly != "to the bit"} <= NOT_TO_THE_BIT | {"in_backward clip"}


def test_plans_are_compared(tmp_path: Path) -> None:
    """Ranks whose parameters differ are told so when the plan is made, on all of them."""
    for code, said in ran("plans", tmp_path):
        assert code == 1
        assert "MismatchError: the plan differs between ranks" in said


def test_a_checked_call(tmp_path: Path) -> None:
    """`check` tells all ranks that they call different collectives, before NCCL hears of them."""
    for code, said in ran("checked", tmp_path):
        assert code == 1
        assert "MismatchError" in said
        assert "fakegpu: communicator" not in said


def test_a_death_in_a_checked_step(tmp_path: Path) -> None:
    """`check` tells the others that a rank has died."""
    (code, said), (other, _) = ran("checked_death", tmp_path)
    assert (code, other) == (1, 7)
    assert "MismatchError" in said


def test_a_checkpoint_goes_to_another_number_of_ranks(tmp_path: Path) -> None:
    """What four ranks saved while they trained on, two restore: the third loss is the same, to the bit."""
    saved = well("saves", tmp_path, 4)[0]
    restored = well("restores", tmp_path, 2)[0]
    assert saved[-2:] == restored[-2:]
    assert saved[-2].startswith("2 ")


def test_an_elastic_restart(tmp_path: Path) -> None:
    """A rank dies, torchrun starts all again, and they go on from the checkpoint."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [sys.executable, *torchrun, str(HERE / "processes.py"), "elastic", str(tmp_path)]
    # torch 2.13 else keeps the store of the world that died, from which a rank may read that world's ncclUniqueId
    env = environment(FAKEGPU_POISON="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [step for step, _ in steps] == ["0", "1", "2", "2", "3"]
    assert steps[2] == steps[3]


def test_nothing_is_left_behind() -> None:
    """The memory in which processes met is gone, also of those that died."""
    assert {name for name in os.listdir("/dev/shm") if name.startswith("fakegpu-")} <= BEFORE
