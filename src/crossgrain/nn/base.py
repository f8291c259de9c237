"""`QuantizedModule`: the base class of all modules with quantized GEMMs.

It builds quantizers from the current recipe when the module runs, and again when the recipe changes. The histories of
delayed scaling are kept through such a change if they fit. It also caches quantized weights.

What a module has to provide is in `module_interface`, weights that are kept quantized are in `kept_weights`, histories
and state dicts in `state_dicts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..formats import Format
from ..gemm.operands import GEMMS, check_operands
from ..linear.padding import known_format
from ..linear.weight_cache import WeightCache
from ..planes import Direction
from ..quantizers.base import Quantizer
from ..recipe import (
    QuantizerRole,
    Recipe,
    RecipeState,
    active,
    active_recipe,
    backward_note,
    check_weight_matches_recipe,
    forward_step,
    this_pass,
    warn_of_another_recipe,
)
from ..recipe.extra_state import is_empty
from ..recipe.summary import formats_in_short
from ..recipe.updates import Step
from ..runtime.settings import settings
from ..runtime.torch_patches.checkpoint_frames import in_backward, unseen_by_policies
from ..runtime.transforms import as_lasting_as
from ..tensor import QuantizedTensor
from .field_names import FieldNames
from .kept_attributes import kept_attributes
from .kept_weights import KeptWeights
from .module_interface import SLOTS, Built, Mode, ParameterInit, nothing_built
from .state_dicts import Histories

_NO_META = {"fp8_checkpoint": False, "fp8_group": None}

_NO_STEP = nullcontext()


class QuantizedModule(KeptWeights, Histories, FieldNames):
    """Base class of modules that run GEMMs in the formats of a recipe.

    Args:
        name: name of the layer, for recipes and messages.

    Attributes:
        name: name of the layer; `name_layers` sets it to the path in the model.
        quantizers: ``{"scaling_fwd": [...], "scaling_bwd": [...]}`` of the recipe that was used last.
        fp8_meta: that recipe, and the states of its quantizers under the same names.
        bound_recipe: the recipe to use when no autocast is active; None for high precision.

    Examples:
        >>> isinstance(cg.Linear(32, 32, name="fc1"), cg.nn.QuantizedModule)
        True
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = dict(_NO_META)
        self._built = nothing_built()
        self._weight_cache = WeightCache()
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._wgrads: list[Callable[[], None]] = []
        self._wgrad_hooks: list[Callable[[], None]] = []
        self.tp_group: Any = None
        context = active()
        self._noted_for: Recipe | None = None
        self._data_device: torch.device | None = None
        self._parameter_init = (
            ParameterInit(active_recipe(), context.preserve_init_value) if context.quantized_parameters else None
        )
        if self._parameter_init is not None:
            self.fp8_meta["recipe"] = self._parameter_init.recipe

    # ---- quantizers ----------------------------------------------------------------------------

    @property
    def layer(self) -> str:
        """The name of the layer in messages: its name, or its class."""
        return self.name or type(self).__name__

    @property
    def has_run(self) -> bool:
        """Whether forward has run since the module was made or converted."""
        return self._built.recipe is not None or "_ran_plain" in vars(self)

    @property
    def quantizers(self) -> dict[str, list[Quantizer]]:
        return self._built.quantizers

    def _recipe_in_force(self) -> Recipe | None:
        """The recipe to use: that of the active autocast, otherwise the bound recipe. None for high precision."""
        recipe = self._recipe_of_context()
        if recipe is None:
            this_pass()  # lets a checkpoint record the context also if nothing is quantized: that of backward may do so
        return recipe

    def _recipe_of_context(self) -> Recipe | None:
        context = active()
        if context.depth:
            if context.step is not None:
                self._note_run(context.step, context.recipe)
            if not (context.enabled or context.calibrating):
                return None
            return active_recipe() if context.recipe is None else context.recipe
        if self.bound_recipe is None and self.fp8 and _is_unknown_recomputation():
            raise RuntimeError(
                f"{self.layer} ran in an autocast and is now recomputed in backward outside of it, where it would not "
                "quantize: use crossgrain.checkpoint or torch.utils.checkpoint.checkpoint, or enter the autocast "
                "inside the function that is recomputed"
            )
        return self.bound_recipe

    def _note_run(self, step: Step, recipe: Recipe | None) -> None:
        """Tell an autocast that this layer ran in it, and what its rules are compared with, once for each recipe."""
        step.layers_ran = True
        if step.roles is not None and self._noted_for is not recipe:
            step.roles.update(role for role in self._roles("forward") if role is not None)
            self._noted_for = recipe

    @staticmethod
    def _only_calibrates() -> bool:
        context = active()
        return context.calibrating and not context.enabled

    def _prepare(self, recipe: Recipe | None) -> Built:
        """Return what forward needs for ``recipe``. Called at the start of forward."""
        if recipe is None:
            self.fp8 = False
            vars(self)["_ran_plain"] = True
            return self._built
        built = self._build_quantizers(recipe, backward=torch.is_grad_enabled() or this_pass().trains)
        if not self.fp8:
            self.fp8 = True
        return built

    def _step(self, recipe: Recipe | None, built: Built) -> AbstractContextManager[None]:
        """A context around everything that forward quantizes."""
        return _NO_STEP if recipe is None else forward_step(built.states["forward"])

    def _build_quantizers(self, recipe: Recipe, *, backward: bool = True) -> Built:
        """Build the quantizers for ``recipe``, unless the present ones fit. If it raises, nothing has changed.

        Without ``backward``, the GEMMs of backward are not checked, because inference does not need them.
        """
        built, device, stamp = self._built, self._device(), None
        if recipe is built.recipe:
            stamp = (None if recipe.immutable else recipe.options(), self._role_stamp(), device, active().nonfinite)
            if stamp == built.stamp and (built.serves_backward or not backward):
                return built
        if built.nonfinite == active().nonfinite and self._states_fit(recipe, device):
            if backward and not built.serves_backward:
                self._check_pairs(recipe, built.quantizers, self._quantized_weights())
                built = built._replace(serves_backward=True)
            if stamp is not None and stamp[1] is not None:
                built = built._replace(stamp=stamp)
            self._built = built
            return built
        with unseen_by_policies():
            new = self._made_for(recipe)
            weights = self._quantized_weights()
            for name, weight in weights.items():
                check_weight_matches_recipe(weight._quantizer, recipe, f"{self.layer}.{name}")
            self._check_pairs(recipe, new.quantizers, weights, backward)
            new = new._replace(serves_backward=backward)
            warn_of_another_recipe(self.fp8_meta.get("recipe"), recipe, self.layer)
            self._adopt(new)
        return new

    def _states_fit(self, recipe: Recipe, device: torch.device | None) -> bool:
        states = self._built.states
        return bool(states) and all(state.fits(recipe, self._roles(mode), device) for mode, state in states.items())

    def _device(self) -> torch.device | None:
        """The device of scales and histories: that of the parameters; None if these are on the meta device.

        A module without parameters has told the device of its input as ``_data_device``.
        """
        for parameter in self._parameters.values():  # `parameters()` takes microseconds
            if parameter is not None:
                return None if parameter.is_meta else parameter.device
        first = next(self.parameters(), None)
        if first is None:
            return self._data_device
        return None if first.is_meta else first.device

    def _role_stamp(self) -> Any:
        """What the roles of the slots depend on; None: they have to be compared every time."""
        return None

    def _roles(self, mode: Mode) -> list[QuantizerRole | None]:
        return self.get_quantizer_roles(fwd=mode == "forward", num_quantizers=self._slot_counts()[mode])

    def _made_for(self, recipe: Recipe) -> Built:
        device, nonfinite = self._device(), active().nonfinite
        states: dict[Mode, RecipeState] = {}
        quantizers: dict[str, list[Quantizer]] = {}
        for mode, count in self._slot_counts().items():
            roles = self._roles(mode)
            with as_lasting_as(next(self.parameters(), None)):
                state = RecipeState.create(recipe, mode=mode, num_quantizers=count, device=device, roles=roles)
                if mode in self._learned:
                    state.inherit_state_from(self._learned[mode])
                made = quantizers[SLOTS[mode]] = state.make_quantizers()
            states[mode] = state
            state.set_policies(made, self.layer, nonfinite)
        return Built(recipe, states, quantizers, self._details(recipe, quantizers), nonfinite=nonfinite)

    def _check_pairs(
        self,
        recipe: Recipe,
        quantizers: Mapping[str, Sequence[Quantizer]],
        quantized_weights: Mapping[str, QuantizedTensor],
        backward: bool = True,
    ) -> None:
        """Raise if the two operands of a GEMM have formats that cannot be multiplied."""
        if recipe.allow_mixed or settings.strict:  # in strict mode the GEMM raises, as in Transformer Engine
            return
        gemms = GEMMS if backward and recipe.backward_override is None else {"fprop": GEMMS["fprop"]}
        for name, by_tensor in self._weights_and_operands(quantizers):
            for which, operands in gemms.items():
                formats = [
                    (tensor, direction, _format(by_tensor[tensor], direction, quantized_weights.get(name), tensor))
                    for tensor, direction in operands.items()
                ]
                check_operands(which, [(t, d, fmt) for t, d, fmt in formats if fmt is not None], self.layer)

    def _adopt(self, new: Built) -> None:
        """Use the quantizers of ``new`` from now on."""
        self._learn(new)
        self._built = new
        self.fp8_meta.update(recipe=new.recipe, **{SLOTS[mode]: state for mode, state in new.states.items()})
        self._weight_cache.clear()
        self._relink_weights(new.quantizers)

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Build quantizers for ``recipe`` now instead of in the next forward."""
        self._build_quantizers(recipe)

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Build quantizers for ``recipe``, unless the present ones fit."""
        self._prepare(recipe)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Build quantizers for the current recipe, unless the present ones fit."""
        self._prepare(self._recipe_in_force())

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of tensor-parallel ranks. Modules that ranks cannot share ignore it."""

    def _forget_quantizers(self) -> None:
        """Drop the quantizers; the next forward builds them again. Histories are kept."""
        self._built = nothing_built()
        self._weight_cache.clear()

    def _backward_noted(self, built: Built) -> Callable[[], None] | None:
        """A function that backward calls before it quantizes, so that delayed scaling is updated when backward ends."""
        state = built.states["backward"]
        return None if state.delayed is None else backward_note(state)

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """The role of the output, that is which operation reads it. Recipes can use it to choose a format."""
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

    def _formats_repr(self) -> str:
        """The formats that the bound recipe gives each layer of the module, as a part of its repr."""
        if self.bound_recipe is None:
            return ""
        layers = dict.fromkeys(role for role in self._roles("forward") if role is not None and role.module_type)
        named = {(role.layer, role.module_type): None for role in layers}
        formats = dict.fromkeys(formats_in_short(self.bound_recipe, *layer) for layer in named)
        return f", recipe='{'; '.join(formats)}'"

    # ---- weights: cache, delayed gradients ------------------------------------------------------

    def clear_weight_cache(self) -> None:
        """Drop the cached quantized copies of the weights; the next forward makes them again."""
        self._weight_cache.clear()

    @property
    def _fp8_workspaces(self) -> dict[str, Any]:
        return self._weight_cache.copies()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._weight_cache.clear()  # parameters move or change: copies of them would be stale
        with kept_attributes(self):
            applied = super()._apply(fn, recurse)
        if self._move_histories(self._device()):
            self._forget_quantizers()  # they would write to the old ones
        return applied

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are waiting to be computed by `backward_dw`."""
        return bool(self._wgrads)

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``delay_wgrad_compute`` delayed, in the order of the backward passes."""
        waiting, self._wgrads[:] = list(self._wgrads), []
        for compute in waiting:
            compute()
        if waiting:
            for hook in self._wgrad_hooks:
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Register a function that is called after `backward_dw` has computed gradients."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    # ---- state ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without quantizers, which are built again. Histories become plain data.

        Weight gradients that wait for `backward_dw` are left out, because they belong to this module's parameters.
        """
        state = dict(self.__dict__)
        histories = self.get_extra_state()
        state.update(
            _built=nothing_built(),
            _learned={},
            _unloaded=None if is_empty(histories) else histories,
            _weight_cache=WeightCache(),
            _wgrads=[],
            _noted_for=None,
            tp_group=None,  # process groups do not travel
            _parameter_init=self._parameter_init if any(p.is_meta for p in self.parameters()) else None,
            fp8_meta={k: v for k, v in self.fp8_meta.items() if k not in ("recipe", *SLOTS.values())},
        )
        return state


def _is_unknown_recomputation() -> bool:
    """Whether the running code is recomputed, and no checkpoint has recorded the context of its first pass."""
    this = this_pass()
    return (in_backward() or this.recomputes) and this.replayed is None


def _format(quantizer: Quantizer, direction: Direction, weight: QuantizedTensor | None, tensor: str) -> Format | None:
    """The format that a GEMM will read. A weight that is kept quantized has its own format."""
    if tensor == "weight" and weight is not None:
        return weight._formats.get(direction)
    return known_format(quantizer, direction)


def name_layers(model: nn.Module) -> None:
    """Name all quantized modules of a model that have no name by their paths, such as ``layers.3.mlp.fc1``.

    Args:
        model: the model; its modules are changed in place.

    Examples:
        >>> model = torch.nn.Sequential(cg.Linear(32, 32), cg.Linear(32, 32))
        >>> cg.name_layers(model)
        >>> model[1].name
        '1'
    """
    for path, module in model.named_modules():
        if hasattr(module, "get_quantizer_roles") and getattr(module, "name", "") is None:
            module.name = path
