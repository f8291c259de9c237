"""Integrations whose program is not installed say what to install, and the library never imports them."""

import subprocess
import sys

import pytest

PROGRAMS = {
    "transformers": ("transformers", "hf"),
    "lightning": ("pytorch_lightning", "lightning"),
    "accelerate": ("accelerate", "accelerate"),
    "torchtitan": ("torchtitan", "torchtitan"),
}


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", PROGRAMS)
def test_what_to_install_is_said(module):
    package, extra = PROGRAMS[module]
    missing = f"import sys; sys.modules.update({{{package!r}: None, 'lightning': None}})"
    done = python(f"{missing}\nimport crossgrain.integrations.{module}")
    assert done.returncode and f"ImportError: {package} could not be imported" in done.stderr
    assert f"pip install 'crossgrain[{extra}]'" in done.stderr


def test_nothing_imports_them():
    names = sorted({package for package, _ in PROGRAMS.values()})
    code = f"import sys, crossgrain, crossgrain.integrations\nprint([n for n in {names} if n in sys.modules])"
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr
