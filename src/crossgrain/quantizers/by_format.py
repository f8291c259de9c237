"""`quantizer_of`: the quantizer of a format."""

from __future__ import annotations

from ..formats import E4M3, E5M2, Format
from ..formats.dtypes import dtype_of_element
from ..planes import COLUMNWISE
from .any_format import FormatQuantizer
from .base import Quantizer
from .float8 import Float8CurrentScalingQuantizer
from .float8_block import Float8BlockQuantizer
from .identity import IdentityQuantizer
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer


def quantizer_of(fmt: Format) -> Quantizer:
    """Make the quantizer of a format, with its default options.

    NVFP4 formats with the lower scale bound (``nvfp4_max256``) select scales by 4-over-6, which needs that bound.
    """
    quantizer = _native_quantizer(fmt)
    if quantizer is None or quantizer.encoding(COLUMNWISE).format != fmt:
        quantizer = FormatQuantizer(fmt)
    return quantizer


def _native_quantizer(fmt: Format) -> Quantizer | None:
    """The quantizer class of a similar built-in format. It may not be able to make exactly this format."""
    tiles = fmt.block_rows > 1
    if fmt.is_identity:
        return IdentityQuantizer()
    if fmt.element in (E4M3, E5M2):
        dtype = dtype_of_element(fmt.element)
        if fmt.scale_rule == "e8m0_up":
            return MXFP8Quantizer(dtype, with_2d_quantization=tiles)
        if fmt.block is None:
            return Float8CurrentScalingQuantizer(dtype)
        return Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=2 if tiles else 1)
    if fmt.scale_rule == "two_level" and fmt.scale_element == E4M3:
        return NVFP4Quantizer(
            with_rht=fmt.rotation is not None,
            with_post_rht_amax=fmt.rotation is not None,
            with_2d_quantization=tiles,
            row_scaled_nvfp4=fmt.global_amax == "row",
            nvfp4_use_4over6=fmt.scale_bound != 448,  # 448 is the largest E4M3 number, the bound of plain NVFP4
            nvfp4_e4m3_max=fmt.scale_bound,
            with_random_sign_mask=fmt.rotation != 0,
        )
    return None
