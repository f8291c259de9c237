"""crossgrain --import: modules that register formats, before a command runs."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from crossgrain.formats import registry
from crossgrain_command.app import app

MODULE = """
from crossgrain.formats import Format, ScaleLayout, TableElement, register_format

ramp = TableElement("ramp", tuple(i - 7.5 for i in range(16)))
register_format(Format("mx_ramp", ramp, (1, 32), "e8m0_up", ScaleLayout(pad=(128, 4))))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in ("ramp_formats", "broken_formats"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "ramp_formats.py").write_text(MODULE)
    return tmp_path


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, arguments)


def test_formats_of_a_module_are_known_to_the_command(here):
    assert invoke("explain", "--recipe", "all: mx_ramp").exit_code == 2
    found = invoke("--import", "ramp_formats", "explain", "--recipe", "all: mx_ramp(sr)")
    assert found.exit_code == 0 and "mx_ramp(sr)" in found.stdout
    assert "mx_ramp" in invoke("--import", "ramp_formats", "formats").stdout


def test_an_installed_command_finds_modules_in_the_current_directory(here):
    """Python puts the directory of the script first, not this one."""
    code = "from crossgrain_command import main; main()"
    command = [sys.executable, "-P", "-c", code, "--import", "ramp_formats", "formats", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=here)
    assert result.returncode == 0 and '"mx_ramp"' in result.stdout, result.stderr


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "--import broken_formats: there is no such module in "),
        ("import not_installed_anywhere", "importing it raised ModuleNotFoundError: No module named 'not_installed"),
        ("raise ValueError('another format')", "importing it raised ValueError: another format"),
        ("x = (", "importing it raised SyntaxError"),
    ],
    ids=["missing", "missing inside", "raises", "no Python"],
)
def test_a_module_that_cannot_be_imported_ends_the_command(here, content, message):
    if content is not None:
        (here / "broken_formats.py").write_text(content)
    result = invoke("--import", "broken_formats", "formats")
    assert result.exit_code == 2 and not result.stdout
    assert message in result.stderr.replace("\n", " ").replace("  ", " ") and "broken_formats" in result.stderr


def test_without_it_nothing_is_added_to_the_path(here):
    before = list(sys.path)
    assert invoke("formats").exit_code == 0 and sys.path == before
