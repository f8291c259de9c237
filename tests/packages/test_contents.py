"""What wheel and sdist contain. `make dist` builds them as users would, and installs them in a fresh environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("crossgrain", "crossgrain_command")
# setuptools changes sys.argv, so it is read once.
BUILD = "import sys; from setuptools import build_meta as b; o = sys.argv[1]; print(b.build_sdist(o), b.build_wheel(o))"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Paths of sdist and wheel, built from a copy: setuptools writes beside what it builds."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        "CHANGELOG.md",
        "CITATION.cff",
    ):
        shutil.copy(ROOT / name, tree)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.nbi", "*.nbc")
    shutil.copytree(ROOT / "src", tree / "src", ignore=skip)
    shutil.copytree(ROOT / "constraints", tree / "constraints")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_something.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD, str(out)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    sdist, wheel = done.stdout.split()[-2:]
    return out / sdist, out / wheel


def names_in(path: Path) -> set[str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist())
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_everything_of_the_package_is_in_both(built):
    sdist, wheel = map(names_in, built)
    here = {
        path.relative_to(ROOT / "src").as_posix()
        for package in PACKAGES
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= wheel and {f"src/{name}" for name in here} <= sdist
    assert {"crossgrain/py.typed", "crossgrain/cli/checkup/golden.npz"} <= wheel


def test_nothing_else_is_in_them(built):
    sdist, wheel = map(names_in, built)
    assert {name.partition("/")[0] for name in wheel} == {*PACKAGES, "crossgrain-0.1.0.dist-info"}
    assert not {name for name in sdist if name.startswith("tests")}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints/core.txt"} <= sdist


def test_the_metadata_says_who_and_what(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read("crossgrain-0.1.0.dist-info/METADATA"))
    assert metadata["Author"] == "The crossgrain developers"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_all("Project-URL") is None  # the project has no address yet
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
