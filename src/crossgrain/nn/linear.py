"""Linear: a drop-in for `torch.nn.Linear` whose three GEMMs each run in the format the recipe gives them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..hybrid import HybridQuantizer
from ..plane import Direction
from ..quantizer import Quantizer
from ..recipe import QuantizerRole, Recipe
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from .base import Mode, QuantizedModule
from .linear_function import LinearCall, Sizes, linear, padded_sizes, quantize_weight

InitMethod = Callable[[Tensor], Any]


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
        factory: Any = {"dtype": params_dtype or torch.get_default_dtype(), "device": _resolved_device(device)}
        for split, rows in self._splits.items():
            self._make_parameters(split, torch.empty(rows, in_features, **factory), bias)

    def _make_parameters(self, split: str, weight: Tensor, bias: bool) -> None:
        if weight.device.type != "meta":
            self._initialise(weight)
        self._register_weight(f"{split}weight", weight, slot=1)
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
        """Initialise the parameters again; those on the meta device get memory on the default device."""
        if defer_init:
            return
        for split, rows in self._splits.items():
            old = getattr(self, f"{split}weight")
            device = torch.get_default_device() if old.device.type == "meta" else old.device
            weight = torch.empty(rows, self.in_features, dtype=old.dtype, device=device)
            if isinstance(old, QuantizedTensor):
                self._initialise(weight)
                with torch.no_grad():
                    old.copy_(weight)
                getattr(self, f"{split}bias").data.zero_() if self.use_bias else None
            else:
                self._make_parameters(split, weight, self.use_bias)

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

    def _gemm_operands(self) -> Sequence[Mapping[str, Quantizer]]:
        return [_by_tensor(self.quantizers)]

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
        self._prepare(recipe)
        weight, bias = self._weight(), self._bias()
        call = LinearCall(
            dtype=_activation_dtype(inp),
            accumulate_main_grad=self.fuse_wgrad_accumulation,
            wgrad_queue=self._wgrads if self.delay_wgrad_compute else None,
            layer=self.layer,
        )
        if recipe is not None:
            self._add_quantizers(call, recipe, weight, inp, is_first_microbatch)
            call.output = self.quantizers["scaling_fwd"][2] if fp8_output else None
            call.grad_input = self.quantizers["scaling_bwd"][1] if fp8_grad else None
        elif fp8_output or fp8_grad:
            raise RuntimeError(f"{self.layer}: a quantized output or gradient needs a recipe, and none is in force")
        y = linear(inp, weight, bias if self.apply_bias else None, call)
        return (y, bias) if self.return_bias else y

    def _add_quantizers(
        self, call: LinearCall, recipe: Recipe, weight: Tensor, inp: Tensor, is_first_microbatch: bool | None
    ) -> None:
        by_tensor = _by_tensor(self.quantizers)
        call.input, call.weight, call.grad_output = (by_tensor[name] for name in ("input", "weight", "grad_output"))
        call.backward_override = recipe.backward_override
        call.allow_mixed = recipe.allow_mixed
        call.keep_input = self._keeps_input(recipe, by_tensor["input"])
        call.on_backward = self._backward_noted() if torch.is_grad_enabled() else None
        if is_first_microbatch is not None and not isinstance(weight, QuantizedTensor):
            call.quantized_weight = self._cached_weight(call, weight, inp, refresh=is_first_microbatch)

    def _cached_weight(self, call: LinearCall, weight: Tensor, inp: Tensor, refresh: bool) -> QuantizedTensorStorage:
        grad = torch.is_grad_enabled()
        # A copy for later microbatches has both directions while training, even if this one's input needs no gradient.
        padded = padded_sizes(Sizes(0, weight.shape[1], weight.shape[0]), call, needs_dx=True, needs_dw=True)
        columnwise = grad and call.quantizes_backward
        assert call.weight is not None
        quantizer = call.weight
        return self._weight_cache.get(
            "weight",
            refresh=refresh,
            columnwise=columnwise,
            shape=(padded.n, padded.k),
            make=lambda: quantize_weight(weight, quantizer, padded, columnwise),
        )

    def _keeps_input(self, recipe: Recipe, quantizer: Quantizer) -> bool:
        if not self.save_original_input:
            return False
        if recipe.delayed():
            raise ValueError(
                f"{self.layer}: save_original_input needs a quantizer without history, not delayed scaling"
            )
        if recipe.backward_override == "high_precision" or can_reconstruct_wgrad_input_from_original(quantizer):
            return True
        warnings.warn(
            f"{self.layer}: save_original_input is off, for its input's quantizer would not make the same bytes twice",
            stacklevel=3,
        )
        return False

    def _weight(self) -> Tensor:
        weights = [getattr(self, name) for name in self.weight_names]
        if len(weights) == 1:
            weight: Tensor = weights[0]
            return weight
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


def _by_tensor(quantizers: Mapping[str, Sequence[Quantizer]]) -> dict[str, Quantizer]:
    forward, backward = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
    return {"input": forward[0], "weight": forward[1], "grad_output": backward[0]}


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
