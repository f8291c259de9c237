"""The state of delayed scaling: ``scale[n]`` and ``amax_history[length, n]`` of the n quantizers of a module."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..planes import Direction
from ..quantizers.base import Quantizer
from ..quantizers.float8 import Float8Quantizer
from .amax_history import ScaleRule, scale_from_amax_reciprocal, update_history_and_scale
from .base import flag_from_environment
from .per_tensor import DelayedScaling
from .state import Mode, RecipeState, Roles
from .support import get_fp8_te_dtype

Column = tuple[int, Direction | None]
"""What a history belongs to: a slot, or one direction of it."""


class DelayedScalingRecipeState(RecipeState, kind="delayed"):
    """Scales and amax histories, with one column for every quantizer.

    A quantizer writes the amax of its tensor to row 0 of the history; `end_step` updates history and scale from it.

    Examples:
        >>> recipe = cg.recipe.DelayedScaling(amax_history_len=4)
        >>> state = cg.recipe.RecipeState.create(recipe, mode="forward", num_quantizers=2)
        >>> state.amax_history.shape
        torch.Size([4, 2])
    """

    recipe: DelayedScaling

    def __init__(
        self,
        recipe: DelayedScaling,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Roles | None = None,
        columns: Sequence[Column] | None = None,
    ) -> None:
        super().__init__(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)
        self.columns = [(slot, None) for slot in range(num_quantizers)] if columns is None else list(columns)
        self.dtype = get_fp8_te_dtype(recipe, mode == "forward")
        with torch.inference_mode(False):  # a state made for inference may be trained later
            self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=self.device)
            self.amax_history = torch.zeros(
                recipe.amax_history_len, num_quantizers, dtype=torch.float32, device=self.device
            )

    @property
    def delayed(self) -> DelayedScalingRecipeState:  # type: ignore[override]
        return self

    @property
    def key(self) -> Hashable:
        """A key that is equal for states that share a history."""
        return self.amax_history

    def _make(self, slot: int) -> Quantizer:
        column = slice(slot, slot + 1)
        return Float8Quantizer(self.scale[column], self.amax_history[0, column], self.dtype)

    def inherit_state_from(self, other: RecipeState) -> bool:
        """Share the buffers of ``other``, if they are for the same tensors and FP8 type.

        Buffers on another device are copied. A history of another length is copied too: it loses its last rows, or gets
        rows of zeros; the scale stays as it is.

        Returns:
            Whether the buffers were taken over.
        """
        if not isinstance(other, DelayedScalingRecipeState):
            return False
        same = (
            self.mode == other.mode
            and self.columns == other.columns
            and self.dtype is other.dtype
            and (self.device == other.device or other.device.type != "meta")
        )
        if same:
            self.scale = other.scale.to(self.device)
            if self.amax_history.shape == other.amax_history.shape:
                self.amax_history = other.amax_history.to(self.device)
            else:
                rows = min(len(self.amax_history), len(other.amax_history))
                with torch.no_grad():
                    self.amax_history[:rows].copy_(other.amax_history[:rows])
        return same

    def move_to(self, device: torch.device) -> None:
        """Move the buffers to a device. Quantizers that were made before keep the old ones: make new ones after it."""
        self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)

    def end_step(self, reduced_amax: Tensor | None = None) -> None:
        """Update history and scale with the amaxes of this step.

        Args:
            reduced_amax: the largest amaxes over ranks; None to use those of this rank.
        """
        with torch.no_grad():
            update_history_and_scale(
                self.amax_history,
                self.scale,
                self.dtype.element.max,
                margin=self.recipe.margin,
                algorithm=self.recipe.amax_compute_algo,
                scale_rule=_scale_rule(self.recipe, self.dtype.element.max),
                reduced_amax=reduced_amax,
                fused=not flag_from_environment("NVTE_UNFUSED_FP8_UPDATE"),
            )

    @contextmanager
    def replaying(self, scale: Tensor) -> Iterator[None]:
        """A context manager for a recomputation: quantizers use ``scale`` of the first pass, and record nothing."""
        now, seen = self.scale.clone(), self.amax_history[0].clone()
        with torch.no_grad():
            self.scale.copy_(scale)
        try:
            yield
        finally:
            with torch.no_grad():
                self.scale.copy_(now)
                self.amax_history[0].copy_(seen)


def _scale_rule(recipe: DelayedScaling, fp8_max: float) -> ScaleRule | None:
    rule = recipe.scaling_factor_compute_algo
    return None if rule is None else partial(_apply_rule, recipe=recipe, fp8_max=fp8_max)


def _apply_rule(amax: Tensor, old_scale: Tensor, *, recipe: DelayedScaling, fp8_max: float) -> Tensor:
    assert recipe.scaling_factor_compute_algo is not None
    return recipe.scaling_factor_compute_algo(amax, old_scale, fp8_max, recipe)


def _amax_and_scale_update(amax_history: Tensor, scale: Tensor, fp8_max: float, recipe: DelayedScaling) -> None:
    """Update a history and scales that belong to no state, in place, as the unfused update does."""
    update_history_and_scale(
        amax_history,
        scale,
        fp8_max,
        margin=recipe.margin,
        algorithm=recipe.amax_compute_algo,
        scale_rule=_scale_rule(recipe, fp8_max),
        fused=False,
    )


def _default_sf_compute(amax: Tensor, scale: Tensor, fp8_max: float, margin: int) -> Tensor:
    """Compute new scales, write them to ``scale`` and return it."""
    return scale.copy_(scale_from_amax_reciprocal(amax, scale, fp8_max, margin))
