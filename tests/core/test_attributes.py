"""Containers of a loss's parameters have each attribute, method and call of their class and of the node itself."""

import abc
import copy
import dataclasses
import pickle
from collections.abc import Callable, Hashable, Iterable, Sized
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from support.logged import Logged
from support.models import counting, same_bits
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import tree
from fshard.core.tree import plain

T = TypeVar("T")


class Rich:
    """What programs write into their classes; each kind below has the children `first` and `layers`, and `act`."""

    __slots__ = ()
    scale = 3
    first: Tensor
    layers: list[Tensor]
    act: str

    @property
    def total(self) -> Tensor:
        """Reads children."""
        return sum((x.sum() for x in self.layers), self.first.sum())

    @classmethod
    def named(cls) -> str:
        """The class's name."""
        return f"{cls.__name__} {cls.scale}"

    @staticmethod
    def twice(x: int) -> int:
        """Needs no object."""
        return 2 * x

    def of_type(self) -> tuple[Any, ...]:
        """Asks the class of the object."""
        return type(self).__name__, type(self).scale, type(self).named(), isinstance(self, type(self))

    def forward(self, x: Tensor) -> Tensor:
        """Is called by another method."""
        for w in self.layers:
            x = getattr(torch, self.act)(x * w.sum() + self.first.sum())
        return x

    def __call__(self, x: Tensor, more: float = 0) -> Tensor:
        return self.forward(x) + more

    def __len__(self) -> int:
        return 5

    def __getitem__(self, key: Any) -> Any:
        return self.first * key

    def __iter__(self) -> Any:
        return iter([self.first, self.act])

    def __contains__(self, key: object) -> bool:
        return key == 7

    def __matmul__(self, other: Any) -> Any:
        return self.first * other

    def __add__(self, other: Any) -> Any:
        return self.first + other

    def __radd__(self, other: Any) -> Any:
        return 2 * self.first + other

    def __mul__(self, other: Any) -> Any:
        return "times", self.act, other

    def __neg__(self) -> Any:
        return -self.first

    def __float__(self) -> float:
        return 2.5

    def __bool__(self) -> bool:
        return self.act == "tanh"

    def __enter__(self) -> str:
        return self.act

    def __exit__(self, *_: object) -> None:
        """Does nothing."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.act}, {self.first.shape})"

    def __format__(self, how: str) -> str:
        return f"{how}:{self.act}"

    def __hash__(self) -> int:
        return hash(self.act)

    def __eq__(self, other: object) -> Any:
        return other == 3

    def __lt__(self, other: int) -> bool:
        return len(self.act) < other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("dynamic_"):
            return name, self.act
        raise AttributeError(name)


@dataclass(eq=False, repr=False)
class Plain(Rich):
    """By register_fields, without a default."""

    first: Tensor
    layers: list[Tensor]
    act: str

    @cached_property
    def kept(self) -> Tensor:
        """Is computed once."""
        return self.first * 2


@dataclass(eq=False, repr=False)
class Default(Rich):
    """With a default, a class variable, and `__post_init__`."""

    first: Tensor
    layers: list[Tensor]
    act: str = "tanh"
    variable: ClassVar[int] = 4
    seed: InitVar[int] = 5

    def __post_init__(self, seed: int) -> None:
        self.first.dim()  # a tensor is what there is


@dataclass(frozen=True, eq=False, repr=False)
class Frozen(Rich):
    """Refuses to be assigned to."""

    first: Tensor
    layers: list[Tensor]
    act: str = "tanh"


@dataclass(slots=True, eq=False, repr=False)
class Slots(Rich):
    """Has no dict."""

    first: Tensor
    layers: list[Tensor]
    act: str = "tanh"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FrozenSlots(Rich):
    """Both."""

    first: Tensor
    layers: list[Tensor]
    act: str = "tanh"


@dataclass(eq=False, repr=False)
class Below(Default):
    """Has another class above, whose methods it calls, with fields of its own."""

    more: int = 1

    def forward(self, x: Tensor) -> Tensor:
        """The other's, and a field."""
        return super().forward(x) * self.more


class Meta(type):
    """Counts classes: a new one would be one too many."""

    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: Any, attributes: Any) -> Any:
        """Count."""
        cls.made.append(name)
        return super().__new__(cls, name, bases, attributes)


class Listed(Rich, metaclass=Meta):
    """Knows the classes below it."""

    below: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Listed.below.append(cls.__name__)


@dataclass(eq=False, repr=False)
class OfMeta(Listed):
    """Has a metaclass and a hook for classes below."""

    first: Tensor
    layers: list[Tensor]
    act: str = "tanh"


@dataclass(eq=False, repr=False)
class Abstract(Rich, abc.ABC, Generic[T]):
    """Of an abstract class, and generic."""

    first: Tensor
    layers: list[Tensor]
    act: str = "tanh"


@dataclass
class Names:
    """Has fields of names that containers have, or that fshard has."""

    values: Tensor
    keys: list[Tensor]
    items: int = 1
    get: int = 2
    copy: int = 3
    filled: int = 4
    placed: int = 5
    gathered: int = 6
    prefetch: int = 7
    child_names: int = 8
    _fields: int = 9
    _spec: int = 10
    _held: int = 11
    _tape: int = 12


class NamesTuple(NamedTuple):
    """So has a NamedTuple."""

    values: Tensor
    keys: list[Tensor]
    get: Any = None
    copy: Any = None


@dataclass
class Generated:
    """Has the special methods that `dataclasses` writes."""

    act: str = "tanh"
    steps: tuple[int, ...] = ()
    layers: list[Tensor] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class OfTorch(Rich):
    """Known to torch alone."""

    first: Tensor
    layers: list[Tensor]
    act: ClassVar[str] = "sin"


@dataclass(eq=False, repr=False)
class Computed(Rich):
    """Known to torch alone, and computes with its children when it is made."""

    first: Tensor
    layers: list[Tensor]

    def __post_init__(self) -> None:
        self.norm = self.first.norm() if isinstance(self.first, Tensor) else "no tensor"
        self.act = "sin" if len(self.layers) == 2 else "cos"


@optree.dataclasses.dataclass(namespace="torch", eq=False, repr=False)
class OfOptree(Rich):
    """Known to optree alone, with a field that is no child."""

    first: Tensor
    layers: list[Tensor]
    act: str = optree.dataclasses.field(default="tanh", pytree_node=False)


class Written(Rich):
    """Registered with functions of its own: attributes come of metadata, and of children."""

    def __init__(self, first: Tensor, layers: list[Tensor], act: str):
        self.first, self.layers, self.act = first, layers, act
        self.halves = [x / 2 for x in layers]


class Mapped(dict[str, Any]):
    """A dict with attributes."""

    act = "sin"

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.first.sum()


class Stacked(list[Any]):
    """A list that is called."""

    def __call__(self, x: Tensor) -> Tensor:
        for w in self:
            x = x * w.sum()
        return x


class Tuple(NamedTuple):
    """Children of a NamedTuple."""

    first: Tensor
    layers: list[Tensor]

    act = "sin"

    @property
    def size(self) -> int:
        """Of one child."""
        return len(self.layers)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.first.sum() * self.layers[0].sum()

    def __matmul__(self, other: Any) -> Any:
        return self[0] * other

    def __bool__(self) -> bool:
        return False

    def __add__(self, other: Any) -> Any:
        return tuple.__len__(self), other


class RichTuple(Rich, Tuple):
    """A NamedTuple with everything."""


class MadeTuple(Tuple):
    """A NamedTuple that computes when it is made."""

    def __new__(cls, first: Tensor, layers: list[Tensor]) -> Any:
        """Another one than was asked for."""
        return super().__new__(cls, first if first is None else first.clamp(-1), layers)


FIELDS = [Plain, Default, Frozen, Slots, FrozenSlots, OfMeta, Abstract]
for of_fields in FIELDS:
    tree.register_fields(of_fields, ["first", "layers"], ["act"])
tree.register_fields(Below, ["layers", "first"], ["act", "more"])
tree.register_fields(
    Names, ["values", "keys"], [f.name for f in dataclasses.fields(Names) if f.type == "int" or f.type is int]
)
tree.register_fields(Generated, ["layers"], ["act", "steps"])
pytree.register_dataclass(OfTorch)
pytree.register_dataclass(Computed)
tree.register(Written, lambda x: ([x.first, x.layers], x.act), lambda act, children: Written(*children, act))
tree.register(
    Mapped, lambda x: ([*x.values()], tuple(x)), lambda keys, children: Mapped(zip(keys, children, strict=True))
)
tree.register(Stacked, lambda x: (x, None), lambda _, children: Stacked(children))


def layers() -> list[Tensor]:
    """Two children."""
    return [counting(2).double() / 5, counting(3).double() / 7]


def first() -> Tensor:
    """One child."""
    return counting(3).double() / 3


KINDS: dict[str, Callable[[], Any]] = {
    **{kind.__name__: (lambda kind=kind: kind(first(), layers(), "sin")) for kind in FIELDS},
    "Below": lambda: Below(first(), layers(), "sin", more=3),
    "Names": lambda: Names(first(), layers(), *range(20, 32)),
    "NamesTuple": lambda: NamesTuple(first(), layers(), first(), [first()]),
    "Generated": lambda: Generated("sin", (1, 2), layers()),
    "OfTorch": lambda: OfTorch(first(), layers()),
    "Computed": lambda: Computed(first(), layers()),
    "OfOptree": lambda: OfOptree(first(), layers(), "sin"),
    "Written": lambda: Written(first(), layers(), "sin"),
    "Mapped": lambda: Mapped(first=first(), layers=layers()),
    "Stacked": lambda: Stacked(layers()),
    "Tuple": lambda: Tuple(first(), layers()),
    "RichTuple": lambda: RichTuple(first(), layers()),
    "MadeTuple": lambda: MadeTuple(first(), layers()),
}


def entered(p: Any) -> Any:
    """What a block is given."""
    with p as x:
        return x


def assigned(name: str, value: Any) -> Callable[[Any], Any]:
    """The attribute after it was assigned, also of what is made of it."""

    def assign(p: Any) -> Any:
        setattr(p, name, value)
        return [getattr(x, name) for x in (p, p, dataclasses.replace(p))]

    return assign


def kept(p: Any) -> Any:
    """What was computed, and whether it is again."""
    return p.kept, p.kept is p.kept, p.kept


X = torch.linspace(0, 1, 3).double()
FIELD_NAMES = [f.name for f in dataclasses.fields(Names)]
READS: dict[str, Callable[[Any], Any]] = {
    "attributes": lambda p: [getattr(p, name) for name in ("act", "scale", "total")],
    "fields": lambda p: [getattr(p, f.name) for f in dataclasses.fields(p)],
    "act": lambda p: (p.act, getattr(p, "act", "none"), hasattr(p, "act")),
    "names": lambda p: [
        x if isinstance(x, Tensor | list | int) else 0 for x in (getattr(p, n, 0) for n in FIELD_NAMES)
    ],
    "computed": lambda p: (p.norm, p.act),
    "halves": lambda p: p.halves,
    "size": lambda p: p.size,
    "more": lambda p: p.more,
    "class variable": lambda p: (p.variable, p.seed),
    "no such": lambda p: p.no_such_attribute,
    "has": lambda p: [
        hasattr(p, name) for name in ("keys", "get", "append", "_fields", "__dict__", "__len__", "first")
    ],
    "dynamic": lambda p: p.dynamic_one,
    "class method": lambda p: p.named(),
    "static method": lambda p: p.twice(4),
    "of type": lambda p: p.of_type(),
    "method": lambda p: (p.forward(X), isinstance(p.forward, MethodType), p.forward.__name__),
    "by class": lambda p: type(p).forward(p, X),
    "again": lambda p: type(p)(first(), layers()).first,
    "call": lambda p: (p(X), callable(p)),
    "call with more": lambda p: p(X, more=2),
    "kept": kept,
    "len": len,
    "item": lambda p: p[1],
    "name": lambda p: p["first"],
    "iter": lambda p: list(p),
    "contains": lambda p: (7 in p, 8 in p),
    "matmul": lambda p: p @ X,
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "mul": lambda p: p * 2,
    "neg": lambda p: -p,
    "float": float,
    "bool": lambda p: (bool(p), not p),
    "with": entered,
    "repr": lambda p: (repr(p), str(p), f"{p!r}"),
    "format": lambda p: f"{p:x}",
    "hash": lambda p: hash(p) == hash(p),
    "known hash": lambda p: hash(p) if isinstance(p, Rich) else 0,
    "eq": lambda p: (p == 3, p != 3, p == 4),
    "itself": lambda p: p == p if not isinstance(p, tuple | list | dict) else 0,
    "lt": lambda p: p < 5,
    "kind": lambda p: (p.__class__.__name__, type(p).__name__, p.__doc__, p.__module__),
    "abstract": lambda p: [isinstance(p, kind) for kind in (Callable, Hashable, Iterable, Sized, Rich, tuple, dict)],
    "replaced": lambda p: (dataclasses.replace(p, act="cos").act, dataclasses.replace(p).act),
    "copied": lambda p: (copy.copy(p).act, copy.deepcopy(p).act, copy.copy(p)),
    "pickled": lambda p: pickle.loads(pickle.dumps(p)),
    "vars": lambda p: (vars(p), list(vars(p))),
    "dict": lambda p: dataclasses.asdict(p),
    "dir": lambda p: "act" in dir(p),
    "mapped": lambda p: (tree.map(torch.neg, p), tree.map(torch.neg, p).act),
    "mapped by torch": lambda p: (pytree.tree_map(torch.neg, p), pytree.tree_map(torch.neg, p).act),
    "mapped twice": lambda p: tree.map(torch.add, p, tree.map(torch.neg, p)).act,
    "called when mapped": lambda p: tree.map(torch.neg, p)(X),
    "gathered": lambda p: (fshard.gather_params(p), fshard.gather_params(p).act),
    "gathered in a copy": lambda p: fshard.gather_params(dataclasses.replace(p, act="cos"))(X),
    "vjp": lambda p: torch.func.vjp(lambda p: p(X), p)[0],
    "grad": lambda p: torch.func.grad(lambda p: p(X).sum())(p).act,
    "assigned": assigned("act", "cos"),
    "assigned a child": assigned("first", 2 * X),
    "assigned another": lambda p: (setattr(p, "other", 4), p.other, getattr(tree.map(torch.neg, p), "other", "lost")),
    "call after": lambda p: (setattr(p, "act", "cos"), p(X)),
    "mapped after": lambda p: (setattr(p, "act", "cos"), setattr(p, "first", X), tree.map(torch.neg, p), p.act),
    "vars after": lambda p: (vars(p).update(act="cos", first=X), p(X), p.first, tree.map(torch.neg, p).first),
}
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "root": (lambda x: x, lambda p: p),
    "dict": (lambda x: {"a": counting(2), "net": x}, lambda p: p["net"]),
    "list": (lambda x: [x, counting(2)], lambda p: p[0]),
    "object": (lambda x: Generated("cos", (3,), [x, counting(2)]), lambda p: p.layers[0]),
    "written": (lambda x: Stacked([counting(2), x]), lambda p: p[1]),
}
OF_TORCH = ("mapped by torch", "vjp", "grad")  # reads
UNITS = ["**", "**.layers.*", "**.layers", "**.first"]


def plans(whole: Any, mesh: Any = None) -> list[Any]:
    """The plans by each list of units that fits the tree."""
    found = []
    for units in UNITS:
        with suppress(ValueError):  # the pattern matches nothing
            found.append(fshard.make_plan(whole, mesh, units=units))
    return found


def outcome(read: Callable[[Any], Any], p: Any) -> Any:
    """What was read, as a plain tree, or the class of the error."""
    try:
        return tree.map(lambda x: x, plain(read(p)))
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as failure:
        return type(failure) if not isinstance(failure, dataclasses.FrozenInstanceError) else AttributeError


def check(kind: str, read: str, found: Any, expected: Any) -> None:
    """Both are alike, to the bit."""
    assert tree.flatten(found)[1] == tree.flatten(expected)[1], (kind, read, found, expected)
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        assert same_bits(a, b) if isinstance(b, Tensor) else a == b, (kind, read, found, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_container_of_a_loss_has_the_attributes_of_the_node(kind: str, place: str) -> None:
    """A field would read as the class's default, or a method would be gone, without a word."""
    put, take = PLACES[place]
    whole = put(KINDS[kind]())
    for read, do in READS.items():
        expected = outcome(do, take(tree.map(torch.clone, whole)))
        if read in OF_TORCH and isinstance(expected, type):
            continue  # torch does not know the class, but what stands for it

        def loss(p: Any, read: str = read, do: Any = do, expected: Any = expected) -> Any:
            check(kind, read, outcome(do, take(p)), expected)
            return torch.zeros(())

        for plan in plans(whole):
            fshard.evaluate(loss)(fshard.shard_params(whole, plan))
    assert Listed.below == ["OfMeta"]  # no hook ran for a class that stands for it
    assert Meta.made == ["Listed", "OfMeta"]


# one that is made of gradients changes them, too
CALLED = [kind for kind in KINDS if callable(KINDS[kind]()) and kind != "MadeTuple"]


def replaced(p: Any) -> Any:
    """Another object of its children, if it is a dataclass."""
    return dataclasses.replace(p) if dataclasses.is_dataclass(p) else p


def of_new(p: Any) -> Any:
    """An object that a method made of its class, as far as there is one."""
    return type(p)(p.first, p.layers, p.act) if isinstance(p, Plain | Default | Frozen | Slots) else p


INSIDE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda p: p,
    "mapped": lambda p: tree.map(lambda x: 1 * x, p),
    "gathered": fshard.gather_params,
    "replaced": replaced,
    "of its class": of_new,
    "in another": lambda p: Generated("cos", (), [replaced(p)]).layers[0],
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "value_and_grad": fshard.value_and_grad,
    "jit": lambda loss: fshard.jit(fshard.value_and_grad(loss), backend="eager"),
    "evaluate": fshard.evaluate,
    "predict": fshard.predict,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CALLED)
def test_an_object_that_is_called_in_a_loss_computes_what_the_node_does(kind: str, way: str) -> None:
    """Its value or its gradient would be that of another function, with units, on ranks, or compiled."""
    whole = tree.map(torch.clone, KINDS[kind]())
    leaves = tree.map(lambda x: x.clone().requires_grad_(), whole)

    def run(mesh: Any) -> None:
        ranks, (put, take) = mesh.size(), PLACES["list"]
        for plan in plans(put(whole), mesh)[: 1 if way == "jit" else None]:
            sharded = fshard.shard_params(put(whole), plan)
            for name, inside in INSIDE.items() if way != "jit" else [("itself", INSIDE["itself"])]:

                def loss(p: Any, x: Tensor, inside: Any = inside) -> Tensor:
                    return inside(take(p))(x).square().sum()

                values = [loss([leaves], X + rank) for rank in range(ranks)]
                slopes = torch.autograd.grad(sum(values) / ranks, tree.leaves(leaves), allow_unused=True)
                found = WAYS[way](loss)(sharded, X + mesh.get_rank())
                if way in ("value_and_grad", "jit"):
                    found, grads = found
                    got = tree.leaves(take(fshard.gather_params(grads)))
                    wanted = [torch.zeros_like(x) if g is None else g for x, g in zip(got, slopes, strict=True)]
                    torch.testing.assert_close(got, wanted, msg=name)
                expected = values[mesh.get_rank()] if way == "predict" else sum(values) / ranks
                torch.testing.assert_close(found, torch.as_tensor(expected).detach(), msg=name)

    for shard in (1, 2) if way == "jit" else (1, 2, 3):
        simulated(run, shard=shard)


STORED = ["Plain", "Default", "Frozen", "Slots", "Below", "OfMeta", "Abstract", "OfTorch", "OfOptree", "RichTuple"]


@pytest.mark.parametrize("kind", STORED)
def test_a_read_gathers_what_it_needs(kind: str) -> None:
    """A field that is no child, or a method, would gather units, and they would stay in memory."""

    def run(mesh: Any) -> None:
        logged, whole = Logged(mesh), KINDS[kind]()
        sharded = fshard.shard_params(whole, fshard.make_plan(whole, logged, units="**", bucket=0))

        def gathered(read: Callable[[Any], Any]) -> set[str]:
            def loss(p: Any) -> Tensor:
                logged.log.clear()
                read(p)
                return torch.zeros(())

            fshard.predict(loss)(sharded)
            return {label for event, kind, label in logged.log if (event, kind) == ("wait", "all_gather")}

        assert gathered(lambda p: (p.act, p.scale, p.named(), p.twice(2), p.forward, callable(p))) == set()
        last = tree.paths(whole)[-1]  # a gather starts that of the unit after it, too
        assert gathered(lambda p: p.first if last == "first" else p.layers[1]) == {last}
        assert gathered(lambda p: p.total) == gathered(lambda p: p(X)) == {"first", "layers.0", "layers.1"}

    simulated(run, shard=2)


def test_a_compiled_loss_sees_another_field() -> None:
    """`jit` would go on with the function of the field that it was traced with."""
    fn = fshard.jit(fshard.value_and_grad(lambda p, x: p(x).sum()), backend="eager")
    for act in ("sin", "cos", "sin", "tanh"):
        whole = Plain(first(), layers(), act)
        for units in (None, "**"):
            value, _ = fn(fshard.shard_params(whole, fshard.make_plan(whole, units=units)), X)
            torch.testing.assert_close(value, whole(X).sum())


def test_a_method_that_is_replaced_is_called() -> None:
    """A class that stands for another would keep the special methods that it was made with."""

    @dataclass
    class Changing:
        w: Tensor

    tree.register_fields(Changing, ["w"])
    whole = {"a": Changing(first()), "b": first()}
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units="**"))
    for factor in (2, 3):
        Changing.__call__ = lambda self, factor=factor: factor * self.w  # type: ignore[attr-defined]
        assert same_bits(fshard.evaluate(lambda p: p["a"]().sum())(sharded), (factor * first()).sum())


@dataclass
class Unregistered:
    """Every kind of field."""

    a: Tensor
    b: str = "b"
    c: int = field(default=3, init=False)
    d: tuple[int, ...] = field(default_factory=tuple, repr=False, compare=False, kw_only=True)
    e: ClassVar[int] = 5
    f: InitVar[int] = 6


class Annotated:
    """No dataclass."""

    a: Tensor
    b: str = "b"
    c: int
    d: tuple[int, ...] = ()
    e: ClassVar[int] = 5


class WithSlots:
    """No dataclass, and no dict."""

    __slots__ = ("a", "b", "c", "d")


@pytest.mark.parametrize("cls", [Unregistered, Annotated, WithSlots])
def test_each_field_of_a_node_is_named(cls: Any) -> None:
    """A field that is left out would go back to its default in each map."""
    for left_out in "abcd":
        kind = type(f"{cls.__name__}_{left_out}", (cls,), {"__slots__": ()} if cls is WithSlots else {})
        metadata = [name for name in "bcd" if name != left_out]
        with pytest.raises(ValueError, match=rf"register_fields\({kind.__name__}\): the field '{left_out}' is neither"):
            tree.register_fields(kind, ["a"] if left_out != "a" else [], metadata)
        with pytest.raises(ValueError, match=rf"metadata=\[.*'{left_out}'\]"):
            tree.register_fields(kind, ["a"] if left_out != "a" else [], metadata)
        for children, more in ((["a", left_out], ["b", "c", "d"]), (["a", "a"], ["b", "c", "d"])):
            if left_out != "a" or children == ["a", "a"]:
                with pytest.raises(
                    ValueError, match=r"expected each name once, as a child or as metadata, got '.' twice"
                ):
                    tree.register_fields(kind, children, more)
        if cls is Unregistered:
            for unknown in ("e", "f", "g"):
                with pytest.raises(ValueError, match=rf"expected names of fields, .*got '{unknown}'"):
                    tree.register_fields(kind, ["a"], ["b", "c", "d", unknown])
        assert tree.leaves(object.__new__(kind)) != []  # not registered: a leaf
        tree.register_fields(kind, ["a"], ["b", "c", "d"])
        whole = object.__new__(kind)
        for name in "abcd":
            setattr(whole, name, name)
        mapped = tree.map(str.upper, whole)
        assert [getattr(mapped, name) for name in "abcd"] == ["A", "b", "c", "d"]
