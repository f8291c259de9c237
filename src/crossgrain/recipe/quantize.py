"""`quantize` and `quantizer_for`: quantize a tensor to a format that is written as in a recipe."""

from __future__ import annotations

from torch import Tensor

from ..formats import Format
from ..quantizers.base import Quantizer
from ..quantizers.by_format import quantizer_of
from ..tensor import QuantizedTensor
from .format_spec import FormatSpec


def quantizer_for(format: str | FormatSpec | Format, *, rowwise: bool = True, columnwise: bool = True) -> Quantizer:
    """Make a quantizer.

    Args:
        format: a format, or its name as in a recipe, with or without options: ``"nvfp4(rht, sr)"``.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.

    Returns:
        A new quantizer. Called with a tensor, it returns a `QuantizedTensor`.

    Raises:
        RecipeSyntaxError: there is no such format, or it does not have such an option; a ValueError.
        ValueError: options exclude each other, or the format needs a history (``delayed``).

    Examples:
        >>> quantizer = cg.quantizer_for("nvfp4(sr)", columnwise=False)
        >>> quantizer.stochastic_rounding
        True
        >>> type(quantizer(torch.ones(32, 32)))
        <class 'crossgrain.quantizers.nvfp4.NVFP4Tensor'>
    """
    if isinstance(format, Format):
        quantizer = quantizer_of(format)
    else:
        spec = FormatSpec.parse(format)
        made = spec.quantizer()
        if not isinstance(made, Quantizer):
            raise ValueError(
                f"{spec}: a quantizer with delayed scaling needs a history, which only a layer has. Use this format in "
                "the recipe of a layer, or leave out the option delayed"
            )
        quantizer = made
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    return quantizer


def quantize(
    tensor: Tensor, format: str | FormatSpec | Format, *, rowwise: bool = True, columnwise: bool = True
) -> QuantizedTensor:
    """Quantize a tensor: ``quantize(x, "nvfp4(2d)").dequantize()``.

    The gradient passes through unchanged.

    Args:
        tensor: a float32, bfloat16 or float16 tensor.
        format: a format, or its name as in a recipe, with or without options (``crossgrain formats`` lists the names).
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.

    Returns:
        A quantized tensor with the planes that were asked for.

    Raises:
        RecipeSyntaxError: there is no such format, or it does not have such an option; a ValueError.
        TypeError: ``tensor`` is of another dtype.
        ValueError: the shape cannot be quantized in this format, or no direction is asked for.

    Examples:
        >>> q = cg.quantize(torch.full((32, 32), 1.05), "mxfp8")
        >>> q.dequantize()[0, :3]
        tensor([1., 1., 1.])
        >>> cg.quantize(torch.ones(32, 32), "nvfp4(sr)", rowwise=False).plane(cg.ROWWISE) is None
        True
    """
    result = quantizer_for(format, rowwise=rowwise, columnwise=columnwise).quantize(tensor)
    assert isinstance(result, QuantizedTensor)
    return result
