"""Rows in groups, each with its own quantizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn import split_quantize as _split
from ...quantizer import Quantizer


def _split_quantize(
    tensor: Tensor,
    split_sizes: Sequence[int],
    quantizers: Sequence[Quantizer],
    activation_dtype: torch.dtype,
    *,
    with_quantized_output: bool = True,
    compute_dbias: bool = False,
    disable_bulk_allocation: bool = False,
) -> tuple[list[Any], list[Tensor | None]]:
    """The groups, quantized if asked, and the sum of each over its rows, if asked."""
    rows = tensor.reshape(-1, tensor.shape[-1]).to(activation_dtype)
    groups: list[Any] = list(rows.split(list(split_sizes)))
    sums: list[Tensor | None] = [group.sum(0) for group in groups] if compute_dbias else [None] * len(groups)
    if with_quantized_output:
        groups = list(_split.split_quantize(rows, split_sizes, quantizers))
    return groups, sums


def split_rows(
    tensor: Tensor, split_sizes: Sequence[int], quantizers: Sequence[Quantizer], *args: Any, **options: Any
) -> list[Any]:
    """The groups, quantized, by hybrids or others; further arguments are about memory."""
    return list(_split.split_quantize(tensor.reshape(-1, tensor.shape[-1]), split_sizes, quantizers))
