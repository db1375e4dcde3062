"""Random numbers from seed, step, rank, and position in the step alone.

Note [Random numbers in a graph]
    If a graph drew from torch's generators, its numbers would depend on earlier code. So each random operator is a node
    from a generator's state to the eager numbers and the next state. The seed of torch's generator is the index of the
    next state: code that restores torch's generator (torch.utils.checkpoint) draws the same numbers again.

Note [Beside other threads]
    All threads share torch's host generator, so other threads' draws would change an eager step's numbers. If there are
    other threads, a step draws from its own generator: a dispatch key that torch keeps for tests, set in the step's
    thread alone, leads random operators to this module. As in a graph, the seed of torch's generator is the index of
    the next state. Other threads may draw (the seed stays), but not seed or restore the generator. A second step in
    another thread would, so this is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from threading import Lock, active_count
from typing import Self

import torch
from torch import Tensor
from torch._ops import _higher_order_ops
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .func_levels import aside
from .tracing import Args, Kwargs, Operator, assigned, define, is_tracing, lead
from .tree import Tree

Place = torch.device | torch.Generator
HOST = torch.device("cpu")
_STATE_BYTES = {"cpu": 5056}  # bytes of a generator's state; 16 on other devices


@contextmanager
def seeded(seed: Tensor, step: Tensor, rank: int, part: int, device: torch.device) -> Iterator[None]:
    cuda = device.type == "cuda"
    # a graph writes to the host's generator alone
    with torch.random.fork_rng([device] if cuda and not is_tracing() else _no_devices() if active_count() > 1 else []):
        if is_tracing():
            state = torch.ops.fshard.seeded(seed, step, rank, part, device)
            with Stream(state, device) as draws, assigned(_STREAM, draws):
                yield
            return
        number = _number(int(seed), int(step), rank, part)
        with torch.cuda.device(device) if cuda else _OwnDraws() if active_count() > 1 else nullcontext() as draws:
            (draws or torch.default_generator).manual_seed(number)
            if cuda:
                torch.cuda.manual_seed(number)
            yield


_LOCK = Lock()  # one thread at a time registers operators
_KEY = "TESTING_ONLY_GenericMode"
_TAG = 0xF5A7 << 48  # marks seeds that are indices of states; lower bits tell steps apart
_FORK, _APART = 0xF5A80000, 0x9E3779B9  # mark seeds in a block of `forked`, and tell its ranks apart
_OWN_DRAWS: ContextVar[_OwnDraws | None] = ContextVar("fshard.core.random.own", default=None)  # of this thread's step


class _OwnDraws(ExitStack):
    """A block in which host operators draw from the block's generator."""

    def __enter__(self) -> Self:
        self.enter_context(assigned(_OWN_DRAWS, self))
        with _LOCK:
            key = _lead_here()
            for op in _higher_order_ops.values():  # no fallback reaches higher-order operators; new ones may exist
                if op.non_fallthrough_keys.has(key):
                    op.fallthrough(key)
        self.enter_context(torch._C._IncludeDispatchKeyGuard(key))
        return self

    def manual_seed(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = self._begin = _TAG | seed >> 40 << 24
        self._states = {self._begin: self._generator.get_state()}  # by seed of torch's generator
        torch.default_generator.manual_seed(self._begin)

    @contextmanager
    def drawing(self) -> Iterator[torch.Generator]:
        self._follow()
        yield self._generator
        self.go_on(self._generator.get_state())

    @property
    def state(self) -> Tensor:
        self._follow()
        return self._generator.get_state()

    def go_on(self, state: Tensor) -> None:
        self._seed = self._begin + len(self._states)
        self._states[self._seed] = state
        self._generator.set_state(state)
        torch.default_generator.manual_seed(self._seed)

    def _follow(self) -> None:
        """If the loss restored or seeded torch's generator, go to its state."""
        if (seed := torch.initial_seed()) != self._seed:
            if seed not in self._states:
                _check_alone()
            self._generator.set_state(self._states.get(seed, torch.get_rng_state()))


def _no_devices() -> list[int]:
    """Return no devices, for `fork_rng`; RuntimeError if another thread runs a step."""
    if _OWN_DRAWS.get() is None:
        _check_alone()
    return []


def _check_alone() -> None:
    if torch.initial_seed() >> 48 == _TAG >> 48:
        raise RuntimeError(
            "random numbers of a step: another thread runs a step, and torch has one generator for all threads. "
            "Run steps in one thread, one after another, or in processes."
        )


@cache
def _lead_here() -> torch._C.DispatchKey:
    key, functions = torch._C._dispatch_key_parse(_KEY), dict[str, Callable[..., object]]()
    known = {*torch._C._dispatch_get_all_op_names()}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + f".{schema.overload_name}" * bool(schema.overload_name)
        if name in known and name.startswith("aten::"):
            op = getattr(getattr(torch.ops.aten, schema.name[6:]), schema.overload_name or "default")
            if torch.Tag.nondeterministic_seeded in op.tags:
                takes = {"Optional[Generator]", "Tensor"} <= {str(x.type) for x in schema.arguments}
                functions[name] = partial(_given if takes else _around_call, op, key)
    lead(_KEY, functions)
    return key


def _given(func: Operator, key: torch._C.DispatchKey, _: object, *args: Tree, **kwargs: Tree) -> Tree:
    block, every = _OWN_DRAWS.get(), (*args, *kwargs.values())
    x = next(x for x in every if isinstance(x, Tensor))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        # a traced operator draws when the graph runs
        is_real = x.device == HOST and not isinstance(x, FakeTensor | FunctionalTensor)
        if block is None or is_tracing() or not is_real or any(isinstance(x, torch.Generator) for x in every):
            return func(*args, **kwargs)
        with block.drawing() as generator:
            return func(*args, **{**kwargs, "generator": generator})


def _around_call(
    func: Operator, key: torch._C.DispatchKey, keys: torch._C.DispatchKeySet, *args: Tree, **kwargs: Tree
) -> Tree:
    """Call an operator without a generator argument: its inner operators get the step's generator.

    Under a dispatch mode they do not get it, so torch's generator gets the step's state for the call.
    """
    block = _OWN_DRAWS.get()
    if block is None or is_tracing() or not torch._C._len_torch_dispatch_stack():
        return func.redispatch(keys.remove(key), *args, **kwargs)
    with block.drawing() as generator, torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        torch.set_rng_state(generator.get_state())
        out = func(*args, **kwargs)
        generator.set_state(torch.get_rng_state())
        return out


@dataclass(frozen=True)
class Seeds:
    """The origin of an update's random numbers. `at`: seeds of one place; `following`: of its next call."""

    seed: Tensor
    step: Tensor
    device: torch.device
    place: int = 0
    calls: Iterator[int] = field(default_factory=count)

    def at(self, *words: int) -> Seeds:
        return replace(self, place=_number(self.place, *words) >> 1, calls=count())

    def following(self) -> Seeds:
        return self.at(next(self.calls))

    @contextmanager
    def block(self) -> Iterator[Callable[[], bool]]:
        """Draw from these seeds; yield a function that returns True once the block has drawn."""
        part = -1  # a loss has parts from 0 on
        with seeded(self.seed, self.step, self.place, part, self.device), assigned(UPDATE, self):
            start = position(self.device)
            yield lambda: position(self.device) != start


UPDATE: ContextVar[Seeds | None] = ContextVar("fshard.core.random.update", default=None)


def position(device: torch.device) -> Hashable:
    if is_tracing() or _OWN_DRAWS.get() is not None:
        return torch.default_generator.initial_seed()  # the index of the next state
    return tuple(g.get_state().numpy().tobytes() for g in (torch.default_generator, _default_generator(device)))


@contextmanager
def seeded_by(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """Seed the generators for the block, then restore them."""
    back, number = bookmark(device), _number(seed, path)
    try:
        torch.default_generator.manual_seed(number)
        if device.type not in ("cpu", "meta"):
            _default_generator(device).manual_seed(number)
        yield
    finally:
        back()


def bookmark(*places: Place) -> Callable[[], None]:
    """Return a function to restore the generators of the host and `places`.

    >>> back = bookmark()
    >>> a = torch.rand(2)
    >>> back()
    >>> torch.equal(a, torch.rand(2))
    True
    """
    return partial(_restore, [bookmark_of(place) for place in (HOST, *places)])


def _restore(backs: Sequence[Callable[[], object]]) -> None:
    for back in backs:
        back()


def bookmark_of(place: Place) -> Callable[[], object]:
    if place == HOST:  # in a trace: the index of the next state
        return partial(torch.set_rng_state, torch.get_rng_state())
    if isinstance(place, torch.Generator):
        return partial(place.set_state, place.get_state())
    if place.type in ("cpu", "meta") or is_tracing():  # meta draws nothing
        return lambda: None
    module = torch.get_device_module(place)
    return partial(module.set_rng_state, module.get_rng_state(place), place)


def accelerators() -> list[torch.device]:
    """Return the accelerator's devices; none before its first use: a question would start it."""
    if (kind := torch.accelerator.current_accelerator()) is None:
        return []
    module = torch.get_device_module(kind)
    is_used = getattr(module, "is_initialized", module.is_available)()
    return [torch.device(kind.type, number) for number in range(module.device_count() if is_used else 0)]


@contextmanager
def forked(rank: int, device: torch.device) -> Iterator[None]:
    """Draw by the present state and `rank`; draws after the block depend neither on `rank` nor on the block."""
    back = fork(rank, device)
    try:
        yield
    finally:
        back()


def fork(rank: int, device: torch.device) -> Callable[[], None]:
    """Begin a block of `forked`; return a function that ends it. `end_fork` ends it without this function."""
    if (draws := stream() or _OWN_DRAWS.get()) is not None:
        inside, after = torch.ops.fshard.forked(draws.state, rank, device)
        draws.go_on(after)
        back = bookmark(device)
        draws.go_on(inside)
        return back
    with aside():  # a transform would wrap the states
        states = {
            g: fork_state(g.get_state(), rank, g.device) for g in {torch.default_generator, _default_generator(device)}
        }
        for generator, (_, after) in states.items():
            generator.set_state(after)
        back = bookmark(device)
        for generator, (inside, _) in states.items():
            generator.set_state(inside)
    return back


def end_fork(rank: int, device: torch.device) -> None:
    """Go on after a block of `forked`, where a part of it runs again; do nothing outside of one."""
    if (draws := stream() or _OWN_DRAWS.get()) is not None:
        draws.go_on(torch.ops.fshard.after_fork(draws.state, rank, device))
        return
    with aside():
        for g in {torch.default_generator, _default_generator(device)}:
            g.set_state(state_after_fork(g.get_state(), rank, g.device))


def fork_state(state: Tensor, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two generator states: from `state` and `rank`, and from `state` alone.

    >>> inside, after = fork_state(torch.get_rng_state(), 0, torch.device("cpu"))
    >>> torch.equal(after, fork_state(torch.get_rng_state(), 1, torch.device("cpu"))[1]), torch.equal(inside, after)
    (True, False)
    """
    word = int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=4).digest())
    # the host's generator takes the last 32 bits alone: they differ between ranks
    inside = torch.Generator(device).manual_seed(_FORK + rank << 32 | (word + rank * _APART) % 2**32).get_state()
    return inside, state_after_fork(inside, rank, device)


def state_after_fork(state: Tensor, rank: int, device: torch.device) -> Tensor:
    """Return the state after a block of `forked`, from a state inside it; any other state as it is."""
    generator = torch.Generator(device)
    generator.set_state(state)
    if (seed := generator.initial_seed()) >> 32 == _FORK + rank:
        generator.manual_seed(_number((seed - rank * _APART) % 2**32, "after") >> 1)
    return generator.get_state()


def _number(*words: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, words)).encode(), digest_size=8).digest(), "little")


def generator_state(seed: Tensor, step: Tensor, rank: int, part: int, device: torch.device) -> Tensor:
    return torch.Generator(device).manual_seed(_number(int(seed), int(step), rank, part)).get_state()


def empty_state(device: torch.device) -> Tensor:
    return torch.empty(_STATE_BYTES.get(device.type, 16), dtype=torch.uint8, device="cpu")


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def drawn_like(how: str, like: Tensor) -> Tensor:
    return torch.empty_like(like, dtype=torch.bool if how == "native_dropout" else None)


def draw(
    state: Tensor, how: str, by: Sequence[Tensor], numbers: Sequence[float], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a tensor, filled by the in-place method `how` or by "randperm", and the next state.

    For "native_dropout" the operator itself draws the mask: on a GPU, `bernoulli_` draws other numbers.
    """
    if how == "native_dropout":
        back = bookmark(like.device)
        _default_generator(like.device).set_state(state)
        mask = torch.native_dropout(like, numbers[0], True)[1]
        after = _default_generator(like.device).get_state()
        back()
        return mask, after
    generator = torch.Generator(like.device)
    generator.set_state(state)
    if how == "randperm":
        x = torch.randperm(len(like), generator=generator, dtype=like.dtype, device=like.device)
        return x, generator.get_state()
    # the schema has turned integers into floats
    values: Sequence[float] = [int(n) for n in numbers] if how == "random_" else numbers
    x = getattr(torch.empty_like(like), how)(*by, *values, generator=generator)
    return x, generator.get_state()


class Stream(TorchDispatchMode):
    """Record random operators as nodes from a generator's state to the next."""

    def __init__(self, state: Tensor, device: torch.device):
        super().__init__()
        self._states, self._device = [state], device
        torch.default_generator.manual_seed(0)  # the index of the next state

    @property
    def state(self) -> Tensor:
        number = torch.default_generator.initial_seed()
        if number >= len(self._states):
            raise RuntimeError("a seed was set (torch.manual_seed) inside the loss: a graph draws from the state alone")
        return self._states[number]

    def go_on(self, state: Tensor) -> None:
        torch.default_generator.manual_seed(len(self._states))
        self._states.append(state)

    def _draw(self, how: str, like: Tensor, numbers: Sequence[float] = (), by: Sequence[Tensor] = ()) -> Tensor:
        drawn, state = torch.ops.fshard.draw(self.state, how, by, numbers, like)
        self.go_on(state)
        return drawn

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if kwargs.get("generator") is not None:
            raise NotImplementedError(_unknown(func))
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "device", "memory_format") and v is not None}
        if name == "native_dropout":
            x, p, train = args
            if train is False or p == 0:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            mask = self._draw(name, x, [p])  # like `x`, bool
            # p == 1: 1 / (1 - p) is infinite, and 0 times it NaN
            return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
        if name == "bernoulli":  # torch.func decomposes dropout into this
            return self._draw("bernoulli_", args[0], args[1:], by=() if args[1:] else args)
        if name.endswith("_") and isinstance(args[0], Tensor) and not any(isinstance(a, Tensor) for a in args[1:]):
            numbers = _defaults(func, args)
            return args[0].copy_(self._draw(name, args[0], numbers))
        if how := {"rand": "uniform_", "randn": "normal_"}.get(name.removesuffix("_like")):
            return self._draw(how, _made_room(name, args, options), [0, 1])
        if name == "randperm":
            return self._draw(name, torch.empty(args[0], **{"dtype": torch.int64, **options}))
        if name in ("randint", "randint_like"):
            *bounds, of = args if name == "randint" else (*args[1:], args[0])
            low, high = bounds if len(bounds) == 2 else (0, *bounds)
            options = options if "dtype" in options or name == "randint_like" else {**options, "dtype": torch.int64}
            return self._draw("random_", _made_room(name, [of], options), [low, high])
        raise NotImplementedError(_unknown(func))


# of the step traced in this thread
_STREAM: ContextVar[Stream | None] = ContextVar("fshard.core.random", default=None)


def stream() -> Stream | None:
    return _STREAM.get()


class SameDraws(TorchDispatchMode):
    """Seed before each draw: equal shapes get equal numbers. ValueError for an operator with a generator."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.drew, self._generators = False, {torch.default_generator, _default_generator(device)}

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if draws(func, args, kwargs or {}):
            if (kwargs or {}).get("generator") is not None:
                raise ValueError(f"{func}: this draws from a generator of its own")
            self.drew = True
            for generator in self._generators:
                generator.manual_seed(0)
        return func(*args, **kwargs or {})


def _unknown(func: Operator) -> str:
    return (
        f"{func}: a graph knows no such random operator, or none with a generator of its own: use torch.rand, randn, "
        "randint, randperm, bernoulli or dropout, or an in-place method such as uniform_ (attention with dropout: "
        "under sdpa_kernel(SDPBackend.MATH))"
    )


def _made_room(name: str, args: Sequence[Tree], options: Mapping[str, Tree]) -> Tensor:
    return torch.empty_like(args[0], **options) if name.endswith("_like") else torch.empty(args[0], **options)


def _defaults(func: Operator, args: Sequence[Tree]) -> list[float]:
    schema = [a for a in func._schema.arguments[1:] if a.name != "generator" and not a.kwarg_only]
    return [args[i] if i < len(args) else a.default_value for i, a in enumerate(schema, start=1)]


def draws(func: Operator, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> bool:
    # fshard's operators have this tag, but draw nothing from torch
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or func.namespace == "fshard":
        return False
    dropout = kwargs.get("dropout_p", next((a for a in args if isinstance(a, float)), 0.0))
    return "attention" not in func.overloadpacket.__name__ or dropout != 0.0


define(
    "seeded(Tensor seed, Tensor step, int rank, int part, Device device) -> Tensor",
    generator_state,
    lambda seed, step, rank, part, device: empty_state(device),
)
define(
    "forked(Tensor state, int rank, Device device) -> (Tensor, Tensor)",
    fork_state,
    lambda state, rank, device: (torch.empty_like(state), torch.empty_like(state)),
)
define(
    "after_fork(Tensor state, int rank, Device device) -> Tensor",
    state_after_fork,
    lambda state, rank, device: torch.empty_like(state),
)
define(
    "draw(Tensor state, str how, Tensor[] by, float[] numbers, Tensor like) -> (Tensor, Tensor)",
    draw,
    lambda state, how, by, numbers, like: (drawn_like(how, like), torch.empty_like(state)),
    exact=True,  # numbers fill `like` in the order of its strides
)
