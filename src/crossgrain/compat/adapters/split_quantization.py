"""Split a tensor into groups of rows and quantize each group with its own quantizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...linear import split_quantize as _split
from ...quantizers.base import Quantizer
from ...quantizers.hybrid import HybridQuantizer


def _split_quantize(
    tensor: Tensor,
    split_sizes: Sequence[int],
    quantizers: Sequence[Quantizer | None] | None,
    activation_dtype: torch.dtype,
    *,
    with_quantized_output: bool = True,
    compute_dbias: bool = False,
    disable_bulk_allocation: bool = False,
) -> tuple[list[Any], list[Tensor] | None]:
    """Return the groups, quantized if there are quantizers for them, and with ``compute_dbias`` their sums over rows.

    Raises:
        ValueError: the number of quantizers is not that of the groups.
    """
    if quantizers is not None and len(quantizers) != len(split_sizes):
        raise ValueError(
            f"the quantizer count does not match the number of groups: {len(quantizers)} quantizers for "
            f"{len(split_sizes)} groups"
        )
    rows = tensor.reshape(-1, tensor.shape[-1]).to(activation_dtype)
    groups: list[Any] = list(rows.split(list(split_sizes)))
    sums = [group.sum(0) for group in groups] if compute_dbias else None
    given = [quantizer for quantizer in quantizers or () if quantizer is not None]
    if with_quantized_output and given:
        groups = split_rows(rows, split_sizes, given)
    return groups, sums


def split_rows(
    tensor: Tensor, split_sizes: Sequence[int], quantizers: Sequence[Quantizer], *args: Any, **options: Any
) -> list[Any]:
    """Return the quantized groups. Further arguments, which are about memory, are ignored."""
    usages = [quantizer.get_usages() for quantizer in quantizers]
    if any(other != usages[0] for other in usages):
        raise ValueError(
            "all groups must be quantized in the same directions, but the quantizers have mixed parent usage flags: "
            f"{usages}"
        )
    return list(_split.split_quantize(tensor.reshape(-1, tensor.shape[-1]), split_sizes, quantizers))


def split_rows_hybrid(
    tensor: Tensor, split_sizes: Sequence[int], quantizers: Sequence[Quantizer], *args: Any, **options: Any
) -> list[Any]:
    """Like `split_rows`, but all quantizers must be hybrids."""
    names = [type(quantizer).__name__ for quantizer in quantizers]
    if not all(isinstance(quantizer, HybridQuantizer) for quantizer in quantizers):
        raise TypeError(f"every group needs a HybridQuantizer here, got {', '.join(names)}")
    return split_rows(tensor, split_sizes, quantizers, *args, **options)
