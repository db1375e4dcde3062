"""The loops of a graph in one file."""

import platform
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from support.models import same_bits
from torch._inductor import config, sizevars
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX2, VecAVX512, VecAVX512VNNI, VecISA
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

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
        methods = AsyncCompile.cpp_pybinding, AsyncCompile.wait, VecISA.check_build
        return *methods, sizevars.simplify_index_in_vec_range, config.realize_reads_threshold

    before = replaced()
    with pytest.raises(ZeroDivisionError), in_one_file({"realize_reads_threshold": 0}):
        1 / any(x == y for x, y in zip(before, replaced(), strict=True))
    assert replaced() == before


def kind(of: type[VecISA], flag: str = "") -> VecISA:
    """Instructions of a kind, as torch asks for them: with a flag more for some."""
    isa = of()
    isa._arch_flags += flag  # type: ignore[attr-defined]
    return isa


BF16 = (kind(VecAVX512, " -mavx512bf16"), VecAVX512._avx512_bf16_code)
KINDS = {
    "bf16": BF16,
    "vnni": (VecAVX512VNNI(), VecAVX512VNNI._avx512_vnni_code),
    "amx": (VecAMX(), VecAMX._amx_code),
    "amx-fp16": (kind(VecAMX, " -mamx-fp16"), VecAMX._amx_fp16_code),
    "no such flag": (kind(VecAVX512, " -mavx512bf16 -mavx512none"), VecAVX512._avx512_bf16_code),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86")
@pytest.mark.parametrize("name", KINDS)
def test_instructions_that_the_compiler_knows(name: str) -> None:
    """Loops would be compiled with a flag that the compiler refuses, or without one that it knows."""
    isa, code = KINDS[name]
    expected = isa.check_build(code)
    with in_one_file({}):
        assert isa.check_build(code) is expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86")
def test_programs_that_torch_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half a second. Where no instruction answers, torch tries."""
    tried: list[str] = []
    monkeypatch.setattr(VecISA, "check_build", lambda _, code: tried.append(code))
    with in_one_file({}):
        assert BF16[0].check_build(BF16[1])
        assert tried == []
        VecAVX2().check_build("no instruction of its own")
        kind(VecAVX512, " -mavx512bf16").check_build(VecISA._avx_code)
        monkeypatch.setitem(loops._INSTRUCTION_OF_FLAG, "-mavx512bf16", "none such")
        BF16[0].check_build("unknown to the assembler")
    assert tried == ["no instruction of its own", VecISA._avx_code, "unknown to the assembler"]


D0, D1 = sympy.symbols("d0 d1", integer=True, nonnegative=True)
INDICES = [
    D0,
    512 * D0 + D1 + 3,
    D0 * (D1 + 2) - D0 * D1,
    16 * FloorDiv(D0, 16) + D1,
    ModularIndexing(D0, 1, 32) + 4 * D1,
    sympy.Max(D0, D1),
    sympy.Symbol("s0") >= 1024,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_strides_of_an_index(index: sympy.Basic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops would be vectorized along another dimension; or sympy would simplify for 0.01 s what is simple."""
    asked: list[sympy.Expr] = []
    simplify = sizevars.simplify_index_in_vec_range

    def recorded(index: sympy.Expr, var: sympy.Expr, length: int) -> sympy.Expr:
        asked.append(index)
        return simplify(index, var, length)

    def strides() -> list[sympy.Expr]:
        sizevars.stride_at_vec_range.cache_clear()
        return [sizevars.stride_at_vec_range(index, var, 16) for var in (D0, D1)]

    expected = strides()
    monkeypatch.setattr(sizevars, "simplify_index_in_vec_range", recorded)
    with in_one_file({}):
        assert strides() == expected
    assert asked == ([] if index in INDICES[:3] else [index, index])


@pytest.mark.parametrize("name", ["check_build", "simplify_index_in_vec_range"])
def test_another_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release without the private names could compile nothing."""
    place: Any = VecISA if hasattr(VecISA, name) else sizevars
    monkeypatch.delattr(place, name)
    before = vars(VecISA).get("check_build"), vars(sizevars).get("simplify_index_in_vec_range")
    with in_one_file({}):
        assert (vars(VecISA).get("check_build"), vars(sizevars).get("simplify_index_in_vec_range")) == before
        assert AsyncCompile.cpp_pybinding.__qualname__ != "AsyncCompile.cpp_pybinding"
    monkeypatch.delattr("torch._inductor.codecache.LambdaFuture")
    with in_one_file({}):
        assert AsyncCompile.cpp_pybinding.__qualname__ == "AsyncCompile.cpp_pybinding"


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
