"""The front door: quantize a tensor in a format by name."""

from __future__ import annotations

from torch import Tensor

from .any_format import FormatQuantizer
from .dtypes import dtype_of_element
from .float8 import Float8CurrentScalingQuantizer
from .float8_block import Float8BlockQuantizer
from .formats import E4M3, E5M2, Format, fp8_block_format, fp8_format, get_format, mxfp8_format, nvfp4_format
from .identity import IdentityQuantizer
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .quantizer import Quantizer
from .tensor import QuantizedTensor


def quantizer_for(format: str | Format, *, rowwise: bool = True, columnwise: bool = True) -> Quantizer:
    """The quantizer of a registered format, with its default options.

    NVFP4 with a lower scale bound (``nvfp4_max256``) means 4-over-6, which is what the bound is for.
    """
    fmt = get_format(format)
    usages = {"rowwise": rowwise, "columnwise": columnwise}
    if fmt.is_identity:
        return IdentityQuantizer(**usages)
    if fmt.element in (E4M3, E5M2):
        dtype = dtype_of_element(fmt.element)
        if fmt == fp8_format(fmt.element):
            return Float8CurrentScalingQuantizer(dtype, **usages)
        for two_d in (False, True):
            if fmt == fp8_block_format(fmt.element, two_d=two_d):
                return Float8BlockQuantizer(dtype, block_scaling_dim=1 + two_d, **usages)
            if fmt == mxfp8_format(fmt.element, two_d=two_d):
                return MXFP8Quantizer(dtype, with_2d_quantization=two_d, **usages)
    for two_d, row_scaled, bound in ((False, False, 448), (True, False, 448), (False, True, 448), (False, False, 256), (True, False, 256)):
        if fmt == nvfp4_format(two_d=two_d, row_scaled=row_scaled, scale_bound=bound):
            return NVFP4Quantizer(
                with_2d_quantization=two_d,
                row_scaled_nvfp4=row_scaled,
                nvfp4_use_4over6=bound != 448,
                nvfp4_e4m3_max=bound,
                **usages,
            )
    return FormatQuantizer(fmt, **usages)


def quantize(
    tensor: Tensor, format: str | Format, *, rowwise: bool = True, columnwise: bool = True
) -> QuantizedTensor:
    """``tensor`` in a registered format: ``quantize(x, "mxfp8").dequantize()``."""
    result = quantizer_for(format, rowwise=rowwise, columnwise=columnwise).quantize(tensor)
    assert isinstance(result, QuantizedTensor)
    return result
