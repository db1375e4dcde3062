"""A file of compiled programs, for later processes to load instead of tracing.

Note [An artifact]
    1. An artifact is a zip file of an index and of parts, named by digest. For each program and rank, the index names
       the texts to compare (Note [What another process compares] in `identity.py`) and the program. Equal parts are
       stored once: ranks with equal shards have equal parts.
    2. A rank loads its program if all texts are equal: tracing would give the same program and collectives. fshard
       compares texts and digests before it runs loaded code.
    3. Rank 0 receives other ranks' parts and writes the file (Note [A file is whole or not there] in `folders.py`). Old
       programs of other functions or arguments stay; programs of changed code, versions or machines go.
"""

from __future__ import annotations

import base64
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence

from ..comm.consensus import of_all, together
from ..comm.mesh import AnyMesh, num_ranks, rank_in
from ..core.arguments import check_path
from ..files.folders import Folder, LocalFolder, LocalReader, folder_of, read_bytes
from ..files.foreign import require
from .identity import FunctionIdentity
from .program import Json, Program, Scope, UnsavableError, digest_of, with_kernels

Path = str | os.PathLike[str]
_INDEX, _FORMAT = "index.json", 2
_MOST = 1 << 60


def file_at(name: str, path: Path) -> str:
    check_path(name, path, "the path of a file")
    text = os.fspath(path)
    return text if "://" in text else os.path.realpath(text)


def find(path: Path, identity: FunctionIdentity, mesh: AnyMesh) -> Program | str:
    """Return this rank's program, or the reason why the file has none."""
    try:
        programs, parts = _read_programs(path)
        rank, reasons = rank_in(mesh), dict[int, str]()  # one difference, by the number of differences
        for entry in programs:
            if len(entry["keys"]) != num_ranks(mesh):
                reasons[_MOST] = f"the number of ranks was {len(entry['keys'])}, is {num_ranks(mesh)}"
                continue
            texts, head = _texts_and_head(entry, rank, parts, identity)
            differences = identity.differences(texts)
            if not differences:
                return Program(head, {digest: parts[digest] for digest in _digests(head)})
            reasons.setdefault(len(differences), differences[0])
        return reasons[min(reasons)]
    except FileNotFoundError:
        return "there is no such file"
    except PermissionError as error:
        return str(error.strerror)
    except OSError:
        raise
    except Exception as error:  # of any type: the file may have any bytes
        return f"it is damaged, or no artifact: {type(error).__name__}: {error}"


def save_program(
    path: Path, identity: FunctionIdentity, program: Program, mesh: AnyMesh, scopes: Sequence[Scope] = ()
) -> None:
    """Add all ranks' programs, and the kernels in `scopes`, to the file at `path`. All ranks call; rank 0 writes."""

    def checked() -> Program:
        if identity.unknown:
            raise UnsavableError(
                f"jit: artifact: {identity.unknown}, which another process cannot compare: pass what the function "
                "needs of it as numbers, strings or tensors, or jit without an artifact"
            )
        return with_kernels(program, scopes)

    program = together(mesh, checked)
    key, head = (json.dumps(x).encode() for x in (identity.texts(), program.head))
    parts = {digest_of(data): data for data in (key, head)} | dict(program.parts)
    places = [json.loads(text) for text in of_all(json.dumps([digest_of(key), digest_of(head), *parts]), mesh)]
    entry = {"keys": [place[0] for place in places], "programs": [place[1] for place in places]}
    rank = rank_in(mesh)
    there = {digest for place in places[:rank] for digest in place}  # earlier ranks send these parts
    sent = {digest: base64.b64encode(parts[digest]).decode() for digest in parts if digest not in there}
    # rank 0 lacks a part of another rank: never if shards are equal
    is_needed = any({*place} - {*places[0]} for place in places[1:])
    received = of_all(json.dumps(sent if rank else {}), mesh) if is_needed else []
    others = {digest: base64.b64decode(data) for text in received for digest, data in json.loads(text).items()}
    together(mesh, lambda: None if rank else _write_programs(path, entry, parts | others, identity))


def _write_programs(path: Path, entry: Json, parts: Mapping[str, bytes], identity: FunctionIdentity) -> None:
    def stays(old: Json) -> bool:
        texts, _ = _texts_and_head(old, 0, before, identity)
        is_of_other = texts["code"].keys() != identity.code.keys()  # of other functions
        return texts["where"] == identity.where and (is_of_other or texts["code"] == identity.code)

    try:
        programs, before = _read_programs(path)
        programs = [old for old in programs if old["keys"] != entry["keys"] and stays(old)]
    except Exception:  # the file is absent or damaged
        programs, before = [], {}
    programs, parts = [entry, *programs], {**before, **parts}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_INDEX, json.dumps({"format": _FORMAT, "programs": programs}))
        for digest in _used_parts(programs, parts):
            archive.writestr(digest, parts[digest])
    place, name = _folder_and_name(path)
    if isinstance(place, LocalFolder):
        place.sweep(name)
    place.put(name, file.getvalue())


def _texts_and_head(entry: Json, rank: int, parts: Mapping[str, bytes], now: FunctionIdentity) -> tuple[Json, Json]:
    """Return a program's texts and head. If the program has no C++ loops, its texts get the current processor."""
    texts, head = (json.loads(parts[entry[name][rank]]) for name in ("keys", "programs"))
    if not head["libraries"]:
        texts["where"].update({name: now.where[name] for name in ("the processor", "the number of threads")})
    return texts, head


def _used_parts(index: Sequence[Json], parts: Mapping[str, bytes]) -> list[str]:
    named = dict.fromkeys(digest for entry in index for digest in (*entry["keys"], *entry["programs"]))
    heads = dict.fromkeys(digest for entry in index for digest in entry["programs"])
    return [*dict.fromkeys([*named, *(x for head in heads for x in _digests(json.loads(parts[head])))])]


def _digests(head: Json) -> list[str]:
    regions = [region["text"] for region in head["regions"]]
    named = [*head["libraries"], *head["kernels"].values()]
    return [head["driver"], *regions, *named, *(digest for *_, digest in head["constants"].values())]


def _read_programs(path: Path) -> tuple[list[Json], dict[str, bytes]]:
    """Return a file's programs, latest first, and its parts. Errors but OSError mean a damaged file."""
    place, name = _folder_and_name(path)
    with place.open(name) as file:
        if isinstance(file, LocalReader):  # whoever may write to the file can run any code here
            file.check_safe()
        data = read_bytes(file, 0, file.size)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {member.filename: archive.read(member) for member in archive.infolist()}
    index = json.loads(parts.pop(_INDEX))
    require(index["format"] == _FORMAT, f"its format was {index['format']}, is {_FORMAT}")
    is_whole = all(digest_of(part) == digest for digest, part in parts.items())
    require(is_whole and {*_used_parts(index["programs"], parts)} <= {*parts}, "a part is not what was written")
    return index["programs"], parts


def _folder_and_name(path: Path) -> tuple[Folder, str]:
    folder, _, name = os.fspath(path).rpartition("/")
    return folder_of(folder), name
