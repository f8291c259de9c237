"""`FP8GlobalStateManager`: the active context and the updates of delayed scaling, under Transformer Engine's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import support
from .base import Recipe
from .context import PrecisionContext, activate, active, active_recipe
from .updates import backward_steps


class QuantizationState:
    """The active context of this thread, by Transformer Engine's names."""

    skip_fp8_weight_update_tensor: Tensor | None = None

    @property
    def fp8_enabled(self) -> bool:
        return active().enabled

    @property
    def fp8_calibration(self) -> bool:
        return active().calibrating

    @property
    def fp8_recipe(self) -> Recipe | None:
        return active().recipe

    @property
    def fp8_distributed_group(self) -> Any:
        return active().group

    @property
    def fp8_parameters(self) -> bool:
        return active().quantized_parameters

    @property
    def high_precision_init_val(self) -> bool:
        return active().preserve_init_value

    @property
    def autocast_depth(self) -> int:
        return active().depth


class FP8GlobalStateManager:
    """Transformer Engine's class methods to ask for the active context. The state itself is in `recipe.context`."""

    quantization_state = QuantizationState()

    @classmethod
    def reset(cls) -> None:
        """Leave all contexts of this thread, and drop all updates that have not been made yet."""
        activate(PrecisionContext())
        backward_steps.clear()
        cls.quantization_state = QuantizationState()

    @classmethod
    def is_fp8_available(cls) -> support.Support:
        return support.check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> support.Support:
        return support.check_mxfp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> support.Support:
        return support.check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> support.Support:
        return support.check_nvfp4_support()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return active().enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return active().calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return active().quantized_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return active().preserve_init_value

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return active_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return active().group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return True for the first call in each outermost enabled autocast."""
        step = active().step
        return step is not None and step.take_first()

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """End the step of delayed scaling now.

        Args:
            forward: True for the step of the active autocast, False for the steps of all backward passes.
        """
        step = active().step
        if not forward:
            backward_steps.end_all()
        elif step is not None:
            step.end()

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Do nothing: states join the step when their modules run."""

    @classmethod
    def get_autocast_state(cls) -> PrecisionContext:
        return active()

    @classmethod
    def set_autocast_state(cls, state: PrecisionContext) -> None:
        activate(state)

    get_fp8_autocast_state = get_autocast_state
    set_fp8_autocast_state = set_autocast_state

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> Tensor | None:
        return cls.quantization_state.skip_fp8_weight_update_tensor

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Set a flag. While it is True, cached quantized weights are not updated."""
        state = cls.quantization_state
        if state.skip_fp8_weight_update_tensor is None:
            state.skip_fp8_weight_update_tensor = torch.zeros(1, dtype=torch.float32)
        state.skip_fp8_weight_update_tensor.fill_(float(skip))
