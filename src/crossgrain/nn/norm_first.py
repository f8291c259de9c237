"""`NormFirst`: the base class of modules that begin with a norm (`LayerNormLinear`, `LayerNormMLP`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..linear.parallel import local
from ..runtime.collectives import gathered_with_gradient
from .forward_pass import ForwardPass, TracedPass
from .linear_module import LinearModule, ParameterSpec
from .norm import NORMALIZATIONS, normalized


class NormFirst(LinearModule):
    """Base class of modules whose first linear layer takes a normalized input."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    return_layernorm_output_gathered: bool

    def _make_norm(
        self, size: int, eps: float, normalization: str, zero_centered_gamma: bool, factory: Mapping[str, Any]
    ) -> None:
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"{self.layer}: normalization must be one of {NORMALIZATIONS}, got {normalization!r}")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        neutral = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        marked = self.sequence_parallel
        self._make_parameter("layer_norm_weight", ParameterSpec((size,), neutral, sequence_parallel=marked), factory)
        if normalization == "LayerNorm":
            spec = ParameterSpec((size,), nn.init.zeros_, sequence_parallel=marked)
            self._make_parameter("layer_norm_bias", spec, factory)
        else:
            self.register_parameter("layer_norm_bias", None)

    def _normalized(self, x: Tensor, this: ForwardPass | TracedPass) -> Tensor:
        """Return norm(x) in high precision; the first linear layer quantizes it."""
        return normalized(
            x,
            local(self.layer_norm_weight),
            local(self.layer_norm_bias),
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
            dtype=this.dtype,
        )

    def _normalized_for_caller(self, x: Tensor) -> Tensor:
        """Return norm(x) as the caller gets it: the rows of this rank, or those of all ranks."""
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            return gathered_with_gradient(x, self.tp_group)
        return x
