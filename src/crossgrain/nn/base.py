"""What all modules with quantized GEMMs have in common: recipes turned into quantizers, cached weights, state.

A module builds its quantizers from the recipe in force when it runs, and again when that changes. The
histories of delayed scaling survive such a change where they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..operands import GEMMS, check_operands
from ..quantizer import Quantizer
from ..recipe import (
    QuantizerRole,
    Recipe,
    RecipeState,
    active,
    active_recipe,
    check_weight_matches_recipe,
    keep_high_precision_init_val,
    ran_in_backward,
    ran_in_forward,
)
from ..tensor import QuantizedTensor
from .weight_cache import WeightCache

Mode = Literal["forward", "backward"]
_SLOTS: dict[Mode, str] = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class QuantizedModule(nn.Module):
    """A module that runs GEMMs in the formats of a recipe.

    ``name``             the layer's name for recipes and messages, by default its path in the model
    ``quantizers``       ``{"scaling_fwd": [...], "scaling_bwd": [...]}`` of the recipe last used
    ``bound_recipe``     used where no autocast says otherwise; None: high precision
    """

    bound_recipe: Recipe | None = None

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._states: dict[Mode, RecipeState] = {}
        self._weight_cache = WeightCache()
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._wgrads: list[Callable[[], None]] = []
        self._wgrad_hooks: list[Callable[[], None]] = []

    # ---- what a module provides ----------------------------------------------------------------

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """The role of each slot."""
        raise NotImplementedError

    def _slot_counts(self) -> Mapping[Mode, int]:
        """``{"forward": ..., "backward": ...}``"""
        raise NotImplementedError

    def _gemm_operands(self) -> Sequence[Mapping[str, Quantizer]]:
        """For each linear layer inside: its quantizers by tensor, to be checked as pairs."""
        raise NotImplementedError

    @property
    def weight_names(self) -> list[str]:
        """Names of the parameters that are quantized for GEMMs."""
        raise NotImplementedError

    # ---- quantizers ----------------------------------------------------------------------------

    @property
    def layer(self) -> str:
        """The name for messages."""
        return self.name or type(self).__name__

    @property
    def primary_weights_in_fp8(self) -> bool:
        return any(isinstance(getattr(self, name), QuantizedTensor) for name in self.weight_names)

    def _recipe_in_force(self) -> Recipe | None:
        """Autocast decides, where there is one; else what the module is bound to."""
        context = active()
        if context.depth:
            return active_recipe() if context.enabled or context.calibrating else None
        return self.bound_recipe

    def _prepare(self, recipe: Recipe | None) -> None:
        """Have quantizers for ``recipe``; called at the start of forward."""
        self.fp8 = recipe is not None
        if recipe is None:
            return
        self._build_quantizers(recipe)
        if recipe.delayed() or recipe.custom():
            ran_in_forward(self._states["forward"])

    def _build_quantizers(self, recipe: Recipe) -> None:
        counts = self._slot_counts()
        roles = {mode: self.get_quantizer_roles(fwd=mode == "forward", num_quantizers=counts[mode]) for mode in counts}
        if self._states and all(state.fits(recipe, roles[mode]) for mode, state in self._states.items()):
            return
        states: dict[Mode, RecipeState] = {}
        quantizers: dict[str, list[Quantizer]] = {}
        for mode, count in counts.items():
            device = next((parameter.device for parameter in self.parameters()), None)
            state = RecipeState.create(
                recipe,
                mode=mode,
                num_quantizers=count,
                device=device,
                roles=roles[mode],
            )
            if mode in self._states:
                state.inherit_state_from(self._states[mode])
            states[mode] = state
            quantizers[_SLOTS[mode]] = state.make_quantizers()
        before = self.quantizers
        self.quantizers = quantizers
        try:
            self._check_recipe(recipe)
        except Exception:
            self.quantizers = before
            raise
        self._states = states
        self.fp8_meta["recipe"] = recipe
        self._weight_cache.clear()

    def _check_recipe(self, recipe: Recipe) -> None:
        """Before the first step: the two operands of every GEMM pair, and quantized weights can be used."""
        for name in self.weight_names:
            weight = getattr(self, name)
            if isinstance(weight, QuantizedTensor):
                check_weight_matches_recipe(weight._quantizer, recipe, f"{self.layer}: {name}")
        if recipe.allow_mixed or recipe.backward_override is not None:
            return
        for by_tensor in self._gemm_operands():
            for which, operands in GEMMS.items():
                check_operands(
                    which,
                    [(t, d, by_tensor[t].encoding(d).format) for t, d in operands.items() if not by_tensor[t].custom],
                    self.layer,
                )

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Build quantizers for ``recipe`` now instead of in the next forward."""
        self._build_quantizers(recipe)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """The same for the recipe in force."""
        self._prepare(self._recipe_in_force())

    def _backward_noted(self) -> Callable[[], None] | None:
        """What backward calls before it quantizes, so that delayed scaling is updated when backward ends."""
        state = self._states["backward"]
        if state.delayed is None:
            return None
        group = active().group
        return lambda: ran_in_backward(state, group)

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """Who consumes the output, for recipes that want to know."""
        return self._output_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._output_role = role  # roles are compared in the next forward, which rebuilds the quantizers

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        return self._grad_input_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._grad_input_role = role

    # ---- parameters ----------------------------------------------------------------------------

    def _register_weight(self, name: str, value: Tensor, slot: int) -> None:
        """A parameter, quantized if a `quantized_model_init` is in force."""
        context = active()
        if not context.quantized_parameters or value.device.type == "meta":
            self.register_parameter(name, nn.Parameter(value))
            return
        recipe = active_recipe()
        with torch.no_grad():
            self._build_quantizers(recipe)
            quantizer = self.quantizers["scaling_fwd"][slot].copy()
            # Both directions, also under no_grad: whoever builds a model there may still train it.
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = False
            quantized = quantizer.quantize(value)
        parameter = nn.Parameter(quantized)
        if context.preserve_init_value:
            keep_high_precision_init_val(parameter, value)
        self.register_parameter(name, parameter)

    # ---- weights: cache, delayed gradients ------------------------------------------------------

    def clear_weight_cache(self) -> None:
        """Forget quantized copies of the weights; the next forward makes them again."""
        self._weight_cache.clear()

    @property
    def _fp8_workspaces(self) -> dict[str, Any]:
        return self._weight_cache.by_name

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._weight_cache.clear()  # parameters move or change: copies of them would be stale
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._weight_cache.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for `backward_dw`."""
        return bool(self._wgrads)

    def backward_dw(self) -> None:
        """Compute the weight gradients that were put off, in the order of the backward passes."""
        waiting, self._wgrads[:] = list(self._wgrads), []
        for compute in waiting:
            compute()
        if waiting:
            for hook in self._wgrad_hooks:
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Called after `backward_dw` has computed gradients."""
        self._wgrad_hooks.append(hook)


def name_layers(model: nn.Module) -> None:
    """Give every quantized module in ``model`` that has no name its path: ``layers.3.mlp.fc1``."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule) and module.name is None:
            module.name = path
