"""Run all checks, and write the report.

    python -m tests.on_gpu --out out --minutes 10

Each file of tests runs in a process of its own: an error on a GPU can make everything fail that follows in a process,
and a process that hangs or dies must not take the report with it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from crossgrain.cli.checkup import check_up

from .report import Group, as_text, report_of, write_report

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_SHARED = "test_bytes.py"
"""Compiling takes most of its time, so that several processes share it."""


def main(arguments: list[str] | None = None) -> int:
    """Run everything. Returns 0 if nothing has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description="Check crossgrain on a GPU.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory of the report")
    parser.add_argument("--minutes", type=float, default=10.0, help="about how long all checks may take")
    parser.add_argument("--files", nargs="*", help="only these files of tests")
    options = parser.parse_args(arguments)
    machine = described_machine()
    groups: list[Group] = []
    for file in options.files or sorted(path.name for path in _HERE.glob("test_*.py")):
        print(f"--- {file}", flush=True)
        groups.append(run_group(file, options.minutes))
        write_report(report_of(machine, groups), options.out)  # after each, in case that the next is the last
    report = report_of(machine, groups)
    data, text = write_report(report, options.out)
    print(as_text(report), f"\nThe report is {data}, and for people {text}.", sep="", flush=True)
    return 1 if report["outcomes"].get("failed") or report["outcomes"].get("error") else 0


def run_group(file: str, minutes: float, executable: str = sys.executable) -> Group:
    """Run the tests of a file in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record"
        command = [executable, "-m", "pytest", "-p", "tests.on_gpu.recorder", "-p", "no:cacheprovider"]
        command += ["--record", str(record), "--minutes", str(minutes), f"tests/on_gpu/{file}"]
        if file == _SHARED:
            command += ["-n", str(min(8, os.cpu_count() or 1))]
        try:
            code = subprocess.run(command, cwd=_ROOT, check=False, timeout=60 * minutes + 600).returncode
            ended = _how_it_ended(code)
        except subprocess.TimeoutExpired:
            ended = "it took too long, and was ended"
        lines = record.read_text().splitlines() if record.exists() else []
    return Group(file, [json.loads(line) for line in lines], ended or ("" if lines else "no test was run"))


def described_machine() -> dict[str, Any]:
    """What ``crossgrain doctor`` finds, and for which driver torch was built and which there is."""
    versions = {"driver": driver_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    return {**check_up().as_data(), **versions}


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None if there is no ``nvidia-smi``."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(sorted(set(done.stdout.split())))


def _how_it_ended(code: int) -> str:
    """What is wrong with an exit code of pytest; "" if tests were run, whether they failed or not."""
    if code in (0, 1):
        return ""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"pytest ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
