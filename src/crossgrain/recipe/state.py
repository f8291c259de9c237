"""`RecipeState`: makes the quantizers of one module in one pass from a recipe.

    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles)
    state.inherit_state_from(old_state)      # histories survive a change of recipe
    input, weight, output = state.make_quantizers()

A slot is the place of one quantizer. The tensor of a slot without a role follows from its position: input, weight,
output in forward; grad_output, grad_input in backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ..formats.dtypes import DType
from ..quantizers.base import Quantizer
from ..quantizers.float8 import Float8CurrentScalingQuantizer
from ..quantizers.float8_block import Float8BlockQuantizer
from ..quantizers.mxfp8 import MXFP8Quantizer
from ..quantizers.nonfinite import Policy
from ..quantizers.nvfp4 import NVFP4Quantizer
from ..quantizers.subject import Subject
from ..runtime.devices import resolved_device
from .base import Recipe
from .blockwise import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, in_scope
from .params import QParams
from .per_tensor import Float8CurrentScaling
from .roles import QuantizerRole
from .support import get_fp4_te_dtype, get_fp8_te_dtype

if TYPE_CHECKING:
    from .delayed_state import DelayedScalingRecipeState

Mode = Literal["forward", "backward"]
Roles = Sequence[QuantizerRole | None]

_BY_POSITION: dict[str, tuple[str, ...]] = {
    "forward": ("input", "weight", "output"),
    "backward": ("grad_output", "grad_input"),
}
_TENSOR_TYPES = frozenset(tensor_type for types in _BY_POSITION.values() for tensor_type in types)


class RecipeState:
    """The state of a recipe for one module in one pass. There is a subclass for each kind of recipe.

    Args:
        recipe: the recipe.
        mode: "forward" or "backward".
        num_quantizers: number of slots.
        device: where scales and histories are.
        roles: the role of each slot; None if they are not known.

    Raises:
        ValueError: ``mode`` is wrong, or there are not as many roles as quantizers.

    Examples:
        >>> state = cg.recipe.RecipeState.create(cg.recipe.MXFP8BlockScaling(), mode="forward", num_quantizers=2)
        >>> quantize_input, quantize_weight = state.make_quantizers()
        >>> type(quantize_input(torch.randn(32, 32)))
        <class 'crossgrain.quantizers.mxfp8.MXFP8Tensor'>
    """

    _class_of: ClassVar[dict[str, type[RecipeState]]] = {}

    recipe: Any
    delayed: DelayedScalingRecipeState | None = None  # the state with scales and histories, if there are any

    def __init_subclass__(cls, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        RecipeState._class_of[kind] = cls

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | int | None = None,
        roles: Roles | None = None,
    ) -> None:
        if mode not in _BY_POSITION:
            raise ValueError(f"Unexpected recipe mode ({mode}): it must be forward or backward")
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(f"there must be one role for each of the {num_quantizers} quantizers, got {len(roles)}")
        self.recipe = recipe
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.device = resolved_device(device)
        self.roles = None if roles is None else list(roles)
        self._made_for = (type(recipe), recipe.options())

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | int | None = None,
        roles: Roles | None = None,
    ) -> RecipeState:
        """Create the state for any recipe; arguments as for `RecipeState`."""
        cls = RecipeState._class_of.get(getattr(recipe, "_kind", ""))
        if cls is None:
            raise ValueError(f"there is no state for {type(recipe).__name__}: it is not a recipe of a known kind")
        return cls(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    def make_quantizers(self) -> list[Quantizer]:
        """Make the quantizers, one for each slot."""
        return [self._make(slot) for slot in range(self.num_quantizers)]

    def _make(self, slot: int) -> Quantizer:
        raise NotImplementedError

    def inherit_state_from(self, other: RecipeState) -> bool:
        """Take over scales and histories of another state. Call it before `make_quantizers`.

        Returns:
            Whether there was something to take over.
        """
        return False

    def fits(self, recipe: Recipe, roles: Roles | None = None, device: torch.device | str | int | None = None) -> bool:
        """Whether the quantizers of this state are still right for a recipe, which may have been changed in place.

        Args:
            recipe: the recipe.
            roles: the role of each slot.
            device: where scales and histories must be; None for any device.
        """
        if device is not None and resolved_device(device) != self.device:
            return False
        same_roles = (None if roles is None else list(roles)) == self.roles
        return same_roles and (type(recipe), recipe.options()) == self._made_for

    def set_policies(self, quantizers: Sequence[Quantizer], layer: str, otherwise: Policy | None) -> None:
        """Tell quantizers what they are for, and what the recipe says about NaNs and infinities in their layer.

        Args:
            quantizers: what `make_quantizers` has returned. Those that have a policy of their own keep it.
            layer: name of the module, for messages.
            otherwise: the policy if the recipe does not say one.
        """
        groups: Counter[tuple[str, str]] = Counter()
        for slot, quantizer in enumerate(quantizers):
            role = self._slot_role(slot)
            policy = self.recipe.nonfinite_of(role.layer, role.module_type)
            named = (role.layer or layer, role.tensor_type or self._slot_tensor_type(slot))
            group = groups[named] if role.module_type == "grouped_linear" else None
            groups[named] += 1
            subject = Subject(*named, group)
            derived = replace(subject, from_rows=True) if quantizer.derives_columns else subject
            for plain, own in zip(quantizer.plain_quantizers(), (subject, derived), strict=False):
                plain.subject = own
                if "nonfinite" not in vars(plain):
                    plain.nonfinite = otherwise if policy is None else policy

    def _slot_role(self, slot: int) -> QuantizerRole:
        """The role of a slot; an empty role if it has none."""
        role = self.roles[slot] if self.roles is not None else None
        return role if role is not None else QuantizerRole()

    def _slot_tensor_type(self, slot: int) -> str:
        """input, weight, output, grad_output or grad_input: from the role, otherwise from the position."""
        named = self._slot_role(slot).tensor_type
        by_position = _BY_POSITION[self.mode]
        return named if named in _TENSOR_TYPES else by_position[slot % len(by_position)]

    def _is_weight(self, slot: int) -> bool:
        """Whether a slot is for a weight. Attention has no weights, although it has slots at their positions."""
        return self._slot_tensor_type(slot) == "weight" and self._slot_role(slot).module_type != "dpa"

    def _describe_slot(self, slot: int) -> str:
        return f"{self.mode} slot {slot} ({str(self._slot_role(slot)) or 'no role'})"


def _is_gradient(tensor_type: str) -> bool:
    return tensor_type in ("grad_output", "grad_input")


class Float8CurrentScalingRecipeState(RecipeState, kind="float8_current_scaling"):
    """The state of `Float8CurrentScaling`.

    Examples:
        >>> type(cg.recipe.RecipeState.create(cg.recipe.Float8CurrentScaling(), mode="forward"))
        <class 'crossgrain.recipe.state.Float8CurrentScalingRecipeState'>
    """

    recipe: Float8CurrentScaling

    @property
    def dtype(self) -> DType:
        """FP8 type of the tensors."""
        return get_fp8_te_dtype(self.recipe, self.mode == "forward")

    def _make(self, slot: int) -> Quantizer:
        recipe = self.recipe
        # Outputs of a module have no parameters of their own in the recipe.
        boundary = QParams(power_2_scale=recipe.use_power_2_scales)
        params = {
            "input": recipe.fp8_quant_fwd_inp,
            "weight": recipe.fp8_quant_fwd_weight,
            "grad_output": recipe.fp8_quant_bwd_grad,
        }.get(self._slot_tensor_type(slot), boundary)
        return Float8CurrentScalingQuantizer(
            self.dtype,
            self.device,
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )


class MXFP8BlockScalingRecipeState(RecipeState, kind="mxfp8"):
    """The state of `MXFP8BlockScaling`.

    Examples:
        >>> type(cg.recipe.RecipeState.create(cg.recipe.MXFP8BlockScaling(), mode="forward"))
        <class 'crossgrain.recipe.state.MXFP8BlockScalingRecipeState'>
    """

    recipe: MXFP8BlockScaling

    @property
    def dtype(self) -> DType:
        """FP8 type of the tensors."""
        return get_fp8_te_dtype(self.recipe, self.mode == "forward")

    def _make(self, slot: int) -> Quantizer:
        two_d = self.recipe.enable_2d_quantization and self._is_weight(slot)
        return MXFP8Quantizer(self.dtype, with_2d_quantization=two_d)


class Float8BlockScalingRecipeState(RecipeState, kind="float8_block_scaling"):
    """The state of `Float8BlockScaling`.

    Examples:
        >>> type(cg.recipe.RecipeState.create(cg.recipe.Float8BlockScaling(), mode="forward"))
        <class 'crossgrain.recipe.state.Float8BlockScalingRecipeState'>
    """

    recipe: Float8BlockScaling

    def _make(self, slot: int) -> Quantizer:
        recipe, tensor_type = self.recipe, self._slot_tensor_type(slot)
        if tensor_type == "weight":
            params, dim = recipe.fp8_quant_fwd_weight, recipe.w_block_scaling_dim
        elif _is_gradient(tensor_type):
            params, dim = recipe.fp8_quant_bwd_grad, recipe.grad_block_scaling_dim
        else:
            params, dim = recipe.fp8_quant_fwd_inp, recipe.x_block_scaling_dim
        return Float8BlockQuantizer(
            get_fp8_te_dtype(recipe, not _is_gradient(tensor_type)),
            rowwise=True,
            columnwise=True,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=dim,
        )


class NVFP4BlockScalingRecipeState(RecipeState, kind="nvfp4"):
    """The state of `NVFP4BlockScaling`.

    Examples:
        >>> type(cg.recipe.RecipeState.create(cg.recipe.NVFP4BlockScaling(), mode="forward"))
        <class 'crossgrain.recipe.state.NVFP4BlockScalingRecipeState'>
    """

    recipe: NVFP4BlockScaling

    @property
    def dtype(self) -> DType:
        """FP4 type of the tensors."""
        return get_fp4_te_dtype(self.recipe)

    def _make(self, slot: int) -> Quantizer:
        recipe, is_weight = self.recipe, self._is_weight(slot)
        is_gradient = _is_gradient(self._slot_tensor_type(slot))
        if is_weight:
            params = recipe.fp4_quant_fwd_weight
        else:
            params = recipe.fp4_quant_bwd_grad if is_gradient else recipe.fp4_quant_fwd_inp
        four_over_six = not is_gradient and in_scope(recipe.nvfp4_4over6, is_weight)
        headroom = four_over_six and in_scope(recipe.nvfp4_4over6_e4m3_use_256, is_weight)
        return NVFP4Quantizer(
            self.dtype,
            with_rht=params.random_hadamard_transform,
            with_post_rht_amax=params.random_hadamard_transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=recipe.row_scaled_activation and not is_weight and not is_gradient,
            nvfp4_use_4over6=four_over_six,
            nvfp4_e4m3_max=256 if headroom else 448,
            nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
        )
