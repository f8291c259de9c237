"""The formats that programs are judged by, against golden vectors; and that they are written without the library."""

import ast
from pathlib import Path

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest

from ..common.golden_cases import assert_same_bits, golden
from . import transcription as tr

DTYPE_MAX = {"fp32": np.finfo(np.float32).max, "bf16": 3.3895313892515355e38, "fp16": 65504.0}


def as_float32(case, field="x"):
    return case.tensor(field).float().numpy()


def packed(codes, fmt):
    """As bytes are stored: two codes of four bits in one, the first in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4 if fmt.element == "e2m1" else codes


def check_direction(case, prefix, fmt, *, transposed=True):
    """Codes, scales, amax and numbers of one direction, in the layouts of the archive."""
    x = as_float32(case)
    plane = tr.encode(x if prefix == "row" else x.T, fmt, infinite=DTYPE_MAX[case["x_dtype"]])
    turn = prefix == "col" and not transposed
    scales = plane.scales
    if fmt.rule in ("e8m0_up", "two_level") and fmt.block[0] > 1:
        scales = scales.repeat(fmt.block[0], 0)  # stored once for each row
    case.check(f"{prefix}_data", packed(plane.codes, fmt).T if turn else packed(plane.codes, fmt))
    if fmt.block is not None:
        case.check_if_present(f"{prefix}_scale", scales.T if turn else scales)
    case.check_if_present(f"{prefix}_amax", plane.amax)
    numbers = tr.decode(plane, fmt)
    case.check_if_present(f"{prefix}_dq", numbers.T if turn else numbers)
    return plane


@golden("element_casts.npz", lambda case: case.name in ("all_bf16", "fp32_boundaries"))
def test_casts(case):
    x = as_float32(case)
    for element, field in (("e4m3", "e4m3_sat"), ("e5m2", "e5m2_sat"), ("e2m1", "e2m1_code")):
        case.check(field, tr.cast(x, element))
    if "e8m0_up" in case:
        positive = ~np.signbit(x)
        np.testing.assert_array_equal(tr.e8m0_up(x[positive]), case.input("e8m0_up")[positive])


@golden("element_casts.npz", lambda case: case.name == "decode_tables")
def test_decode_tables(case):
    for element in ("e4m3", "e5m2", "e2m1"):
        case.check(element, tr.decode_table(element))
    case.check("e8m0", tr.e8m0_value(np.arange(256)))
    case.check("e8m0_reciprocal", tr.e8m0_reciprocal(np.arange(256)))
    case.assert_complete()


@golden("fp8_current_scaling.npz")
def test_fp8(case):
    fmt = tr.Format("fp8", case["fp8"], power_of_two=case["pow2"], epsilon=case["eps"])
    for prefix in ("row", "col"):
        plane = check_direction(case, prefix, fmt)
    case.check("scale_inv", plane.scales.reshape(1))
    case.check("amax", tr.amax_of(as_float32(case)).reshape(1))


@golden("fp8_blockwise.npz")
def test_fp8_blocks(case):
    block = (1, 128) if case["block"] == "1x128" else (128, 128)
    fmt = tr.Format("fp8_block", case["fp8"], block, power_of_two=case["pow2"], epsilon=case["eps"])
    for prefix in ("row", "col"):
        check_direction(case, prefix, fmt)


@golden("mxfp8.npz", lambda case: case.name != "scale_swizzle")
def test_mxfp8(case):
    fmt = tr.Format("mxfp8", case["fp8"], (32, 32) if case["two_d"] else (1, 32), "e8m0_up")
    for prefix in ("row", "col"):
        check_direction(case, prefix, fmt, transposed=False)
    case.assert_complete()


@golden("nvfp4.npz", lambda case: "x" in case and not case.get("four_over_six"))
def test_nvfp4(case):
    block, amax = ((16, 16) if case["two_d"] else (1, 16)), "row" if case["row_scaled"] else "tensor"
    fmt = tr.Format("nvfp4", "e2m1", block, "two_level", amax)
    check_direction(case, "row", fmt)
    if not case["rht"]:  # the transcription has no rotation
        check_direction(case, "col", fmt)


@golden("hybrid.npz", lambda case: "rht" not in case.name and "identity" not in case.name)
def test_hybrids(case):
    row, column, source = case.name.split("__")
    rows, columns = tr.FORMATS[row.partition("_")[0]], tr.FORMATS[column.partition("_")[0]]
    plane = check_direction(case, "row", rows)
    numbers = tr.decode(plane, rows).astype(ml_dtypes.bfloat16)
    case.check("row_dq_bf16", numbers.view(np.uint16))
    x = as_float32(case) if source == "original" else numbers.astype(np.float32)
    made = tr.encode(x.T, columns, infinite=DTYPE_MAX["bf16"])
    stored_transposed = columns.element == "e2m1"
    case.check("col_data", packed(made.codes, columns) if stored_transposed else made.codes.T)
    case.check("col_scale", made.scales if stored_transposed else made.scales.T)
    case.check_if_present("col_amax", made.amax)
    case.assert_complete()


def test_mxfp4_agrees_with_gfloat():
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 32)) * np.exp2(rng.integers(-30, 30, (64, 1)))).astype(np.float32)
    x[0] = 0
    info = gfloat.formats.format_info_mxfp4_e2m1
    plane = tr.encode(x, tr.FORMATS["mxfp4"])
    for row, block in enumerate(x.astype(np.float64)):
        scale = gfloat.compute_scale_amax(info.etype.emax, block)
        expected = list(gfloat.encode_block(info, scale, block / scale))
        np.testing.assert_array_equal([*plane.scales[row], *plane.codes[row]], expected)
    values = [gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in x.astype(np.float64)]
    assert_same_bits(tr.decode(plane, tr.FORMATS["mxfp4"]), np.array(values, dtype=np.float32))


@pytest.mark.parametrize("name", [name for name, fmt in tr.FORMATS.items() if fmt.symmetric])
def test_symmetric_formats_have_the_same_codes_in_both_directions(name):
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    row, column = (tr.encode(operand, tr.FORMATS[name]) for operand in (x, x.T))
    np.testing.assert_array_equal(row.codes, column.codes.T)
    np.testing.assert_array_equal(row.scales, column.scales.T)


def test_the_transcription_shares_no_code_with_the_library():
    tree = ast.parse(Path(tr.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert imported == {"__future__", "functools", "typing", "numpy"}
