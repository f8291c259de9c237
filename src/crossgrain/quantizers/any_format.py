"""Tensors and quantizers for any registered format. A new format that is only data needs no classes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import Format, get_format
from ..formats.encoding import Encoding, RandomSource, cached_encoding, check_random_source
from ..planes import Direction
from ..tensor import QuantizedTensor
from ..tensor.fields import DataScaleAndAmaxStorage
from .base import Quantizer


class FormatTensorStorage(DataScaleAndAmaxStorage):
    """The two planes of a tensor in a registered format.

    Examples:
        >>> quantizer = cg.quantizer_for("mxfp4")
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> type(quantizer(torch.ones(128, 128)))
        <class 'crossgrain.quantizers.any_format.FormatTensorStorage'>
    """

    def _init_fields(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        amax_rowwise: Tensor | None,
        amax_columnwise: Tensor | None,
        formats: Mapping[Direction, Format],
        quantizer: Quantizer | None,
        *,
        fake_dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        buffers = (
            rowwise_data,
            columnwise_data,
            rowwise_scale_inv,
            columnwise_scale_inv,
            amax_rowwise,
            amax_columnwise,
        )
        self._init_common(formats, quantizer, fake_dtype, shape, buffers)

    def get_metadata(self) -> dict[str, Any]:
        return self._common_metadata()

    def _build_default_quantizer(self) -> Quantizer:
        return FormatQuantizer(next(iter(self._formats.values())))


class FormatTensor(QuantizedTensor, FormatTensorStorage):
    """A tensor in a registered format.

    Examples:
        >>> q = cg.quantize(torch.ones(128, 128), "mxfp4")
        >>> isinstance(q, cg.FormatTensor)
        True
        >>> q.shape, q.dtype
        (torch.Size([128, 128]), torch.float32)
    """


class FormatQuantizer(Quantizer):
    """Quantizes to a registered format: ``FormatQuantizer("mxfp4")``.

    Args:
        format: a format, or the name of a registered one.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.
        stochastic_rounding: round stochastically instead of to the nearest number.
        random_source: the random bits of stochastic rounding: "hash", or "philox" as on a GPU (slower here).

    Raises:
        KeyError: there is no format of this name.
        ValueError: the format is "identity", or a random source is chosen without stochastic rounding.

    Examples:
        >>> quantizer = cg.FormatQuantizer("mxfp4")
        >>> quantizer(torch.full((32, 32), 1.4)).dequantize()[0, :3]
        tensor([1.5000, 1.5000, 1.5000])
    """

    _tensor_class = FormatTensor
    _value_fields = ("format", "stochastic_rounding", "random_source")
    random_source: RandomSource = "hash"  # of quantizers that were pickled before there was a choice

    def __init__(
        self,
        format: str | Format,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        stochastic_rounding: bool = False,
        random_source: RandomSource = "hash",
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.format = get_format(format)
        self.stochastic_rounding = stochastic_rounding
        self.random_source = random_source
        check_random_source(random_source, stochastic_rounding)
        if self.format.is_identity:
            raise ValueError(
                "FormatQuantizer cannot make the format 'identity', which has no codes: use IdentityQuantizer"
            )

    def _encoding(self, direction: Direction) -> Encoding:
        return cached_encoding(self.format, stochastic=self.stochastic_rounding, random=self.random_source)

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding
