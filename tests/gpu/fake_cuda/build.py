"""Compile the emulated device for the torch that is installed. A compiled one is kept for the next run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")


def why_not_built() -> str | None:
    """Why the device cannot be compiled here; None if it can."""
    if torch.cuda.is_available():
        return "there is a GPU: a second implementation of the device would not be used"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the emulated device with"
    return None


def built_library(kept_in: Path) -> Path:
    """The shared library of the device, compiled unless ``kept_in`` has it for this source, torch and compiler.

    Raises:
        RuntimeError: it does not compile.
    """
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    seen = "\n".join([SOURCE.read_text(), torch.__version__, compiler])
    library = kept_in / f"device-{hashlib.sha256(seen.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        _compile(library)
    return library


def _compile(library: Path) -> None:
    installed = Path(torch.__path__[0])
    unfinished = library.with_suffix(f".{os.getpid()}")  # another process may compile it at the same time
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{installed / 'include'}"]
    libraries = [f"-L{installed / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{installed / 'lib'}"]
    command = ["g++", *options, str(SOURCE), *libraries, "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated device does not compile:\n{done.stderr[-4000:]}")
    unfinished.replace(library)
