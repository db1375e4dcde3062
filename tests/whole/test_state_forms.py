"""The forms that a transformation of one's own may give its state: each is right wherever leaves lie, or an error."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support.models import rand
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import optim
from fshard.core import tree

Pair = tuple[Callable[..., Any], Callable[..., Any]]
F64 = torch.float64
BATCHES = [torch.tensor([1.0, 2.0 + i], dtype=F64) for i in range(3)]
CLEAR = (
    r"(has for a leaf an? \w+ of .*Make a tree for each|depends on which leaves or elements it is given, and each rank|"
    r"its state of a leaf depends on other leaves)"
)


CHANGED = (
    r"(a step that may be skipped keeps|the structure that it was given, got another|other ranks know its shape|"
    r"tensors alone|expected a flat tensor|depends on which leaves or elements it is given)"
)


def start() -> dict[str, Tensor]:
    """Uneven leaves."""
    return {"w": rand(5, 3, seed=1, dtype=F64), "b": rand(3, seed=2, dtype=F64), "t": rand(1, seed=3, dtype=F64)}


def loss(p: Any, x: Tensor) -> Tensor:
    """A loss of all leaves."""
    return sum((n * (p[name] * x.mean()).square().sum() for n, name in enumerate("wbt", 1)), torch.zeros((), dtype=F64))


class Two(NamedTuple):
    """Two tensors of a leaf."""

    m: Any
    v: Any


def in_tree(lr: Any, make: Callable[[Any, Any], Any]) -> Pair:
    """A mean and a sum of squares, together for each leaf."""

    def init(p: Any) -> Any:
        return tree.map(lambda x: make(torch.zeros_like(x), torch.zeros_like(x)), p)

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        parts = lambda x: tuple(x.values()) if isinstance(x, dict) else x  # noqa: E731
        both = tree.map(lambda g, s: make(*[a * m + b for a, m, b in zip((0.9, 1), parts(s), (g, g * g))]), g, s)  # noqa: B905
        return tree.map(lambda g, s: -lr * parts(s)[0] / (1 + parts(s)[1]), g, both), both

    return init, update


def in_trees(lr: Any) -> Pair:
    """The same in two trees; between them one tree of tuples, which is no state."""

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        both = tree.map(lambda g, m, v: (0.9 * m + g, v + g * g), g, s["m"], s["v"])
        m, v = (tree.map(lambda g, x, i=i: x[i], g, both) for i in range(2))
        return tree.map(lambda m, v: -lr * m / (1 + v), m, v), {"m": m, "v": v}

    return lambda p: {name: tree.map(torch.zeros_like, p) for name in "mv"}, update


def in_list(lr: Any, copies: Callable[[Tensor], int]) -> Pair:
    """A list with so many means for each leaf."""

    def init(p: Any) -> Any:
        return [(torch.zeros_like(x),) * n for x in tree.leaves(p) if (n := copies(x))]

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        (flat, spec), old, new = tree.flatten(g), iter(s), []
        for x in flat:
            new.append(tuple(0.9 * m + x for m in next(old)) if copies(x) else ())
        return tree.unflatten(spec, [-lr * sum(ms, 0 * x) for ms, x in zip(new, flat, strict=True)]), [
            *filter(len, new)
        ]

    return init, update


def by_place(lr: Any, key: Callable[[int, Tensor], Any]) -> Pair:
    """A dict of means."""

    def init(p: Any) -> Any:
        return {key(n, x): torch.zeros_like(x) for n, x in enumerate(tree.leaves(p))}

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        flat, spec = tree.flatten(g)
        new = {key(n, x): 0.9 * s[key(n, x)] + x for n, x in enumerate(flat)}
        return tree.unflatten(spec, [-lr * m for m in new.values()]), new

    return init, update


def as_vector(lr: Any) -> Pair:
    """One mean of all elements."""

    def flat(x: Any) -> Tensor:
        return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(x)])

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        (leaves, spec), new = tree.flatten(g), 0.9 * s + flat(g)
        parts = new.split([x.numel() for x in leaves])
        return tree.unflatten(spec, [-lr * m.view(x.shape) for m, x in zip(parts, leaves, strict=True)]), new

    return lambda p: torch.zeros_like(flat(p)), update


def of_all(lr: Any) -> Pair:
    """A sum over all leaves, which no update reads."""

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        return tree.map(lambda x: -lr * x, g), s + sum(x.square().sum() for x in tree.leaves(g))

    return lambda p: torch.zeros((), dtype=F64), update


def counted(lr: Any, first: Any) -> Pair:
    """A mean, corrected by a count."""

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        n, m = s["n"] + 1, tree.map(lambda m, g: 0.9 * m + 0.1 * g, s["m"], g)
        power = 0.9 ** (n.double() if isinstance(first, Tensor) else n)
        return tree.map(lambda m: -lr * m / (1 - power), m), {"n": n, "m": m}

    return lambda p: {"n": first, "m": tree.map(torch.zeros_like, p)}, update


RIGHT: dict[str, Callable[[Any], Pair]] = {
    "trees": in_trees,
    "number": lambda lr: counted(lr, 0),
    "0-d tensor": lambda lr: counted(lr, torch.zeros((), dtype=torch.int64)),
}
NESTED: dict[str, Callable[[Any], Pair]] = {
    "tuple for each": lambda lr: in_tree(lr, lambda m, v: (m, v)),
    "dict for each": lambda lr: in_tree(lr, lambda m, v: {"m": m, "v": v}),
    "named for each": lambda lr: in_tree(lr, Two),
}
LOCAL: dict[str, Callable[[Any], Pair]] = {
    "by index": lambda lr: by_place(lr, lambda n, x: n),
    "by shape": lambda lr: by_place(lr, lambda n, x: f"{tuple(x.shape)}{n}"),
    "vector": as_vector,
}
OF_LEAVES: dict[str, Callable[[Any], Pair]] = {  # functions of a leaf's shape, which flat tensors have not
    "list for each": lambda lr: in_list(lr, lambda x: 2),
    "list for some": lambda lr: in_list(lr, lambda x: int(x.dim() > 1)),
    "list for others": lambda lr: in_list(lr, lambda x: int(x.dim() == 1)),
    "unequal": lambda lr: in_list(lr, lambda x: x.dim()),
    "of all": of_all,
}
FORMS = RIGHT | NESTED | LOCAL | OF_LEAVES
WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda tx: tx,
    "masked": lambda tx: optim.masked(tx, {"t": False, "**": True}),
    "by_label": lambda tx: optim.by_label({"a": tx, "b": optim.sgd(0.1)}, {"b": "b", "**": "a"}),
    "chain": lambda tx: optim.chain(optim.scale(0.5), tx),
}


def made(form: str, over: str, wrap: str, lr: Any = 0.1) -> optim.Transform:
    """The transformation."""
    return WRAPS[wrap](optim.Transform(*FORMS[form](lr), over=over))


def begun(mesh: Any, tx: Any, scaled: bool = False) -> Any:
    """A state before the first step."""
    scale = {"loss_scale": fshard.DynamicLossScale(4.0)} if scaled else {}
    return fshard.init_state(fshard.shard_params(start(), fshard.make_plan(start(), mesh)), tx, **scale)


def steps(mesh: Any, tx: Any, folder: Any) -> Any:
    """The parameters after some steps."""
    state = begun(mesh, tx)
    for x in BATCHES:
        state, _ = fshard.train_step(loss, tx)(state, x)
    return fshard.gather_params(state.params)


def scaled(mesh: Any, tx: Any, folder: Any) -> Any:
    """The parameters after the same steps, of a loss scale, one that is skipped, and a checkpoint."""
    state = begun(mesh, tx, scaled=True)
    for n, x in enumerate([BATCHES[0], torch.tensor([torch.inf], dtype=F64), *BATCHES[1:]]):
        if n == 3:
            fshard.checkpoint.save(folder, state, n)
            state = fshard.checkpoint.restore(folder, begun(mesh, tx, scaled=True))
        state, _ = fshard.train_step(loss, tx)(state, x)
    return fshard.gather_params(state.params)


def gathered(mesh: Any, tx: Any, folder: Any) -> Any:
    """The parameters after a state was gathered and cut again."""
    state = begun(mesh, tx)
    for x in BATCHES:
        whole = optim.state.gather_state(state.opt_state)
        again = optim.state.shard_state(whole, begun(mesh, tx).opt_state)
        fshard.testing.assert_trees_equal(again, state.opt_state)
        assert whole.keys() == optim.state.gather_state(begun(None, tx).opt_state).keys()
        state, _ = fshard.train_step(loss, tx)(fshard.TrainState(**{**vars(state), "opt_state": again}), x)
    return fshard.gather_params(state.params)


def plain(tx: Any, p: Any) -> Any:
    """The parameters after the same steps, of one device."""
    state = tx.init(p)
    for x in BATCHES:
        updates, state = tx.update(torch.func.grad(loss)(p, x), state, p)
        p = optim.apply_updates(p, updates)
    return p


def outer(p: Any) -> Tensor:
    """What is differentiated by the rate."""
    return sum(((3 * p[name]).sin().sum() for name in "wbt"), torch.zeros((), dtype=F64))


def by_rate(mesh: Any, make: Callable[[Any], Any]) -> Tensor:
    """A derivative by the rate."""
    params = fshard.shard_params(start(), fshard.make_plan(start(), mesh))

    def after(lr: Tensor) -> Tensor:
        tx, p = make(lr), params
        state = tx.init(p)
        for x in BATCHES:
            grads = torch.func.grad(lambda p, x=x: loss(fshard.gather_params(p), x))(p)
            p, state = tx.step(tree.map(lambda g: g / mesh.size(), grads), state, p)
        return outer(fshard.gather_params(p))

    return torch.func.grad(after)(torch.tensor(0.1, dtype=F64))


def cases() -> Iterator[tuple[str, str]]:
    """The forms and trees that go together."""
    for form in FORMS:
        for over in ("leaves",) if form in OF_LEAVES else ("leaves", "elements", "tree"):
            yield form, over


ACTS = {"steps": steps, "scaled": scaled, "gathered": gathered}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("act", [*ACTS, "derivative"])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("form", "over"), [*cases()])
def test_a_state_of_any_form_is_right_or_an_error(tmp_path: Any, form: str, over: str, wrap: str, act: str, ranks: int):
    """Else each rank would gather a state of its own, and a tree would lose all but one tensor of a leaf."""
    make = lambda lr=0.1: made(form, over, wrap, lr)  # noqa: E731
    try:
        if act == "derivative":
            got = [sum(simulated(by_rate, make, shard=ranks)) / ranks]
        else:
            got = simulated(ACTS[act], make(), tmp_path / "saved", shard=ranks)
    except (TypeError, ValueError) as error:
        if form in RIGHT and (form, act) != ("number", "gathered"):
            raise
        found = re.search(CLEAR if form not in RIGHT else "tensors alone", str(error))
        if found is None:
            raise
        return
    assert form not in NESTED
    plainly = lambda lr: plain(WRAPS[wrap](optim.Transform(*FORMS[form](lr))), start())  # noqa: E731
    rate = torch.tensor(0.1, dtype=F64)
    want = torch.func.grad(lambda lr: outer(plainly(lr)))(rate) if act == "derivative" else plainly(0.1)
    for each in got:
        torch.testing.assert_close(each, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("over", ["leaves", "elements", "tree"])
@pytest.mark.parametrize("form", [*NESTED, *LOCAL, "list for some", "list for others", "unequal", "of all"])
def test_a_state_that_ranks_know_nothing_of_is_an_error_at_once(form: str, over: str) -> None:
    """A program would train for hours before its first checkpoint; also a rank that owns no leaf says so."""
    if form in OF_LEAVES and over != "leaves":
        return
    for ranks in (2, 4):
        ends = simulated(_fate, form, over, shard=ranks)
        assert len(set(ends)) == 1
        with pytest.raises(Exception, match=CLEAR):
            raise ends[0][0](ends[0][1])


def _fate(mesh: Any, form: str, over: str) -> tuple[type, str]:
    try:
        begun(mesh, made(form, over, "plain"))
    except (TypeError, ValueError) as error:
        return type(error), str(error).partition(" (raised in")[0]
    return type(None), ""


@pytest.mark.parametrize("over", ["leaves", "elements"])
@pytest.mark.parametrize("value", [None, 0, 0.5, torch.zeros(())])
def test_what_is_no_tensor_of_a_leaf_is_not_gathered(tmp_path: Any, value: Any, over: str) -> None:
    """A tree may hold anything while it is mapped, but what belongs to no leaf has no place in a checkpoint."""
    if (over == "leaves" and isinstance(value, Tensor)) or (over, value) == ("elements", None):
        return  # a tensor of another shape is known there; and an update of elements without tensors fails before

    def run(mesh: Any, save: bool) -> Any:
        tx = optim.Transform(lambda p: {"n": tree.map(lambda x: value, p)}, lambda g, s, p=None, **_: (g, s), over=over)
        state = begun(mesh, tx)
        state, _ = fshard.train_step(loss, tx)(state, BATCHES[0])
        if save:
            fshard.checkpoint.save(tmp_path, state, 1)
        optim.state.gather_state(state.opt_state)

    for save in (False, True):
        with pytest.raises(
            (TypeError, fshard.testing.MismatchError), match=r"leaf '\w': expected a (flat )?tensor, got"
        ):
            simulated(run, save, shard=2)


@pytest.mark.parametrize("wrap", ["masked", "by_label", "chain"])
def test_tensors_that_differ_between_ranks_are_not_gathered(wrap: str) -> None:
    """Each rank would return its own."""

    def run(mesh: Any) -> Any:
        state = begun(mesh, WRAPS[wrap](optim.Transform(*of_all(0.1), over="tree"))).opt_state
        state = tree.map(
            lambda x: x + mesh.get_rank(),
            (state, optim.sgd(0.1, momentum=0.9).init(begun(mesh, optim.sgd(0.1)).params)),
        )
        return optim.state.gather_state(state)

    with pytest.raises(
        fshard.testing.MismatchError, match=r"gather_state: state differs between ranks.*keep a tensor for"
    ):
        simulated(run, shard=2)


def becoming(first: Callable[[Any], Any], later: Callable[[Any, Any], Any]) -> Pair:
    """The state has a `first(params)`, which is `later(it, gradients)` after an update."""

    def update(g: Any, s: Any, p: Any = None, **_: object) -> Any:
        return tree.map(lambda x: -0.1 * x, g), {"v": later(s["v"], g)}

    return lambda p: {"v": first(p)}, update


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("over", ["leaves", "elements", "tree"])
@pytest.mark.parametrize("into", ["number", "tensor"])
@pytest.mark.parametrize(("first", "later"), [(0, 1), (0.5, 0.25), (True, False)])
def test_a_number_is_restored_into_a_number_or_a_tensor(
    tmp_path: Any, first: Any, later: Any, into: str, over: str, ranks: int
) -> None:
    """A step that may be skipped makes a tensor of it, so a state that begins and one that went on differ."""

    def run(mesh: Any) -> Any:
        tx = optim.Transform(*becoming(lambda p: first, lambda s, g: later), over=over)
        begins = begun(mesh, tx, scaled=True)
        after, _ = fshard.train_step(loss, tx)(begins, BATCHES[0])
        saved, like = (after, begins) if into == "number" else (begins, after)
        fshard.checkpoint.save(tmp_path, saved, 1)
        return fshard.checkpoint.restore(tmp_path, like).opt_state["v"]

    for got in simulated(run, shard=ranks):
        assert got == (later if into == "number" else first)
        assert (got.dtype == torch.bool) == isinstance(first, bool)


def _zeros(p: Any) -> Any:
    return tree.map(torch.zeros_like, p)


def _number(p: Any) -> float:
    return 0.5


def _momentum(s: Any, g: Any) -> Any:
    return tree.map(lambda m, g: 0.9 * m + g, s if isinstance(s, type(g)) else tree.map(torch.zeros_like, g), g)


BECOMING: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "kept": (_zeros, _momentum),
    "number, number": (_number, lambda s, g: s + 1),
    "number, string": (_number, lambda s, g: "a"),
    "number, tree": (_number, _momentum),
    "number, vector": (_number, lambda s, g: torch.ones(2, dtype=F64)),
    "none, tree": (lambda p: None, _momentum),
    "0-d, vector": (lambda p: torch.zeros((), dtype=F64), lambda s, g: torch.cat([s.reshape(-1)[-1:], torch.ones(1)])),
    "0-d leaves, leaves": (lambda p: tree.map(lambda x: torch.zeros((), dtype=F64), p), lambda s, g: _momentum(s, g)),
    "leaves, 0-d leaves": (_zeros, lambda s, g: tree.map(lambda m, g: m.sum() + g.sum(), s, g)),
    "leaves, one of each": (_zeros, lambda s, g: tree.map(lambda m, g: (m + g).reshape(-1)[:1], s, g)),
    "leaves, twice": (_zeros, lambda s, g: tree.map(lambda m, g: torch.cat([m, g]), s, g)),
    "grows": (lambda p: torch.zeros(0), lambda s, g: torch.cat([s, torch.ones(1)])),
    "shrinks": (lambda p: torch.ones(3), lambda s, g: s.sum().reshape(1) / 3),
    "list grows": (lambda p: [], lambda s, g: [*s, torch.ones(())]),
    "list shrinks": (lambda p: [torch.ones(()), torch.ones(())], lambda s, g: s[:1]),
}


def stepped(mesh: Any, tx: Any, first: Tensor, scaled: bool) -> Any:
    """The state after two steps, the first perhaps skipped."""
    state = begun(mesh, tx, scaled)
    for x in (first, BATCHES[1]):
        state, _ = fshard.train_step(loss, tx)(state, x)
    return state.opt_state


def by_hand(tx: Any, first: Tensor) -> dict[str, Any]:
    """The same of plain tensors."""
    p, state = start(), tx.init(start())
    for x in (first, BATCHES[1]):
        if x.isfinite().all():
            updates, state = tx.update(torch.func.grad(loss)(p, x), state, p)
            p = optim.apply_updates(p, updates)
    leaves, spec = tree.flatten(state)
    tensors = [torch.tensor(x, dtype=F64) if isinstance(x, float) else x for x in leaves]
    return dict(zip(tree.leaf_paths(spec), tensors, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("scale", ["none", "scaled", "skipped"])
@pytest.mark.parametrize("over", ["leaves", "elements", "tree"])
@pytest.mark.parametrize("form", BECOMING)
def test_a_state_that_takes_another_form_is_right_or_an_error(form: str, over: str, scale: str, ranks: int) -> None:
    """Else a tensor of the old shape is broadcast, and each rank gathers a part of the state as the whole."""
    make = lambda: optim.Transform(*becoming(*BECOMING[form]), over=over)  # noqa: E731
    first = torch.tensor([torch.inf if scale == "skipped" else 1.0], dtype=F64)

    def run(mesh: Any) -> Any:
        state = stepped(mesh, make(), first, scale != "none")
        return optim.state.gather_state(state)

    try:
        got = simulated(run, shard=ranks)
    except (TypeError, ValueError) as error:
        if form == "kept" or re.search(CHANGED, str(error)) is None:
            raise
        return
    want = by_hand(optim.Transform(*becoming(*BECOMING[form])), first)
    for each in got:
        torch.testing.assert_close(each, want, rtol=1e-10, atol=1e-12)


class Held:
    """A class that nobody registered."""

    def __init__(self, m: Any) -> None:
        self.m = m


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass that nobody registered, with slots."""

    m: Any


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("over", ["leaves", "elements", "tree"])
@pytest.mark.parametrize("first", [_zeros, lambda p: [_zeros(p)], lambda p: torch.zeros(())])
@pytest.mark.parametrize("kind", [Held, Slotted])
def test_a_state_of_an_unregistered_class_is_an_error_at_once(
    kind: Any, first: Any, over: str, scaled: bool, ranks: int
) -> None:
    """Its tensors would be neither cut nor saved, and a skipped step could not keep them."""
    tx = optim.Transform(*becoming(lambda p: kind(first(p)), lambda s, g: kind(s.m)), over=over)
    with pytest.raises(TypeError, match=rf"'v' is an object of the class {kind.__name__}.*'m'.*register_fields"):
        simulated(begun, tx, scaled, shard=ranks)


def test_every_rank_has_the_error_of_a_state_that_is_not_gathered() -> None:
    """Also one that owns no leaf of the wrong form."""

    def run(mesh: Any) -> type:
        tx = optim.Transform(lambda p: {"n": tree.map(lambda x: None, p)}, lambda g, s, p=None, **_: (g, s))
        with pytest.raises(TypeError, match=r"leaf 'n?\.?\w': expected a tensor, got None"):
            optim.state.gather_state(begun(mesh, tx).opt_state)
        return type(mesh)

    assert len(simulated(run, shard=4)) == 4
