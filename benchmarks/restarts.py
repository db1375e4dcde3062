"""A training run on two hosts of which one is killed or cut off again and again: `make bench-restarts`.

A host is a network namespace, with a torchrun and its ranks. A third namespace has the store in which the hosts meet,
and a bridge that connects all three. At random moments a random rank is killed, or a random host is cut off: its link
goes down, and what still runs on it after `--patience` seconds is killed. Then the link goes up, and the host joins
again. The run must end by itself, with the losses of a run in one process that nothing disturbs: to the bit, because
both train with `--reduction=tree`. Needs Linux, root and the command ip.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fshard import checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples" / "nanogpt.py"
MODEL = ["--width=64", "--layers=2", "--context=64", "--batch=8"]
TINY = ["--width=16", "--layers=1", "--heads=2", "--context=16", "--batch=4"]  # for a test
SETTINGS = ["--reduction=tree", "--minutes=600", "--eval-every=100000", "--sample=1"]
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], 29400, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(1e6)
"""
MEETING = "10.79.0.3"  # the address of the store
POLL = 0.05  # seconds
HANGS = 120  # seconds without a further step that are an error

Record = dict[str, Any]


# --- Hosts.


def ip(command: str) -> str:
    """What `ip` prints. RuntimeError with its words if it fails."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {command}: {done.stderr.strip()}")
    return done.stdout


def kill_all(namespace: str) -> None:
    """Kill every process in a network namespace."""
    for process in ip(f"netns pids {namespace}").split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


@contextmanager
def network() -> Iterator[list[str]]:
    """Three network namespaces: of two hosts, and of the store. RuntimeError where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise RuntimeError("no network namespaces here: they need root and the command ip")
    names = [f"elastic-{os.getpid()}-{number}" for number in range(3)]
    with ExitStack() as stack:
        for name in names:
            ip(f"netns add {name}")
            stack.callback(ip, f"netns del {name}")
            stack.callback(kill_all, name)
            ip(f"-n {name} link set lo up")
        *hosts, middle = names
        ip(f"-n {middle} link add bridge type bridge")
        ip(f"-n {middle} addr add {MEETING}/24 dev bridge")
        ip(f"-n {middle} link set bridge up")
        for number, name in enumerate(hosts):
            ip(f"link add cable netns {name} type veth peer name cable{number} netns {middle}")
            ip(f"-n {name} addr add 10.79.0.{number + 1}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {middle} link set cable{number} master bridge up")
        yield names


@dataclass
class Host:
    """One of the two hosts, and the torchrun on it."""

    number: int
    names: Sequence[str]  # of all namespaces
    torchrun: Sequence[str]  # the command
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start torchrun."""
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "cable",  # both hosts have the same name, which leads to no other
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # with torch 2.13 restarted ranks wait in vain otherwise
            "OMP_NUM_THREADS": "1",
        }
        address = f"--local-addr=10.79.0.{self.number + 1}"
        command = ["ip", "netns", "exec", self.names[self.number], *self.torchrun[:3], address, *self.torchrun[3:]]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def has_ended(self) -> bool:
        """Whether torchrun has ended."""
        return self.process is not None and self.process.poll() is not None

    def ranks(self) -> list[int]:
        """The processes that torchrun has started."""
        assert self.process is not None
        with suppress(FileNotFoundError):
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
            return [int(child) for child in children.split()]
        return []

    def link(self, state: str) -> None:
        """Set the link "up" or "down"."""
        ip(f"-n {self.names[2]} link set cable{self.number} {state}")

    def clear(self) -> None:
        """Kill what still runs on the host."""
        kill_all(self.names[self.number])
        assert self.process is not None
        self.process.wait()


# --- The run.


def records_in(out: Path) -> list[Record]:
    """The records of steps in a folder's metrics; without a last line of which a part is written."""
    records = list[Record]()
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in (out / "metrics.jsonl").read_text().splitlines():
            records.append(json.loads(line))
    return [record for record in records if "step" in record]


@dataclass
class Watch:
    """What is seen of a run from outside: the last step, and how many steps each restart has cost."""

    out: Path
    logs: Sequence[Path]
    step: int = 0  # of the last record
    ranks: int = 0  # of the world that made it; 0: the ranks that have started last have made none yet
    restarts: int = 0  # from a checkpoint
    lost: dict[str, list[int]] = field(default_factory=dict)  # steps that were made again, by cause

    def look(self, cause: str) -> None:
        """Read the logs and the metrics; a restart since the last look is due to `cause`."""
        lines = [line.split() for log in self.logs for line in log.read_text(errors="replace").splitlines()]
        resumed = [int(words[4].rstrip(":")) for words in lines if words[:4] == ["Goes", "on", "from", "step"]]
        records = records_in(self.out)
        if len(resumed) > self.restarts:
            self.restarts, self.ranks = len(resumed), 0
            begin = max(step for step in resumed if step <= self.step)
            self.lost.setdefault(cause, []).append(self.step - begin)
            self.step = begin
        if records and records[-1]["step"] > self.step:
            self.step, self.ranks = records[-1]["step"], records[-1]["ranks"]

    def has_saved(self) -> bool:
        """Whether there is a checkpoint."""
        return bool(checkpoint.steps(self.out))

    def has_restarted_since(self, restarts: int) -> bool:
        """Whether there are more restarts than so many."""
        return self.restarts > restarts

    def until(self, condition: Callable[[], bool], what: str, cause: str) -> None:
        """Look until a condition holds. TimeoutError, which says what was waited for, if the run stands still."""
        deadline = time.monotonic() + HANGS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: no step in {HANGS} s; the logs are {', '.join(map(str, self.logs))}")
            time.sleep(POLL)
            step = self.step
            self.look(cause)
            deadline = time.monotonic() + HANGS if self.step > step else deadline


def cut_off(host: Host, watch: Watch, patience: float) -> None:
    """Wait until torchrun has ended on a host that is cut off, or for `patience` seconds; then the host joins again."""
    deadline = time.monotonic() + patience
    watch.until(lambda: host.has_ended() or time.monotonic() > deadline, "", "cut")
    host.clear()
    host.link("up")
    host.start()


def disturb(hosts: Sequence[Host], watch: Watch, events: Sequence[str], full: int, rng: random.Random, s: Any) -> None:
    """Let the events happen to a run, each when all ranks take part, and wait until it has ended by itself."""
    cause = "start"

    def has_ended() -> bool:
        return all(host.has_ended() for host in hosts)

    # each event after the first save is whole: before, there is nothing to go on from
    for number, kind in enumerate(events):
        watch.until(lambda: (watch.ranks == full and watch.has_saved()) or has_ended(), "an event", cause)
        if has_ended():
            raise RuntimeError(f"the training ended before event {number + 1}: give it more --steps")
        time.sleep(rng.uniform(0, s.pause))
        watch.look(cause)
        host, cause, restarts = rng.choice(hosts), kind, watch.restarts
        print(f"{number + 1:3}. step {watch.step:5}: {kind}, host {host.number}", flush=True)
        if kind == "kill":
            os.kill(rng.choice(host.ranks()), signal.SIGKILL)
        else:
            host.link("down")
        watch.until(partial(watch.has_restarted_since, restarts), "the run goes on", cause)
        if kind == "cut":
            cut_off(host, watch, s.patience)
            cause = "join"
    watch.until(has_ended, "the run ends", cause)


def compare(out: Path, plain: Path) -> tuple[float, float]:
    """The final loss, and the highest difference of any record's loss from the undisturbed run's."""
    ours, theirs = ({r["step"]: r["train_bits_per_byte"] for r in records_in(folder)} for folder in (out, plain))
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"{out} has records of steps {sorted(ours)}, {plain} of {sorted(theirs)}")
    return ours[max(ours)], max(abs(ours[step] - theirs[step]) for step in ours)


def run(s: Any) -> Record:
    """Make both runs, and return what is in the table."""
    rng, folder = random.Random(s.seed), Path(s.out or tempfile.mkdtemp(prefix="elastic-"))
    events = ["kill"] * s.kills + ["cut"] * s.cuts
    rng.shuffle(events)
    script = [str(EXAMPLE), *(TINY if s.tiny else MODEL), *SETTINGS, f"--data={s.data}", f"--steps={s.steps}"]
    script += [f"--save-every={s.save_every}", f"--timeout={s.timeout}"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={s.ranks}"]
    launch += ["--max-restarts=1000", "--monitor-interval=0.1", "--shutdown-timeout=5", "--rdzv-backend=c10d"]
    launch += [f"--rdzv-endpoint={MEETING}:29400", "--rdzv-id=elastic", f"--rdzv-conf={s.rdzv_conf}"]
    began = time.monotonic()
    with network() as names:
        store = subprocess.Popen(
            ["ip", "netns", "exec", names[2], sys.executable, "-c", STORE, MEETING], stdout=subprocess.PIPE
        )
        assert store.stdout is not None
        store.stdout.readline()
        command = [*launch, *script, f"--out={folder / 'disturbed'}"]
        hosts = [Host(number, names, command, folder / f"host-{number}.log") for number in range(2)]
        for host in hosts:
            host.start()
        watch = Watch(folder / "disturbed", [host.log for host in hosts])
        print(f"The logs are in {folder}", flush=True)
        disturb(hosts, watch, events, 2 * s.ranks, rng, s)
        statuses = [host.process.returncode for host in hosts if host.process]
        store.kill()
        store.wait()
    took = time.monotonic() - began
    print("The same run undisturbed, in one process", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "undisturbed.log").open("wb") as log:
        command = [sys.executable, *script, f"--out={folder / 'undisturbed'}"]
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)
    loss, difference = compare(folder / "disturbed", folder / "undisturbed")
    return {"events": events, "lost": watch.lost, "statuses": statuses, "loss": loss, "difference": difference} | {
        "seconds": took
    }


def table(result: Record, s: Any) -> str:
    """The result as a table in Markdown."""
    lost = result["lost"]
    rows = [
        ("kills of a rank", s.kills, "kill"),
        ("cuts of a host", s.cuts, "cut"),
        ("joins of a host", s.cuts, "join"),
    ]
    lines = ["| event | times | restarts | steps made again: in all | at most at once |", "|---|---|---|---|---|"]
    for name, times, cause in rows:
        steps = lost.get(cause, [])
        lines.append(f"| {name} | {times} | {len(steps)} | {sum(steps)} | {max(steps, default=0)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1, help="of each host: 1, 2 or 4")
    parser.add_argument("--timeout", type=float, default=5, help="seconds that ranks wait for each other")
    parser.add_argument("--patience", type=float, default=20, help="seconds until a host that is cut off is cleared")
    parser.add_argument(
        "--pause", type=float, default=2, help="most seconds between two events in which all ranks train"
    )
    parser.add_argument("--data", default=EXAMPLE.parents[1] / "docs", help="text to train on")
    parser.add_argument("--out", help="folder for logs and checkpoints; without it a temporary one")
    parser.add_argument("--tiny", action="store_true", help="train a smaller model")
    parser.add_argument("--seed", type=int, default=0)
    conf = "is_host=false,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"
    parser.add_argument("--rdzv-conf", default=conf)
    s = parser.parse_args()
    result = run(s)
    print(table(result, s))
    print(f"\n{json.dumps(result)}")
    if result["difference"]:
        raise SystemExit("the losses differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
