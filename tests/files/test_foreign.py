"""Every reader of files, given every kind of hostile file: an error in bounded memory, whose text is printable."""

import contextlib
import io
import json
import os
import pickletools
import re
import shutil
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import replayed
from support.costs import cost

import fshard
from fshard import checkpoint
from fshard.__main__ import main
from fshard.cli.main import COMMANDS
from fshard.files import foreign, hugging_face, index, inert_pickle, zip_item
from fshard.files.folders import LocalReader
from fshard.files.index import sealed
from fshard.files.safetensors_file import FileEntry
from fshard.testing import first_difference, observed, record, replay
from fshard.watch import recording

NAME = "\x1b[2J\n"  # it clears a terminal, and begins a new line


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that Python's objects took while a function ran."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- the readers ---


class Reader(NamedTuple):
    """A file of a good folder, what reads it, and how a JSON text of it is taken out and put in.

    Of the commands that read it "/x" is a path in the folder.
    """

    file: str
    read: Callable[[Path], object]
    text: Callable[[bytes], bytes] = bytes
    put: Callable[[bytes, bytes], bytes] = lambda good, text: text
    commands: Sequence[str] = ()


def header_of(data: bytes) -> bytes:
    """The header of a safetensors file."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def with_header(good: bytes, text: bytes) -> bytes:
    """The data of a safetensors file below another header."""
    return len(text).to_bytes(8, "little") + text + good[8 + len(header_of(good)) :]


def metadata_of(data: bytes) -> bytes:
    """The JSON in the metadata of a file of torch's HuggingFaceStorageWriter."""
    return json.loads(header_of(data))["__metadata__"]["DCP_SHARDING_INFO"].encode()


def with_metadata(good: bytes, text: bytes) -> bytes:
    """A file of torch's HuggingFaceStorageWriter with other metadata."""
    header = json.loads(header_of(good)) | {"__metadata__": {"DCP_SHARDING_INFO": text.decode()}}
    return with_header(good, json.dumps(header).encode())


def resealed(good: bytes, text: bytes) -> bytes:
    """An index with the checksum of its text, as somebody writes it who knows how; other text as it is."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return sealed({key: x for key, x in raw.items() if key != "checksum"}) if isinstance(raw, dict) else text


LIKE = {"w": torch.zeros(2)}


def loaded(path: Path) -> object:
    """Load parameters of one leaf."""
    return checkpoint.load_safetensors(path, fshard.make_plan(LIKE))


def restored(path: Path) -> object:
    """Restore a state of one leaf."""
    return checkpoint.restore(path, LIKE)


def compared(path: Path) -> object:
    """Compare what an observed step has seen with itself."""
    (_, got), (_, expected) = recording.seen_in(path), recording.seen_in(path)
    return first_difference(got, expected)


HEADER = (header_of, with_header)
OWN = ("inspect /own", "inspect /own --step 1", "inspect /own --verify", "inspect /own --against /own")
STEP = "/step-00000000/rank-0"
REPLAY = "replay /recorded --step support.replayed:make"
READERS = {
    "index": Reader("own/step-000000000001/index.json", lambda path: restored(path / "own"), bytes, resealed, OWN),
    "safetensors": Reader(
        "x.safetensors", lambda path: loaded(path / "x.safetensors"), *HEADER, ("plan /x.safetensors",)
    ),
    "restored safetensors": Reader("x.safetensors", lambda path: restored(path / "x.safetensors"), *HEADER),
    "weights": Reader(
        "hf/model.safetensors.index.json", lambda path: loaded(path / "hf"), commands=("inspect /hf", "plan /hf")
    ),
    "restored weights": Reader("hf/model.safetensors.index.json", lambda path: restored(path / "hf")),
    "shards": Reader(
        "dcp hf/shard-00001-model-00001-of-00001.safetensors",
        lambda path: restored(path / "dcp hf"),
        metadata_of,
        with_metadata,
        ("inspect /dcp@hf",),
    ),
    "about": Reader(
        f"recorded{STEP}/about.json", lambda path: replay(path / "recorded", replayed.make), commands=(REPLAY,)
    ),
    "about what was seen": Reader(
        f"observed{STEP}/about.json",
        lambda path: compared(path / "observed"),
        commands=("compare /observed /observed",),
    ),
}
# files of which the text is no JSON
OTHERS = {
    "metadata": Reader("dcp/.metadata", lambda path: restored(path / "dcp"), commands=("inspect /dcp",)),
    "item": Reader("dcp/__0_0.distcp", lambda path: restored(path / "dcp")),
    "data": Reader(
        "own/step-000000000001/data.safetensors",
        lambda path: restored(path / "own"),
        commands=("inspect /own --verify",),
    ),
    "tensors": Reader(
        f"recorded{STEP}/before.pt", lambda path: replay(path / "recorded", replayed.make), commands=(REPLAY,)
    ),
    "values": Reader(
        f"observed{STEP}/after.pt", lambda path: compared(path / "observed"), commands=("compare /observed /observed",)
    ),
    "a file of values": Reader(
        "seen.pt",
        lambda path: compared(path / "seen.pt"),
        commands=("compare /seen.pt /seen.pt", "compare /seen.pt /observed"),
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, whose name is hostile, with a good file for each reader."""
    path = tmp_path_factory.mktemp("good") / f"a{NAME}b"
    checkpoint.save(path / "own", {"w": torch.ones(2)}, 1)
    index = path / "own" / "step-000000000001" / "index.json"
    (data,) = index.parent.glob("*.safetensors")
    text = index.read_bytes().replace(data.name.encode(), b"data.safetensors")
    index.write_bytes(resealed(b"", text))
    data.rename(data.with_name("data.safetensors"))
    checkpoint.save_safetensors(path / "hf", fshard.shard_params({"w": torch.ones(2)}, fshard.make_plan(LIKE)))
    model = (path / "hf" / "model.safetensors").rename(path / "hf" / "m.safetensors")
    shutil.copy(model, path / "x.safetensors")
    (path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "m.safetensors"}}))
    shard = path / "dcp hf" / "shard-00001-model-00001-of-00001.safetensors"
    shard.parent.mkdir()
    shard.write_bytes(with_metadata(model.read_bytes(), json.dumps({"w": {"saved_offsets": [0]}}).encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process
        dcp.save({"w": torch.ones(2)}, checkpoint_id=path / "dcp", no_dist=True)
    step, state, batch, *_ = replayed.make(None)
    record(step, path / "recorded", steps={0})(state, batch)
    step = record(
        observed(fshard.train_step(lambda p, x: p["w"].sum(), tx := fshard.optim.sgd(0.1))),
        path / "observed",
        steps={0},
    )
    (_, seen) = step(fshard.init_state(fshard.shard_params({"w": torch.ones(2)}, fshard.make_plan(LIKE)), tx), None)
    torch.save([seen], path / "seen.pt")
    return path


def run(command: str, folder: Path) -> int:
    """The exit status of a command, of which "/x" is a path in a folder."""
    words = [f"{folder}{word}" if word.startswith("/") else word for word in command.split()]
    return main([word.replace("@", " ") if word.startswith(str(folder)) else word for word in words])


@pytest.fixture
def folder(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; texts may be of a MiB, and take 4 MiB of memory."""
    monkeypatch.setattr(foreign, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(foreign, "MOST_MEMORY", 1 << 22)
    monkeypatch.setattr(inert_pickle, "MOST_MEMORY", 1 << 22)
    monkeypatch.setattr(zip_item, "_MOST_BYTES", 1 << 17)
    return Path(shutil.copytree(good, tmp_path / good.name))


@pytest.mark.parametrize("name", [*READERS, *OTHERS])
def test_good_files_are_read(name, folder):
    """A bound that refuses what is right would let each of the tests below pass."""
    reader = (READERS | OTHERS)[name]
    reader.read(folder)
    path = folder / reader.file
    path.write_bytes(reader.put(path.read_bytes(), reader.text(path.read_bytes())))
    reader.read(folder)
    assert [command for command in reader.commands if run(command, folder)] == []


def test_every_command_is_tried():
    """A command that reads files would not be among those below."""
    tried = {command.split()[0] for reader in (READERS | OTHERS).values() for command in reader.commands}
    assert tried | {"doctor"} == {*COMMANDS}


def test_no_file_is_read_otherwise():
    """A file would be read by torch.load, which makes what a pickle says, of any size."""
    calls = re.compile(r"\btorch\.load\(|\bpickle\.loads?\(|\bjit\.load\(")
    house = Path(fshard.__file__).parent
    assert [path.name for path in house.rglob("*.py") if calls.search(path.read_text())] == []


def check_refused(reader: Reader, folder: Path, capsys: Any) -> None:
    """A reader raises a printable error, in bounded memory; so does the command line."""

    def read() -> None:
        with pytest.raises((ValueError, OSError)) as failure:
            reader.read(folder)
        causes: list[Any] = [failure.value]
        while causes[-1] is not None:
            assert str(causes[-1]).isprintable(), repr(causes[-1])[:300]
            assert len(str(causes[-1])) < 12_000
            causes.append(causes[-1].__cause__ or causes[-1].__context__)

    assert peak_of(read) < 12 << 20
    for command in reader.commands:
        assert peak_of(lambda command=command: run(command, folder)) < 12 << 20
        said = "".join(capsys.readouterr())
        assert said.replace("\n", "").isprintable(), repr(said)[:300]
        assert len(said) < 20_000


# --- texts ---

MANY = 300_000
TEXTS = {
    "empty objects": b'{"a":[' + b"{}," * MANY + b"{}]}",
    "empty lists": b'{"a":[' + b"[]," * MANY + b"[]]}",
    "short keys": b"{" + b",".join(b'"%x":1' % n for n in range(MANY // 3)) + b"}",
    "numbers": b'{"a":[' + b"1e9," * (MANY // 2) + b"1]}",
    "long numbers": b'{"a":' + b"9" * 900_000 + b"}",
    "deep": b'{"a":' * 100_000,
    "deep lists": b"[" * 900_000,
    "a wide string": b'{"a": "\\ud83d\\ude00' + b"a" * 900_000 + b'"}',
    "wide text": '{"a": "\U0001f600'.encode() + b"a" * 900_000 + b'"}',
    "a long name": b'{"' + b"a" * 900_000 + b'": 1}',
    "too long": b" " * (1 << 21),
    "a list": b"[" + b"1," * 1000 + b"1]",
    "no text": bytes(range(256)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", TEXTS)
def test_hostile_json_is_an_error_in_bounded_memory(name, text, folder, capsys):
    """A small file would fill the memory of every rank, or be quoted whole."""
    reader, path = READERS[name], folder / READERS[name].file
    if text == "no text" and name == "shards":
        pytest.skip("it is a string in a header, which is text")
    path.write_bytes(reader.put(path.read_bytes(), TEXTS[text]))
    check_refused(reader, folder, capsys)


def strings(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value has strings: keys that lead to them, the last one for a key itself (None: the value)."""
    if isinstance(value, str):
        yield *path, None
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(key, str):
            yield *path, key
        yield from strings(part, *path, key)


def replaced(value: Any, path: tuple[Any, ...], new: str) -> Any:
    """A JSON value with another string at a place that `strings` gives."""
    key, *rest = path
    if key is None:
        return new
    if not rest:  # the key itself
        return {new if name == key else name: part for name, part in value.items()}
    parts = dict(value.items() if isinstance(value, dict) else enumerate(value))
    parts[key] = replaced(parts[key], tuple(rest), new)
    return parts if isinstance(value, dict) else [*parts.values()]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("new", [NAME, "a" * 300_000], ids=["a code", "a long string"])
def test_what_others_wrote_is_quoted_in_printable_text(name, new, folder, capsys):
    """A name or a dtype in a file would send codes to a terminal, or fill it."""
    reader, path = READERS[name], folder / READERS[name].file
    whole = path.read_bytes()
    value, refused = json.loads(reader.text(whole)), 0
    places = [*strings(value)]
    for place in places[:: -(-len(places) // 16)]:
        path.write_bytes(reader.put(whole, json.dumps(replaced(value, place, new)).encode()))
        try:
            reader.read(folder)
        except (ValueError, OSError):
            check_refused(reader, folder, capsys)
            refused += 1
    assert refused


# --- memory ---


@pytest.mark.parametrize("text", TEXTS)
def test_json_takes_no_more_memory_than_is_counted(text):
    """The bound on memory, which is counted before a text is parsed, would be none."""

    def read() -> None:
        with contextlib.suppress(ValueError):
            foreign.parsed(TEXTS[text], "x")

    assert peak_of(read) < foreign._memory_of_text(TEXTS[text]) + (1 << 16)


OPERATIONS: dict[str, tuple[bytes, Callable[[int], bytes] | None]] = {
    "lists": (b"]", None),
    "lists that are remembered": (b"]\x94", None),
    "remembered once more": (b"]", lambda n: b"r" + n.to_bytes(4, "little")),
    "dicts": (b"}", None),
    "marks": (b"(", None),
    "tuples": (b"K\x01\x85", None),
    "nested tuples": (b"\x85", None),
    "tuples of marked": (b"(K\x01t", None),
    "numbers": (b"J\xff\xff\xff\x7f", None),
    "long numbers": (b"\x8a\x08" + b"\x7f" * 8, None),
    "fractions": (b"G" + b"\x7f" * 8, None),
    "strings": (b"\x8c\x02ab", None),
    "wide strings": (b"\x8c\x04\xf0\x9f\x98\x80", None),
    "names": (b"ctorch\nSize\n", None),
    "calls": (b"ctorch\nSize\n)R", None),
    "keys": (b"}", lambda n: b"\x8c\x03" + bytes((n & 127, n >> 7 & 127, n >> 14)) + b"Ns"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_pickle_takes_no_more_memory_than_is_counted(name, monkeypatch):
    """A pickle of a few MiB of empty lists would fill the memory."""
    monkeypatch.setattr(inert_pickle, "MOST_MEMORY", 1 << 23)
    begin, more = OPERATIONS[name]
    rest = b"".join(map(more, range(200_000))) if more else b""
    data = b"\x80\x04N" + begin + (rest or begin * MANY)

    def read() -> None:
        with pytest.raises(ValueError, match="a pickle that takes more than 8,388,608 bytes of memory"):
            inert_pickle.read_pickle(data, {"torch.Size"})

    assert peak_of(read) < (1 << 23) + (1 << 16)


@pytest.mark.parametrize("operation", [b"N", b"\x88", b")", b"h\0", b"\x80\x04"])
def test_a_pickle_has_bounded_operations(operation, monkeypatch):
    """Operations that take next to no memory would keep a reader busy for minutes: a file may have 128 MiB of them."""
    monkeypatch.setattr(inert_pickle, "MOST_OPERATIONS", 1000)
    begin = b"\x80\x04Nq\0"  # three of them
    assert inert_pickle.read_pickle(begin + b"\x80\x04" * 997 + b".", set()) is None
    with pytest.raises(ValueError, match="a pickle that takes more than 1,000 operations"):
        inert_pickle.read_pickle(begin + operation * 998 + b".", set())


def test_metadata_is_bounded_by_memory_first(tmp_path):
    """The bound on operations would refuse what torch wrote, and what takes less memory than it may."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save({f"layers.{n}.weight": torch.ones(2) for n in range(200)}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    codes = [op.code.encode("latin-1") for op, _, _ in pickletools.genops(data)][:-1]
    memory = 4 * len(data) + sum(inert_pickle._BY_CODE[code][-1] for code in codes)
    assert len(codes) / foreign.MOST_OPERATIONS < memory / foreign.MOST_MEMORY


def test_an_index_is_read_in_linear_time():
    """An index of as many files as tensors would keep a reader busy for the square of their number."""

    def read(num: int) -> int:
        entries = {f"{n}.safetensors": {f"w{n}": FileEntry(f"w{n}", "F32", (), 0, 4, Path())} for n in range(num)}
        raw = {"weight_map": {name: file for file, there in entries.items() for name in there}}
        return cost(lambda: hugging_face.indexed(raw, "an index", entries.__getitem__))

    assert read(400) < 5 * read(100)


# --- files ---


def zipped(*members: tuple[str, bytes]) -> bytes:
    """A zip file."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, content in members:
            file.writestr(name, content)
    return data.getvalue()


def a_pipe(path: Path) -> None:
    """A pipe, which nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def a_device(path: Path) -> None:
    """A device that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    """A folder."""
    path.unlink()
    path.mkdir()


def pickled(*operations: bytes, members: tuple[tuple[str, bytes], ...] = ()) -> Callable[[Path], object]:
    """Put what torch.save would write, with a pickle of these operations in it, in the place of a file."""
    parts = (("a/data.pkl", b"\x80\x02" + b"".join(operations) + b"."), ("a/byteorder", b"little"), *members)
    return lambda path: path.write_bytes(zipped(*parts))


FILES: dict[str, Callable[[Path], object]] = {
    "an allocation": pickled(b"cbuiltins\nbytearray\nJ\x00\x00\x00\x10\x85R"),
    "allocations": pickled(b"]", b"ccollections\nOrderedDict\n)Ra" * 4000),
    "a storage": pickled(b"ctorch.storage\nUntypedStorage\nJ\x00\x00\x00\x10\x85R"),
    "nested keys": pickled(b"})", *(b"q%ch%c\x86" % (n, n) for n in range(20)), b"Ns"),
    "a pipe": a_pipe,
    "a device": a_device,
    "a folder": a_folder,
    "a terabyte": lambda path: os.truncate(path, 1 << 40),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "lists": lambda path: path.write_bytes(b"\x80\x02" + b"]" * 900_000 + b"."),
    "many members": lambda path: path.write_bytes(zipped(*((f"a/{n}", b"") for n in range(3_000)))),
    "a long pickle": lambda path: path.write_bytes(zipped(("a/data.pkl", b"\x80\x02" + b"]" * 900_000 + b"."))),
    "names": lambda path: path.write_bytes(zipped((f"a/{NAME}", b""), ("a/data.pkl", NAME.encode()))),
}


@pytest.mark.parametrize("name", [*READERS, *OTHERS])
@pytest.mark.parametrize("file", FILES)
def test_hostile_files_are_an_error(name, file, folder, capsys):
    """A pipe in place of a file would wait for ever, and a long one fill the memory."""
    if (name, file) == ("item", "a terabyte"):
        pytest.skip("what follows the last item is not read")
    reader = (READERS | OTHERS)[name]
    FILES[file](folder / reader.file)
    check_refused(reader, folder, capsys)
    assert not reader.commands or any(run(command, folder) for command in reader.commands)


class Broken(io.FileIO):
    """A file of a disk that cannot be read any more."""

    def read(self, size: int = -1) -> bytes:
        """Fail as the disk does."""
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("name", [*READERS, *OTHERS])
def test_a_read_that_fails_names_the_file(name, folder, monkeypatch):
    """A disk that cannot be read would be an error without a path: nobody knew which of thousands of files."""
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    monkeypatch.setattr(foreign, "FileIO", Broken)
    reader = (READERS | OTHERS)[name]
    with pytest.raises((OSError, ValueError), match=r"Input/output error") as failure:
        reader.read(folder)
    assert Path(reader.file).parts[0] in str(failure.value)


def elements_in_one_member(shape: bytes, num: int) -> Callable[[Path], object]:
    """A record whose leaves are all the same bytes of the file."""
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\x40\x00\x00\x00tQ"
    )
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00(" + shape + b"t(K\x01t\x89N" + b"tR"
    pairs = (b"X\x07\x00\x00\x00state %d" % n + tensor + b"s" for n in range(num))
    return pickled(b"}", *pairs, members=(("a/data/0", bytes(256)),))


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (FILES["an allocation"], "names 'builtins.bytearray', which plain data does not need"),
        (FILES["allocations"], "in place of tensors by name"),
        (FILES["a storage"], "in place of tensors by name"),
        (FILES["nested keys"], "keys that are no strings"),
        (elements_in_one_member(b"K\x40", 2), "'state 1' is no whole tensor"),
        (elements_in_one_member(b"K\x41", 1), "'state 0' is no whole tensor"),
        (elements_in_one_member(b"J\x00\x00\x00\x40", 1), "'state 0' is no whole tensor"),
        (elements_in_one_member(b"K\x40", 1), "expected 'state 1'"),  # all is right but for what is missing
    ],
)
def test_tensors_of_a_record_are_read_as_data(put, words, folder, capsys):
    """A record of a kilobyte would take gigabytes, or double the work with each level of a key."""
    put(folder / OTHERS["tensors"].file)
    check_refused(OTHERS["tensors"], folder, capsys)
    with pytest.raises(ValueError, match=words):
        OTHERS["tensors"].read(folder)


def test_members_of_a_record_lie_apart(tmp_path):
    """A zip file whose members lie in one another would take its size many times over."""
    inner = bytes(4096)
    for number in range(9):  # each member has the one before, with its head
        packed = zipped((f"a/data/{number}", inner))
        inner = packed[: packed.index(b"PK\x01\x02")]
    file = io.BytesIO(packed)
    with zipfile.ZipFile(file, "a") as opened:
        members, at = [opened.infolist()[0]], 0
        for number in range(7, -1, -1):
            at += 30 + len(f"a/data/{number}")
            member = zipfile.ZipInfo(f"a/data/{number}")
            member.header_offset = at
            member.file_size = member.compress_size = members[-1].file_size - 30 - len("a/data/0")
            data = packed[at + 30 + len(member.filename) :][: member.file_size]
            member.CRC = zlib.crc32(data)
            members.append(member)
            opened.filelist.append(member)
        opened._didModify = True
    (tmp_path / "x").write_bytes(file.getvalue())
    with foreign.open_file(tmp_path / "x") as whole:
        reader = LocalReader(whole)
        item = zip_item.ZipItem(reader, 0, reader.size)
        with pytest.raises(ValueError, match="bytes in a file of"):
            item.check()


EMPTY = {"dtype": "F32", "shape": [0], "pieces": []}
HEAD = {"format": "fshard", "version": 1, "step": 1, "threads": 1, "values": {}, "leaves": {}, "files": {}}
HEAD |= {"ranks": 1, "plans": [], "by_rank": []}
# many items of a kind in an index
INDEXES: dict[str, Callable[[int], dict[str, Any]]] = {
    "leaves": lambda n: {"leaves": {f"w{i}": EMPTY for i in range(n)}},
    "deep leaves": lambda n: {"leaves": {f"w{i}.{'x.' * 40}": EMPTY for i in range(n)}},
    "values": lambda n: {"values": {f"v{i}": i for i in range(n)}},
    "plans": lambda n: {"plans": [f"p{i}" for i in range(n)]},
    "files": lambda n: {"files": {f"{i}.safetensors": 1 for i in range(n)}},
    "ranks": lambda n: {"ranks": n, "values": {f"x@{i}": i for i in range(n)}, "by_rank": ["x"]},
}
# and in other files: what reads it, and its bytes for a number and the good ones
ITEMS: dict[str, tuple[str, Callable[[int, bytes], bytes]]] = {
    "tensors": (
        "safetensors",
        lambda n, good: with_header(
            good[:8] + b" " * (len(good) - 8),
            json.dumps({f"w{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(n)}).encode(),
        ),
    ),
    "weights": (
        "weights",
        lambda n, good: json.dumps({"weight_map": {f"w{i}": f"{i}.safetensors" for i in range(n)}}).encode(),
    ),
    "paths": (
        "about",
        lambda n, good: json.dumps(
            json.loads(good) | {"before state": {"paths": [str(i) for i in range(n)], "plain": {}}}
        ).encode(),
    ),
    "operations": ("metadata", lambda n, good: b"\x80\x02" + b"})s" * n + b"."),
    "nested tuples": ("metadata", lambda n, good: b"\x80\x02)" + b"\x85" * n + b"."),
}
ADD = "operator\tadd\t\tx.py:1\t"
# of n items: the names of what a rank has seen, and the number of ranks
SEEN: dict[str, Callable[[int], tuple[list[str], int]]] = {
    "operators": lambda n: ([ADD] * n + [f"metric\t{i}\t\t\t" for i in range(n)], 1),
    "ranks": lambda n: ([ADD], n),
}


def seen_file(kind: str, num: int) -> bytes:
    """A file of what ranks of an observed step have seen."""
    names, ranks = SEEN[kind](num)
    names, file = [f"forward\t{ranks}\t\t\t", *names], io.BytesIO()
    torch.save([{"names": names, "values": [torch.ones(()) for _ in names]} for _ in range(ranks)], file)
    return file.getvalue()


OF_INDEX = {"restore": (), "show": ("--step", "1"), "compare": ("--against", ""), "list": ()}
MANY_OF = [*ITEMS, *(f"{what}: {command}" for what in INDEXES for command in OF_INDEX)]


ITEMS |= {f"seen {kind}": ("a file of values", lambda n, good, kind=kind: seen_file(kind, n)) for kind in SEEN}


def put_many(what: str, num: int, folder: Path) -> Callable[[], None]:
    """Write a file of so many items, and return what reads it."""
    kind, _, command = what.partition(": ")
    name, text = ITEMS.get(kind, ("index", lambda n, good: sealed(HEAD | INDEXES[kind](n))))
    reader, own = (READERS | OTHERS)[name], str(folder / "own")
    path = folder / reader.file
    path.write_bytes(text(num, path.read_bytes()))

    def call() -> None:
        if command in ("", "restore"):
            with contextlib.suppress(ValueError, OSError):
                reader.read(folder)
        else:
            main(["inspect", own, *(x or own for x in OF_INDEX[command])])

    return call


@pytest.mark.parametrize("what", [*MANY_OF, *(f"seen {kind}" for kind in SEEN)])
def test_work_grows_with_the_items_and_no_faster(what, folder, capsys):
    """A file of as many items as there may be would keep a reader busy for hours."""
    few = cost(put_many(what, 20, folder))
    assert cost(put_many(what, 80, folder)) < 4.5 * few


@pytest.mark.parametrize("what", MANY_OF)
def test_there_may_be_so_many_items(what, folder, monkeypatch, capsys):
    """A text of 128 MiB has a million leaves, which take a minute to read and show."""
    for module in (foreign, index, recording):
        monkeypatch.setattr(module, "MOST_ITEMS", 100)
    monkeypatch.setattr(inert_pickle, "MOST_OPERATIONS", 200)
    put_many(what, 90 if what != "operations" else 60, folder)()
    said = "".join(capsys.readouterr())
    assert "expected at most" not in said
    work = cost(put_many(what, 1000, folder))
    assert cost(put_many(what, 4000, folder)) < 1.5 * work
    if what == "paths":
        with pytest.raises(ValueError, match="'before state': expected the paths of a tree"):
            READERS["about"].read(folder)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"shard": 1 << 20, "replicate": 1 << 5}, "expected what 33554432 ranks wrote"),
        ({str(n): 1 << 20 for n in range(10_000)}, "'axes': expected the sizes of at most 16 axes"),
    ],
    ids=["large", "many"],
)
def test_a_recording_of_many_ranks_is_an_error(axes, words, folder, capsys):
    """The product of a recording's axes would be a list in memory."""
    reader = READERS["about"]
    path = folder / reader.file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"axes": axes}))
    check_refused(reader, folder, capsys)
    with pytest.raises(ValueError, match=words):
        reader.read(folder)


@pytest.mark.parametrize(
    "call",
    [
        lambda dir: checkpoint.save(dir, LIKE, 1),
        lambda dir: checkpoint.restore(dir, LIKE),
        lambda dir: checkpoint.save_safetensors(dir, fshard.shard_params(LIKE, fshard.make_plan(LIKE))),
        lambda dir: checkpoint.load_safetensors(dir, fshard.make_plan(LIKE)),
        checkpoint.steps,
        checkpoint.latest,
        lambda dir: checkpoint.delete(dir, 1),
        lambda dir: record(lambda state, batch: None, dir),  # type: ignore[arg-type,return-value]
        lambda dir: replay(dir, replayed.make),
    ],
)
def test_no_path_is_an_error(call, tmp_path, monkeypatch):
    """A path that was not set would be the working directory: checkpoints lie, or are deleted, where nobody looks."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"(dir|path)='': expected the path of a .*\. The working directory is '\.'"):
        call("")
    with pytest.raises(TypeError, match=r"(dir|path)=None: expected the path of a "):
        call(None)
    assert not [*tmp_path.iterdir()]
