"""Checks crossgrain and crossgrain-te as they were installed from their wheels: ``python -I check_installed.py``.

Not a test of pytest: it runs in an environment that has nothing but the packages and mypy.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def run(*command: str | Path, may_fail: bool = False) -> str:
    """What a command prints, outside of the tree."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=tempfile.mkdtemp())
    assert may_fail or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def main() -> None:
    """All checks; the first that fails raises."""
    import crossgrain

    package = Path(crossgrain.__file__).parent
    assert "site-packages" in package.parts, package
    assert crossgrain.__version__ == importlib.metadata.version("crossgrain")
    print(f"crossgrain {crossgrain.__version__} is in {package}")

    import transformer_engine.pytorch as te

    assert te.Linear.__module__.startswith("crossgrain."), te.Linear
    print(f"transformer-engine is {importlib.metadata.version('transformer-engine')}")

    binaries = Path(sys.executable).parent
    # It also fails for what is wrong with the machine, which is not what is checked here.
    doctor = json.loads(run(binaries / "crossgrain", "doctor", "--json", may_fail=True))
    assert doctor["self_tests"]
    for test in doctor["self_tests"]:
        assert test["cases"] > 0 and not test["problems"], test
        print(f"golden vectors, {test['backend']}: {test['cases']} of {test['of']} were compared, and are right")

    client = HERE.parents[1] / "examples" / "typed_client.py"
    run(sys.executable, client)
    print(run(binaries / "mypy", "--strict", "--cache-dir", tempfile.mkdtemp(), client).strip())


if __name__ == "__main__":
    main()
