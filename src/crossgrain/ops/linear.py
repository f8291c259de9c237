"""`Linear` as an operation: a `BasicLinear` and a `Bias`, with the parameter names of `torch.nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..linear.parallel import mark_sequence_parallel, set_tensor_model_parallel_attributes
from ..nn.module_interface import Mode
from ..nn.options import options_for
from ..nn.state_dicts import StateDicts
from ..recipe import QuantizerRole, Recipe
from .basic.bias import Bias
from .basic.linear import BasicLinear
from .op import BasicOperation, FusedOperation


class Linear(StateDicts, FusedOperation):
    """``y = x · Wᵀ + b``. Results are those of `crossgrain.nn.Linear`, bit for bit.

    Its state dict has the names of `crossgrain.nn.Linear` and `torch.nn.Linear`.

    Args:
        in_features: features of the input, of the whole layer.
        out_features: features of the output, of the whole layer.
        bias: add a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        tensor_parallel_mode: "column" to divide the outputs among ranks, "row" to divide the inputs, None for neither.
        tensor_parallel_group: the process group; None for all ranks.
        sequence_parallel: each rank has only its part of the rows of x ("column") or of y ("row").
        rng_state_tracker_function: returns a tracker of random states for the initialization.
        accumulate_into_main_grad: add the weight gradient to ``weight.main_grad``, which the caller provides.
        userbuffers_options: not supported; must be None.
        name: name of the layer, for recipes and messages.

    Examples:
        >>> layer = cg.ops.Linear(32, 64)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = layer(torch.randn(32, 32))
        >>> y.shape
        torch.Size([32, 64])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
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
        linear = BasicLinear(**options_for(BasicLinear.__init__, locals()))
        ops: list[BasicOperation] = [linear]
        if bias:
            ops.append(added := Bias(linear.local_out_features, device=device, dtype=linear.weight.dtype))
            linear.take_bias(added)
        super().__init__(ops)
        self.in_features = in_features
        self.out_features = out_features
        self.register_parameter("weight", linear.weight)
        self.register_parameter("bias", ops[1].bias if bias else None)  # type: ignore[arg-type]
        if self.bias is not None and linear.tensor_parallel_mode == "column":
            set_tensor_model_parallel_attributes(self.bias, True, 0, 1)
        if self.bias is not None and linear.tensor_parallel_mode == "row":
            mark_sequence_parallel(self, "bias", marked=linear.sequence_parallel)

    def _hold(self, basic_ops: list[BasicOperation]) -> None:
        # Not as submodules, whose parameters would be listed again under other names.
        self.basic_ops = tuple(basic_ops)

    # ---- parameters that are shared with the basic operations ----------------------------------

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._share_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "bias"):
            self._share_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # which may replace parameters
        self._share_parameters()
        return self

    def _share_parameters(self) -> None:
        """Let the basic operations use the parameters that are registered here."""
        for op, name in zip(self.basic_ops, ("weight", "bias"), strict=False):
            parameter = self._parameters.get(name)
            if parameter is not None and parameter is not op._parameters[name]:
                op._parameters[name] = parameter
                op.clear_weight_cache()

    def pre_first_fuser_forward(self) -> None:
        super().pre_first_fuser_forward()
        self._take_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters again."""
        for op in self.basic_ops:
            op.reset_parameters()  # type: ignore[operator]
        self._take_parameters()

    def _take_parameters(self) -> None:
        for op, name in zip(self.basic_ops, ("weight", "bias"), strict=False):
            self._parameters[name] = op._parameters[name]

    # ---- what the layer is for recipes ---------------------------------------------------------

    @property
    def name(self) -> str | None:
        return self.basic_ops[0].name

    @name.setter
    def name(self, name: str | None) -> None:
        self.basic_ops[0].name = name

    @property
    def bound_recipe(self) -> Recipe | None:
        """The recipe that the layer uses when no autocast is active."""
        return self.basic_ops[0].bound_recipe

    @bound_recipe.setter
    def bound_recipe(self, recipe: Recipe | None) -> None:
        for op in self.basic_ops:
            op.bound_recipe = recipe

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole | None]:
        return self.basic_ops[0].get_quantizer_roles(mode)

    # ---- state ---------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        return self.basic_ops[0].get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        self.basic_ops[0].set_extra_state(state)

    def clear_weight_cache(self) -> None:
        """Drop the cached quantized copies of the weight; the next forward makes them again."""
        self.basic_ops[0].clear_weight_cache()

    def _expect_other_weights(self) -> None:
        self.basic_ops[0]._expect_other_weights()

    def extra_repr(self) -> str:
        has_bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"
