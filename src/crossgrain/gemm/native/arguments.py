"""From two planes to the arguments of ``scaled_mm``: views where planes lie as the hardware reads them, else copies.

Hardware reads both operands along the summed dimension ("TN"): rows of ``a`` and columns of ``b`` are contiguous. So
are the operands of all planes but those whose columns are stored by rows (`planes.plane`): these are transposed here,
which is one pass over their codes. Scales of MXFP8 and NVFP4 are copied to the swizzled layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from ... import kernels
from ...planes import Plane, round_up
from .scaled_call import ScaledCall
from .scaling import Scaling, scaling_of, torch_dtype

_ALIGNMENT = 16  # bytes: where a row of codes may begin


class _Scales:
    """The scales of an operand: tensors, what they scale, and how they are stored."""

    def __init__(self, *scales: tuple[Tensor, ScalingType, SwizzleType | None]) -> None:
        self.tensors = [tensor for tensor, _, _ in scales]
        self.recipe = [recipe for _, recipe, _ in scales]
        self.swizzle = [swizzle for _, _, swizzle in scales if swizzle is not None]


def scaled_call(
    a: Plane, b: Plane, output_dtype: torch.dtype, bias: Tensor | None = None, alpha: float = 1.0
) -> ScaledCall:
    """The arguments with which ``scaled_mm`` multiplies two operands that `rules.refuses` does not refuse.

    Args:
        a: the first operand, [rows, summed dimension].
        b: the second operand, [columns, summed dimension].
        output_dtype: dtype of the result.
        bias: added to each row, in the dtype of the result; None for none.
        alpha: multiplies the product; 1 if the operands have no global scale.
    """
    first, second = scaling_of(a.format), scaling_of(b.format)
    assert first is not None and second is not None
    for plane in (a, b):
        plane.check_readable()
        plane.check_buffers()
    joint: list[Tensor | None] = [None, None]
    if first.has_global_scale:  # rounded once for both operands, as everywhere
        joint = list(kernels.joint_scale(kernels.global_scale(a), kernels.global_scale(b), alpha, a.data).split(1))
    scales = [_scales(*each) for each in ((a, first, joint[0]), (b, second, joint[1]))]
    return ScaledCall(
        _codes(a),
        _codes(b).t(),
        scales[0].tensors,
        scales[0].recipe,
        scales[0].swizzle,
        scales[1].tensors,
        scales[1].recipe,
        scales[1].swizzle,
        bias,
        output_dtype,
    )


def lies_as_read(codes: Tensor) -> bool:
    """Whether hardware can read codes [rows, bytes] where they are: contiguous rows that begin at multiples of 16."""
    return codes.stride(1) == 1 and codes.stride(0) % _ALIGNMENT == 0 and codes.storage_offset() % _ALIGNMENT == 0


def _codes(plane: Plane) -> Tensor:
    codes = plane.operand_codes()
    if not lies_as_read(codes):
        codes = codes.clone(memory_format=torch.contiguous_format)
    return codes.view(torch_dtype(plane.format))


def _scales(plane: Plane, scaling: Scaling, joint: Tensor | None) -> _Scales:
    if scaling is Scaling.TENSOR:
        assert joint is not None
        return _Scales((joint, ScalingType.TensorWise, None))
    if scaling is Scaling.ROWS:
        return _Scales((_by_columns(plane.operand_scales()), ScalingType.BlockWise1x128, None))
    if scaling is Scaling.TILES:
        return _Scales((_tile_scales(plane.operand_scales()), ScalingType.BlockWise128x128, None))
    swizzled = kernels.swizzle_scales(plane.operand_scales())
    if scaling is Scaling.MX:
        blocks = (swizzled.view(torch.float8_e8m0fnu), ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4)
        return _Scales(blocks)
    assert joint is not None
    blocks = (swizzled.view(torch.float8_e4m3fn), ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4)
    return _Scales(blocks, (joint, ScalingType.TensorWise, SwizzleType.NO_SWIZZLE))


def _by_columns(scales: Tensor) -> Tensor:
    """Scales [rows, blocks] with the strides (1, rows)."""
    if scales.stride() == (1, scales.shape[0]):
        return scales
    return scales.t().contiguous().t()


def _tile_scales(scales: Tensor) -> Tensor:
    """Scales [tiles, blocks] as [blocks padded to a multiple of 4, tiles], with the strides (1, padded blocks)."""
    tiles, blocks = scales.shape
    padded = round_up(blocks, 4)
    if padded == blocks and scales.is_contiguous():
        return scales.t()
    copied = torch.zeros(tiles, padded, dtype=scales.dtype, device=scales.device)
    copied[:, :blocks].copy_(scales)
    return copied.t()
