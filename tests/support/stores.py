"""Stores for checkpoints: a local S3 server, fsspec's memory, a file system behind a URL; and stores that fail."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import sync_wrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

BUCKET = "checkpoints"
DEAD = 77  # the exit status of a process that died


class Disk(LocalFileSystem):
    """A file system that is no object store: files grow, folders are made, `mv` renames."""

    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("disk://"))


fsspec.register_implementation("disk", Disk, clobber=True)


class StoreIsDown(Exception):
    """What a store raises that does not answer: no OSError, as with many of fsspec's."""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """A server of S3 on this host, as the variables of the environment by which clients find it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        other_store("s3://").mkdir(BUCKET)
        yield variables
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def new_url(kind: str, tmp_path: Path) -> str:
    """A folder that nothing is in yet."""
    name = f"{tmp_path.name}-{secrets.token_hex(4)}"
    return {
        "local": str(tmp_path / name),
        "disk": f"disk://{tmp_path / name}",
        "memory": f"memory://{name}",
        "s3": f"s3://{BUCKET}/{name}/run",
    }[kind]


def other_store(url: str) -> Any:
    """The file system of a URL as another process sees it: nothing is shared with the instance that fshard has."""
    return fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)[0]


def files(url: str) -> list[str]:
    """The names of all files in a folder and its folders, relative to it."""
    fs = other_store(url)
    root = fs._strip_protocol(url)
    return sorted(os.path.relpath(path, root) for path in fs.find(root))


def fails(patch: pytest.MonkeyPatch, kind: str, what: str, part: str) -> None:
    """Let a store fail at files whose name has `part`, when it would write, read or look at ("info") them."""
    error = StoreIsDown("the store does not answer")
    if kind == "s3":
        fs = fsspec.get_filesystem_class("s3")
        requests = {"write": "put_object", "read": "get_object", "info": "head_object"}
        call = fs._call_s3

        async def call_s3(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            if method == requests[what] and part in kwargs["Key"]:
                raise error
            return await call(self, method, *args, **kwargs)

        patch.setattr(fs, "_call_s3", call_s3)
        patch.setattr(fs, "call_s3", sync_wrapper(call_s3))  # of files
        return
    fs = {"memory": MemoryFileSystem, "disk": Disk}[kind]
    name = {"write": "_open", "read": "cat_file", "info": "info"}[what]
    function = getattr(fs, name)

    def fail(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if part in os.fspath(path) and (what != "write" or "w" in kwargs.get("mode", args[0] if args else "")):
            raise error
        return function(self, path, *args, **kwargs)

    patch.setattr(fs, name, fail)


def dies(patch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    """End the process before its store is changed for the time of this number."""
    left = [number]

    def count() -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(DEAD)

    if kind == "s3":
        fs = fsspec.get_filesystem_class("s3")
        call = fs._call_s3

        async def call_s3(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            if method.startswith(("put", "delete", "complete")):
                count()
            return await call(self, method, *args, **kwargs)

        patch.setattr(fs, "_call_s3", call_s3)
        patch.setattr(fs, "call_s3", sync_wrapper(call_s3))
        return
    for name in ("_open", "mv", "rm_file"):
        patch.setattr(Disk, name, _counted(getattr(Disk, name), count))


def _counted(function: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    def counted(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ != "_open" or "w" in kwargs.get("mode", args[0] if args else ""):
            count()
        return function(self, path, *args, **kwargs)

    return counted
