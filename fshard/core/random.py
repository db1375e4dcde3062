"""Random numbers that depend on a seed, a rank and a position in a step, and on nothing else.

Note [Random numbers in a graph]
    A graph that drew from torch's generators would depend on what ran before it. So while a graph is traced, every
    random operator becomes a node that takes the state of a generator and returns the next state; the graph draws the
    numbers that the same code draws eagerly. The index of the next state is kept as the seed of torch's generator: code
    that restores the generator to recompute something (torch.utils.checkpoint) draws the same numbers again.

Note [Beside other threads]
    All threads share torch's generator of the host: one that draws beside an eager step would change the step's
    numbers. So where there are other threads, a step's operators are given a generator of the step's own. A dispatch
    key, which torch keeps for tests and only the step's thread has on, leads random operators here, and no others: the
    rest take no longer. As in a graph, the seed of torch's generator is the number of the next state, which no draw
    changes. So another thread may draw, but not seed or restore the generator, as a second step would do: an error.
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

from .tracing import Args, Kwargs, Operator, assigned, define, is_tracing, lead
from .tree import Tree

Place = torch.device | torch.Generator
HOST = torch.device("cpu")
_aten = torch.ops.aten
_STATE_BYTES = {"cpu": 5056}  # size of a generator's state; 16 on other devices


@contextmanager
def seeded(seed: Tensor, step: Tensor, rank: int, part: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators by (seed, step, rank, part) inside the block, and restore them after it."""
    cuda = device.type == "cuda"
    # a graph writes to the host's generator alone: it keeps the index of the next state there
    with torch.random.fork_rng([device] if cuda and not is_tracing() else _alone() if active_count() > 1 else []):
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


_LOCK = Lock()  # while operators are registered, once
_KEY = "TESTING_ONLY_GenericMode"
_TAG = 0xF5A7 << 48  # of the seeds that number states; those of other steps differ in the bits below
_OWN: ContextVar[_OwnDraws | None] = ContextVar("fshard.core.random.own", default=None)  # of this thread's step


class _OwnDraws(ExitStack):
    """A block in which operators on the host draw what torch's generator would, from a generator of the block's own."""

    def __enter__(self) -> Self:
        self.enter_context(assigned(_OWN, self))
        with _LOCK:
            key = _lead_here()
            for op in _higher_order_ops.values():  # no fallback is theirs, and others may have been made since
                if op.non_fallthrough_keys.has(key):
                    op.fallthrough(key)
        self.enter_context(torch._C._IncludeDispatchKeyGuard(key))
        return self

    def manual_seed(self, seed: int) -> None:
        """Draw from here on what torch's generator draws after this seed."""
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = self._begin = _TAG | seed >> 40 << 24
        self._states = {self._begin: self._generator.get_state()}  # by the seed that numbers it
        torch.default_generator.manual_seed(self._begin)

    @contextmanager
    def drawing(self) -> Iterator[torch.Generator]:
        """A block that draws from the generator that it gets."""
        self._follow()
        yield self._generator
        self.go_on(self._generator.get_state())

    @property
    def state(self) -> Tensor:
        """The state from which the next numbers are drawn."""
        self._follow()
        return self._generator.get_state()

    def go_on(self, state: Tensor) -> None:
        """Draw from this state next."""
        self._seed = self._begin + len(self._states)
        self._states[self._seed] = state
        self._generator.set_state(state)
        torch.default_generator.manual_seed(self._seed)

    def _follow(self) -> None:
        """Go to the state that torch's generator stands for, if it was restored, or seeded by the loss."""
        if (seed := torch.initial_seed()) != self._seed:
            if seed not in self._states:
                _check_alone()
            self._generator.set_state(self._states.get(seed, torch.get_rng_state()))


def _alone() -> list[int]:
    """No devices. RuntimeError if another thread runs a step: to restore the generator would change its numbers."""
    if _OWN.get() is None:
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
    """Lead random operators to the step's own draws, where the key is on."""
    key, functions = torch._C._dispatch_key_parse(_KEY), dict[str, Callable[..., object]]()
    known = {*torch._C._dispatch_get_all_op_names()}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + f".{schema.overload_name}" * bool(schema.overload_name)
        if name in known and name.startswith("aten::"):
            op = getattr(getattr(torch.ops.aten, schema.name[6:]), schema.overload_name or "default")
            if torch.Tag.nondeterministic_seeded in op.tags:
                takes = {"Optional[Generator]", "Tensor"} <= {str(x.type) for x in schema.arguments}
                functions[name] = partial(_given if takes else _around, op, key)
    lead(_KEY, functions)
    return key


def _given(func: Operator, key: torch._C.DispatchKey, _: object, *args: Tree, **kwargs: Tree) -> Tree:
    """Call an operator that takes a generator, with the step's own unless it is given one."""
    block, every = _OWN.get(), (*args, *kwargs.values())
    x = next(x for x in every if isinstance(x, Tensor))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        # a compiler traces with fake tensors: its code asks for numbers when it runs
        is_real = x.device == HOST and not isinstance(x, FakeTensor | FunctionalTensor)
        if block is None or is_tracing() or not is_real or any(isinstance(x, torch.Generator) for x in every):
            return func(*args, **kwargs)
        with block.drawing() as generator:
            return func(*args, **{**kwargs, "generator": generator})


def _around(
    func: Operator, key: torch._C.DispatchKey, keys: torch._C.DispatchKeySet, *args: Tree, **kwargs: Tree
) -> Tree:
    """Call an operator that takes none: those that it calls come here, unless a dispatch mode, as a profiler, is on."""
    block = _OWN.get()
    if block is None or is_tracing() or not torch._C._len_torch_dispatch_stack():
        return func.redispatch(keys.remove(key), *args, **kwargs)
    with block.drawing() as generator, torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        torch.set_rng_state(generator.get_state())
        out = func(*args, **kwargs)
        generator.set_state(torch.get_rng_state())
        return out


@dataclass(frozen=True)
class Seeds:
    """The origin of the random numbers of a step's update: the state's seed and step, and a place in the update.

    Places are numbered by `at`, and the functions that draw at one place by `following`, in the order of their calls.
    """

    seed: Tensor
    step: Tensor
    device: torch.device
    place: int = 0
    calls: Iterator[int] = field(default_factory=count)

    def at(self, *words: int) -> Seeds:
        """Return the seeds of a place inside of this one."""
        return replace(self, place=_number(self.place, *words) >> 1, calls=count())

    def following(self) -> Seeds:
        """Return the seeds of the next function that draws here."""
        return self.at(next(self.calls))

    @contextmanager
    def block(self) -> Iterator[Callable[[], bool]]:
        """Draw from these seeds inside the block; yields a function that says whether anything was drawn in it."""
        part = -1  # those of a loss are at least 0
        with seeded(self.seed, self.step, self.place, part, self.device), assigned(UPDATE, self):
            start = position(self.device)
            yield lambda: position(self.device) != start


# of the update that a step makes in this thread; None outside of steps
UPDATE: ContextVar[Seeds | None] = ContextVar("fshard.core.random.update", default=None)


def position(device: torch.device) -> Hashable:
    """A value that changes if anything is drawn from torch's generators, of the host or of a device."""
    if is_tracing() or _OWN.get() is not None:
        return torch.default_generator.initial_seed()  # the index of the next state
    return tuple(g.get_state().numpy().tobytes() for g in (torch.default_generator, _default_generator(device)))


@contextmanager
def seeded_by(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, of the host and of `device`, by (seed, path) inside the block; restore them after it."""
    back, number = bookmark(device), _number(seed, path)
    try:
        torch.default_generator.manual_seed(number)
        if device.type not in ("cpu", "meta"):
            _default_generator(device).manual_seed(number)
        yield
    finally:
        back()


def bookmark(*places: Place) -> Callable[[], None]:
    """Return a function that restores torch's generators, of the host and of these places, to their present state.

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
    """Return a function that restores a generator, or the one of a device, to its present state."""
    if place == HOST:  # while a graph is traced, the index of the next state
        return partial(torch.set_rng_state, torch.get_rng_state())
    if isinstance(place, torch.Generator):
        return partial(place.set_state, place.get_state())
    if place.type in ("cpu", "meta") or is_tracing():  # on meta nothing is drawn
        return lambda: None
    module = torch.get_device_module(place)
    return partial(module.set_rng_state, module.get_rng_state(place), place)


def accelerators() -> list[torch.device]:
    """Return the devices of the accelerator's kind, if this process has used one: to ask a device would start it."""
    if (kind := torch.accelerator.current_accelerator()) is None:
        return []
    module = torch.get_device_module(kind)
    is_used = getattr(module, "is_initialized", module.is_available)()
    return [torch.device(kind.type, number) for number in range(module.device_count() if is_used else 0)]


@contextmanager
def forked(rank: int, device: torch.device) -> Iterator[None]:
    """Inside the block draw from other streams, which depend on the present ones and on `rank`; after it from new ones.

    Those after it do not depend on `rank`, nor on what is drawn in the block.
    """
    if (draws := stream() or _OWN.get()) is not None:
        inside, after = torch.ops.fshard.forked(draws.state, rank, device)
        draws.go_on(after)
        back = bookmark(device)
        draws.go_on(inside)
    else:
        states = {
            g: fork_state(g.get_state(), rank, g.device) for g in {torch.default_generator, _default_generator(device)}
        }
        for generator, (_, after) in states.items():
            generator.set_state(after)
        back = bookmark(device)
        for generator, (inside, _) in states.items():
            generator.set_state(inside)
    try:
        yield
    finally:
        back()


def fork_state(state: Tensor, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The states of two generators: of one that depends on a generator's state and on `rank`, and of one on the state.

    >>> inside, after = fork_state(torch.get_rng_state(), 0, torch.device("cpu"))
    >>> torch.equal(after, fork_state(torch.get_rng_state(), 1, torch.device("cpu"))[1]), torch.equal(inside, after)
    (True, False)
    """
    word = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
    inside, after = (torch.Generator(device).manual_seed(_number(word, which)) for which in (rank, "after"))
    return inside.get_state(), after.get_state()


def _number(*words: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, words)).encode(), digest_size=8).digest(), "little")


def generator_state(seed: Tensor, step: Tensor, rank: int, part: int, device: torch.device) -> Tensor:
    """Return the state of a generator seeded by (seed, step, rank, part)."""
    return torch.Generator(device).manual_seed(_number(int(seed), int(step), rank, part)).get_state()


def empty_state(device: torch.device) -> Tensor:
    """Return an empty tensor of the size of a generator's state."""
    return torch.empty(_STATE_BYTES.get(device.type, 16), dtype=torch.uint8, device="cpu")


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators of a device use by default."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def drawn_like(how: str, like: Tensor) -> Tensor:
    """Return an empty tensor like the first result of `draw`."""
    return torch.empty_like(like, dtype=torch.bool if how == "native_dropout" else None)


def draw(
    state: Tensor, how: str, by: Sequence[Tensor], numbers: Sequence[float], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a tensor filled by the in-place random method `how`, or "randperm", and the generator's next state.

    For "native_dropout" the tensor is the mask. That operator draws from the device's own generator, and on a GPU other
    numbers than `bernoulli_`: so the operator itself is run, and the generator restored.
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
    # `random_` takes integers alone, and the schema of the operator `draw` makes them floats
    values: Sequence[float] = [int(n) for n in numbers] if how == "random_" else numbers
    x = getattr(torch.empty_like(like), how)(*by, *values, generator=generator)
    return x, generator.get_state()


class Stream(TorchDispatchMode):
    """Record every random operator as a node that takes and returns the state of a generator."""

    def __init__(self, state: Tensor, device: torch.device):
        super().__init__()
        self._states, self._device = [state], device
        torch.default_generator.manual_seed(0)  # the index of the next state

    @property
    def state(self) -> Tensor:
        """The state from which the next numbers are drawn."""
        number = torch.default_generator.initial_seed()  # the index of the next state, unless the user has set a seed
        if number >= len(self._states):
            raise RuntimeError("a seed was set (torch.manual_seed) inside the loss: a graph draws from the state alone")
        return self._states[number]

    def go_on(self, state: Tensor) -> None:
        """Draw from this state next."""
        torch.default_generator.manual_seed(len(self._states))
        self._states.append(state)

    def _draw(self, how: str, like: Tensor, numbers: Sequence[float] = (), by: Sequence[Tensor] = ()) -> Tensor:
        """Return what the in-place method `how` draws from the next state; arguments as in the function `draw`."""
        drawn, state = torch.ops.fshard.draw(self.state, how, by, numbers, like)
        self.go_on(state)
        return drawn

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
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
            # 1 / (1 - p) is infinite for p = 1, and zero times that NaN
            return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
        if name == "bernoulli":  # torch.func decomposes dropout into bernoulli with a probability
            return self._draw("bernoulli_", args[0], args[1:], by=() if args[1:] else args)
        if name.endswith("_") and isinstance(args[0], Tensor) and not any(isinstance(a, Tensor) for a in args[1:]):
            numbers = _defaults(func, args)
            return args[0].copy_(self._draw(name, args[0], numbers))
        if name in ("rand", "rand_like"):
            return self._draw("uniform_", _room(name, args, options), [0, 1])
        if name in ("randn", "randn_like"):
            return self._draw("normal_", _room(name, args, options), [0, 1])
        if name == "randperm":
            return self._draw(name, torch.empty(args[0], **{"dtype": torch.int64, **options}))
        if name in ("randint", "randint_like"):
            *bounds, of = args if name == "randint" else (*args[1:], args[0])
            low, high = bounds if len(bounds) == 2 else (0, *bounds)
            options = options if "dtype" in options or name == "randint_like" else {**options, "dtype": torch.int64}
            return self._draw("random_", _room(name, [of], options), [low, high])
        raise NotImplementedError(_unknown(func))


# of the step that is traced in this thread, inside of its loss
_STREAM: ContextVar[Stream | None] = ContextVar("fshard.core.random", default=None)


def stream() -> Stream | None:
    """Return the stream that random numbers are drawn from while a graph is traced; None for torch's generator."""
    return _STREAM.get()


class SameDraws(TorchDispatchMode):
    """Every random operator draws from the same seed, whatever ran before it: equal shapes get equal numbers.

    `drew` says whether there was one. ValueError for an operator with a generator of its own, before it draws.
    """

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


def _room(name: str, args: Sequence[Tree], options: Mapping[str, Tree]) -> Tensor:
    """Return an empty tensor like that which a factory (`rand`, `randn_like`) returns for these arguments."""
    return torch.empty_like(args[0], **options) if name.endswith("_like") else torch.empty(args[0], **options)


def _defaults(func: Operator, args: Sequence[Tree]) -> list[float]:
    """Return the numbers an in-place random operator is called with, defaults included."""
    schema = [a for a in func._schema.arguments[1:] if a.name != "generator" and not a.kwarg_only]
    return [args[i] if i < len(args) else a.default_value for i, a in enumerate(schema, start=1)]


def draws(func: Operator, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> bool:
    """Whether a call of an operator draws random numbers; attention does so only with dropout."""
    # fshard's own operators have this tag, so that compilers do not merge them, and draw from no generator
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
    "draw(Tensor state, str how, Tensor[] by, float[] numbers, Tensor like) -> (Tensor, Tensor)",
    draw,
    lambda state, how, by, numbers, like: (drawn_like(how, like), torch.empty_like(state)),
    exact=True,  # the order in which a tensor is filled follows its strides
)
