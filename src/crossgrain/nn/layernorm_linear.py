"""`LayerNormLinear`: a norm followed by a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linear.parallel import ParallelMode
from .compiled import compilable
from .linear import ParametersSplit, SingleLinear
from .linear_module import InitMethod, LinearModule
from .norm import Normalization
from .norm_first import NormFirst
from .options import options_for, parameter_options


class LayerNormLinear(NormFirst, SingleLinear):
    """``y = norm(x) · Wᵀ + b`` for x [..., in_features]. Options that are not listed here are those of `Linear`.

    Args:
        in_features: features of the input.
        out_features: features of the output, of the whole layer.
        eps: epsilon of the norm.
        normalization: "LayerNorm", or "RMSNorm", which has no bias.
        parallel_mode: "column" or None; a norm needs whole rows, so "row" is not possible.
        return_layernorm_output: return norm(x) too, as the last result.
        return_layernorm_output_gathered: with sequence parallelism, return norm(x) of the rows of all ranks.
        zero_centered_gamma: ``layer_norm_weight`` is stored as its difference from 1.

    Examples:
        >>> layer = cg.LayerNormLinear(32, 64)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = layer(torch.randn(32, 32))
        >>> y.shape
        torch.Size([32, 64])
        >>> y.sum().backward()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: ParallelMode | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: ParametersSplit = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        rng_tracker_name: str | None = None,
        **gpu_options: Any,
    ) -> None:
        super().__init__(**options_for(LinearModule.__init__, locals()))
        if parallel_mode == "row" and self.tp_size > 1:
            raise ValueError(
                f"{self.layer}: parallel_mode='row' is not possible: a norm needs whole rows, but each rank would have "
                "only a part of every row"
            )
        self.return_layernorm_output = return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        factory = parameter_options(params_dtype, device)
        self._make_norm(in_features, eps, normalization, zero_centered_gamma, factory)
        self._make_linear(in_features, out_features, init_method, parameters_split, factory)

    @compilable
    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """Compute the layer.

        Args:
            inp: x, [..., in_features].
            is_first_microbatch: see `Linear.forward`.
            fp8_output: return y quantized.
            fp8_grad: return the gradient of ``inp`` quantized.

        Returns:
            y; with ``return_bias`` or ``return_layernorm_output`` a tuple of y, the bias and norm(x).
        """
        this = self._forward_pass(inp, is_first_microbatch)
        with this.step:
            x = self._normalized(inp, this)
            y, bias = self._projected(x, this, quantized_output=fp8_output, quantized_grad_input=fp8_grad)
        extras = [bias] * self.return_bias
        if self.return_layernorm_output:
            extras.append(self._normalized_for_caller(x))
        return (y, *extras) if extras else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, normalization={self.normalization}, eps={self.eps}"
