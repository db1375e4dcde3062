"""The loops of a graph in one file."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import same_bits
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

import fshard
from fshard.compiler import loops, lowered
from fshard.compiler.loops import in_one_file

PLUS = '#include <cmath>\nextern "C" void kernel(const float* x, float* y)\n{{\n    y[0] = std::floor(x[0]) + {};\n}}\n'
TYPES = ["const float*", "float*"]
DIRECTIVE = "#define ONE 1\n" + PLUS.format("ONE")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile threads; torch's choice is the number of processors."""
    with config.patch(compile_threads=request.param):
        yield


def built(*sources: str) -> dict[str, Any]:
    """A module's loops, as one that Inductor writes makes them."""
    compiler = AsyncCompile()
    scope: dict[str, Any] = {f"loop{n}": compiler.cpp_pybinding(TYPES, source) for n, source in enumerate(sources)}
    compiler.wait(scope)
    return scope


def library(loop: Any) -> str:
    """The file that a loop is in."""
    return loop.__self__.__file__ if hasattr(loop.__self__, "__file__") else str(loop.__self__)


def results(scope: dict[str, Any]) -> list[float]:
    """What each loop makes of 1.5."""
    out = []
    for loop in scope.values():
        x, y = torch.tensor([1.5]), torch.zeros(1)
        loop(x, y)
        out.append(float(y))
    return out


@pytest.mark.usefixtures("threads")
def test_loops_are_in_one_file() -> None:
    """Each would take a run of g++; or one loop would be called for another."""
    with in_one_file({}):
        scope = built(PLUS.format(1), PLUS.format(2), PLUS.format(1), PLUS.format(3))
    assert results(scope) == [2.0, 3.0, 2.0, 4.0]
    assert len({*map(library, scope.values())}) == 1
    assert scope["loop0"] is scope["loop2"]


@pytest.mark.usefixtures("threads")
def test_modules_of_one_block() -> None:
    """Each region of a graph would take a run of g++; or a loop that is asked for early would wait for later ones."""
    with in_one_file({}):
        first = built(PLUS.format(4), PLUS.format(5))
        second = built(PLUS.format(6), PLUS.format(5))
    assert (results(first), results(second)) == ([5.0, 6.0], [7.0, 6.0])
    assert library(first["loop0"]) == library(second["loop0"])
    with in_one_file({}):
        early = AsyncCompile().cpp_pybinding(TYPES, PLUS.format(12)).result()
        late = built(PLUS.format(13))
    assert (results({"early": early}), results(late)) == ([13.0], [14.0])


def test_what_goes_into_no_file_with_others() -> None:
    """A macro would change the loops after it."""
    with in_one_file({}):
        scope = built(DIRECTIVE, PLUS.format(7), PLUS.format(8))
    assert results(scope) == [2.0, 8.0, 9.0]
    assert library(scope["loop0"]) != library(scope["loop1"]) == library(scope["loop2"])


def test_a_thread_of_its_own() -> None:
    """Another thread's loops would be compiled when this thread asks for its own, or never."""
    there: list[dict[str, Any]] = []
    with in_one_file({}):
        thread = threading.Thread(target=lambda: there.append(built(PLUS.format(9), PLUS.format(10))))
        thread.start()
        thread.join()
        here = built(PLUS.format(11))
    assert (results(here), results(there[0])) == ([12.0], [10.0, 11.0])
    assert len({*map(library, (*here.values(), *there[0].values()))}) == 3


class Lock:
    """The lock of compilers, which says when the second one waits for it."""

    def __init__(self) -> None:
        self.lock, self.asked, self.second = threading.RLock(), 0, threading.Event()

    def __enter__(self) -> None:
        self.asked += 1
        if self.asked == 2:
            self.second.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_two_threads_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends last would leave the methods of the other in their place: torch could compile no more."""
    before, lock = AsyncCompile.cpp_pybinding, Lock()
    monkeypatch.setattr(loops, "_ONE_AT_A_TIME", lock)

    def other() -> None:
        with in_one_file({}):
            pass

    thread = threading.Thread(target=other)
    with in_one_file({}):
        thread.start()
        lock.second.wait()
    thread.join()
    assert AsyncCompile.cpp_pybinding is before


def test_nothing_is_left_behind() -> None:
    """Other graphs of the process would be compiled by fshard, or with its settings."""

    def replaced() -> tuple[object, ...]:
        return AsyncCompile.cpp_pybinding, AsyncCompile.wait, config.realize_reads_threshold

    before = replaced()
    with pytest.raises(ZeroDivisionError), in_one_file({"realize_reads_threshold": 0}):
        1 / any(x == y for x, y in zip(before, replaced(), strict=True))
    assert replaced() == before


def test_the_settings_of_a_graph() -> None:
    """Inductor would try each vector instruction for seconds, or not heed what the user told it."""
    assert lowered._settings()["cpp.vec_isa_ok"] is True
    for told in (True, False):
        with config.patch({"cpp.vec_isa_ok": told}):
            assert "cpp.vec_isa_ok" not in lowered._settings()


@pytest.mark.parametrize("name", ["step", "elements"])
def test_the_bits_are_those_of_files_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of a file apply to all of its loops."""
    params = {"a": torch.linspace(-1, 1, 35).view(5, 7), "b": torch.linspace(1, 2, 21).view(7, 3)}
    x = torch.linspace(-2, 2, 20).view(4, 5)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), fshard.optim.adamw(0.1))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.tanh(x @ p["a"]) @ p["b"], -1)[:, 0].sum()

    def run() -> Any:
        if name == "step":
            return fshard.tree.leaves(fshard.jit(fshard.train_step(loss, fshard.optim.adamw(0.1)))(state, x)[0])
        return fshard.jit(lambda x: (x.exp().sum(0), torch.sort(x.sin(), -1).values.cumsum(1)))(x)

    together = run()
    with config.patch(compile_threads=1):
        assert same_bits(together, run())
    monkeypatch.setattr(lowered, "in_one_file", config.patch)
    assert same_bits(together, run())
