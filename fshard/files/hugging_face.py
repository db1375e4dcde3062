"""Directories as Hugging Face writes them: one file, or several files and an index of their tensors."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import torch
from torch import Tensor

from ..core.differences import lacking
from .folders import flush, is_file_name
from .foreign import naming, parsed, read_text
from .index import Json
from .safetensors_file import PICKLES, FileEntry, header, laid_out, read_entries, write_tensor

FILE, INDEX, PARTIAL = "model.safetensors", "model.safetensors.index.json", ".partial"


def entries_at(path: Path) -> dict[str, FileEntry]:
    """Return the tensors of a file, or of all files of a directory, by name. Only headers are read."""
    if not path.is_dir():
        return read_entries(path)
    if (path / FILE).exists():
        return read_entries(path / FILE)  # transformers reads this file first, too
    if (path / INDEX).exists():
        raw = parsed(read_text(path / INDEX), path / INDEX)
        return indexed(raw, path / INDEX, lambda file: read_entries(path / file))
    pickles = [x.name for x in sorted(path.iterdir()) if x.suffix in PICKLES]
    sentence = f"expected {FILE} or {INDEX} in it, or the path of one .safetensors file"
    if any(path.glob("shard-*-model-*.safetensors")):
        sentence += "; the shards of torch's HuggingFaceStorageWriter are read by fshard.checkpoint.restore"
    sentence += f", it has {pickles[0]!r}, a pickle, which may run any code when it is read" if pickles else ""
    raise FileNotFoundError(errno.ENOENT, sentence, str(path))


def indexed(raw: Json, index: object, read: Callable[[str], dict[str, FileEntry]]) -> dict[str, FileEntry]:
    """Return the tensors of the files in an index. `index`: the index's name in errors."""
    entries, names_of = dict[str, FileEntry](), dict[str, list[str]]()
    file_of = raw.get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise ValueError(f"{index}: expected weight_map, a name of a file for every tensor")
    for name, file in file_of.items():
        if not is_file_name(file):  # a path may lead out of the directory
            raise ValueError(f"{index}: {name!r}: expected the name of a file beside the index, got {file!r}")
        names_of.setdefault(file, []).append(name)
    for file, listed in names_of.items():
        if difference := lacking(listed, there := read(file)):
            raise ValueError(f"{index}: {file} has other tensors: {difference}")
        entries |= there
    return entries


LeafInFile = tuple[str, tuple[int, ...], torch.dtype]  # name in the file, shape, dtype


def new_files(folder: Path, groups: Sequence[Sequence[LeafInFile]]) -> dict[str, FileEntry]:
    """Make a file for each group of leaves, under a temporary name; return each leaf's entry."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_partial(folder)  # left by a killed save
    entries: dict[str, FileEntry] = {}
    for name, leaves in zip(_free_names(folder, len(groups)), groups, strict=True):
        group = laid_out(leaves, folder / (name + PARTIAL))
        first = header(group)
        with naming(path := folder / (name + PARTIAL)):
            path.write_bytes(first)
        entries |= {x.name: replace(x, start=x.start + len(first)) for x in group}
    return entries


def remove_partial(folder: Path) -> None:
    for path in folder.glob(f"model*{PARTIAL}"):
        path.unlink()


def _free_names(folder: Path, num_files: int) -> list[str]:
    """Return unused names: an earlier save's files stay until the new index replaces theirs."""
    if num_files == 1:
        return [FILE]
    stems = chain(["model"], (f"model-{number}" for number in count(2)))
    choices = ([f"{stem}-{i:05}-of-{num_files:05}.safetensors" for i in range(1, num_files + 1)] for stem in stems)
    return next(names for names in choices if not any((folder / name).exists() for name in names))


def put_in_file(entry: FileEntry, value: Tensor) -> None:
    with naming(entry.file), open(entry.file, "r+b") as file:
        write_tensor(file, entry.start, value)


def finish(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """When all files of `new_files` are whole, give them their final names, and remove an earlier save's files.

    If the process is killed between any two lines, a load reads all the earlier files, or all the new ones.
    """
    # names that fshard and transformers give
    part = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
    old = {path.name for path in folder.iterdir() if path.name in (FILE, INDEX) or part.fullmatch(path.name)}
    files = sorted(folder.glob(f"model*{PARTIAL}"))  # in the order of their numbers
    names = {file: file.name.removesuffix(PARTIAL) for file in files}
    new = {*names.values()}
    for file in files:
        flush(file)
        os.replace(file, folder / names[file])  # loads read a single new file from here on
    if len(files) > 1:
        size = sum(x.num_bytes for x in entries.values())
        index = {"metadata": {"total_size": size}, "weight_map": {x.name: names[x.file] for x in entries.values()}}
        partial = folder / (INDEX + PARTIAL)
        partial.write_text(json.dumps(index, indent=2, ensure_ascii=False), "utf-8")
        flush(partial)
        flush(folder)
        os.replace(partial, folder / INDEX)
        new.add(INDEX)
    flush(folder)
    for name in sorted(old - new):  # loads read an earlier FILE until it is gone
        (folder / name).unlink(missing_ok=True)
