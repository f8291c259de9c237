"""`BasicLinear`: a linear layer without bias as an operation. The GEMMs are those of `crossgrain.nn`.

The weight is quantized in each forward, or is kept quantized (`quantized_model_init`). A weight that is kept quantized
never loses a plane because one step does not need it, since the next step may. This holds for steps without gradients
and for a change of recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...linear.call import LinearCall, Needs, check_gradient_quantizer, check_input
from ...linear.function import LinearFunction
from ...linear.padding import NO_PADDING, Padding, padding_for
from ...linear.parallel import TensorParallel, set_tensor_model_parallel_attributes, share, shared_by
from ...nn.linear_module import calibrate
from ...nn.module_interface import Mode
from ...nn.options import parameter_options
from ...quantizers.base import Quantizer
from ...recipe import QuantizerRole, Recipe
from ...runtime.failures import telling_others
from ...tensor import QuantizedTensor
from ..computation import Computation
from ..context import OperationContext
from ..op import BasicOperation, Gradients, activation_dtype
from .bias import Bias
from .parameters import init_weight, tensor_parallel_ranks


class LinearOperation(BasicOperation):
    """Base class of linear operations: sets up their quantizers and calls the GEMMs with them."""

    accumulate_into_main_grad: bool = False

    def _weight_quantizers(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> dict[str, Quantizer]:
        """Quantizers for weights that are kept quantized, which keep the planes that a weight has already."""
        made = super()._weight_quantizers(quantizers)
        for name, weight in self._quantized_weights().items():
            made[name].set_usage(columnwise=torch.is_grad_enabled())
            keep_usages(made[name], weight)
        return made

    def _set_usages(
        self, x: Quantizer, weight: Quantizer, grad_output: Quantizer, requires_grad: bool, weight_requires_grad: bool
    ) -> None:
        """Set which planes the quantizers make in this step. Called before forward.

        This does not change a weight that is kept quantized, which has its own quantizer.
        """
        assert self._recipe is not None
        quantizes_backward = self._recipe.backward_override is None
        weight_requires_grad = weight_requires_grad and requires_grad
        x.set_usage(rowwise=True, columnwise=weight_requires_grad and quantizes_backward)
        weight.set_usage(rowwise=True, columnwise=requires_grad)
        grad_output.set_usage(rowwise=True, columnwise=weight_requires_grad and quantizes_backward)

    def _call(
        self, x: Tensor, weight: Tensor, operands: Mapping[str, Quantizer] | None, padding: Padding
    ) -> LinearCall:
        """Describe a call of the linear layer with these quantizers, or in high precision if ``operands`` is None.

        It computes in the dtype of the weight, or in the dtype of torch.autocast if that is enabled.
        """
        call = LinearCall(
            dtype=activation_dtype(x, weight.dtype),
            accumulate_main_grad=self.accumulate_into_main_grad,
            layer=self.layer,
        )
        if operands is not None:
            assert self._recipe is not None
            call.input, call.weight, call.grad_output = (operands[n] for n in ("input", "weight", "grad_output"))
            call.padding = padding
            call.backward_override = self._recipe.backward_override
            call.allow_mixed = self._recipe.allow_mixed
        return call

    def _padding(self, recipe: Recipe, operands: Mapping[str, Quantizer]) -> Padding:
        check_gradient_quantizer(operands["grad_output"], self.layer)
        grad_output = operands["grad_output"] if recipe.backward_override is None else None
        return padding_for(operands["input"], operands["weight"], grad_output)


def keep_usages(quantizer: Quantizer, weight: QuantizedTensor) -> None:
    """Let a new quantizer make the same planes as the present quantizer of the weight."""
    if weight._quantizer is not None:
        quantizer.set_usage(**weight._quantizer.get_usages())


class BasicLinear(Computation, LinearOperation):
    """``y = x · Wᵀ`` for x [..., in_features], W [out_features, in_features].

    Args:
        in_features: features of the input, of the whole layer.
        out_features: features of the output, of the whole layer.
        device: device of the weight.
        dtype: dtype of the weight.
        tensor_parallel_mode: "column" to divide the outputs among ranks, "row" to divide the inputs, None for neither.
        tensor_parallel_group: the process group; None for all ranks.
        sequence_parallel: each rank has only its part of the rows of x ("column") or of y ("row").
        rng_state_tracker_function: returns a tracker of random states for the initialization.
        accumulate_into_main_grad: add the weight gradient to ``weight.main_grad``, which the caller provides.
        userbuffers_options: not supported; must be None.
        name: name of the layer, for recipes and messages.

    Examples:
        >>> cg.ops.BasicLinear(32, 64)(torch.randn(4, 32)).shape
        torch.Size([4, 64])
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.tp_group, ranks = tensor_parallel_ranks(
            self, tensor_parallel_mode, tensor_parallel_group, sequence_parallel
        )
        self.tensor_parallel_mode = tensor_parallel_mode if ranks > 1 else None
        self.tensor_parallel_size = ranks
        self.sequence_parallel = sequence_parallel and ranks > 1
        if userbuffers_options:
            raise NotImplementedError(f"{self.layer}: userbuffers_options need a GPU and are not supported; pass None")
        self.in_features = in_features
        self.out_features = out_features
        column, row = (ranks if tensor_parallel_mode == mode else 1 for mode in ("column", "row"))
        self.local_in_features = share(self.layer, "in_features", in_features, row)
        self.local_out_features = share(self.layer, "out_features", out_features, column)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_tracker = rng_state_tracker_function
        self._bias: tuple[Bias, ...] = ()  # not as a submodule: it is an operation of its own
        factory = parameter_options(dtype, device)
        self._make_weight(torch.empty(self.local_out_features, self.local_in_features, **factory))

    def take_bias(self, bias: Bias) -> None:
        """Let the GEMM add the bias of the next operation before it rounds, as a module does."""
        self._bias = (bias,)
        bias.added_by_gemm = True

    def _make_weight(self, weight: Tensor) -> None:
        if not weight.is_meta:
            init_weight(weight, self._rng_tracker)
        self._register_weight("weight", weight)
        if self.tensor_parallel_mode is not None:
            set_tensor_model_parallel_attributes(
                self.weight, True, 0 if self.tensor_parallel_mode == "column" else 1, 1
            )

    def reset_parameters(self) -> None:
        """Initialise the weight again; one on the meta device gets memory on the default device."""
        old: Any = self.weight
        if isinstance(old, QuantizedTensor):
            value = torch.empty(old.shape, dtype=old.dtype, device=old.device)
            init_weight(value, self._rng_tracker)
            with torch.no_grad():
                old.copy_(value)
        elif old.is_meta:
            self._make_weight(torch.empty(old.shape, dtype=old.dtype, device=torch.get_default_device()))
        else:
            init_weight(old, self._rng_tracker)

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    def _parallel(self) -> TensorParallel | None:
        mode, size = self.tensor_parallel_mode, self.tensor_parallel_size
        return shared_by(self.layer, mode, self.tp_group, size, self.sequence_parallel)  # type: ignore[arg-type]

    def _sharing_of_weight(self, index: int) -> TensorParallel | None:
        return self._parallel()

    # ---- quantizers ----------------------------------------------------------------------------

    @property
    def weight_names(self) -> list[str]:
        return ["weight"]

    def num_quantizers(self, mode: Mode) -> int:
        return 2 if mode == "forward" else 1

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole | None]:  # type: ignore[override]
        tensors = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole("linear", tensor, self.name or "") for tensor in tensors]

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        (x, weight), (grad_output,) = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
        return [{"input": x, "weight": weight, "grad_output": grad_output}]

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> Padding:
        return self._padding(recipe, self._gemm_operands(quantizers)[0])

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer of the input; None if this operation could not use an input that is quantized already."""
        recipe = self._recipe
        if recipe is None or self._calibrates or recipe.backward_override == "high_precision" or self._quantizes_alone:
            return None
        return self.get_quantizer("forward", 0)

    def get_grad_output_quantizer(self) -> Quantizer | None:
        recipe = self._recipe
        if recipe is None or self._calibrates or recipe.backward_override is not None or self._quantizes_alone:
            return None
        return self.get_quantizer("backward", 0)

    @property
    def _quantizes_alone(self) -> bool:
        """Whether the operations before and after cannot quantize for this one.

        It has to quantize itself if it pads its operands, or reduces amaxes over ranks.
        """
        assert self._recipe is not None
        if self.tensor_parallel_mode is not None:
            return True
        padding: Padding = self._built.details
        return self._recipe.allow_mixed or bool(self.in_features % padding.k or self.out_features % padding.n)

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        if self._recipe is not None:
            operands = self._gemm_operands(self.quantizers)[0]
            self._set_usages(
                operands["input"],
                operands["weight"],
                operands["grad_output"],
                requires_grad,
                self.weight.requires_grad,
            )

    # ---- forward and backward ------------------------------------------------------------------

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        return self.gemm_forward(ctx, input_)

    def gemm_forward(
        self, ctx: OperationContext, x: Tensor, *, bias: Bias | None = None, scale: float = 1.0, wide: bool = False
    ) -> Tensor:
        """Return y in high precision, and save in ``ctx`` what backward needs.

        Args:
            ctx: the context of this operation.
            x: the input.
            bias: the operation right after this one, if the GEMM is to add its bias.
            scale: multiplies the product before it is rounded.
            wide: return y unrounded, in fp32.
        """
        with nullcontext() if self.tensor_parallel_mode is None else telling_others(self.layer):
            return self._gemm_forward(ctx, x, (bias,) if bias is not None else self._bias, scale, wide)

    def _gemm_forward(
        self, ctx: OperationContext, x: Tensor, biases: tuple[Bias, ...], scale: float, wide: bool
    ) -> Tensor:
        check_input(x, self.weight, self.layer)
        operands = None
        if self._calibrates:
            measured = self._gemm_operands(self.quantizers)[0]
            calibrate(measured["input"], measured["weight"], x, self.weight)
        elif self._recipe is not None:
            operands = self._gemm_operands(self.quantizers)[0]
        parallel = self._parallel()
        if parallel is not None and operands is not None:
            operands = {name: parallel.quantizer(name, quantizer) for name, quantizer in operands.items()}
        call = self._call(x, self.weight, operands, NO_PADDING if operands is None else self._built.details)
        call.parallel = parallel
        call.scale, call.wide_output = scale, wide
        needs = Needs(ctx.input_requires_grad, ctx.requires_grad and self.weight.requires_grad, False)
        bias = biases[0].bias.detach() if biases else None
        y: Tensor = LinearFunction.forward(ctx, x, self.weight, bias, call, needs)
        return y

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        dx, dw = self.gemm_backward(ctx, grad_output)
        return dx, [dw]

    def gemm_backward(
        self, ctx: OperationContext, dy: Tensor, *, scale: float = 1.0, wide: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx in high precision, and dW.

        Args:
            ctx: the context of this operation.
            dy: the gradient of the output.
            scale: multiplies both before they are rounded.
            wide: return dx unrounded, in fp32.
        """
        ctx.call.gradient_scale, ctx.call.wide_gradient = scale, wide
        dx, dw, *_ = LinearFunction.backward(ctx, dy)
        return dx, dw

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
