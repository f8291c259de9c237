"""One version in the package and in its project file."""

import tomllib
from pathlib import Path

import crossgrain as cg


def test_the_version_is_that_of_the_project_file():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert cg.__version__ == project["version"]
