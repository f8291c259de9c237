"""`QuantizedModule`: the base class of all modules with quantized GEMMs.

It builds quantizers from the current recipe when the module runs, and again when the recipe changes. The histories of
delayed scaling are kept through such a change if they fit. It also caches quantized weights, and handles state dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..formats import Format
from ..gemm.operands import GEMMS, check_operands
from ..linear.padding import known_format
from ..linear.parallel import TensorParallel
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
    check_extra_state,
    check_weight_matches_recipe,
    extra_state_of,
    forward_step,
    load_extra_state,
    this_pass,
)
from ..recipe.pickled_state import passes_over
from ..runtime.collectives import same_ranks
from ..runtime.torch_patches.checkpoint_frames import in_backward, unseen_by_policies
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val, renew_preserved_values
from ..tensor.loading import check_formats
from ..tensor.sharding import follow_quantizer, is_sharded, local_part
from .field_names import FieldNames
from .kept_attributes import kept_attributes

Mode = Literal["forward", "backward"]
_SLOTS: dict[Mode, str] = {"forward": "scaling_fwd", "backward": "scaling_bwd"}

_NO_META = {"fp8_checkpoint": False, "fp8_group": None}

_NO_STEP = nullcontext()
_EXTRA_STATE = "_extra_state"  # torch's name


class Built(NamedTuple):
    """What was built for a recipe. It is one object, so that a thread never sees parts of two recipes."""

    recipe: Recipe | None
    states: Mapping[Mode, RecipeState]
    quantizers: dict[str, list[Quantizer]]
    details: Any = None  # what the module derives from them
    serves_backward: bool = True  # whether the operands of its GEMMs are known to pair up, too
    stamp: Any = None  # of the last call that compared all options and roles: as long as it is the same, so are they


class ParameterInit(NamedTuple):
    """How to create weights that are still on the meta device."""

    recipe: Recipe
    preserve_init_value: bool


class QuantizedModule(FieldNames):
    """Base class of modules that run GEMMs in the formats of a recipe.

    Args:
        name: name of the layer, for recipes and messages.

    Attributes:
        name: name of the layer; `name_layers` sets it to the path in the model.
        quantizers: ``{"scaling_fwd": [...], "scaling_bwd": [...]}`` of the recipe that was used last.
        fp8_meta: that recipe, and the states of its quantizers under the same names.
        bound_recipe: the recipe to use when no autocast is active; None for high precision.
    """

    bound_recipe: Recipe | None = None

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = dict(_NO_META)
        self._built = _nothing_built()
        self._learned: dict[Mode, RecipeState] = {}  # the last states with histories
        self._unloaded: Any = None  # extra state that waits for states to load it into
        self._weight_cache = WeightCache()
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._wgrads: list[Callable[[], None]] = []
        self._wgrad_hooks: list[Callable[[], None]] = []
        self.tp_group: Any = None
        context = active()
        self._parameter_init = (
            ParameterInit(active_recipe(), context.preserve_init_value) if context.quantized_parameters else None
        )
        if self._parameter_init is not None:
            self.fp8_meta["recipe"] = self._parameter_init.recipe

    # ---- what a module provides ----------------------------------------------------------------

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """The role of each slot for a quantizer, in the forward or the backward pass."""
        raise NotImplementedError

    def _slot_counts(self) -> Mapping[Mode, int]:
        """The number of quantizers in each pass: ``{"forward": ..., "backward": ...}``."""
        raise NotImplementedError

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        """For each linear layer of the module, its quantizers by tensor."""
        raise NotImplementedError

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> Any:
        """What the module computes once per recipe; kept as ``Built.details``."""
        return None

    @property
    def weight_names(self) -> list[str]:
        """Names of the parameters that are weights of GEMMs, in the order of `_gemm_operands`."""
        raise NotImplementedError

    def _sharing_of_weight(self, index: int) -> TensorParallel | None:
        """How ranks share weight ``index``; None if each rank has the whole weight."""
        return None

    # ---- quantizers ----------------------------------------------------------------------------

    @property
    def layer(self) -> str:
        """The name of the layer in messages: its name, or its class."""
        return self.name or type(self).__name__

    @property
    def quantizers(self) -> dict[str, list[Quantizer]]:
        return self._built.quantizers

    @property
    def primary_weights_in_fp8(self) -> bool:
        return bool(self._quantized_weights())

    def _quantized_weights(self) -> dict[str, QuantizedTensor]:
        """The weights that are kept quantized, as this rank uses them: of a tensor-parallel DTensor, its local part."""
        found = {name: self._usable(getattr(self, name, None)) for name in self.weight_names}  # there may be none yet
        return {name: weight for name, weight in found.items() if isinstance(weight, QuantizedTensor)}

    def _usable(self, weight: Any) -> Any:
        if not is_sharded(weight) or weight.device_mesh.ndim > 1:
            return weight
        of_styles = same_ranks(weight.device_mesh.get_group(), self.tp_group)
        return local_part(weight) if of_styles else weight

    def _recipe_in_force(self) -> Recipe | None:
        """The recipe to use: that of the active autocast, otherwise the bound recipe. None for high precision."""
        context = active()
        if context.depth:
            if not (context.enabled or context.calibrating):
                return None
            return active_recipe() if context.recipe is None else context.recipe
        if self.bound_recipe is None and self.fp8 and (in_backward() or this_pass().recomputes):
            raise RuntimeError(
                f"{self.layer} ran in an autocast and is now recomputed in backward outside of it, where it would not "
                "quantize: use crossgrain.checkpoint or torch.utils.checkpoint.checkpoint, or enter the autocast "
                "inside the function that is recomputed"
            )
        return self.bound_recipe

    @staticmethod
    def _only_calibrates() -> bool:
        context = active()
        return context.calibrating and not context.enabled

    def _prepare(self, recipe: Recipe | None) -> Built:
        """Return what forward needs for ``recipe``. Called at the start of forward."""
        if recipe is None:
            self.fp8 = False
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
            stamp = (recipe.changes, self._role_stamp(), device)
            if stamp == built.stamp and (built.serves_backward or not backward):
                return built
        if built.states and all(state.fits(recipe, self._roles(mode), device) for mode, state in built.states.items()):
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
                check_weight_matches_recipe(weight._quantizer, recipe, f"{self.layer}: {name}")
            self._check_pairs(recipe, new.quantizers, weights, backward)
            new = new._replace(serves_backward=backward)
            self._adopt(new)
        return new

    def _device(self) -> torch.device | None:
        """The device of scales and histories: that of the parameters; None if these are on the meta device."""
        for parameter in self._parameters.values():  # `parameters()` takes microseconds
            if parameter is not None:
                return None if parameter.is_meta else parameter.device
        first = next(self.parameters(), None)
        return None if first is None or first.is_meta else first.device

    def _role_stamp(self) -> Any:
        """What the roles of the slots depend on; None: they have to be compared every time."""
        return None

    def _roles(self, mode: Mode) -> list[QuantizerRole | None]:
        return self.get_quantizer_roles(fwd=mode == "forward", num_quantizers=self._slot_counts()[mode])

    def _made_for(self, recipe: Recipe) -> Built:
        device = self._device()
        states: dict[Mode, RecipeState] = {}
        quantizers: dict[str, list[Quantizer]] = {}
        for mode, count in self._slot_counts().items():
            state = RecipeState.create(recipe, mode=mode, num_quantizers=count, device=device, roles=self._roles(mode))
            if mode in self._learned:
                state.inherit_state_from(self._learned[mode])
            states[mode] = state
            quantizers[_SLOTS[mode]] = state.make_quantizers()
        return Built(recipe, states, quantizers, self._details(recipe, quantizers))

    def _check_pairs(
        self,
        recipe: Recipe,
        quantizers: Mapping[str, Sequence[Quantizer]],
        quantized_weights: Mapping[str, QuantizedTensor],
        backward: bool = True,
    ) -> None:
        """Raise if the two operands of a GEMM have formats that cannot be multiplied."""
        if recipe.allow_mixed:
            return
        gemms = GEMMS if backward and recipe.backward_override is None else {"fprop": GEMMS["fprop"]}
        for name, by_tensor in zip(self.weight_names, self._gemm_operands(quantizers), strict=False):
            for which, operands in gemms.items():
                formats = [
                    (tensor, direction, _format(by_tensor[tensor], direction, quantized_weights.get(name), tensor))
                    for tensor, direction in operands.items()
                ]
                check_operands(which, [(t, d, fmt) for t, d, fmt in formats if fmt is not None], self.layer)

    def _adopt(self, new: Built) -> None:
        """Use the quantizers of ``new`` from now on."""
        learned = {mode: state for mode, state in new.states.items() if state.delayed is not None}
        if learned and self._unloaded is not None:
            load_extra_state(self._unloaded, new.states["forward"], new.states["backward"], self.layer)
            self._unloaded = None
        self._learned |= learned
        self._built = new
        self.fp8_meta.update(recipe=new.recipe, **{_SLOTS[mode]: state for mode, state in new.states.items()})
        self._weight_cache.clear()
        self._relink_weights(new.quantizers)

    def _relink_weights(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> None:
        """Let weights that are kept quantized use the new quantizers when they are written next. Their bytes stay.

        Their planes stay too, because a later step may need a plane that this step does not.
        """
        weights = self._quantized_weights()
        if not weights:
            return
        for name, quantizer in self._weight_quantizers(quantizers).items():
            weight = weights.get(name)
            if weight is None or type(weight._quantizer) is not type(quantizer):
                continue
            try:
                quantizer.check_writable(weight)
            except ValueError:
                continue  # another format of the same family: the weight stays what it is
            follow_quantizer(weight, quantizer)

    def reset_fp8_meta_tensors(self) -> None:
        """Reset the histories of delayed scaling: amaxes become 0 and scales 1."""
        for state in self._learned.values():
            assert state.delayed is not None
            state.delayed.amax_history.zero_()
            state.delayed.scale.fill_(1.0)

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
        self._built = _nothing_built()
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

    # ---- parameters ----------------------------------------------------------------------------

    def _register_weight(self, name: str, value: Tensor) -> None:
        """Register a weight, quantized if the module was made under `quantized_model_init`."""
        if self._parameter_init is None:
            self.register_parameter(name, nn.Parameter(value))
            return
        if value.is_meta:
            self.register_parameter(name, nn.Parameter(self._meta_parameter(value, name, self._parameter_init.recipe)))
            return
        built = self._build_quantizers(self._parameter_init.recipe)
        parameter = nn.Parameter(self._quantized_parameter(value, name, built))
        if self._parameter_init.preserve_init_value:
            keep_high_precision_init_val(parameter, value)
        self.register_parameter(name, parameter)
        self._relink_weights(built.quantizers)

    def _quantized_parameter(self, value: Tensor, name: str, built: Built) -> QuantizedTensor:
        """Quantize ``value`` as the weight ``name``."""
        quantizer = self._weight_quantizers(built.quantizers)[name]
        with torch.no_grad(), self._naming(name):
            quantized: QuantizedTensor = quantizer.quantize(value.detach())
        return quantized

    def _meta_parameter(self, value: Tensor, name: str, recipe: Recipe) -> QuantizedTensor:
        """The quantized weight ``name`` on the meta device, so that it can be sharded before it gets memory."""
        with torch.device("cpu"):  # histories and scales are needed whole, wherever the model is made
            built = self._made_for(recipe)
        quantizer = self._weight_quantizers(built.quantizers)[name]
        with self._naming(name):
            empty: QuantizedTensor = quantizer.make_empty(value.shape, dtype=value.dtype, device=value.device)
        return empty

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.layer}: {name} cannot be kept quantized: {error}") from error

    def _weight_quantizers(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> dict[str, Quantizer]:
        """The quantizers of weights that are kept quantized, by name.

        They make planes in both directions, also under no_grad, because the model may be trained later.
        """
        made = {}
        weights = zip(self.weight_names, self._gemm_operands(quantizers), strict=False)
        for index, (name, by_tensor) in enumerate(weights):
            sharing, quantizer = self._sharing_of_weight(index), by_tensor["weight"].copy()
            made[name] = quantizer = quantizer if sharing is None else sharing.quantizer("weight", quantizer)
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = False
        return made

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
            return super()._apply(fn, recurse)

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

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Register a function that is called after `backward_dw` has computed gradients."""
        self._wgrad_hooks.append(hook)

    # ---- state ---------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Return the histories of delayed scaling as a plain dict. If there are none, it is empty and not saved."""
        if self._unloaded is not None:
            return dict(self._unloaded)
        return extra_state_of(self._learned.get("forward"), self._learned.get("backward"))

    def set_extra_state(self, state: Any) -> None:
        """Load the histories of `get_extra_state`. Before the first forward, they wait for it."""
        if passes_over(state, self._built.recipe or self.bound_recipe):
            return
        check_extra_state(state, self.layer)
        self._unloaded = None
        if state is None or not len(state):
            return
        if self._learned:
            load_extra_state(state, self._learned.get("forward"), self._learned.get("backward"), self.layer)
        else:
            self._unloaded = {
                key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()
            }

    def _expect_other_weights(self) -> None:
        """Prepare for weights that are replaced from outside: the next forward checks them."""
        self._built = _nothing_built()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not destination[prefix + _EXTRA_STATE]:
            del destination[prefix + _EXTRA_STATE]  # then the keys are those of torch.nn

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + _EXTRA_STATE
        # What cannot be used is refused before parameters are overwritten.
        if local_metadata.get("assign_to_params_buffers", False):
            self._expect_other_weights()
        else:
            check_formats(self._parameters, state_dict, prefix)
        if key in state_dict:
            self.set_extra_state(state_dict[key])
        self._weight_cache.clear()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        renew_preserved_values(self._parameters, state_dict, prefix)
        if key in missing_keys:
            missing_keys.remove(key)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without quantizers, which are built again. Histories become plain data.

        Weight gradients that wait for `backward_dw` are left out, because they belong to this module's parameters.
        """
        state = dict(self.__dict__)
        state.update(
            _built=_nothing_built(),
            _learned={},
            _unloaded=self.get_extra_state() or None,
            _weight_cache=WeightCache(),
            _wgrads=[],
            tp_group=None,  # process groups do not travel
            _parameter_init=self._parameter_init if any(p.is_meta for p in self.parameters()) else None,
            fp8_meta={k: v for k, v in self.fp8_meta.items() if k not in ("recipe", *_SLOTS.values())},
        )
        return state


def _nothing_built() -> Built:
    return Built(None, {}, {"scaling_fwd": [], "scaling_bwd": []})


def _format(quantizer: Quantizer, direction: Direction, weight: QuantizedTensor | None, tensor: str) -> Format | None:
    """The format that a GEMM will read. A weight that is kept quantized has its own format."""
    if tensor == "weight" and weight is not None:
        return weight._formats.get(direction)
    return known_format(quantizer, direction)


def name_layers(model: nn.Module) -> None:
    """Name all quantized modules of a model that have no name by their paths, such as ``layers.3.mlp.fc1``.

    Args:
        model: the model; its modules are changed in place.
    """
    for path, module in model.named_modules():
        if hasattr(module, "get_quantizer_roles") and getattr(module, "name", "") is None:
            module.name = path
