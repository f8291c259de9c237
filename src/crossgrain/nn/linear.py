"""Linear: a drop-in for `torch.nn.Linear` whose three GEMMs each run in the format the recipe gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..linear.parallel import ParallelMode, local, share
from ..recipe import QuantizerRole
from ..tensor import QuantizedTensor
from .base import Mode
from .compiled import compilable
from .forward_pass import ForwardPass, TracedPass
from .linear_module import InitMethod, LinearModule, default_init
from .options import parameter_options

ParametersSplit = Sequence[str] | Mapping[str, int] | None


class SingleLinear(LinearModule):
    """A module with one linear layer, whose weight may be several parameters."""

    weight: Any  # or parameters of other names, if the weight is split
    bias: Any
    in_features: int
    out_features: int
    _splits: dict[str, int]  # rows by the prefix of the parameter's name

    def _make_linear(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        init_method: InitMethod | None,
        parameters_split: ParametersSplit,
        factory: Mapping[str, Any],
    ) -> None:
        mode = self.parallel_mode
        if self.tp_size > 1 and mode is None:
            raise ValueError(f"{self.layer}: tp_size={self.tp_size} needs a parallel_mode, 'row' or 'column'")
        columns = self.tp_size if mode == "column" else 1
        splits = _resolved_splits(parameters_split, out_features)
        self._splits = {
            name: share(self.layer, f"rows of {name}weight", rows, columns) for name, rows in splits.items()
        }
        rows = self.tp_size if mode == "row" else 1
        in_features = self.in_features = share(self.layer, "in_features", in_features, rows)
        self.out_features = sum(self._splits.values())
        self.return_bias = return_bias
        self.use_bias = bias
        self.apply_bias = bias and not return_bias
        self.init_method = init_method or default_init
        if len(self._splits) > 1 and self._parameter_init is not None:
            raise NotImplementedError(f"{self.layer}: weights that are kept quantized cannot be split into parameters")
        for split, rows in self._splits.items():
            self._add_weight(f"{split}weight", (rows, in_features), self.init_method, factory, mode)
            self._add_bias(f"{split}bias", rows, factory, present=bias, mode=mode)

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

    def _cache_name(self, index: int) -> str:
        return "weight"

    def _projected(
        self, x: Tensor, this: ForwardPass | TracedPass, *, quantized_output: bool, quantized_grad_input: bool
    ) -> tuple[Tensor, Tensor | None]:
        """y, and the bias if it is left to the caller."""
        weights = self._parameters_of_weight()
        bias = self._bias()
        y = self._linear(
            0,
            x,
            self._weight(weights),
            bias if self.apply_bias else None,
            this,
            parameters=weights,
            quantized_output=quantized_output,
            quantized_grad_input=quantized_grad_input,
        )
        return y, bias

    def _parameters_of_weight(self) -> list[Tensor]:
        return [self.weight] if "" in self._splits else [getattr(self, name) for name in self.weight_names]

    def _weight(self, weights: Sequence[Tensor]) -> Tensor:
        if len(weights) == 1:
            only: Tensor = weights[0] if type(weights[0]) is nn.Parameter else local(weights[0])
            return only
        if any(isinstance(weight, QuantizedTensor) for weight in weights):
            raise RuntimeError(f"{self.layer}: weights that are kept quantized cannot be split into parameters")
        return torch.cat([local(weight) for weight in weights])

    def _bias(self) -> Tensor | None:
        if "" in self._splits:  # one weight and one bias
            bias: Tensor | None = self.bias
            return bias if bias is None or type(bias) is nn.Parameter else local(bias)
        biases = [local(getattr(self, name)) for name in self.bias_names]
        if biases[0] is None:
            return None
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


class Linear(SingleLinear):
    """``y = x · Wᵀ + b`` for x [..., in_features].

    ``fuse_wgrad_accumulation``  dW is added to ``weight.main_grad``, which the caller provides
    ``delay_wgrad_compute``      dW is computed by `backward_dw`, not in backward
    ``save_original_input``      backward quantizes the input again instead of keeping its columnwise plane
    ``return_bias``              the bias is returned beside y, not added
    ``parameters_split``         several weights, ``{name: rows}``, that form one GEMM
    ``name``                     the layer's name for recipes
    ``parallel_mode``            "column", "row": the ranks of ``tp_group`` share the outputs, the inputs. Sizes are
                                 given for the whole; ``in_features``, ``out_features`` are those of the rank
    ``sequence_parallel``        they share the rows of x (column) or of y (row) as well
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
        parallel_mode: ParallelMode | None = None,
        parameters_split: ParametersSplit = None,
        device: torch.device | str | int | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        **gpu_options: Any,
    ) -> None:
        super().__init__(
            name,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            parallel_mode=parallel_mode,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
            **gpu_options,
        )
        self._make_linear(
            in_features,
            out_features,
            bias=bias,
            return_bias=return_bias,
            init_method=init_method,
            parameters_split=parameters_split,
            factory=parameter_options(params_dtype, device),
        )

    @compilable
    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """y, or (y, bias) with ``return_bias``.

        ``is_first_microbatch``  None: the weight is quantized in every call; True: and kept; False: what was kept
                                 is used. A weight that changes needs True in the next call.
        ``fp8_output``           y is returned quantized; ``fp8_grad``: dx is
        """
        this = self._forward_pass(inp, is_first_microbatch)
        with this.step:
            y, bias = self._projected(inp, this, quantized_output=fp8_output, quantized_grad_input=fp8_grad)
        return (y, bias) if self.return_bias else y


def _resolved_splits(split: ParametersSplit, out_features: int) -> dict[str, int]:
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
