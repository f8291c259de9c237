"""Exact numbers of bytes: of planes in memory, of planes that are sent, and of optimizer states.

This module does not know how many bits a format has. It makes planes on the meta device, with the quantizers of the
layers, and counts the bytes of their buffers, including padding of scales and amaxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..distributed.weight_shard import WeightLayout
from ..formats.dtypes import DType
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane
from ..planes.transport import Shipment, kind_of
from ..quantizers.base import Quantizer
from ..quantizers.float8 import Float8CurrentScalingQuantizer
from ..recipe import GemmRecipe
from ..recipe.layer_formats import Choice, LayerFormats

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOMENTS = ("fp32", "bf16", "fp16", "fp8")
MASTERS = ("fp32", "fp16", "remainder", "none")

_META = torch.device("meta")


def quantizer_for(chosen: LayerFormats, tensor: str) -> Quantizer:
    """The quantizer of a tensor, which makes all planes at once; late ones have the same number of bytes.

    Delayed scaling is replaced by current scaling, which stores the same bytes.
    """
    formats = tuple(
        (place, choice if choice.value.delayed is None else Choice(choice.value.without(["delayed"]), choice.why))
        for place, choice in chosen.formats
    )
    sources = tuple((name, Choice(choice.value.removesuffix("_late"), choice.why)) for name, choice in chosen.sources)
    quantizer = replace(chosen, formats=formats, sources=sources).quantizer(tensor)
    assert isinstance(quantizer, Quantizer)
    return quantizer


@lru_cache(maxsize=4096)
def planes_of(
    chosen: LayerFormats, tensor: str, shape: tuple[int, int], dtype: torch.dtype, directions: tuple[Direction, ...]
) -> tuple[Plane, ...]:
    """The planes of a tensor in these directions, without memory.

    Raises:
        ValueError: the shape cannot be divided into blocks.
    """
    # The rowwise plane is always made: the columnwise plane may be another view of it.
    storing = quantizer_for(chosen, tensor).storing(rowwise=True, columnwise=COLUMNWISE in directions)
    made: Any = storing.make_empty(shape, dtype=dtype, device=_META)
    return tuple(made.plane(direction) for direction in directions)


def plane_bytes(
    chosen: LayerFormats, tensor: str, shape: tuple[int, int], dtype: torch.dtype, directions: tuple[Direction, ...]
) -> int:
    """Bytes of the planes of these directions. A buffer that they share is counted once."""
    return buffer_bytes(planes_of(chosen, tensor, shape, dtype, directions))


def buffer_bytes(planes: Iterable[Plane]) -> int:
    """Bytes of the buffers of planes. A buffer that they share is counted once."""
    buffers = {id(buffer): buffer.nbytes for plane in planes for buffer in plane.buffers()}
    return sum(buffers.values())


# ---- on the wire -----------------------------------------------------------------------------------


class Gathered(NamedTuple):
    """Bytes of a whole weight, as all ranks send it.

    Attributes:
        forward: for forward, which reads rowwise planes.
        backward: for backward, which reads columnwise planes.
        both: one gather for both passes.

    Examples:
        >>> gathered = cg.planning.layer_estimate("mxfp8", tokens=8192, inputs=4096, outputs=4096).gathered
        >>> gathered.forward / 4096**2  # a byte for each number, and a scale for 32 of them
        1.03125
    """

    forward: int
    backward: int
    both: int


def gathered_bytes(
    recipe: GemmRecipe | str,
    shape: Sequence[int],
    *,
    ranks: int = 1,
    layer: str = "",
    module_type: str = "linear",
    dtype: torch.dtype = torch.bfloat16,
) -> Gathered:
    """Bytes of a quantized weight in an all-gather: rowwise planes for forward, columnwise planes for backward.

    Each rank sends the codes and scales of its rows without padding, and the scale or amax of the whole tensor, which
    is a few bytes. A rank whose rows end inside a block sends the whole block. If one direction can be made from the
    other, ``both`` is only one of them.

    >>> forward, backward, _ = gathered_bytes("mxfp8-fwd-nvfp4-bwd", (4096, 4096), ranks=8)
    >>> forward / 4096**2, backward / 4096**2  # 1 + 1/32 and 1/2 + 1/16
    (1.03125, 0.5625...)

    Args:
        recipe: the recipe, or its text.
        shape: shape of the weight.
        ranks: number of ranks that have a part of the weight.
        layer: name of the layer, for rules of the recipe.
        module_type: type of the layer: "linear" or "grouped_linear".
        dtype: dtype of the weight in high precision.

    Raises:
        ValueError: the shape does not have two dimensions, or cannot be divided into blocks.
    """
    if len(shape) != 2:
        raise ValueError(f"the weight of a linear layer must have two dimensions, got shape {list(shape)}")
    chosen = GemmRecipe.load(recipe).layer_formats(layer, module_type)
    return gathered_by_formats(chosen, (shape[0], shape[1]), ranks, dtype)


def gathered_by_formats(
    chosen: LayerFormats,
    shape: tuple[int, int],
    ranks: int,
    dtype: torch.dtype,
    *,
    padded: tuple[int, int] | None = None,
    directions: tuple[Direction, ...] = (ROWWISE, COLUMNWISE),
) -> Gathered:
    """`gathered_bytes` for the formats of a layer.

    Args:
        chosen: the formats.
        shape: shape of the weight.
        ranks: number of ranks.
        dtype: dtype of the weight in high precision.
        padded: shape with padding, as it is quantized; by default ``shape``.
        directions: directions that GEMMs read, whose blocks must not be divided between shards. With rows alone,
            backward reads them too.
    """
    padded = shape if padded is None else padded
    windows = WeightLayout("weight", quantizer_for(chosen, "weight"), shape, padded, directions).windows(ranks)

    def sent(*planes: Plane) -> int:
        kinds = tuple(kind_of(plane) for plane in planes)
        return ranks * Shipment(padded, tuple(windows), kinds).bytes_per_rank()

    if COLUMNWISE not in directions:
        (rows,) = planes_of(chosen, "weight", padded, dtype, (ROWWISE,))
        return Gathered(sent(rows), sent(rows), sent(rows))
    rows, columns = planes_of(chosen, "weight", padded, dtype, (ROWWISE, COLUMNWISE))
    one_serves_both = rows.data is columns.data or (rows.format == columns.format and rows.format.is_symmetric)
    return Gathered(sent(rows), sent(columns), sent(rows) if one_serves_both else sent(rows, columns))


def numbers_in_shards(shape: Sequence[int], ranks: int) -> int:
    """Numbers of a parameter that FSDP2 sends: every rank sends as many rows as the largest shard has."""
    return math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) if shape else ranks


# ---- optimizer -------------------------------------------------------------------------------------


def moment_bytes(shape: Sequence[int], stored_as: str) -> int:
    """Bytes of one moment of a parameter."""
    numel = math.prod(shape)
    if stored_as != "fp8":
        scale = 4 if stored_as == "fp16" else 0  # fp16 states have an fp32 scale
        return numel * DTYPES[stored_as].itemsize + scale
    made: Any = _fp8_state().make_empty(tuple(shape) or (1,), device=_META)
    return buffer_bytes(made.planes())


@lru_cache(maxsize=1)
def _fp8_state() -> Quantizer:
    return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, _META, columnwise=False)


def master_bytes(shape: Sequence[int], stored_as: str, quantized: bool, dtype: torch.dtype) -> int:
    """Bytes of the master of a parameter; 0 if the fused optimizers keep none."""
    if stored_as == "none" or (dtype == torch.float32 and not quantized):
        return 0
    if stored_as == "remainder":
        return math.prod(shape) * (2 if dtype == torch.bfloat16 and not quantized else 4)
    return moment_bytes(shape, stored_as)
