"""Jobs that lose ranks: no rank waits for one that is gone, and a run goes on from its last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import same_bits
from support.worlds import fates, simulated
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import fshard
from fshard import checkpoint
from fshard.checkpoint import writing

ROOT = Path(__file__).parents[2]


def loses_a_rank_that_saves(mesh: Any, dir: str) -> None:
    """Rank 1 is killed while it writes its part; rank 0, which waits for it in the background, then misses it."""
    mock.patch.object(writing, "_AFTER_THE_PROGRAM", 0.1).start()
    params = {"w": torch.ones(4)}
    shards = fshard.shard_params(params, fshard.make_plan(params, mesh))
    if mesh.get_rank() == 1:
        mock.patch.object(writing.Writer, "put", side_effect=threading.Event().wait).start()
    checkpoint.save(dir, shards, 1, wait=False)
    if mesh.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fshard.all_reduce(torch.ones(1), mesh, "shard")


def test_a_rank_that_waits_for_the_files_of_another_ends_with_its_program(tmp_path: Path) -> None:
    """A process whose peer was killed while it saved would stay for an hour, and torchrun could not start it again."""
    first, second = fates(loses_a_rank_that_saves, str(tmp_path), shard=2, seconds=30.0)
    assert "rank 1 of axis 'shard' has gone" in str(first.error)
    assert (first.exitcode, second.exitcode) == (1, -signal.SIGKILL)
    assert checkpoint.steps(tmp_path) == []


def as_text(position: Any) -> str:
    """The position of a data loader as JSON, with the tensors of its generators."""
    return json.dumps(position, default=lambda x: {"bytes": x.tolist()})


def as_position(text: str) -> Any:
    """The position that a text is."""
    return json.loads(text, object_hook=lambda d: torch.tensor(d["bytes"], dtype=torch.uint8) if "bytes" in d else d)


ADAMW = fshard.optim.adamw(1e-2)
STEP = fshard.train_step(lambda p, x: fshard.Mean((x @ p["w"]).square().sum(), len(x)), ADAMW)


def trained_on_a_loader(mesh: Any, dir: str, saves: bool) -> tuple[fshard.TrainState, list[Tensor]]:
    """10 steps with a loader on each rank that shuffles by itself; with `saves` from the checkpoint of step 3."""
    generator = torch.Generator().manual_seed(mesh.get_rank())
    rows = torch.arange(48.0).view(12, 4) / 48
    # not `shuffle=True, generator=generator`: loader and sampler would draw from one generator, in another order later
    loader = StatefulDataLoader(rows, batch_size=3, sampler=RandomSampler(rows, generator=generator))  # 4 batches
    params = {"w": torch.ones(4, 2)}
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), ADAMW)
    if not saves:
        saved = checkpoint.restore(dir, {"state": state, "data": ""})
        state = saved["state"]
        loader.load_state_dict(as_position(saved["data"]))
    losses = list[Tensor]()
    while int(state.step) < 10:
        for batch in loader:
            state, metrics = STEP(state, batch)
            losses.append(metrics["loss"])
            if saves and int(state.step) == 3:
                checkpoint.save(dir, {"state": state, "data": as_text(loader.state_dict())}, 3)
            if int(state.step) == 10:
                break
    return state, losses


def test_a_data_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    """A run that goes on would see rows again, or others than the run that was not stopped."""
    whole, rest = (simulated(trained_on_a_loader, str(tmp_path), saves, shard=2) for saves in (True, False))
    for (state, losses), (other, later) in zip(whole, rest, strict=True):
        assert same_bits([state, losses[3:]], [other, later])
    with pytest.raises(ValueError, match="'data': it differs between the 2 ranks that saved it"):
        simulated(trained_on_a_loader, str(tmp_path), False, shard=1)


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/restarts.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import restarts

    yield restarts
    del sys.modules["restarts"]


def ranks(restarts: Any, tmp_path: Path) -> None:
    """Two ranks of a mesh with two axes, each on a host of its own, end within their timeout when the link is cut."""
    with restarts.network() as names:
        script = [sys.executable, str(ROOT / "tests" / "support" / "cut_off.py")]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *script, str(rank), "10.79.0.1", str(tmp_path)],
                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment},
            )
            for rank, name in enumerate(names[:2])
        ]
        assert [process.stdout.readline() for process in processes] == ["training\n"] * 2
        restarts.ip(f"-n {names[2]} link set cable1 down")
        for process in processes:
            out, errors = process.communicate(timeout=60)
            assert process.returncode == 1, errors
            assert out.endswith(" has gone, or did not answer within the process group's timeout\n"), errors


def run(restarts: Any, tmp_path: Path) -> None:
    """A training run of which a rank is killed and a host is cut off ends as one that nothing disturbs."""
    small = ["--kills=1", "--cuts=1", "--steps=600", "--save-every=20", "--pause=0.5", "--patience=1", "--tiny"]
    small.append(f"--data={tmp_path / 'text'}")
    (tmp_path / "text").write_text("a part of a tree is a tree; " * 100)
    script = [sys.executable, str(ROOT / "benchmarks" / "restarts.py"), *small, f"--out={tmp_path}"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["difference"] == 0
    assert result["statuses"] == [0, 0]
    assert set(result["lost"]) >= {"kill", "cut"}
    assert max(max(steps) for steps in result["lost"].values()) <= 40  # the save before the last may be the whole one


@pytest.mark.parametrize("what", [ranks, run], ids=lambda what: what.__name__)
def test_two_hosts_that_lose_each_other(what: Callable[[Any, Path], None], restarts: Any, tmp_path: Path) -> None:
    """Ranks whose peers are on a host that is gone would hang, or a run would end with other numbers."""
    try:
        with restarts.network():
            pass
    except RuntimeError as failure:
        pytest.skip(str(failure))
    what(restarts, tmp_path)
