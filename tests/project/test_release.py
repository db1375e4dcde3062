"""What users install: the wheel has the package, its commands and nothing else, and needs torch and optree alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import first_use
import pytest

import fshard
from fshard.cli import doctor

ROOT = Path(__file__).parents[2]
PARTS = ["pyproject.toml", "README.md", "LICENSE", "fshard_command.py", "pytest_fshard.py", "fshard"]
BUILD = "from setuptools import build_meta; print(build_meta.build_{}('dist'))"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build leaves files beside them."""
    copy = tmp_path_factory.mktemp("clone") / "fshard"
    copy.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def built(clone: Path, kind: str) -> Path:
    """A wheel of a clone."""
    args = [sys.executable, "-c", BUILD.format(kind)]
    done = subprocess.run(args, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return clone / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(clone: Path) -> Path:
    """The wheel that users install."""
    return built(clone, "wheel")


def test_a_clone_beside_a_script_does_not_hide_the_package(clone: Path, tmp_path: Path) -> None:
    """After `git clone`, `pip install -e ./fshard` a script in this folder would import the clone's folder."""
    zipfile.ZipFile(built(clone, "editable")).extractall(tmp_path)
    script = clone.parent / "mine.py"
    # only the path of the package: to import it takes torch
    script.write_text(
        "import sys, site, importlib.util as u; site.addsitedir(sys.argv[1]); print(u.find_spec('fshard').origin)"
    )
    args = [sys.executable, "-ES", str(script), str(tmp_path)]
    done = subprocess.run(args, cwd=clone.parent, capture_output=True, text=True, check=True)
    assert done.stdout == f"{clone / 'fshard' / '__init__.py'}\n"


def test_the_wheel_has_the_package_and_no_tests(wheel: Path) -> None:
    """An install would lack a folder or the marker of types, or bring tests along."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "fshard").rglob("*.py")}
    assert names == sources | {"fshard/py.typed", "fshard_command.py", "pytest_fshard.py"}


def test_the_wheel_needs_torch_and_optree_and_has_the_commands(wheel: Path) -> None:
    """An install would bring packages that a training does not need, have another version, or lack its commands."""
    archive = zipfile.ZipFile(wheel)
    files = {name.partition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
    about = message_from_bytes(archive.read(files["METADATA"]))
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.partition(">=")[0] for line in needed) == ["optree", "torch"]
    assert about["Version"] == fshard.__version__
    assert f"\nversion: {fshard.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {fshard.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert archive.read(files["entry_points.txt"]).decode().split("\n\n") == [
        "[console_scripts]\nfshard = fshard_command:main",
        "[pytest11]\npytest_fshard = pytest_fshard\n",
    ]


def test_another_torch_than_the_newest_is_told() -> None:
    """CI would pass with an old package index, and nobody would learn that the newest torch was not tried."""
    newest = doctor.TESTED[1]
    assert first_use.remark(f"{newest}.1+cu132") == ""
    assert first_use.remark("2.11.0").startswith(f"NOT THE NEWEST: this is torch 2.11.0; docs/limits.md names {newest}")
    assert first_use.remark("2.99.0a0").startswith(f"NEW: this is torch 2.99.0a0; docs/limits.md names {newest}")


def test_the_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """The command of an install would fail: a file that it reads would be in the repository alone."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = "import fshard, sys; from fshard_command import main; print(fshard.__file__); sys.exit(main(['--help']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{tmp_path / 'fshard' / '__init__.py'}\nusage: fshard")
