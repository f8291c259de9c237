"""Whole planes against the golden vectors: per-tensor FP8, FP8 blocks, MXFP8, NVFP4.

Every field is compared bit for bit; neither of the relaxations that the golden README allows is used.
"""

import numpy as np
import torch

from crossgrain import kernels
from crossgrain.formats import DEFAULT_SIGN_MASK, fp8_block_format, fp8_format, get_element, mxfp8_format, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target
from crossgrain.kernels.reference import hadamard
from crossgrain.kernels.reference.packing import unpack
from crossgrain.kernels.reference.scaling import fp32_scales
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane

from ..common.golden_cases import encoded, golden

DIRECTIONS = {"row": ROWWISE, "col": COLUMNWISE}


def check_plane(case, prefix, plane):
    """All golden fields of one plane, each in the layout that the archives use."""
    case.check(f"{prefix}_data", plane.data)
    scales, operand = plane.operand_scales(), kernels.decode_operand(plane)
    if plane.direction is COLUMNWISE and not plane.transposed:  # MXFP8: stored as [M, K], and so in the archive
        scales, operand = scales.t(), operand.t()
    case.check_if_present(f"{prefix}_scale", scales)
    case.check_if_present(f"{prefix}_scale_te", plane.scale)
    case.check_if_present(f"{prefix}_amax", plane.amax)
    case.check_if_present(f"{prefix}_dq", operand)


@golden("fp8_current_scaling.npz")
def test_fp8_current_scaling(case):
    x, element = case.tensor(), get_element(case["fp8"])
    encoding = Encoding(fp8_format(element), power_of_two=case["pow2"], epsilon=case["eps"])
    for prefix, direction in DIRECTIONS.items():
        plane = empty_plane(encoding.format, direction, x.shape, device=x.device)
        (target,) = kernels.measure(x, [Target(plane, encoding)])
        kernels.encode(x, [target])
        check_plane(case, prefix, plane)
        case.check("amax", target.amax)
        case.check("scale_inv", plane.scale)
    factor = fp32_scales(target.amax, element, epsilon=case["eps"], power_of_two=case["pow2"]).factor
    case.check("scale", factor)
    case.assert_complete()


@golden("fp8_blockwise.npz")
def test_fp8_blocks(case):
    fmt = fp8_block_format(get_element(case["fp8"]), two_d=case["block"] == "128x128")
    encoding = Encoding(fmt, power_of_two=case["pow2"], epsilon=case["eps"])
    for prefix, direction in DIRECTIONS.items():
        check_plane(case, prefix, encoded(case.tensor(), encoding, direction))
    case.assert_complete()


@golden("mxfp8.npz", lambda case: case.name != "scale_swizzle")
def test_mxfp8(case):
    encoding = Encoding(mxfp8_format(get_element(case["fp8"]), two_d=case["two_d"]))
    for prefix, direction in DIRECTIONS.items():
        check_plane(case, prefix, encoded(case.tensor(), encoding, direction))
    case.assert_complete()


@golden("mxfp8.npz", lambda case: case.name == "scale_swizzle")
def test_scale_swizzle(case):
    compact = case.tensor("compact")
    swizzled = kernels.swizzle_scales(compact)
    case.check("swizzled", swizzled)
    case.check("compact", kernels.unswizzle_scales(swizzled, *compact.shape))
    case.assert_complete()


def nvfp4_encodings(case):
    """Rowwise and columnwise; only columnwise planes are ever rotated."""
    rotation = (DEFAULT_SIGN_MASK if case["random_sign"] else 0) if case["rht"] else None
    options = {"two_d": case["two_d"], "row_scaled": case["row_scaled"], "scale_bound": case.get("e4m3_max", 448)}
    four_over_six = case["err_mode"] if case.get("four_over_six") else None
    return {
        "row": Encoding(nvfp4_format(**options), four_over_six=four_over_six),
        "col": Encoding(nvfp4_format(**options, rotation=rotation), four_over_six=four_over_six),
    }


def check_nvfp4_planes(case):
    planes = {}
    for prefix, encoding in nvfp4_encodings(case).items():
        planes[prefix] = encoded(case.tensor(), encoding, DIRECTIONS[prefix])
        check_plane(case, prefix, planes[prefix])
    return planes


@golden("nvfp4.npz", lambda case: "x" in case and "pyref_row_data" not in case)
def test_nvfp4(case):
    planes = check_nvfp4_planes(case)
    if "rht_xt" in case:
        rotated = hadamard.rotate(case.tensor().t().to(torch.float32), planes["col"].format.rotation)
        case.check("rht_xt", rotated.to(torch.bfloat16))
    case.assert_complete()


@golden("nvfp4.npz", lambda case: "pyref_row_data" in case)
def test_nvfp4_special_values(case):
    """The Python reference differs from the kernels exactly by the documented rules, and nowhere else."""
    plane = check_nvfp4_planes(case)["row"]
    x = case.tensor()
    ours = unpack(plane.data, 4)
    theirs = unpack(case.tensor("pyref_row_data"), 4)
    their_scales = case.tensor("pyref_row_scale")
    if x.isnan().any():
        # Theirs: NaN reaches the global amax, hence every scale, and every element is NaN, which they encode as 0.
        assert (their_scales & 0x7F == 0x7F).all()
        assert (theirs == 0).all()
        assert (ours[x.isnan()] == 7).all()
        assert ((plane.operand_scales() & 0x7F) != 0x7F).all()
    else:
        negative_zero = (x == 0) & x.signbit()
        assert negative_zero.any()
        np.testing.assert_array_equal(ours != theirs, negative_zero)
        assert (ours[negative_zero] == 8).all() and (theirs[negative_zero] == 0).all()
        case.check("pyref_row_scale", plane.operand_scales())
    case.assert_complete()


@golden("nvfp4.npz", lambda case: case.name == "rht_matrix")
def test_rotation_matrix(case):
    mask = DEFAULT_SIGN_MASK
    case.check("sign_mask", np.array([mask], dtype=np.int32))
    case.check("signs", hadamard.signs(mask))
    case.check("matrix", hadamard.rotation_matrix(mask))
    case.check("matrix_nosign", hadamard.rotation_matrix(0))
    case.assert_complete()
