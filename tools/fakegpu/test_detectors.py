"""Every detector is seen to fire: a small program with a fault, and the same without it. `make fakegpu` runs this file.

It runs on the stub, alone, with a log (check.py says how). Each test would pass for a detector that sees nothing, if
it did not ask for the fault's words; and for one that always fires, if it did not run the program without the fault.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counts import counts_of
from races import judged, races_of
from recorder import Recorder, mark
from table import Case, wrong
from torch import Tensor

N = 1 << 18  # elements of a block that the allocator gives out by itself


@pytest.fixture(autouse=True, scope="module")
def _device() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=8)
    with Recorder():
        dist.all_reduce(torch.zeros(1, device="cuda"))  # makes the communicator
        yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


def log_of(program: Callable[[], object]) -> tuple[str, str]:
    """Run a program as the last case of the log. Returns the log and the case's name."""
    log, name = os.environ["FAKEGPU_LOG"], f"case{next(NUMBERS)}"
    torch.cuda.synchronize()
    mark(f"case name={name}")
    mark("step")
    program()
    mark("peak bytes=0 estimate=0")
    mark("end")
    torch.cuda.synchronize()
    return log, name


NUMBERS = iter(range(1000))


def races(program: Callable[[], object]) -> Counter[str]:
    """The races of a program."""
    log, name = log_of(program)
    return races_of(log)[name]


def counts(program: Callable[[], object]) -> Counter[str]:
    """The counts of a program."""
    log, name = log_of(program)
    return counts_of(log)[name]


def ones(number: int = N) -> Tensor:
    return torch.ones(number, device="cuda")


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait(waits: bool) -> None:
    """The computation reads what a side stream writes."""
    side = torch.cuda.Stream()

    def program() -> None:
        x = ones()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        x.sum()

    words = "sum on the computation reads what mul_ on a side stream still writes"
    assert set(races(program)) == (set() if waits else {words})


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_begins_too_early(waits: bool) -> None:
    """A side stream reads what the computation has not written yet."""
    side = torch.cuda.Stream()

    def program() -> None:
        x = ones()
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        torch.cuda.current_stream().wait_stream(side)

    assert set(races(program)) == (
        set() if waits else {"sum on a side stream reads what ones on the computation still writes"}
    )


@pytest.mark.parametrize("then", ["the same size", "another size", "nothing"])
@pytest.mark.parametrize("kept", ["dropped", "kept", "recorded"])
def test_a_dropped_reference(kept: str, then: str) -> None:
    """Memory that a side stream reads is freed: right if nothing is allocated before the computation waits."""
    side, sizes = torch.cuda.Stream(), {"the same size": N, "another size": 64 * N, "nothing": 0}
    torch.cuda.empty_cache()

    def program() -> None:
        x = ones()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if kept == "recorded":
            x.record_stream(side)
        held = x if kept == "kept" else None
        del x
        ones(sizes[then])
        torch.cuda.current_stream().wait_stream(side)
        del held

    words = {"freed while sum on a side stream still reads it"}
    if then == "the same size":
        words |= {"ones on the computation writes what sum on a side stream still reads"}
    assert set(races(program)) == (words if kept == "dropped" and then != "nothing" else set())


def dropped(x: Tensor, side: torch.cuda.Stream) -> None:
    """Give the memory of `x` back to torch's allocator, which asks `side` when it is used next."""
    x.record_stream(side)
    x.set_(ones(1))
    ones()


QUESTIONS: dict[str, Callable[[torch.cuda.Stream, torch.cuda.Event, Tensor], object]] = {
    "of an event": lambda side, event, x: event.query(),
    "of a stream": lambda side, event, x: side.query(),
    "of torch's allocator of the device": lambda side, event, x: dropped(x, side),
    "of torch's allocator of the host": lambda side, event, x: torch.zeros(N, pin_memory=True),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_no_wait(question: str) -> None:
    """A missing wait is found though somebody asks, before it, whether the side stream is done."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()

    def program() -> None:
        x, other, row = ones(), ones(), torch.zeros(N, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
            row.copy_(x, non_blocking=True)
            event.record()
        del row
        QUESTIONS[question](side, event, other)
        x.sum()
        torch.cuda.current_stream().wait_stream(side)

    assert set(races(program)) == {"sum on the computation reads what mul_ on a side stream still writes"}


def test_who_asks_again_and_again_waits() -> None:
    """A loop of questions ends, and is an order."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()

    def program() -> None:
        x = ones()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
            event.record()
        while not event.query():
            pass
        x.sum()

    assert set(races(program)) == set()


def test_a_race_between_cases_belongs_to_none() -> None:
    """What follows the end of a case is not booked on it."""
    side = torch.cuda.Stream()

    def program() -> None:
        with torch.cuda.stream(side):
            ones(8)

    log, name = log_of(program)
    x = ones()
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.synchronize()
    assert races_of(log)[name] == Counter()


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_on_the_wrong_stream(waits: bool) -> None:
    """Rows from pinned memory arrive on a side stream, and the computation does not wait."""
    side, row = torch.cuda.Stream(), torch.zeros(N, pin_memory=True)

    def program() -> None:
        with torch.cuda.stream(side):
            x = row.to("cuda", non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        x.sum()

    words = "sum on the computation reads what _to_copy on a side stream still writes"
    assert set(races(program)) == (set() if waits else {words})


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_reads_too_early(waits: bool) -> None:
    """The host reads pinned memory into which a copy is under way."""
    row = torch.zeros(N, pin_memory=True)

    def program() -> None:
        row.copy_(ones(), non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        row.sum()

    words = "sum on the host reads what copy_ on the computation still writes"
    assert set(races(program)) == (set() if waits else {words})


@pytest.mark.parametrize("waits", [True, False])
def test_a_collective_that_nobody_waits_for(waits: bool) -> None:
    """The computation reads what NCCL receives."""

    def program() -> None:
        x = ones(8)
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        x.sum()
        work.wait()

    words = "sum on the computation reads what all_reduce on communicator 1 still writes"
    assert set(races(program)) == (set() if waits else {words})


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_sent_is_overwritten(waits: bool) -> None:
    """The computation writes what NCCL sends."""

    def program() -> None:
        x, out = ones(8), ones(64)
        work = dist.all_gather_single(out, x, async_op=True)
        if waits:
            work.wait()
        x.zero_()
        work.wait()

    words = "zero_ on the computation writes what all_gather on communicator 1 still reads"
    assert set(races(program)) == (set() if waits else {words})


def test_what_the_watchdog_learns() -> None:
    """A thread of ProcessGroupNCCL learns that a collective is done once the host has waited for the device.

    It drops what was sent when it learns that. If it learned it at once, that memory would be written to while, by the
    log, it is read: a race that no GPU has.
    """
    event = torch.cuda.Event()
    # torch has no public name for it; a thread of another name is one of the program, and sees another answer here
    with ThreadPoolExecutor(1, initializer=torch._C._set_thread_name, initargs=("pt_nccl_watchdg",)) as watchdog:
        event.record()
        assert not any(watchdog.submit(event.query).result() for _ in range(2000))
        torch.cuda.synchronize()
        assert watchdog.submit(event.query).result()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_host_read_is_an_error_and_counted() -> None:
    """`.item()` raises where waits are errors, and is counted where they are not."""
    x = ones(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.item()
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            torch.nonzero(x)
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            torch.zeros(4).to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts(lambda: x.item())["host waits"] == 1
    assert counts(lambda: x.add(1))["host waits"] == 0


def test_a_pageable_copy() -> None:
    """A copy from memory that is not pinned is counted."""
    pageable, pinned = torch.zeros(N), torch.zeros(N, pin_memory=True)
    assert counts(lambda: pageable.to("cuda"))["pageable copies"] == 1
    assert counts(lambda: pinned.to("cuda", non_blocking=True)) == {"copies": 1}


def test_a_cuda_malloc() -> None:
    """Memory that the allocator does not have is counted; what it has is not."""
    torch.cuda.empty_cache()
    assert counts(lambda: ones(64 * N))["cudaMallocs"] == 1
    assert counts(lambda: ones(64 * N))["cudaMallocs"] == 0


@pytest.mark.parametrize("early", [True, False])
def test_collectives_beside_the_computation(early: bool) -> None:
    """A gather that is under way while the computation goes on is counted, one that it waits for at once is not."""
    x, outs = ones(8), [ones(64), ones(64)]

    def program() -> None:
        for n, out in enumerate(outs):
            work = dist.all_gather_single(out, x, async_op=True)
            if early and n:
                ones(8)
            work.wait()
            out.sum()

    log, name = log_of(program)
    assert judged(log)[name].counted == ({"all_gather": 1} if early else {})


def test_collectives_are_counted() -> None:
    """Each call of NCCL is counted, and each message."""
    found = counts(lambda: dist.all_reduce(ones(8)))
    assert (found["collectives"], found["all_reduce"]) == (1, 1)
    parts = [ones(rank + 1) for rank in range(8)]
    found = counts(lambda: dist.all_to_all([x.clone() for x in parts], parts))
    assert (found["collectives"], found["messages"]) == (0, 16)


def test_a_null_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of no memory is refused, if NCCL is asked to look; a message of no elements is not, as in NCCL."""
    monkeypatch.setenv("NCCL_CHECK_POINTERS", "1")
    with pytest.raises(dist.DistBackendError, match="is no memory of the device"):
        dist.all_gather_single(ones(0), ones(0))
    dist.all_to_all([ones(0)] * 8, [ones(0)] * 8)


def test_what_nobody_wrote_is_sent() -> None:
    """A number that nobody wrote is refused by NCCL, of new memory and of memory that is used again."""
    torch.cuda.empty_cache()
    for _ in range(2):
        x = torch.empty(N, device="cuda")
        x[: N - 1] = 1
        with pytest.raises(dist.DistBackendError, match=f"nobody wrote element {N - 1} of what is sent"):
            dist.all_reduce(x)
        x[N - 1] = float("nan")  # a number
        dist.all_reduce(x)
        x.zero_()
        del x


def test_a_sum_of_flags() -> None:
    """A sum of bools, which torch would make an "or"."""
    with pytest.raises(TypeError, match=r"NCCL has no sum of torch\.bool"):
        dist.all_reduce(torch.zeros(8, dtype=torch.bool, device="cuda"))


def test_a_sum_of_complex_numbers() -> None:
    """NCCL has no complex numbers."""
    x = torch.zeros(8, dtype=torch.complex64, device="cuda")
    with pytest.raises(TypeError, match="not supported for NCCL"):
        dist.reduce_scatter_single(x[:1].clone(), x)


def test_what_a_gpu_refuses() -> None:
    """Two dtypes in one layer_norm, which CPUs take: torch's own checks run, as they do on a GPU."""
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        F.layer_norm(ones(8).bfloat16(), (8,), ones(8))


def test_values() -> None:
    """What is computed is what the CPU computes, in the backward too: else a wrong loss would pass."""
    w = torch.arange(6.0).view(2, 3)
    x = w.to("cuda").requires_grad_()
    F.gelu(x @ x.T).sum().backward()
    y = w.clone().requires_grad_()
    F.gelu(y @ y.T).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), y.grad)


def test_what_differs_from_the_expected_numbers() -> None:
    """A race, another count and more memory are each a line that names the case."""
    case = Case(Counter(), {"collectives": 18}, 1 << 20, 1 << 20)
    expected = {"full": {"collectives": 18, "peak KiB": 1024}}
    assert wrong("8-fast", {"full": case}, expected) == []
    for other, words in (
        (case._replace(races=Counter({"a on b reads": 2})), "2 times: a on b reads"),
        (case._replace(counts={"collectives": 19}), "18 collectives expected, got 19"),
        (case._replace(peak=1 << 19), "1024 peak KiB expected, got 512"),
        (case._replace(estimate=1 << 19), "needs 1024 KiB, estimated were 512 KiB"),
    ):
        (line,) = wrong("8-fast", {"full": other}, expected)
        assert line.startswith("8-fast full: ")
        assert words in line
