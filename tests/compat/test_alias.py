"""`import transformer_engine`: given, taken away, and refused where there is a real one."""

import importlib
import importlib.metadata
import importlib.util
import pickle
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import crossgrain as cg
from crossgrain import compat
from crossgrain.compat.tree import MODULES, ROOTS
from crossgrain.te import __main__ as te_main

REPOSITORY = Path(__file__).parents[2]


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    compat.uninstall()
    forget()
    importlib.invalidate_caches()


@pytest.fixture
def real(tmp_path):
    """A package with the name, and a distribution, that are not ours."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.9.0'\n")
    (package / "common.py").write_text("REAL = True\n")
    info = tmp_path / "transformer_engine-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.9.0\n")
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    return package


def test_the_names_are_there_while_installed():
    assert importlib.util.find_spec("transformer_engine") is None
    compat.install()
    import transformer_engine
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    assert transformer_engine is compat.transformer_engine and tex is compat.transformer_engine_torch
    assert te.Linear is cg.Linear and issubclass(cg.Linear, TransformerEngineBaseModule)
    assert transformer_engine.__version__ == compat.VERSION
    assert all(sys.modules[name] is module for name, module in MODULES.items())
    compat.uninstall()
    assert importlib.util.find_spec("transformer_engine") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine.pytorch")


@pytest.mark.parametrize("name", ["transformer-engine", "transformer_engine", "Transformer.Engine"])
def test_clients_that_ask_for_the_distribution_are_answered(name):
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)
    compat.install()
    assert importlib.metadata.version(name) == compat.VERSION
    assert importlib.util.find_spec("transformer_engine") is not None
    assert importlib.util.find_spec("transformer_engine.pytorch") is not None
    assert importlib.metadata.packages_distributions()["transformer_engine"] == ["transformer-engine"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer-engines")
    compat.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)


def test_twice_is_once():
    for _ in range(2):
        compat.install()
    assert compat.is_installed() and sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path) == 1
    for _ in range(2):
        compat.uninstall()
    assert not compat.is_installed() and not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path)


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_one_is_not_hidden(real, imported):
    if imported:
        importlib.import_module("transformer_engine.common")
    with pytest.raises(RuntimeError, match=r"a Transformer Engine at .*__init__.py.*replace=True"):
        compat.install()
    assert not compat.is_installed() and importlib.import_module("transformer_engine").__version__ == "2.9.0"
    assert importlib.metadata.version("transformer-engine") == "2.9.0"


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_one_is_hidden_if_asked_and_comes_back(real, imported):
    before = [importlib.import_module(name) for name in ("transformer_engine", "transformer_engine.common")]
    if not imported:
        forget()
    compat.install(replace=True)
    assert importlib.import_module("transformer_engine") is compat.transformer_engine
    assert importlib.import_module("transformer_engine.common") is compat.transformer_engine.common
    assert importlib.metadata.version("transformer-engine") == compat.VERSION
    compat.uninstall()
    after = [importlib.import_module(name) for name in ("transformer_engine", "transformer_engine.common")]
    assert after[1].REAL and all((a is b) == imported for a, b in zip(after, before, strict=True))
    assert importlib.metadata.version("transformer-engine") == "2.9.0"


def test_an_extension_alone_is_a_real_one(tmp_path):
    (tmp_path / "transformer_engine_torch.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(RuntimeError, match="transformer_engine_torch.py, which crossgrain would hide"):
        compat.install()


@pytest.mark.parametrize("first", ROOTS)
def test_our_own_distribution_is_no_real_one(first):
    sys.path.insert(0, str(REPOSITORY / "crossgrain-te"))
    importlib.invalidate_caches()
    assert importlib.import_module(first) is getattr(compat, first)
    assert importlib.import_module("transformer_engine.pytorch").Linear is cg.Linear
    compat.uninstall()
    assert importlib.import_module("transformer_engine") is compat.transformer_engine


def test_the_distribution_can_be_built_and_installed(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(REPOSITORY / "crossgrain-te", source)  # building leaves files
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", target, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    assert importlib.util.find_spec("transformer_engine").origin.startswith(str(target))
    assert importlib.metadata.version("transformer-engine") == compat.VERSION
    assert importlib.import_module("transformer_engine_torch") is compat.transformer_engine_torch
    assert importlib.import_module("transformer_engine.pytorch.ops").Sequential is cg.ops.Sequential


def test_the_distribution_says_the_same_version():
    project = tomllib.loads((REPOSITORY / "crossgrain-te" / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("transformer-engine", compat.VERSION)


def test_pickles_with_the_other_names_can_be_read():
    recipe = b"\x80\x02ctransformer_engine.common.recipe\nMXFP8BlockScaling\n."
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(recipe)
    compat.install()
    assert pickle.loads(recipe) is cg.recipe.MXFP8BlockScaling


# ---- python -m crossgrain.te --------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    def _run(*arguments):
        monkeypatch.setattr(sys, "argv", ["crossgrain.te", *arguments])
        te_main.main(list(arguments))
        return capsys.readouterr().out

    return _run


SCRIPT = """
import sys
import transformer_engine.pytorch as te
import beside
print(__name__, te.Linear.__module__, sys.argv[1:], beside.X)
"""


def test_scripts_and_modules_run_as_python_runs_them(run, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("X = 7\n")
    expected = "__main__ crossgrain.nn.linear ['--lr', '1'] 7\n"
    assert run(str(tmp_path / "script.py"), "--lr", "1") == expected
    monkeypatch.chdir(tmp_path)
    sys.path[0] = ""  # as under python -m
    assert run("-m", "script", "--lr", "1") == expected


def test_a_script_does_not_hide_a_real_one_unless_asked(run, real, tmp_path):
    (tmp_path / "script.py").write_text("import transformer_engine as te; print(te.__version__)")
    with pytest.raises(SystemExit, match="a Transformer Engine at"):
        run(str(tmp_path / "script.py"))
    assert run("--replace", str(tmp_path / "script.py")) == f"{compat.VERSION}\n"


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--unknown", "x.py"], ["--replace"]])
def test_other_arguments_get_the_usage(run, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2 and "usage: python -m crossgrain.te" in capsys.readouterr().err
