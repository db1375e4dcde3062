"""Pickles read as data: nothing is imported, called or built, except a record of each object.

A pickle is a program for the standard library's unpickler, a stack machine, and may import and call any function.
`read_pickle` first rewrites the program to operations of plain data, or refuses it. Each expected name of a class or
function becomes a `PickleRecord`; a call of a record makes another record. Every operation takes constant time and
memory beyond its own bytes. The result may have a list in many lists, or in itself: a walk over the result must count
its steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Set
from dataclasses import dataclass
from io import BytesIO
from pickletools import opcodes, read_uint1, read_uint4
from typing import Any

from .foreign import MOST_MEMORY, MOST_OPERATIONS

PERSISTENT = "a persistent id"  # the name of a record for an object outside the pickle
_DICT = "..."  # the name of `_Dict` in rewritten programs

Plain = Any  # None, numbers, strings, lists, tuples, dicts, and records


@dataclass(eq=False, slots=True)
class PickleRecord:
    """An object in a pickle: its class or function, the arguments of the call, and its state.

    `args` is None for a class or function that is not called.
    """

    name: str
    args: tuple[Plain, ...] | None = None
    state: Plain = None

    def __call__(self, *args: Plain) -> Plain:
        _require(self.args is None, "calls what is no name")
        return _Dict(*args) if self.name == _DICT else PickleRecord(self.name, args)

    def __setstate__(self, state: Plain) -> None:
        _require(self.args is not None and self.state is None, "fills what is no object")
        self.state = state


class _Dict(dict[Plain, Plain]):
    """A dict with only strings and records as keys: hashes of nested tuples may take exponential time."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()

    def __setitem__(self, key: Plain, value: Plain) -> None:
        _require(type(key) in (str, PickleRecord), "has a dict with keys that are no strings")
        super().__setitem__(key, value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, program: bytes, names: Set[str]):
        super().__init__(BytesIO(program))
        self._names = names

    def find_class(self, module: str, name: str) -> object:
        full_name = f"{module}.{name}"
        if full_name not in self._names and full_name != _DICT:
            raise ValueError(
                f"a pickle that names {full_name[:80]!r}, which plain data does not need: nothing of it was run"
            )
        return PickleRecord(full_name)

    def persistent_load(self, pid: Plain) -> PickleRecord:
        _require(PERSISTENT in self._names, "refers to what lies outside of it")
        return PickleRecord(PERSISTENT, (pid,))


def read_pickle(data: bytes, names: Set[str]) -> Plain:
    """Return a pickle's plain data. `names`: dotted names of classes and functions, read as records.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"lr": [0.5, None]}), set())
    {'lr': [0.5, None]}
    >>> read_pickle(pickle.dumps(slice(1, 3)), {"builtins.slice"})
    PickleRecord(name='builtins.slice', args=(1, 3, None), state=None)
    >>> read_pickle(pickle.dumps(exec), set())
    Traceback (most recent call last):
    ValueError: a pickle that names 'builtins.exec', which plain data does not need: nothing of it was run
    """
    program = _inert(data)
    try:
        return _Unpickler(program, names).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"a pickle that is damaged, or was made to do harm ({error}): nothing of it was run") from None


def _inert(data: bytes) -> bytes:
    """Rewrite a pickle's program to the operations of `_BY_CODE`. ValueError for other operations, or too many."""
    file, program, copied, at = BytesIO(data), bytearray(), 0, 0
    memory, left, num_remembered = 4 * len(data), MOST_OPERATIONS, 0  # a character of a string takes up to 4 bytes
    while (code := data[at : at + 1]) != b".":
        if code not in _BY_CODE:
            raise ValueError(_refusal(code, at))
        begin, (read, size, instead, num_bytes) = at, _BY_CODE[code]
        at, memory, left = at + 1 + size, memory + num_bytes, left - 1
        if memory > MOST_MEMORY or left < 0:
            most = f"{MOST_OPERATIONS:,} operations" if left < 0 else f"{MOST_MEMORY:,} bytes of memory"
            raise ValueError(f"a pickle that takes more than {most}")
        if read is not None:
            # skip arguments without a reader: decoding may warn, or take long
            file.seek(begin + 1)
            argument, at = read(file), file.tell()
            # the unpickler's memo is as long as its largest number: allow no gaps
            if isinstance(argument, int):
                most_number = num_remembered if code in b"qr" else (1 << 63) - 1
                _require(-(1 << 63) <= argument <= most_number, f"has a number above {most_number}")
        num_remembered += code in b"qr\x94"
        if instead is not None:
            program += data[copied:begin] + instead
            copied = at
    return bytes(program + data[copied : at + 1])


def _refusal(code: bytes, position: int) -> str:
    if not code:
        return "a pickle without an end"
    names = [f"the operation {operation.name}" for operation in opcodes if operation.code.encode("latin-1") == code]
    name = names[0] if names else f"the byte {code[0]:#x}, which is no operation,"
    return f"a pickle with {name} at byte {position:,}, which plain data does not need: nothing of it was run"


def _skip_name(file: BytesIO) -> None:
    """Skip two lines, a module and a name: pickletools would decode escapes in them, unlike the unpickler."""
    file.readline()
    file.readline()


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise ValueError(f"a pickle that {otherwise}: it is damaged, or was made to do harm. Nothing of it was run")


# bytes of memory, at most, for an operation, with its entries in a dict or the memo
_MEMORY_BY_OPCODE = {
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ"), 160),
    "EMPTY_DICT": 160,
    **dict.fromkeys(("EMPTY_LIST", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT"), 80),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINFLOAT", "BININT", "BININT2", "LONG1"), 80),
    **dict.fromkeys(("PROTO", "FRAME", "NONE", "NEWTRUE", "NEWFALSE", "BININT1", "BINGET", "LONG_BINGET"), 16),
    **dict.fromkeys(("EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPERSID", "BUILD"), 16),
}
# replacements: a call of the name _DICT; a call; nothing, because a frame's length would be wrong
_INSTEAD = {"EMPTY_DICT": b"c.\n.\n)R", "NEWOBJ": b"R", "FRAME": b""}
_READERS = {"GLOBAL": _skip_name, "BINPUT": read_uint1, "LONG_BINPUT": read_uint4}
# by the operation's byte: reader or size of its argument; replacement; bytes of memory
_BY_CODE: dict[bytes, tuple[Callable[[BytesIO], Plain] | None, int, bytes | None, int]] = {
    operation.code.encode("latin-1"): (
        _READERS.get(operation.name, operation.arg.reader if operation.arg and operation.arg.n < 0 else None),
        max(operation.arg.n, 0) if operation.arg else 0,
        _INSTEAD.get(operation.name),
        _MEMORY_BY_OPCODE[operation.name],
    )
    for operation in opcodes
    if operation.name in _MEMORY_BY_OPCODE
}
