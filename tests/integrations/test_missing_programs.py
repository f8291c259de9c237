"""Integrations whose program is not installed say what to install, and the library never imports them."""

import subprocess
import sys
import textwrap

PROGRAMS = {
    "transformers": ("transformers", "hf"),
    "lightning": ("pytorch_lightning", "lightning"),
    "accelerate": ("accelerate", "accelerate"),
    "torchtitan": ("torchtitan", "torchtitan"),
}


def test_what_to_install_is_said_and_nothing_imports_them():
    packages = [package for package, _ in PROGRAMS.values()]
    code = f"""
        import importlib, sys, crossgrain, crossgrain.integrations
        print([name for name in {packages} if name in sys.modules])
        sys.modules.update(dict.fromkeys({packages}))
        for name in {list(PROGRAMS)}:
            try:
                importlib.import_module(f"crossgrain.integrations.{{name}}")
            except ImportError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    imported, *errors = done.stdout.splitlines()
    assert imported == "[]", done.stderr
    assert len(errors) == len(PROGRAMS), done.stderr
    for (package, extra), error in zip(PROGRAMS.values(), errors, strict=True):
        assert error.startswith(f"{package} could not be imported")
        assert error.endswith(f"pip install 'crossgrain[{extra}]'")
