"""hybrid.npz and gemm.npz: planes of several formats put together."""

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import (
    DEFAULT_SIGN_MASK,
    E5M2,
    IDENTITY,
    fp8_block_format,
    fp8_format,
    mxfp8_format,
    nvfp4_format,
)
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target
from crossgrain.planes import COLUMNWISE, ROWWISE, Plane

from ..common.golden_cases import encoded, golden
from .test_golden_planes import check_plane

MXFP8 = Encoding(mxfp8_format())
NVFP4 = Encoding(nvfp4_format())
NVFP4_2D = Encoding(nvfp4_format(two_d=True))
NVFP4_RHT = Encoding(nvfp4_format(rotation=DEFAULT_SIGN_MASK))
NVFP4_ROW_SCALED = Encoding(nvfp4_format(row_scaled=True))
FP8 = Encoding(fp8_format())
FP8_E5M2 = Encoding(fp8_format(E5M2))
FP8_BLOCK = Encoding(fp8_block_format(), power_of_two=True)
FP8_BLOCK_2D = Encoding(fp8_block_format(two_d=True), power_of_two=True)

HYBRID_HALVES = {  # parts of the case names
    "mxfp8_row": MXFP8,
    "mxfp8_col": MXFP8,
    "nvfp4_row": NVFP4,
    "nvfp4_plain_col": NVFP4,
    "nvfp4_rht_col": NVFP4_RHT,
    "identity_col": Encoding(IDENTITY),
}


@golden("hybrid.npz")
def test_hybrid(case):
    x = case.tensor()
    row_name, column_name, source = case.name.split("__")
    assert source == case["columnwise_source"]
    row = encoded(x, HYBRID_HALVES[row_name], ROWWISE)
    check_plane(case, "row", row)
    dequantized = kernels.decode(row, x.dtype)
    case.check_if_present("row_dq_bf16", dequantized)

    column_input = x if source == "original" else dequantized
    column_encoding = HYBRID_HALVES[column_name]
    if column_encoding.format.is_identity:
        plane = Plane(IDENTITY, COLUMNWISE, tuple(x.shape), torch.empty_like(x))
        kernels.encode(column_input, [Target(plane, column_encoding)])
        case.check("col_hp", kernels.decode(plane, x.dtype))
        assert torch.equal(kernels.decode_operand(plane), column_input.float().t())
    else:
        check_plane(case, "col", encoded(column_input, column_encoding, COLUMNWISE))
    case.assert_complete()


GEMM_RECIPES = {  # (rowwise, columnwise) encodings of x, w, dy
    "mxfp8_e4m3": [(MXFP8, MXFP8)] * 3,
    "fp8_current_hybrid": [(FP8, FP8), (FP8, FP8), (FP8_E5M2, FP8_E5M2)],
    "fp8_block": [(FP8_BLOCK, FP8_BLOCK), (FP8_BLOCK_2D, FP8_BLOCK_2D), (FP8_BLOCK, FP8_BLOCK)],
    "nvfp4_plain": [(NVFP4, NVFP4)] * 3,
    "nvfp4_recipe_no_sr": [(NVFP4, NVFP4_RHT), (NVFP4_2D, NVFP4_2D), (NVFP4, NVFP4_RHT)],
    "nvfp4_rowscaled_x": [(NVFP4_ROW_SCALED, NVFP4_ROW_SCALED), (NVFP4, NVFP4), (NVFP4, NVFP4)],
}


@golden("gemm.npz")
def test_gemm(case):
    """Operands are bit-exact, so only the order of summation may differ, and tolerances follow from that."""
    operands = {}
    for role, encodings in zip(("x", "w", "dy"), GEMM_RECIPES[case.name], strict=True):
        for direction, encoding in zip((ROWWISE, COLUMNWISE), encodings, strict=True):
            plane = encoded(case.tensor(role), encoding, direction)
            operands[role, direction] = kernels.decode_operand(plane).numpy().astype(np.float64)

    products = {
        "y": (operands["x", ROWWISE], operands["w", ROWWISE]),
        "dx": (operands["dy", ROWWISE], operands["w", COLUMNWISE]),
        "dw": (operands["dy", COLUMNWISE], operands["x", COLUMNWISE]),
    }
    for name, (a, b) in products.items():
        out = a @ b.T
        # Two sums of n float64 products in different orders are at most 2 n eps/2 * sum|a||b| apart.
        bound = a.shape[1] * np.finfo(np.float64).eps * (np.abs(a) @ np.abs(b).T)
        assert (np.abs(out - case.input(f"{name}_f64")) <= bound).all(), name
        if f"{name}_ref_fp32" in case:
            check_against_fp32_gemm(case, name, out)
    case.assert_complete()


def check_against_fp32_gemm(case, name, out):
    """The Python reference GEMM adds 16-blocks up in fp32 and scales the sum: some fp32 roundings of numbers as large
    as the largest output, which the specification allows 1e-5 of it. In bf16, a number at a tie may fall either way."""
    reference = case.input(f"{name}_ref_fp32")
    assert np.abs(out - reference).max() <= 1e-5 * np.abs(reference).max(), name
    in_bf16 = torch.from_numpy(out).to(torch.float32).to(torch.bfloat16)
    steps = bf16_order(in_bf16) - bf16_order(case.tensor(f"{name}_ref_bf16"))
    assert steps.abs().max() <= 1, name


def bf16_order(values):
    """Integers that count bf16 numbers from zero: neighbours differ by one, and +0 and -0 are the same."""
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("a, b, distance", [(1.0, 1.0078125, 1), (-1.0, -1.0078125, -1), (0.0, -0.0, 0)])
def test_bf16_order_counts_neighbours(a, b, distance):
    first, second = torch.tensor([a, b], dtype=torch.bfloat16)
    assert bf16_order(second) - bf16_order(first) == distance
