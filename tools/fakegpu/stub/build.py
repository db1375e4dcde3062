"""Build the stub for the torch of this Python: `python tools/fakegpu/stub/build.py` prints the folder of the libraries.

The hand-written files define what matters. All other functions that torch's libraries need of NVIDIA's are made by a
rule: what `nm` lists as undefined in torch's libraries (or Triton's driver) and as defined in NVIDIA's, less what the
files define, returns 0. The folder is named by the sources and torch's version, so a change builds anew.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SITE = Path(torch.__file__).parent.parent
FILES = ("device.c", "streams.c", "capture.c", "kernels.c", "nccl.c", "meeting.c")
# libraries that are replaced; the others (cuDNN, CUPTI, NVRTC, NVSHMEM) are loaded as they are, and never called
REPLACED = ("cudart", "cublas", "cublasLt", "cufft", "cufile", "curand", "cusolver", "cusparse", "cusparseLt", "nccl")


def symbols(library: Path, which: str) -> set[str]:
    """The names of functions that a library defines (`which` "defined") or needs ("undefined")."""
    listed = subprocess.run(["nm", "-D", f"--{which}-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}


def needed() -> set[str]:
    """The functions that torch's libraries need of those that are replaced, and of the driver."""
    libraries = [path for name in REPLACED for path in (SITE / "nvidia").rglob(f"lib{name}.so.*")]
    given = set[str]().union(*(symbols(path, "defined") for path in libraries))
    wanted = set[str]().union(*(symbols(path, "undefined") for path in (SITE / "torch" / "lib").glob("*.so")))
    of_driver = {name for name in wanted if re.fullmatch(r"cu[A-Z]\w+", name)}
    triton = SITE / "triton" / "backends" / "nvidia" / "driver.c"
    by_triton = set(re.findall(r"\b(cu[A-Z]\w+)\b", triton.read_text())) if triton.exists() else set()
    return {name for name in (wanted & given) | of_driver | by_triton if re.match(r"cu|nccl|__cuda", name)}


def compiled(sources: Iterable[Path], to: Path) -> None:
    """Compile C files to a shared library; RuntimeError with gcc's words if it cannot."""
    headers = [SITE / "nvidia" / "cu13" / "include", SITE / "triton" / "backends" / "nvidia" / "include"]
    command = ["gcc", "-shared", "-fPIC", "-O2", "-std=gnu11", "-fvisibility=default", "-o", str(to)]
    command += [f"-I{path}" for path in (HERE, *headers)] + [str(path) for path in sources]
    done = subprocess.run([*command, "-lpthread", "-ldl"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"gcc could not build the stub:\n{done.stderr}")


def built() -> Path:
    """The folder with `libfakegpu.so`, and the same as `libcuda.so.1`, which Triton looks for; built if it is new."""
    texts = [path.read_bytes() for path in sorted(HERE.glob("*.[ch]"))]
    version = importlib.metadata.version("torch")
    name = hashlib.sha256(b"".join([*texts, Path(__file__).read_bytes(), version.encode()])).hexdigest()[:12]
    folder = HERE / "build" / name
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as other:  # several processes may build at once
        build(Path(other))
        with suppress(OSError):  # another process was first
            Path(other).rename(folder)
        Path(other).mkdir(exist_ok=True)  # for its removal
    return folder


def build(folder: Path) -> None:
    """Make the libraries in a folder."""
    first = folder / "first.so"  # to see what the files define
    compiled([HERE / name for name in FILES], first)
    rest = sorted(needed() - symbols(first, "defined"))
    (folder / "rest.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in rest))
    compiled([*(HERE / name for name in FILES), folder / "rest.c"], folder / "libfakegpu.so")
    for name in ("libcuda.so.1", "libcuda.so"):
        (folder / name).symlink_to("libfakegpu.so")


if __name__ == "__main__":
    print(built())
