"""The kernels in Triton's interpreter, in a process that has it from the start: `interpreted`, and golden vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[3]
_HERE = "tests/gpu/kernels/interpreted"
_GOLDEN = "tests/kernels/test_golden_planes.py"
_KERNELS = {f"{name}_kernel" for name in ("amax", "encode", "mark", "decode", "epilogue", "joint_scale", "swizzle")}

QUICK_GOLDEN = (
    "test_fp8_current_scaling[fp8_current_scaling/tiny_e4m3_bf16]",
    "test_fp8_blocks[fp8_blockwise/tiny_1d_e4m3_bf16_eps]",
    "test_fp8_blocks[fp8_blockwise/tiny_2d_e4m3_bf16_pow2]",
    "test_mxfp8[mxfp8/tiny_e4m3_bf16]",
    "test_scale_swizzle[mxfp8/scale_swizzle]",
    "test_nvfp4[nvfp4/tiny_rht_bf16]",
    "test_nvfp4[nvfp4/tiny_rowscaled_bf16]",
    "test_nvfp4[nvfp4/tiny_4over6_2d_mae256_bf16]",
    "test_nvfp4_special_values[nvfp4/special_nan]",
    "test_nvfp4_special_values[nvfp4/special_inf]",
)
OTHERS = ("tests/kernels/test_golden_hybrid_gemm.py", "tests/kernels/test_mx_formats.py")


def interpreted(directory: Path, *arguments: str) -> dict[str, Any]:
    """What tests have told that ran with interpreted kernels for CPU tensors."""
    outcome = directory / "outcome.json"
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.kernels.on_triton", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning", "--outcome", str(outcome), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    said = done.stdout[-20000:] + done.stderr[-4000:]
    assert done.returncode == 0, f"the tests in the interpreter have failed:\n{said}"
    found: dict[str, Any] = json.loads(outcome.read_text())
    assert found["tests"]["skipped"] == 0, f"some tests did not run:\n{said}"
    return found


def test_interpreted_kernels_give_the_bits_of_the_reference(tmp_path: Path) -> None:
    golden = [f"{_GOLDEN}::{name}" for name in QUICK_GOLDEN]
    found = interpreted(tmp_path, "-m", "not long", _HERE, *golden)
    assert found["tests"]["passed"] >= 50 + len(golden)
    assert set(found["launched"]) == _KERNELS
    assert found["launched"]["encode_kernel"] >= 50 and found["launched"]["decode_kernel"] >= 70


@pytest.mark.long
def test_all_cases_in_the_interpreter(tmp_path: Path) -> None:
    found = interpreted(tmp_path, "-m", "long", _HERE)
    assert found["tests"]["passed"] >= 700
    assert found["launched"]["encode_kernel"] >= 1000


@pytest.mark.long
def test_golden_vectors_and_tests_of_other_backends_in_the_interpreter(tmp_path: Path) -> None:
    found = interpreted(tmp_path, _GOLDEN, *OTHERS)
    assert found["tests"]["passed"] >= 170
    assert found["launched"]["encode_kernel"] >= 400 and found["launched"]["decode_kernel"] >= 300
