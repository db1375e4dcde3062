"""Pickles read as data: nothing is imported, called or built, but a record of what the pickle says of each object.

Python's own unpickler is a machine with a stack, whose program may import any function and call it. This one knows the
operations that plain data needs. An operation that would import, call or fill an object makes a `Record` of the name,
the arguments and the state, for names that are expected; anything else is an error. Every operation takes constant time
and memory beyond the bytes that it reads. What is read may refer to one object from many places, or to itself: a walk
over it must count its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from io import BytesIO
from pickletools import opcodes
from typing import Any

from ..core.foreign import MOST_MEMORY

# torch's `.metadata` has 70 operations a chunk, and takes MOST_MEMORY before it has so many
_MOST_OPERATIONS = 1 << 24
PERSISTENT = "a persistent id"  # the name of records of what lies outside of the pickle

Plain = Any  # None, numbers, strings, lists, tuples, dicts, and records


@dataclass(eq=False, slots=True)
class Record:
    """What a pickle says of an object: its class or function, the arguments of the call, the state it is given.

    `args` is None for a class or function itself. Two records are equal if they are one.
    """

    name: str
    args: tuple[Plain, ...] | None = None
    state: Plain = None


def read_pickle(data: bytes, names: Set[str]) -> Plain:
    """Return what a pickle has: plain data, and records for these dotted names of classes and functions.

    ValueError names any other operation or name.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"lr": [0.5, None]}), set())
    {'lr': [0.5, None]}
    >>> read_pickle(pickle.dumps(slice(1, 3)), {"builtins.slice"})
    Record(name='builtins.slice', args=(1, 3, None), state=None)
    >>> read_pickle(pickle.dumps(exec), set())
    Traceback (most recent call last):
    ValueError: a pickle that names 'builtins.exec', which plain data does not need: nothing of it was run
    """
    machine = _Machine(names)
    file = BytesIO(data)
    memory, left = 4 * len(data), _MOST_OPERATIONS  # of strings
    while (code := file.read(1)) != b".":
        if code not in _BY_CODE:
            raise ValueError(_refusal(code, file.tell() - 1))
        # the argument is decoded only now: to decode those of other operations may warn, or take long
        read, step, num_bytes = _BY_CODE[code]
        memory, left = memory + num_bytes, left - 1
        if memory > MOST_MEMORY or left < 0:
            most = f"{_MOST_OPERATIONS:,} operations" if left < 0 else f"{MOST_MEMORY:,} bytes of memory"
            raise ValueError(f"a pickle that takes more than {most}")
        step(machine, None if read is None else read(file))
    return machine.end()


def _refusal(code: bytes, position: int) -> str:
    if not code:
        return "a pickle without an end"
    names = [f"the operation {operation.name}" for operation in opcodes if operation.code.encode("latin-1") == code]
    name = names[0] if names else f"the byte {code[0]:#x}, which is no operation,"
    return f"a pickle with {name} at byte {position:,}, which plain data does not need: nothing of it was run"


class _Machine:
    """The stack, the objects that the program remembers by number, and the stacks below the marks."""

    def __init__(self, names: Set[str]):
        self._names = names
        self._stack: list[Plain] = []
        self._below: list[list[Plain]] = []
        self._memo: dict[int, Plain] = {}

    def end(self) -> Plain:
        _require(len(self._stack) == 1 and not self._below, "does not end with one object")
        return self._stack[0]

    def ignore(self, argument: Plain) -> None:
        pass

    def push(self, argument: Plain) -> None:
        self._stack.append(argument)

    def push_int(self, argument: int) -> None:
        _require(-(1 << 63) <= argument < 1 << 63, "has a number of more than 64 bits")
        self._stack.append(argument)

    def mark(self, argument: Plain) -> None:
        self._below.append(self._stack)
        self._stack = []

    def put(self, number: int) -> None:
        self._memo[number] = self._top()

    def memoize(self, argument: Plain) -> None:
        self._memo[len(self._memo)] = self._top()

    def get(self, number: int) -> None:
        _require(number in self._memo, "refers to an object that it does not have")
        self._stack.append(self._memo[number])

    def tuple_of_marked(self, argument: Plain) -> None:
        self.push(tuple(self._pop_marked()))

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def append(self, argument: Plain) -> None:
        self._extend([self._pop()])

    def appends(self, argument: Plain) -> None:
        self._extend(self._pop_marked())

    def set_item(self, argument: Plain) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def set_items(self, argument: Plain) -> None:
        self._set(self._pop_marked())

    def name(self, argument: str) -> None:
        self._add_name(argument)

    def name_of_stack(self, argument: Plain) -> None:
        name, module = self._pop(), self._pop()
        _require(type(name) is str and type(module) is str, "names something by what is no string")
        self._add_name(f"{module}.{name}")

    def persistent(self, argument: Plain) -> None:
        _require(PERSISTENT in self._names, "refers to what lies outside of it")
        self._stack.append(Record(PERSISTENT, (self._pop(),)))

    def call(self, argument: Plain) -> None:
        args, function = self._pop(), self._pop()
        _require(type(function) is Record and function.args is None and type(args) is tuple, "calls what is no name")
        self._stack.append(Record(function.name, args))

    def build(self, argument: Plain) -> None:
        state, built = self._pop(), self._top()
        _require(type(built) is Record and built.args is not None and built.state is None, "fills what is no object")
        built.state = state

    def _add_name(self, name: str) -> None:
        if name not in self._names:
            raise ValueError(
                f"a pickle that names {name[:80]!r}, which plain data does not need: nothing of it was run"
            )
        self._stack.append(Record(name))

    def _extend(self, values: list[Plain]) -> None:
        target = self._top()
        _require(type(target) is list, "appends to what is no list")
        target.extend(values)

    def _set(self, values: list[Plain]) -> None:
        target = self._top()
        _require(type(target) is dict and len(values) % 2 == 0, "sets items of what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # the hashes of nested tuples take exponential time, and those of numbers may be chosen to collide
            _require(type(key) in (str, Record), "has a dict with keys that are no strings")
            target[key] = value

    def _top(self) -> Plain:
        _require(self._stack, "takes more than it has")
        return self._stack[-1]

    def _pop(self) -> Plain:
        _require(self._stack, "takes more than it has")
        return self._stack.pop()

    def _pop_marked(self) -> list[Plain]:
        _require(self._below, "takes more than it has")
        values, self._stack = self._stack, self._below.pop()
        return values


def _name_in_lines(file: BytesIO) -> str:
    """Read a module and a name in it, a line each."""
    lines = [file.readline(), file.readline()]
    _require(all(line.endswith(b"\n") for line in lines), "ends within a name")
    return ".".join(line[:-1].decode() for line in lines)


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise ValueError(f"a pickle that {otherwise}: it is damaged, or was made to do harm. Nothing of it was run")


_STEPS: dict[str, Callable[[_Machine, Plain], None]] = {
    "PROTO": _Machine.ignore,
    "FRAME": _Machine.ignore,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _Machine.push_int),
    **dict.fromkeys(("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"), _Machine.push),
    "MARK": _Machine.mark,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "TUPLE": _Machine.tuple_of_marked,
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_of_stack,
    "BINPERSID": _Machine.persistent,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
}
# at most so many bytes are taken by an operation, and by what a dict or the memo adds for it; others push or fill
_MEMORY = {
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ"), 160),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT"), 80),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINFLOAT", "BININT", "BININT2", "LONG1"), 80),
}
# what reads the argument of an operation, what it does, and the bytes that it takes, by the operation's byte
_BY_CODE: dict[bytes, tuple[Callable[[BytesIO], Plain] | None, Callable[[_Machine, Plain], None], int]] = {
    operation.code.encode("latin-1"): (
        # pickletools would decode escapes in names, as Python does not
        _name_in_lines if operation.name == "GLOBAL" else operation.arg.reader if operation.arg else None,
        _STEPS[operation.name],
        _MEMORY.get(operation.name, 16),
    )
    for operation in opcodes
    if operation.name in _STEPS
}
