"""`LinearModule`: the base class of modules that consist of linear layers.

A module may have several linear layers: two in an MLP, one per expert in a grouped layer. Each has its own weight and
its own quantizers (`LinearSlots`). All of them run through `crossgrain.linear.function`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..linear import probe  # whether somebody looks into layers is asked when they run
from ..linear.call import LinearCall, activation_dtype, check_gradient_quantizer
from ..linear.function import linear
from ..linear.gathered_weight import GatheredWeight
from ..linear.padding import Padding, known_format, padding_for
from ..linear.parallel import (
    ParallelMode,
    TensorParallel,
    mark_sequence_parallel,
    resolved_group,
    set_tensor_model_parallel_attributes,
    shared_by,
)
from ..linear.weight_copies import copies_columns, frees_gathered_weights, quantized_copy, repeats
from ..planes import Direction
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..recipe import QuantizerRole, Recipe
from ..runtime.collectives import AwaitedGroup, group_size
from ..runtime.failures import telling_others
from ..runtime.passes import current_pass
from ..runtime.settings import settings
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.init_values import keep_high_precision_init_val
from ..tensor.sharding import is_sharded, local_part, own_part, write_shard
from .base import QuantizedModule
from .compiled import constant_ticket, traced_linear
from .forward_pass import ForwardPass, TracedPass, both
from .options import refuse_gpu_options

InitMethod = Callable[[Tensor], Any]


class LinearSlots(NamedTuple):
    """The indices of the quantizers of one linear layer in the lists of its module."""

    input: int = 0
    weight: int = 1
    output: int = 2
    grad_output: int = 0
    grad_input: int = 1


class LinearDetails(NamedTuple):
    """The quantizers and the padding that a recipe gives a linear layer."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    padding: Padding
    repeats: bool = False  # quantizing the weight again gives the same bytes, so copies can be used instead
    product: str = ""  # name of the layer in recipes


class ParameterSpec(NamedTuple):
    """How to create a parameter, and how `reset_parameters` initializes it again."""

    shape: tuple[int, ...]
    init: InitMethod
    is_weight: bool = False  # of a GEMM: quantized in a quantized_model_init
    cut: int | None = None  # the dimension that ranks share, in tensor parallelism
    sequence_parallel: bool | None = None  # whether its gradient is a rank's part of a sum over rows


def default_init(weight: Tensor) -> None:
    nn.init.normal_(weight, mean=0.0, std=0.023)


class LinearModule(QuantizedModule):
    """Base class of modules that consist of linear layers.

    Its options are those that these modules have in common; `Linear` describes them. The modules list them in their own
    signatures and pass them on with `options_for`.
    """

    def __init__(
        self,
        name: str | None,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: ParallelMode | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        **gpu_options: Any,
    ) -> None:
        super().__init__(name)
        kind = type(self).__name__
        refuse_gpu_options(kind, gpu_options)
        if parallel_mode not in (None, "row", "column"):
            raise ValueError(f"{kind}: parallel_mode must be None, 'row' or 'column', got {parallel_mode!r}")
        self.tp_group, self.tp_size = resolved_group(kind, tp_group, tp_size)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.ub_name = gpu_options.get("ub_name")
        self.rng_tracker_name = rng_tracker_name
        self._rng_tracker = (get_rng_state_tracker, rng_tracker_name)
        self._parameter_specs: dict[str, ParameterSpec] = {}

    # ---- parameters ----------------------------------------------------------------------------

    def _add_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        init: InitMethod,
        factory: Mapping[str, Any],
        mode: ParallelMode | None = None,
    ) -> None:
        """Create the weight of a GEMM. With a parallel ``mode`` it is marked as this rank's part."""
        cut = None if mode is None else {"column": 0, "row": 1}[mode]
        self._make_parameter(name, ParameterSpec(shape, init, is_weight=True, cut=cut), factory)

    def _add_bias(
        self,
        name: str,
        size: int,
        factory: Mapping[str, Any],
        present: bool = True,
        mode: ParallelMode | None = None,
    ) -> None:
        """Create a bias of zeros; without ``present``, register None under its name."""
        if not present:
            self.register_parameter(name, None)
            return
        cut = 0 if mode == "column" else None
        marked = self.sequence_parallel if mode == "row" else None
        self._make_parameter(name, ParameterSpec((size,), nn.init.zeros_, cut=cut, sequence_parallel=marked), factory)

    def _make_parameter(self, name: str, spec: ParameterSpec, factory: Mapping[str, Any]) -> None:
        self._parameter_specs[name] = spec
        value = torch.empty(spec.shape, **factory)
        if not value.is_meta:
            self._initialise(value, spec)
        if spec.is_weight:
            self._register_weight(name, value)
        else:
            self.register_parameter(name, nn.Parameter(value))
        if spec.cut is not None:
            set_tensor_model_parallel_attributes(getattr(self, name), True, spec.cut, 1)
        if spec.sequence_parallel is not None:
            mark_sequence_parallel(self, name, marked=spec.sequence_parallel)

    def _initialise(self, value: Tensor, spec: ParameterSpec) -> None:
        tracker, tracker_name = self._rng_tracker
        with torch.no_grad():
            if tracker is None or not spec.is_weight:
                spec.init(value)
            else:
                with tracker().fork(tracker_name) if tracker_name else tracker().fork():
                    spec.init(value)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize the parameters again, in place.

        Parameters on the meta device get memory on the default device. Weights that are to be kept quantized are
        quantized, for which new parameters replace the old ones.

        Args:
            defer_init: if True, do nothing.
        """
        if defer_init:
            return
        self._weight_cache.clear()
        for name, spec in self._parameter_specs.items():
            old: Any = getattr(self, name)
            quantized = isinstance(old, QuantizedTensor)
            if is_sharded(old):
                self._reset_shard(name, old, spec)
            elif old.is_meta or (spec.is_weight and self._parameter_init is not None and not quantized):
                device = torch.get_default_device() if old.is_meta else old.device
                self._make_parameter(name, spec, {"dtype": old.dtype, "device": device})
            elif quantized:
                self._requantize_in_place(old, self._new_value(old, spec))
            else:
                self._initialise(old, spec)

    def _new_value(self, parameter: Tensor, spec: ParameterSpec) -> Tensor:
        value = torch.empty(spec.shape, dtype=parameter.dtype, device=parameter.device)
        self._initialise(value, spec)
        return value

    def _reset_shard(self, name: str, parameter: Any, spec: ParameterSpec) -> None:
        """Draw the whole parameter on every rank and keep this rank's part: the numbers are those of one process."""
        if parameter.is_meta:
            raise RuntimeError(f"{self.layer}: {name} is sharded and on the meta device; call model.to_empty() first")
        whole, own = self._new_value(parameter, spec), local_part(parameter)
        value = own_part(whole, parameter.device_mesh, parameter.placements)
        if not isinstance(own, QuantizedTensor):
            own.copy_(value)
            return
        if self._parameter_init is not None:
            built = self._build_quantizers(self._parameter_init.recipe)
            own._quantizer = self._weight_quantizers(built.quantizers)[name]
        write_shard(parameter, value)
        if self._parameter_init is not None and self._parameter_init.preserve_init_value:
            keep_high_precision_init_val(own, value)

    def _requantize_in_place(self, parameter: Any, value: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(value)
        preserves = self._parameter_init is not None and self._parameter_init.preserve_init_value
        if preserves or getattr(parameter, "get_high_precision_init_val", None) is not None:
            keep_high_precision_init_val(parameter, value)

    # ---- tensor parallelism --------------------------------------------------------------------

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the process group of the ranks that share the layer.

        Args:
            tp_group: a group of ``tp_size`` ranks.

        Raises:
            ValueError: the group has another number of ranks.
        """
        resolved_group(self.layer, tp_group, self.tp_size)
        if tp_group is not None and self.tp_size == 1 and group_size(tp_group) > 1:
            raise ValueError(
                f"{self.layer} was made for one rank, but tp_group has {group_size(tp_group)}; pass tp_size to the "
                "constructor"
            )
        self.tp_group = tp_group
        self._forget_quantizers()  # which know the group
        weights = self._quantized_weights()
        for index, name in enumerate(self.weight_names):  # they may be written before the next forward
            sharing, weight = self._sharing_of_weight(index), weights.get(name)
            if sharing is not None and weight is not None:
                quantizer = weight._get_quantizer().copy()
                quantizer.leave_group()
                weight._quantizer = sharing.quantizer("weight", quantizer)

    def _require_parallel_mode(self) -> None:
        """Raise if ranks share the module and nobody has said how."""
        if self.tp_size > 1 and self.parallel_mode is None:
            raise ValueError(f"{self.layer}: tp_size={self.tp_size} needs a parallel_mode, 'row' or 'column'")

    def _mode(self, index: int) -> ParallelMode | None:
        """How ranks share linear layer ``index``: "column", "row" or None."""
        return self.parallel_mode

    def _segments(self, index: int) -> tuple[int, ...]:
        """The rows of this rank in each piece of the weight ``index`` that column-parallel ranks divide separately."""
        return ()

    def _parallel(self, index: int) -> TensorParallel | None:
        return self._shared_by(index, self.tp_group)

    def _shared_by(self, index: int, group: Any) -> TensorParallel | None:
        mode, segments = self._mode(index), self._segments(index)
        return shared_by(self.layer, mode, group, self.tp_size, self.sequence_parallel, segments)

    def _sharing_of_weight(self, index: int) -> TensorParallel | None:
        group = self.tp_group or AwaitedGroup(
            f"{self.layer}: its weights are kept quantized under scales that tp_size={self.tp_size} ranks have in "
            "common, but the process group is not set yet. Pass tp_group; or make the layer on the meta device, call "
            "set_tensor_parallel_group and then reset_parameters"
        )
        return self._shared_by(index, group)

    # ---- recipes -------------------------------------------------------------------------------

    def _linear_slots(self) -> Sequence[LinearSlots]:
        """The slots of each linear layer, in the order of `weight_names`."""
        return [LinearSlots()]

    def _counted(self, roles: list[QuantizerRole | None], num_quantizers: int) -> list[QuantizerRole | None]:
        """Return ``roles``; raise if the caller expects another number of them."""
        if num_quantizers != len(roles):
            raise ValueError(
                f"{self.layer} has {len(roles)} slots for quantizers in this pass, got num_quantizers={num_quantizers}"
            )
        return roles

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        forward, backward = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
        return [
            {"input": forward[at.input], "weight": forward[at.weight], "grad_output": backward[at.grad_output]}
            for at in self._linear_slots()
        ]

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> list[LinearDetails]:
        quantizes_backward = recipe.backward_override is None
        made, slots, roles = [], self._linear_slots(), self._roles("forward")
        for index, by_tensor in enumerate(self._gemm_operands(quantizers)):
            role = roles[slots[index].input]
            product = "" if role is None else role.layer
            parallel = self._parallel(index) if self.tp_group is not None else None
            if parallel is not None:
                by_tensor = {name: parallel.quantizer(name, quantizer) for name, quantizer in by_tensor.items()}
            x, weight, grad_output = (by_tensor[name] for name in ("input", "weight", "grad_output"))
            check_gradient_quantizer(grad_output, self.layer)
            padding = padding_for(x, weight, grad_output if quantizes_backward else None)
            made.append(LinearDetails(x, weight, grad_output, padding, repeats(weight), product))
        return made

    def linear_roles(self) -> list[QuantizerRole | None]:
        """The role of the input of each linear layer, which has the name of the layer."""
        roles = self._roles("forward")
        return [roles[at.input] for at in self._linear_slots()]

    # ---- running -------------------------------------------------------------------------------

    def _forward_pass(self, x: Tensor, is_first_microbatch: bool | None) -> Any:
        """What is settled at the start of forward; a `TracedPass` while a graph is made, else a `ForwardPass`."""
        if torch.compiler.is_compiling():
            return TracedPass(constant_ticket(self), activation_dtype(x))
        recipe = self._recipe_in_force()
        built = self._prepare(recipe)
        calibrates = recipe is not None and self._only_calibrates()
        step = self._step(recipe, built)
        if self.tp_size > 1:
            step = both(step, telling_others(self.layer))
        return ForwardPass(recipe, built, calibrates, activation_dtype(x), is_first_microbatch, step)

    def _role_stamp(self) -> Any:
        if self.get_quantizer_roles.__module__.partition(".")[0] != __package__.partition(".")[0]:
            return None  # roles that a user makes up may depend on anything
        return self.name, self._output_role, self._grad_input_role

    def _linear(
        self,
        index: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        this: ForwardPass | TracedPass,
        *,
        parameters: Sequence[Tensor] | None = None,
        quantized_output: bool = False,
        quantized_grad_input: bool = False,
    ) -> Tensor:
        """Run linear layer ``index`` of the module. ``weight`` may consist of several ``parameters``."""
        if isinstance(this, TracedPass):
            return traced_linear(x, weight, bias, this, index)
        call = self._linear_call(index, x, weight, this, parameters)
        if probe.attach is not None:
            probe.attach(self, index, weight, call)
        if quantized_output or quantized_grad_input:
            if this.recipe is None:
                raise RuntimeError(f"{self.layer}: fp8_output and fp8_grad need a recipe, but none is active")
            at = self._linear_slots()[index]
            if not this.calibrates:
                call.output = this.built.quantizers["scaling_fwd"][at.output] if quantized_output else None
                call.grad_input = this.built.quantizers["scaling_bwd"][at.grad_input] if quantized_grad_input else None
        return linear(x, weight, bias, call)

    def _traceable(self) -> bool:
        """Whether the linear layers can be operators in a compiled graph; options with side effects break graphs."""
        recipe = self._recipe_in_force()
        effects = self.fuse_wgrad_accumulation or self.delay_wgrad_compute or self.save_original_input
        if self.tp_size > 1 or effects or self.primary_weights_in_fp8 or probe.attach is not None:
            return False
        if recipe is None or self._only_calibrates():
            return recipe is None
        quantizers = [quantizer for details in self._build_quantizers(recipe).details for quantizer in details[:3]]
        return not any(known_format(quantizer, side) is None for quantizer in quantizers for side in Direction)

    def _linear_call(
        self, index: int, x: Tensor, weight: Tensor, this: ForwardPass, parameters: Sequence[Tensor] | None = None
    ) -> LinearCall:
        parameters = parameters or [weight]
        gathered = weight if isinstance(weight, GatheredWeight) else None
        call = LinearCall(
            dtype=this.dtype,
            accumulate_main_grad=self.fuse_wgrad_accumulation,
            wgrad_queue=self._wgrads if self.delay_wgrad_compute else None,
            weight_parts=parameters if len(parameters) > 1 else None,
            parallel=None if self.tp_size == 1 else self._parallel(index),
            layer=self.layer,
        )
        if gathered is not None and (this.recipe is None or this.calibrates):
            gathered.used_by(None, self.layer)
        if this.recipe is None:
            return call
        details: LinearDetails = this.built.details[index]
        if this.calibrates:
            calibrate(details.input, details.weight, x, weight)
            return call
        call.input, call.weight, call.grad_output, call.padding, same_again, call.product = details
        call.backward_override = this.recipe.backward_override
        call.allow_mixed = this.recipe.allow_mixed
        call.keep_input = self.save_original_input and self._keeps_input(index, this)
        call.on_backward = self._backward_noted(this.built) if torch.is_grad_enabled() else None
        if gathered is not None:
            call.quantized_weight = gathered.used_by(call.weight, self.layer)
        elif this.is_first_microbatch is not None and not isinstance(weight, QuantizedTensor):
            call.quantized_weight = self._cached_weight(index, call, weight, parameters, this)
        elif same_again and not isinstance(weight, QuantizedTensor):
            trains = parameters[0].requires_grad or any(own.requires_grad for own in parameters[1:])
            if not trains or not (torch.is_grad_enabled() or current_pass().trains):
                call.quantized_weight = self._unchanged_weight(index, call, weight, parameters)
            elif self._weight_cache.unchanged.copies:
                self._weight_cache.unchanged.clear()  # of a validation: training would keep them for nothing
        return call

    def _cached_weight(
        self, index: int, call: LinearCall, weight: Tensor, parameters: Sequence[Tensor], this: ForwardPass
    ) -> QuantizedTensorStorage:
        cache, name = self._weight_cache, self._cache_name(index)

        def copy() -> QuantizedTensorStorage:
            return cache.get(
                name,
                parameters,
                layer=self.layer,
                refresh=bool(this.is_first_microbatch),
                columnwise=copies_columns(call),
                make=partial(quantized_copy, call, weight),
            )

        # Recomputed with the copy that the first pass used, which may not be the cached one any more.
        return current_pass().same((cache, name), copy)

    def _unchanged_weight(
        self, index: int, call: LinearCall, weight: Tensor, parameters: Sequence[Tensor]
    ) -> QuantizedTensorStorage | None:
        """A copy from an earlier call, if the weight is still the same; None if it has to be quantized."""
        if not settings.reuse_unchanged_weights or self.tp_size > 1 or frees_gathered_weights():
            return None
        # A layer may multiply several parts of one parameter. Where the parameter itself lies may change in every call.
        place = weight.storage_offset() - parameters[0].storage_offset()
        return self._weight_cache.unchanged.get(
            (index, place),
            weight,
            columnwise=copies_columns(call),
            make=partial(quantized_copy, call, weight),
        )

    def _cache_name(self, index: int) -> str:
        return self.weight_names[index]

    def _keeps_input(self, index: int, this: ForwardPass) -> bool:
        """Whether backward may quantize the input again, which must give the bytes that forward would have kept."""
        assert this.recipe is not None
        if this.recipe.delayed():
            raise ValueError(
                f"{self.layer}: the DelayedScaling recipe is not supported with save_original_input=True, because its "
                "scales change before backward quantizes the input again"
            )
        if this.recipe.backward_override == "high_precision":
            return True
        state, slot = this.built.states["forward"].delayed, self._linear_slots()[index].input
        has_history = state is not None and any(at == slot for at, _ in state.columns)  # its scale changes meanwhile
        if not has_history and can_reconstruct_wgrad_input_from_original(this.built.details[index].input):
            return True
        # By `warnings`, as Transformer Engine does, because programs for it catch this one there.
        warnings.warn(
            f"{self.layer}: Ignoring save_original_input=True, because the quantizer of the input would not make the "
            "same bytes a second time",
            stacklevel=3,
        )
        return False


def calibrate(input_quantizer: Quantizer, weight_quantizer: Quantizer, x: Tensor, weight: Tensor) -> None:
    """Let the quantizers of forward record the statistics of their operands."""
    with torch.no_grad():
        for quantizer, tensor in ((input_quantizer, x), (weight_quantizer, weight)):
            quantizer.calibrate(tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.detach())


def can_reconstruct_wgrad_input_from_original(quantizer: Quantizer) -> bool:
    """Whether backward may make the operand of wgrad from the original input, after forward used the rowwise plane.

    In a hybrid, a columnwise plane that is made from the original is independent of the rowwise plane. One that is made
    from the rowwise plane needs the same rowwise bytes again.

    Examples:
        >>> cg.nn.can_reconstruct_wgrad_input_from_original(cg.quantizer_for("mxfp8"))
        True
    """
    if isinstance(quantizer, HybridQuantizer):
        row: Quantizer = quantizer.child(Direction.ROWWISE)
        return not quantizer.derives_columns or row.is_requantization_safe()
    return quantizer.is_requantization_safe()
