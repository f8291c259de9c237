"""`quantize` and `quantizer_for`: quantize a tensor to a format by its name."""

from __future__ import annotations

from torch import Tensor

from ..formats import E4M3, E5M2, Format, get_format
from ..formats.dtypes import dtype_of_element
from ..planes import COLUMNWISE
from ..tensor import QuantizedTensor
from .any_format import FormatQuantizer
from .base import Quantizer
from .float8 import Float8CurrentScalingQuantizer
from .float8_block import Float8BlockQuantizer
from .identity import IdentityQuantizer
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer


def quantizer_for(format: str | Format, *, rowwise: bool = True, columnwise: bool = True) -> Quantizer:
    """Make the quantizer of a format, with its default options.

    NVFP4 formats with the lower scale bound (``nvfp4_max256``) select scales by 4-over-6, which needs that bound.

    Args:
        format: a format, or the name of a registered one.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.

    Raises:
        KeyError: there is no format of this name.
    """
    fmt = get_format(format)
    quantizer = _native_quantizer(fmt)
    if quantizer is None or quantizer.encoding(COLUMNWISE).format != fmt:
        quantizer = FormatQuantizer(fmt)
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
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
    if fmt.scale_rule == "two_level":
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


def quantize(tensor: Tensor, format: str | Format, *, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
    """Quantize a tensor to a registered format: ``quantize(x, "mxfp8").dequantize()``.

    The gradient passes through unchanged.

    Args:
        tensor: a float32, bfloat16 or float16 tensor.
        format: a format, or the name of a registered one (``crossgrain formats`` lists them).
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.

    Returns:
        A quantized tensor with the planes that were asked for.

    Raises:
        KeyError: there is no format of this name.
        TypeError: ``tensor`` is of another dtype.
        ValueError: the shape cannot be quantized in this format, or no direction is asked for.
    """
    result = quantizer_for(format, rowwise=rowwise, columnwise=columnwise).quantize(tensor)
    assert isinstance(result, QuantizedTensor)
    return result
