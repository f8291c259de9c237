"""Linear: a drop-in for `torch.nn.Linear` whose three GEMMs each run in the format the recipe gives them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..hybrid import HybridQuantizer
from ..plane import Direction
from ..quantizer import Quantizer
from ..recipe import QuantizerRole, Recipe, active, keep_high_precision_init_val
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from .base import Built, Mode, QuantizedModule
from .linear_function import LinearCall, linear, quantize_weight
from .padding import Padding, Sizes, padding_for

InitMethod = Callable[[Tensor], Any]


class LinearDetails(NamedTuple):
    """What a recipe means for a linear layer."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    padding: Padding


def _default_init(weight: Tensor) -> None:
    nn.init.normal_(weight, mean=0.0, std=0.023)


class Linear(QuantizedModule):
    """``y = x · Wᵀ + b`` for x [..., in_features].

    ``fuse_wgrad_accumulation``  dW is added to ``weight.main_grad``, which the caller provides
    ``delay_wgrad_compute``      dW is computed by `backward_dw`, not in backward
    ``save_original_input``      backward quantizes the input again instead of keeping its columnwise plane
    ``return_bias``              the bias is returned beside y, not added
    ``parameters_split``         several weights, ``{name: rows}``, that form one GEMM
    ``name``                     the layer's name for recipes
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Literal["row", "column"] | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(name)
        _refuse_gpu_options(type(self).__name__, unused)
        if tp_size != 1 or parallel_mode not in (None, "row", "column") or sequence_parallel:
            raise NotImplementedError(
                f"{type(self).__name__}: one process holds the whole layer: tp_size=1, no sequence_parallel, not "
                f"tp_size={tp_size}, parallel_mode={parallel_mode!r}, sequence_parallel={sequence_parallel}"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.return_bias = return_bias
        self.use_bias = bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.init_method = init_method or _default_init
        self._rng_tracker = (get_rng_state_tracker, rng_tracker_name)
        self._splits = _resolved_splits(parameters_split, out_features)
        if len(self._splits) > 1 and self._parameter_init is not None:
            raise NotImplementedError(f"{self.layer}: weights that are kept quantized cannot be split into parameters")
        factory: Any = {"dtype": params_dtype or torch.get_default_dtype(), "device": _resolved_device(device)}
        for split, rows in self._splits.items():
            self._make_parameters(split, torch.empty(rows, in_features, **factory), bias)

    def _make_parameters(self, split: str, weight: Tensor, bias: bool) -> None:
        if weight.device.type != "meta":
            self._initialise(weight)
        self._register_weight(f"{split}weight", weight)
        self.register_parameter(f"{split}bias", nn.Parameter(weight.new_zeros(weight.shape[0])) if bias else None)

    def _initialise(self, weight: Tensor) -> None:
        tracker, tracker_name = self._rng_tracker
        with torch.no_grad():
            if tracker is None:
                self.init_method(weight)
            else:
                with tracker().fork(tracker_name) if tracker_name else tracker().fork():
                    self.init_method(weight)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters again, in place.

        Those on the meta device get memory on the default device, and those that are to be kept quantized are
        quantized, which needs new parameters.
        """
        if defer_init:
            return
        self._weight_cache.clear()
        for split, rows in self._splits.items():
            old = getattr(self, f"{split}weight")
            quantized = isinstance(old, QuantizedTensor)
            if old.is_meta or quantized or self._parameter_init is not None:
                device = torch.get_default_device() if old.is_meta else old.device
                weight = torch.empty(rows, self.in_features, dtype=old.dtype, device=device)
                if not quantized:
                    self._make_parameters(split, weight, self.use_bias)
                    continue
                self._initialise(weight)
                self._requantize_in_place(old, weight)
            else:
                self._initialise(old)
            if self.use_bias:
                nn.init.zeros_(getattr(self, f"{split}bias"))

    def _requantize_in_place(self, parameter: Any, value: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(value)
        if getattr(parameter, "get_high_precision_init_val", None) is not None:
            keep_high_precision_init_val(parameter, value)

    # ---- recipes -------------------------------------------------------------------------------

    @property
    def weight_names(self) -> list[str]:
        return [f"{split}weight" for split in self._splits]

    @property
    def bias_names(self) -> list[str]:
        return [f"{split}bias" for split in self._splits]

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        name = self.name or ""
        roles: list[QuantizerRole | None] = (
            [QuantizerRole("linear", "input", name), QuantizerRole("linear", "weight", name), self._output_role]
            if fwd
            else [QuantizerRole("linear", "grad_output", name), self._grad_input_role]
        )
        if num_quantizers != len(roles):
            raise ValueError(f"{self.layer} has {len(roles)} slots in this pass, not {num_quantizers}")
        return roles

    def _slot_counts(self) -> Mapping[Mode, int]:
        return {"forward": 3, "backward": 2}

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        forward, backward = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
        return [{"input": forward[0], "weight": forward[1], "grad_output": backward[0]}]

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> LinearDetails:
        by_tensor = self._gemm_operands(quantizers)[0]
        x, weight, grad_output = (by_tensor[name] for name in ("input", "weight", "grad_output"))
        quantizes_backward = recipe.backward_override is None
        padding = padding_for(x, weight, grad_output if quantizes_backward else None)
        return LinearDetails(x, weight, grad_output, padding)

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """y, or (y, bias) with ``return_bias``.

        ``is_first_microbatch``  None: the weight is quantized in every call; True: and kept; False: what was kept
                                 is used. A weight that changes needs True in the next call.
        ``fp8_output``           y is returned quantized; ``fp8_grad``: dx is
        """
        recipe = self._recipe_in_force()
        built = self._prepare(recipe)
        weight, bias = self._weight(), self._bias()
        call = LinearCall(
            dtype=_activation_dtype(inp),
            accumulate_main_grad=self.fuse_wgrad_accumulation,
            wgrad_queue=self._wgrads if self.delay_wgrad_compute else None,
            weight_parts=self._parameters_of_weight() if len(self._splits) > 1 else None,
            layer=self.layer,
        )
        if recipe is not None and not active().enabled and active().calibrating:
            self._calibrate(built.details, inp, weight)
        elif recipe is not None:
            self._add_quantizers(call, recipe, built, weight, is_first_microbatch)
            call.output = built.quantizers["scaling_fwd"][2] if fp8_output else None
            call.grad_input = built.quantizers["scaling_bwd"][1] if fp8_grad else None
        elif fp8_output or fp8_grad:
            raise RuntimeError(f"{self.layer}: a quantized output or gradient needs a recipe, and none is in force")
        y = linear(inp, weight, bias if self.apply_bias else None, call)
        return (y, bias) if self.return_bias else y

    def _calibrate(self, details: LinearDetails, inp: Tensor, weight: Tensor) -> None:
        """Statistics are taken, nothing is quantized."""
        with torch.no_grad():
            for quantizer, tensor in ((details.input, inp), (details.weight, weight)):
                quantizer.calibrate(tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.detach())

    def _add_quantizers(
        self, call: LinearCall, recipe: Recipe, built: Built, weight: Tensor, is_first_microbatch: bool | None
    ) -> None:
        details: LinearDetails = built.details
        call.input, call.weight, call.grad_output, call.padding = details
        call.backward_override = recipe.backward_override
        call.allow_mixed = recipe.allow_mixed
        call.keep_input = self.save_original_input and self._keeps_input(recipe, built)
        call.on_backward = self._backward_noted(built) if torch.is_grad_enabled() else None
        if is_first_microbatch is not None and not isinstance(weight, QuantizedTensor):
            call.quantized_weight = self._cached_weight(call, details, weight, refresh=is_first_microbatch)

    def _cached_weight(
        self, call: LinearCall, details: LinearDetails, weight: Tensor, refresh: bool
    ) -> QuantizedTensorStorage:
        # A copy for later microbatches has both directions while training, even if this one's input needs no gradient.
        columnwise = torch.is_grad_enabled() and call.quantizes_backward
        padded = details.padding.padded(Sizes(0, weight.shape[1], weight.shape[0]), backward=True)
        return self._weight_cache.get(
            "weight",
            self._parameters_of_weight(),
            refresh=refresh,
            columnwise=columnwise,
            make=lambda: quantize_weight(weight, details.weight, padded, columnwise),
        )

    def _keeps_input(self, recipe: Recipe, built: Built) -> bool:
        """Whether backward may quantize the input again: only if it gets what forward would have kept."""
        if recipe.delayed():
            raise ValueError(
                f"{self.layer}: save_original_input needs a quantizer without history, not delayed scaling"
            )
        if recipe.backward_override == "high_precision":
            return True
        state = built.states["forward"].delayed
        has_history = state is not None and any(slot == 0 for slot, _ in state.columns)  # its scale changes meanwhile
        if not has_history and can_reconstruct_wgrad_input_from_original(built.details.input):
            return True
        warnings.warn(
            f"{self.layer}: save_original_input is off, for its input's quantizer would not make the same bytes twice",
            stacklevel=3,
        )
        return False

    def _parameters_of_weight(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.weight_names]

    def _weight(self) -> Tensor:
        weights = self._parameters_of_weight()
        if len(weights) == 1:
            return weights[0]
        if any(isinstance(weight, QuantizedTensor) for weight in weights):
            raise RuntimeError(f"{self.layer}: weights that are kept quantized cannot be split into parameters")
        return torch.cat(weights)

    def _bias(self) -> Tensor | None:
        biases = [getattr(self, name) for name in self.bias_names]
        if biases[0] is None:
            return None
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def can_reconstruct_wgrad_input_from_original(quantizer: Quantizer) -> bool:
    """Whether wgrad's operand may be made from the input in backward, after forward used the rowwise plane.

    In a hybrid, a columnwise plane of the original has nothing to do with the rowwise one; one that is
    derived from the rowwise plane needs the same rowwise bytes again.
    """
    if isinstance(quantizer, HybridQuantizer):
        row: Quantizer = quantizer.child(Direction.ROWWISE)
        return quantizer.columnwise_source == "original" or row.is_requantization_safe()
    return quantizer.is_requantization_safe()


def _activation_dtype(x: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _resolved_splits(split: Sequence[str] | Mapping[str, int] | None, out_features: int) -> dict[str, int]:
    """Parameter prefixes and their rows: ``{"": out_features}`` if there is one weight."""
    if not split:
        return {"": out_features}
    if not isinstance(split, Mapping):
        if out_features % len(split):
            raise ValueError(f"{out_features} rows cannot be split evenly into {list(split)}")
        split = dict.fromkeys(split, out_features // len(split))
    if sum(split.values()) != out_features:
        raise ValueError(f"the parts {dict(split)} do not add up to {out_features} rows")
    return {f"{name.removesuffix('_')}_": rows for name, rows in split.items()}


def _resolved_device(device: torch.device | str | None) -> torch.device:
    device = torch.get_default_device() if device is None else torch.device(device)
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


def _refuse_gpu_options(layer: str, options: Mapping[str, Any]) -> None:
    """Overlap of communication and the like are accepted as long as they are off."""
    for name, value in options.items():
        if not (name.startswith("ub_") or name == "symmetric_ar_type"):
            raise TypeError(f"{layer} has no option {name!r}")
        if value not in (None, False) and name != "ub_name":
            raise NotImplementedError(f"{layer}: {name} is an option of GPU communication; leave it off")
