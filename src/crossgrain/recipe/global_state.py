"""`FP8GlobalStateManager`: the active context and the updates of delayed scaling, under Transformer Engine's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import global_buffers, support
from .base import Recipe
from .context import PrecisionContext, RecipeLike, activate, active, active_recipe, autocast
from .global_buffers import BufferNames, Registered
from .updates import Step, backward_steps


class QuantizationState:
    """The active context of this thread, by Transformer Engine's names."""

    skip_fp8_weight_update_tensor: Tensor | None = None
    fp8_graph_capturing = False

    def __init__(self) -> None:
        self.registered = Registered()
        self.entered: list[autocast] = []

    @property
    def global_amax_buffer(self) -> dict[str, list[Tensor]]:
        """The amaxes of this step that were registered by hand, by key."""
        return self.registered.tensors("amax")

    @property
    def global_amax_history_buffer(self) -> dict[str, list[Tensor]]:
        return self.registered.tensors("amax_history")

    @property
    def global_scale_buffer(self) -> dict[str, list[Tensor]]:
        return self.registered.tensors("scale")

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


def refuse_graphs(graph: bool) -> None:
    """Raise for ``_graph=True``: it postpones the update of scales while a CUDA graph is captured."""
    if graph:
        raise NotImplementedError("_graph=True is for the capture of CUDA graphs, which crossgrain does not do")


class FP8GlobalStateManager(BufferNames):
    """Transformer Engine's class methods to ask for the active context. The state itself is in `recipe.context`.

    Examples:
        >>> with cg.autocast(recipe="mxfp8"):
        ...     enabled = cg.recipe.FP8GlobalStateManager.is_fp8_enabled()
        ...     y = cg.Linear(32, 32)(torch.randn(32, 32))
        >>> enabled
        True
    """

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
        registered = cls.quantization_state.registered
        if forward:
            step = active().step or Step()
            registered.join(step, forward=True)
            step.end()
        else:
            registered.join(backward_steps.current(), forward=False)
            backward_steps.end_all()

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Register the histories of a module, so that every `reduce_and_update_fp8_tensors` updates them.

        Modules that run in an autocast need not be registered: they join the step by themselves.
        """
        global_buffers.register(fp8_meta, cls.quantization_state.registered)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Remember scales and histories before the first pass of a checkpoint."""
        global_buffers.keep_first_pass(fp8_meta, cls.quantization_state.registered)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Use the scales and histories of the first pass again, for the recomputation."""
        global_buffers.return_to_first_pass(fp8_meta, cls.quantization_state.registered)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        """Use the newest scales and histories again, after the recomputation."""
        global_buffers.leave_first_pass(fp8_meta)

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Return False: no CUDA graph is ever captured here."""
        return False

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: RecipeLike = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Enter an autocast, which `autocast_exit` leaves. Arguments as for `autocast`; ``_graph`` must be False."""
        refuse_graphs(_graph)
        context = autocast(enabled, calibrating, fp8_recipe, fp8_group)
        context._nonfinite = "saturate"  # as in Transformer Engine, for whose clients this is
        context.__enter__()
        cls.quantization_state.entered.append(context)

    @classmethod
    def autocast_exit(cls, enabled: bool = True, _graph: bool = False) -> None:
        """Leave the autocast that `autocast_enter` has entered last."""
        refuse_graphs(_graph)
        if not cls.quantization_state.entered:
            raise RuntimeError("autocast_exit was called without autocast_enter: use `with autocast(...):` instead")
        cls.quantization_state.entered.pop().__exit__(None, None, None)

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
