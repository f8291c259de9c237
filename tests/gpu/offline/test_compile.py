"""Compiling for GPUs that are not here, and reading what came out."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from ..ptx import PtxError, run
from . import Built, Constant, build, inexact


class _Pair(NamedTuple):
    x: object
    y: object
    FACTOR: object


@triton.jit
def _scale_kernel(pair, n, B: tl.constexpr):
    """y = x * FACTOR."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(pair.y + at, tl.load(pair.x + at, mask=at < n) * pair.FACTOR, mask=at < n)


@triton.jit
def _divide_kernel(x, y, B: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, B)
    a, b = tl.load(x + at), tl.load(x + B + at)
    if HOW == "rounded":
        c = tl.div_rn(a, b)
    elif HOW == "fast":
        c = a / b
    elif HOW == "exponential":
        c = tl.exp2(a)
    else:
        c = a * b + a
    tl.store(y + at, c)


def _divide(how: str, target: str = "sm_90", **options: Any) -> Built:
    types = {"x": "*fp32", "y": "*fp32"}
    return build(_divide_kernel, types, {"B": 512, "HOW": how}, target, divisible=("x", "y"), **options)


def test_a_tuple_argument_with_a_constant_inside() -> None:
    built = build(
        _scale_kernel,
        {"pair": _Pair("*fp32", "*fp32", Constant(3)), "n": "i32"},
        {"B": 256},
        "sm_90",
        divisible=("pair.x", "pair.y", "n"),
        num_warps=2,
    )
    x = np.arange(512, dtype=np.float32)
    y = np.zeros(512, np.float32)
    run(built.ptx, (2,), [x, y, 512], built.shared)
    assert np.array_equal(y, 3 * x)
    assert built.threads == 64
    # Divisibility inside of the tuple is believed: four numbers at once.
    assert built.widths == {("load", 16): 1, ("store", 16): 1}
    assert built.registers > 0 and built.spills == 0


def test_machine_code_of_nvidia_is_counted() -> None:
    built = _divide("plus")
    assert built.count(r"FMUL.*") == 4 and built.count(r"FADD.*") == 4 and built.count(r"FFMA.*") == 0
    assert built.instructions["EXIT"] >= 1 and not any(name.startswith("NOP") for name in built.instructions)
    assert built.instructions_per_element(512) == built.instructions.total() * 128 / 512
    fused = _divide("plus", enable_fp_fusion=True)
    assert fused.count(r"FFMA.*") == 4 and fused.inexact["fma.rn.f32"] == 4


@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx950", marks=pytest.mark.long)])
def test_machine_code_of_amd_is_counted(target: str) -> None:
    built = _divide("plus", target)
    assert built.threads == 256 and built.registers > 0 and built.spills == 0
    assert built.widths == {("load", 8): 2, ("store", 8): 1}
    assert built.count("v_(pk_)?mul_f32.*") > 0 and built.count(".*fma.*") == 0


@pytest.mark.parametrize("how, found", [("rounded", None), ("fast", "div.full.f32"), ("exponential", "ex2.approx")])
def test_inexact_instructions_are_listed_and_not_run(how: str, found: str | None) -> None:
    built = _divide(how)
    listed = list(built.inexact)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(1024).astype(np.float32), np.zeros(512, np.float32)
    if found is None:
        assert not listed
        run(built.ptx, (1,), [x, y], built.shared)
        assert np.array_equal(y, x[:512] / x[512:])
    else:
        assert any(name.startswith(found) for name in listed)
        with pytest.raises(PtxError, match="leaves open"):
            run(built.ptx, (1,), [x, y], built.shared)


def test_fused_multiply_adds_are_listed() -> None:
    assert inexact(_divide("plus", enable_fp_fusion=True).ptx) == {"fma.rn.f32": 4}
    assert not inexact(_divide("plus").ptx)


def test_fused_multiply_adds_of_minus_zero_are_products() -> None:
    """Triton 3.9.0 writes products of bf16 so for GPUs that have no others."""
    built = build(_scale_kernel, {"pair": _Pair("*bf16", "*bf16", Constant(3.0)), "n": "i32"}, {"B": 256}, "sm_80")
    assert not built.inexact


def test_an_interpreted_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="InterpretedFunction: with TRITON_INTERPRET=1"):
        build(InterpretedFunction(_divide_kernel.fn), {}, {}, "sm_90")


def test_arguments_are_complete_and_known() -> None:
    with pytest.raises(ValueError, match="has the arguments x, y, B, HOW; got x, B"):
        build(_divide_kernel, {"x": "*fp32"}, {"B": 1}, "sm_90")
    with pytest.raises(ValueError, match="z is no argument"):
        build(_divide_kernel, {"x": "*fp32", "y": "*fp32"}, {"B": 1, "HOW": ""}, "sm_90", divisible=("z",))
    with pytest.raises(ValueError, match="target sm_70 is none of"):
        build(_divide_kernel, {"x": "*fp32", "y": "*fp32"}, {"B": 1, "HOW": ""}, "sm_70")
