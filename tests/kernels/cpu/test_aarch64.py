"""Kernels hold nothing that only x86 has: LLVM compiles what numba makes of them for ARM, to instructions of NEON.

Nothing is run: the machine has another processor.
"""

import os
import platform
import re
import subprocess
import sys

import pytest
from llvmlite import binding

TRIPLE = "aarch64-unknown-linux-gnu"
NEON = re.compile(r"\bv\d+\.(?:4s|8h|16b)\b")  # a register as four floats, eight halves or sixteen bytes

# A CPU without extensions: kernels then use no instruction of x86 by its name.
GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
COMPILE = """
import gc, pathlib, sys, torch
from numba.core.dispatcher import Dispatcher
import crossgrain as cg

x = torch.randn(128, 128)
cg.quantize(x, "mxfp8").dequantize(direction=cg.COLUMNWISE)
cg.quantize(x, "nvfp4", columnwise=False).dequantize()
for each in gc.get_objects():
    if isinstance(each, Dispatcher) and each.py_func.__module__.startswith("crossgrain.kernels.cpu."):
        name = f"{each.py_func.__module__.split('.')[-1]}.{each.py_func.__name__}"
        for number, made in enumerate(each.overloads.values()):
            (pathlib.Path(sys.argv[1]) / f"{name}.{number}.ll").write_text(made.library.get_llvm_str())
"""


@pytest.fixture(scope="module")
def machine():
    try:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        return binding.Target.from_triple(TRIPLE).create_target_machine(cpu="neoverse-n1", opt=3)
    except RuntimeError as error:
        pytest.skip(f"this LLVM has no ARM: {error}")


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """The code of LLVM of kernels and their parts, by name."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("a CPU without extensions is configured by its name on x86")
    folder = tmp_path_factory.mktemp("llvm")
    fresh = {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}  # what was compiled before has no code of LLVM
    subprocess.run([sys.executable, "-c", COMPILE, folder], env=os.environ | GENERIC | fresh, check=True)
    return {file.stem: file.read_text() for file in folder.iterdir()}


def for_arm(code, machine):
    """The same code for another processor."""
    code = re.sub(r'target triple = "[^"]*"', f'target triple = "{TRIPLE}"', code)
    code = re.sub(r'target datalayout = "[^"]*"', f'target datalayout = "{machine.target_data}"', code)
    return re.sub(r'"target-(?:cpu|features)"="[^"]*"', "", code)


def test_kernels_compile_for_arm(modules, machine):
    vectors: dict[str, int] = {}
    for name, code in modules.items():
        assert not re.findall(r"llvm\.x86[\w.]*", code), name
        made = machine.emit_assembly(binding.parse_assembly(for_arm(code, machine)))
        file = name.split(".")[0]
        vectors[file] = max(vectors.get(file, 0), len(NEON.findall(made)))
    assert all(vectors.get(file, 0) > 20 for file in ("rows", "columns", "decode", "measure")), vectors
