"""`GroupedLinear`: one linear layer per group of rows, as for experts: ``y[rows of g] = x[rows of g] · W_gᵀ + b_g``.

A group consists of consecutive rows. The sizes of the groups are an extra input, and a group may be empty. Each group
has its own weight and quantizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...gemm.activations import compute_dtype
from ...linear.call import Needs, check_input
from ...linear.grouped_function import Groups, grouped_backward, grouped_forward, in_memory
from ...linear.padding import NO_PADDING, Padding
from ...nn.grouped_parameters import GroupedParameters
from ...nn.linear_module import calibrate
from ...nn.module_interface import Mode
from ...nn.options import parameter_options
from ...quantizers.base import Quantizer
from ...recipe import QuantizerRole, Recipe
from ...runtime.host_and_device import on_device
from ..computation import ComputationWithExtras
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients, Kwargs
from .linear import LinearOperation
from .parameters import init_weight

# Keyword arguments: memory of the caller's that the output, or the gradient of the input, is written to.
OUTPUT_BUFFER_KEY = "output_buffer"
GRAD_INPUT_BUFFER_KEY = "grad_input_buffer"


class GroupedLinear(GroupedParameters, ComputationWithExtras, LinearOperation):
    """A linear operation for each group of rows.

    Its extra inputs are the sizes of the groups [num_groups], and with ``scale_bias`` a factor for the bias of each
    row.

    Args:
        num_groups: number of groups.
        in_features: features of the input.
        out_features: features of the output.
        bias: add a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        rng_state_tracker_function: returns a tracker of random states for the initialization.
        accumulate_into_main_grad: add weight gradients to ``weight.main_grad``, which the caller provides.
        single_grouped_weight: have one parameter ``weight`` [groups, out, in] instead of ``weight0``, ``weight1``, ...
            If it is kept quantized in a format with a scale for the whole tensor, all groups share one scale.
        single_grouped_bias: have one parameter ``bias`` [groups, out] instead of ``bias0``, ``bias1``, ...
        delay_wgrad_compute: compute weight gradients not in backward, but when `backward_dw` is called.
        scale_bias: multiply the bias of each row by a factor, which is an extra input.
        name: name of the layer, for recipes and messages.

    Examples:
        >>> experts = cg.ops.GroupedLinear(2, 32, 64)
        >>> experts(torch.randn(48, 32), torch.tensor([16, 32])).shape  # 16 rows for the first, 32 for the second
        torch.Size([48, 64])
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if num_groups < 1:
            raise ValueError(f"{self.layer}: num_groups must be at least 1, got {num_groups}")
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias and bias
        self.delay_wgrad_compute = delay_wgrad_compute
        self.scale_bias = scale_bias and bias
        self.num_extra_inputs = 2 if self.scale_bias else 1
        self._rng_tracker = rng_state_tracker_function
        self._make_parameters(parameter_options(dtype, device))

    # ---- parameters ----------------------------------------------------------------------------

    def _make_parameters(self, factory: Mapping[str, Any]) -> None:
        groups, rows, columns = self.num_groups, self.out_features, self.in_features
        weights = torch.empty(groups, rows, columns, **factory)
        if not weights.is_meta:
            for weight in weights:
                init_weight(weight, self._rng_tracker)
        for name, value in zip(self.weight_names, [weights] if self.single_grouped_weight else weights, strict=True):
            self._register_weight(name, value.clone())
        try:
            self._group_weights()
        except ValueError as error:
            raise ValueError(
                f"{self.layer}: one weight for {groups} groups cannot be quantized: {error}. Use "
                "single_grouped_weight=False"
            ) from error
        shape = (groups, rows) if self.single_grouped_bias else (rows,)
        for name in self.bias_names:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, **factory)))

    def reset_parameters(self) -> None:
        """Initialize the parameters again. Those on the meta device get memory on the default device."""
        weights = [self._named(name) for name in self.weight_names]
        if weights[0].is_meta:
            self._make_parameters({"dtype": weights[0].dtype, "device": torch.get_default_device()})
            return
        with torch.no_grad():
            for weight in weights:
                value = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                for matrix in value.view(-1, self.out_features, self.in_features):
                    init_weight(matrix, self._rng_tracker)
                weight.copy_(value)
            for name in self.bias_names:
                self._parameters[name].zero_()  # type: ignore[union-attr]

    def pre_first_fuser_forward(self) -> None:
        if self._named(self.weight_names[0]).is_meta:
            self.reset_parameters()

    @property
    def _groups(self) -> int:
        return self.num_groups

    @property
    def _biased(self) -> bool:
        return self.has_bias

    def _group_biases(self) -> list[Tensor] | list[None]:
        return [bias if bias is None else bias.detach() for bias in super()._group_biases()]  # type: ignore[return-value]

    # ---- quantizers ----------------------------------------------------------------------------

    def num_quantizers(self, mode: Mode) -> int:
        return self.num_groups * (2 if mode == "forward" else 1)

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole | None]:  # type: ignore[override]
        tensors = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole("grouped_linear", tensor, self.name or "") for tensor in tensors * self.num_groups]

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        forward, backward = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
        return [
            {"input": forward[2 * g], "weight": forward[2 * g + 1], "grad_output": backward[g]}
            for g in range(self.num_groups)
        ]

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> Padding:
        self._check_groups_alike(recipe, quantizers)
        return self._padding(recipe, self._gemm_operands(quantizers)[0])

    def get_input_quantizer(self) -> Quantizer | None:
        """Always None: each group quantizes its own rows, so the operation before cannot do it."""
        return None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return None

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        if self._recipe is None:
            return
        weight_requires_grad = any(self._named(name).requires_grad for name in self.weight_names)
        for group in self._gemm_operands(self.quantizers):
            self._set_usages(group["input"], group["weight"], group["grad_output"], requires_grad, weight_requires_grad)

    # ---- forward -------------------------------------------------------------------------------

    def _computed(
        self, ctx: OperationContext, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        weights, biases = self._group_weights(), self._group_biases()
        check_input(input_, weights[0], self.layer)
        x = plain(input_).reshape(-1, self.in_features)
        ctx.sizes = self._sizes(extra_inputs[0], x)
        bias_scales = self._bias_scales(extra_inputs[1], x) if self.scale_bias else None

        operands: Any = [None] * self.num_groups
        if self._recipe is not None and not self._calibrates:
            operands = self._gemm_operands(self.quantizers)
        padding = NO_PADDING if operands[0] is None else self._built.details
        calls = [self._call(input_, weights[g], operands[g], padding) for g in range(self.num_groups)]
        for g, rows in enumerate(x.split(ctx.sizes)):
            calls[g].wgrad_queue = self._wgrads if self.delay_wgrad_compute else None
            if self._calibrates:
                measured = self._gemm_operands(self.quantizers)[g]
                calibrate(measured["input"], measured["weight"], rows, weights[g])
        dw = ctx.requires_grad and any(self._named(name).requires_grad for name in self.weight_names)
        db = ctx.requires_grad and not self.scale_bias and self._needs_bias_gradients()
        ctx.groups = Groups(
            ctx.sizes,
            weights,
            [None] * self.num_groups if self.scale_bias else biases,
            calls,
            packed_weight=self._named("weight") if self.single_grouped_weight else None,
            packed_bias=self._named("bias") if self.single_grouped_bias else None,
        )
        needs = [Needs(ctx.input_requires_grad, dw, db)] * self.num_groups
        y, ctx.contexts, saved = grouped_forward(x, ctx.groups, needs)
        if bias_scales is not None:
            y += _spread(biases, ctx.sizes) * bias_scales.unsqueeze(-1).to(y.dtype)
        ctx.save_for_backward(bias_scales, *saved)
        ctx.shape = input_.shape
        ctx.grad_input_buffer = kwargs.get(GRAD_INPUT_BUFFER_KEY)
        y = y.reshape(*input_.shape[:-1], self.out_features)
        return in_memory(y, kwargs.get(OUTPUT_BUFFER_KEY), OUTPUT_BUFFER_KEY, self.layer), ()

    def _sizes(self, split_sizes: Tensor, x: Tensor) -> list[int]:
        sizes = [int(size) for size in split_sizes.tolist()]
        if len(sizes) != self.num_groups or sum(sizes) != len(x) or min(sizes) < 0:
            raise ValueError(
                f"{self.layer}: the sizes of the groups must be {self.num_groups} numbers >= 0 that add up to {len(x)} "
                f"rows, got {sizes}"
            )
        return sizes

    def _bias_scales(self, scales: Tensor, x: Tensor) -> Tensor:
        if scales.numel() != len(x):
            raise ValueError(
                f"{self.layer}: the bias scales must have one number for each of {len(x)} rows, got shape "
                f"{list(scales.shape)}"
            )
        return scales.detach().reshape(-1)

    def _needs_bias_gradients(self) -> bool:
        return any(self._named(name).requires_grad for name in self.bias_names)

    # ---- backward ------------------------------------------------------------------------------

    def _gradients(
        self, ctx: OperationContext, grad_output: Tensor, grad_extra_outputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Gradients, Gradients]:
        bias_scales, *saved = ctx.saved_tensors
        dy = plain(grad_output).reshape(-1, self.out_features)
        dx, grads, dbs = grouped_backward(dy, ctx.groups, ctx.contexts, saved)
        d_scales: Tensor | None = None
        if bias_scales is not None:
            dbs, d_scales = self._scaled_bias_gradients(dy, bias_scales, ctx.sizes)
        if dx is not None:
            dx = in_memory(dx.reshape(ctx.shape), ctx.grad_input_buffer, GRAD_INPUT_BUFFER_KEY, self.layer)
        return dx, grads + dbs if self.has_bias else grads, (None, d_scales) if self.scale_bias else (None,)

    def _scaled_bias_gradients(
        self, dy: Tensor, scales: Tensor, sizes: list[int]
    ) -> tuple[list[Tensor | None], Tensor]:
        wide = dy.to(compute_dtype(dy))
        biases = self._group_biases()
        scaled = wide * scales.unsqueeze(-1).to(wide.dtype)
        dbs: list[Tensor | None] = [
            rows.sum(0).to(bias.dtype)
            for rows, bias in zip(scaled.split(sizes), biases, strict=True)
            if bias is not None
        ]
        if self.single_grouped_bias:
            dbs = [torch.stack([db for db in dbs if db is not None])]
        return dbs, (wide * _spread(biases, sizes)).sum(-1).to(scales.dtype)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_groups={self.num_groups}, {sizes}, bias={self.has_bias}"


def _spread(biases: Sequence[Tensor | None], sizes: list[int]) -> Tensor:
    """The bias for each row, [M, N]."""
    stacked = torch.stack([bias for bias in biases if bias is not None])
    return stacked.repeat_interleave(on_device(sizes, stacked.device), dim=0, output_size=sum(sizes))
