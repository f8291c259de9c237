"""`layer_estimate` and `gemm_seconds`: what one linear layer costs, by the figures that a plan adds up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch

from ..recipe import GemmRecipe
from ..recipe.base import BackwardOverride
from ..recipe.layer_formats import LayerFormats
from ..recipe.syntax import did_you_mean
from .devices import Device, device_of
from .layer_cost import gathered_planes, layer_cost
from .plane_bytes import DTYPES, Gathered
from .price import price
from .result import Work


@dataclass(frozen=True)
class LayerEstimate:
    """What a linear layer costs in one micro batch.

    Attributes:
        gemms: work and time by GEMM: "fprop", "dgrad" and "wgrad".
        saved_input: bytes that are saved of the input for backward.
        saved_weight: bytes of the plane of the weight that is saved for backward; 0 if the weight is kept quantized.
        gathered: bytes of the weight, as FSDP gathers its planes.
        without_rate: formats whose elements have no published rate. They are counted as bf16.
        decoded: formats that the device does not multiply natively. They are counted as bf16.

    Examples:
        >>> estimate = cg.planning.layer_estimate("mxfp8", tokens=8192, inputs=4096, outputs=4096)
        >>> list(estimate.gemms)
        ['fprop', 'dgrad', 'wgrad']
        >>> estimate.saved_input / (8192 * 4096)
        1.03125
    """

    gemms: Mapping[str, Work]
    saved_input: int
    saved_weight: int
    gathered: Gathered
    without_rate: tuple[str, ...] = ()
    decoded: tuple[str, ...] = ()

    @property
    def seconds(self) -> dict[str, float]:
        """The time of each GEMM."""
        return {name: work.seconds for name, work in self.gemms.items()}


def layer_estimate(
    recipe: GemmRecipe | str,
    layer: str = "",
    *,
    tokens: int,
    inputs: int,
    outputs: int,
    device: str | Device = "b200",
    dtype: str = "bf16",
    module_type: str = "linear",
    experts: int = 1,
    ranks: int = 1,
    weight_is_quantized: bool = False,
    gemm_efficiency: float = 1.0,
) -> LayerEstimate:
    """Estimate what one linear layer costs, by the same figures as `plan`. Nothing is run.

    >>> fprop = layer_estimate("mxfp8", tokens=8192, inputs=4096, outputs=4096).seconds["fprop"]
    >>> round(fprop * 1e6, 1)  # 2 * 8192 * 4096**2 / 4500e12 seconds
    61.1

    Args:
        recipe: the recipe, or its text.
        layer: name of the layer, for rules of the recipe.
        tokens: rows of the input; of a grouped layer those of all experts, which get equal parts.
        inputs: features of the input.
        outputs: features of the output.
        device: the GPU: a name, also with changed figures (``b200, fp4=8000``), or a `Device`.
        dtype: dtype of activations, and of the weight in high precision: "fp32", "bf16" or "fp16".
        module_type: type of the layer: "linear" or "grouped_linear".
        experts: number of weights of a grouped layer.
        ranks: number of ranks that FSDP divides the weight among.
        weight_is_quantized: the parameter is kept quantized, so the layer saves none of it.
        gemm_efficiency: the part of the peak rate that GEMMs reach.

    Raises:
        ValueError: a size is not positive, there is no such device or dtype, the operands of a GEMM cannot be
            multiplied, or a weight that is kept quantized cannot be divided into blocks.
    """
    for name, size in {
        "tokens": tokens,
        "inputs": inputs,
        "outputs": outputs,
        "experts": experts,
        "ranks": ranks,
    }.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype cannot be {dtype!r}{did_you_mean(dtype, DTYPES)}")
    recipe = GemmRecipe.load(recipe)
    return _estimate(
        recipe.layer_formats(layer, module_type).without_reasons(),
        recipe.backward_override,
        (tokens, inputs, outputs),
        device_of(device),
        DTYPES[dtype],
        experts,
        ranks,
        weight_is_quantized,
        gemm_efficiency,
    )


@lru_cache(maxsize=4096)
def _estimate(
    chosen: LayerFormats,
    override: BackwardOverride,
    sizes: tuple[int, int, int],
    device: Device,
    dtype: torch.dtype,
    experts: int,
    ranks: int,
    weight_is_quantized: bool,
    efficiency: float,
) -> LayerEstimate:
    """The estimate of all layers with equal formats and sizes."""
    tokens, inputs, outputs = sizes
    rows = math.ceil(tokens / experts)
    cost = layer_cost(chosen, override, rows, inputs, outputs, dtype, weight_is_quantized)
    prices = {gemm.name: price(gemm, device, efficiency) for gemm in cost.gemms}
    gathered = gathered_planes(
        chosen, override, (outputs, inputs), ranks, dtype, tokens=rows, kept_quantized=weight_is_quantized
    )
    work = {
        gemm.name: Work(gemm.name, gemm.format, own.kind, gemm.flops * experts, own.seconds * experts)
        for gemm, own in zip(cost.gemms, prices.values(), strict=True)
    }
    return LayerEstimate(
        gemms=MappingProxyType(work),
        saved_input=cost.saved_input * experts,
        saved_weight=cost.saved_weight * experts,
        gathered=Gathered(*(size * experts for size in gathered)),
        without_rate=_formats(gemm.format for gemm in cost.gemms if prices[gemm.name].missing),
        decoded=_formats(gemm.format for gemm in cost.gemms if prices[gemm.name].decoded),
    )


def gemm_seconds(
    recipe: GemmRecipe | str,
    layer: str = "",
    *,
    tokens: int,
    inputs: int,
    outputs: int,
    device: str | Device = "b200",
    dtype: str = "bf16",
    module_type: str = "linear",
    experts: int = 1,
) -> dict[str, float]:
    """The time of each GEMM of a linear layer, at published rates: ``{"fprop": ..., "dgrad": ..., "wgrad": ...}``.

    Args and errors are those of `layer_estimate`, which also returns bytes.

    Examples:
        >>> seconds = cg.planning.gemm_seconds("mxfp8", tokens=8192, inputs=4096, outputs=4096)
        >>> {gemm: round(1e6 * time, 1) for gemm, time in seconds.items()}
        {'fprop': 61.1, 'dgrad': 61.1, 'wgrad': 61.1}
    """
    return layer_estimate(
        recipe,
        layer,
        tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        device=device,
        dtype=dtype,
        module_type=module_type,
        experts=experts,
    ).seconds


def _formats(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
