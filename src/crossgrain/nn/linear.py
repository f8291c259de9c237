"""`Linear`: replaces `torch.nn.Linear`; each of its three GEMMs runs in the formats that the recipe gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..linear.parallel import ParallelMode, local, share
from ..recipe import QuantizerRole
from ..tensor import QuantizedTensor
from .compiled import compilable
from .forward_pass import ForwardPass, TracedPass
from .linear_module import InitMethod, LinearModule, default_init
from .module_interface import Mode
from .options import options_for, parameter_options

ParametersSplit = Sequence[str] | Mapping[str, int] | None


class SingleLinear(LinearModule):
    """Base class of modules with one linear layer, whose weight may consist of several parameters."""

    weight: Any  # or parameters of other names, if the weight is split
    bias: Any
    in_features: int
    out_features: int
    _splits: dict[str, int]  # rows by the prefix of the parameter's name
    _fused: tuple[int, ...] = ()  # rows of this rank in each piece of one weight, as of queries, keys and values
    _role_name: str | None = None  # the last part of the name in roles, if Transformer Engine has another one there

    def _make_linear(
        self,
        in_features: int,
        out_features: int,
        init_method: InitMethod | None,
        parameters_split: ParametersSplit,
        factory: Mapping[str, Any],
    ) -> None:
        mode = self.parallel_mode
        self._require_parallel_mode()
        columns = self.tp_size if mode == "column" else 1
        splits = _resolved_splits(parameters_split, out_features)
        self._splits = {
            name: share(self.layer, f"rows of {name}weight", rows, columns) for name, rows in splits.items()
        }
        rows = self.tp_size if mode == "row" else 1
        in_features = self.in_features = share(self.layer, "in_features", in_features, rows)
        self.out_features = sum(self._splits.values())
        self.init_method = init_method or default_init
        if len(self._splits) > 1 and self._parameter_init is not None:
            raise NotImplementedError(
                f"{self.layer}: weights that are kept quantized cannot be split into parameters; leave out "
                "parameters_split"
            )
        for split, rows in self._splits.items():
            self._add_weight(f"{split}weight", (rows, in_features), self.init_method, factory, mode)
            self._add_bias(f"{split}bias", rows, factory, present=self.use_bias, mode=mode)

    def _segments(self, index: int) -> tuple[int, ...]:
        return self._fused or tuple(self._splits.values())

    @property
    def weight_names(self) -> list[str]:
        return [f"{split}weight" for split in self._splits]

    @property
    def bias_names(self) -> list[str]:
        return [f"{split}bias" for split in self._splits]

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        path = name = self.name or ""
        if path and self._role_name is not None:
            name = f"{path.rpartition('.')[0]}.{self._role_name}".lstrip(".")
        tensors = ("input", "weight") if fwd else ("grad_output",)
        operands = [QuantizerRole("linear", tensor, name, path) for tensor in tensors]
        return self._counted([*operands, self._output_role if fwd else self._grad_input_role], num_quantizers)

    def _slot_counts(self) -> Mapping[Mode, int]:
        return {"forward": 3, "backward": 2}

    def _cache_name(self, index: int) -> str:
        return "weight"

    def _projected(
        self, x: Tensor, this: ForwardPass | TracedPass, *, quantized_output: bool, quantized_grad_input: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return y, and the bias, which the caller may have to add."""
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
            raise RuntimeError(
                f"{self.layer}: weights that are kept quantized cannot be split into parameters; leave out "
                "parameters_split"
            )
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
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
        return sizes + self._formats_repr()


class Linear(SingleLinear):
    """``y = x · Wᵀ + b`` for x [..., in_features].

    Args:
        in_features: features of the input, of the whole layer. The attribute is that of this rank.
        out_features: features of the output, of the whole layer. The attribute is that of this rank.
        sequence_parallel: each rank has only its part of the rows: of x for "column", of y for "row".
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad``, which the caller provides, instead of
            returning it through autograd.
        tp_group: process group of the ranks that share the layer.
        tp_size: number of these ranks, if the group is set later with `set_tensor_parallel_group`.
        get_rng_state_tracker: returns a tracker of random states for the initialization.
        rng_tracker_name: name of the random state in that tracker.
        init_method: initializes the weight in place; by default normal numbers with deviation 0.023.
        bias: add a bias.
        return_bias: return the bias as a second result instead of adding it.
        params_dtype: dtype of the parameters.
        parallel_mode: "column" to divide the outputs among the ranks of ``tp_group``, "row" to divide the inputs, None
            for neither.
        parameters_split: have several weights that form one GEMM: names, or ``{name: rows}``.
        device: device of the parameters; "meta" to create them later with `reset_parameters`.
        delay_wgrad_compute: compute the weight gradient not in backward, but when `backward_dw` is called.
        save_original_input: keep the unquantized input for backward and quantize it again there, instead of keeping its
            columnwise plane.
        name: name of the layer, for recipes and messages.
        **gpu_options: options of GPU communication (``ub_*``); they must be off.

    Examples:
        >>> layer = cg.Linear(32, 64)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = layer(torch.randn(32, 32))
        >>> y.shape
        torch.Size([32, 64])
        >>> y.sum().backward()
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
        super().__init__(**options_for(LinearModule.__init__, locals()))
        factory = parameter_options(params_dtype, device)
        self._make_linear(in_features, out_features, init_method, parameters_split, factory)

    @compilable
    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """Compute the layer.

        Args:
            inp: x, [..., in_features], plain or quantized.
            is_first_microbatch: None to quantize the weight in every call; True to quantize it and keep the result for
                later calls; False to use the kept one. After the weight has changed, pass True.
            fp8_output: return y quantized.
            fp8_grad: return the gradient of ``inp`` quantized.

        Returns:
            y, or ``(y, bias)`` with ``return_bias``.
        """
        this = self._forward_pass(inp, is_first_microbatch)
        with this.step:
            y, bias = self._projected(inp, this, quantized_output=fp8_output, quantized_grad_input=fp8_grad)
        return (y, bias) if self.return_bias else y


def _resolved_splits(split: ParametersSplit, out_features: int) -> dict[str, int]:
    """The prefixes of parameter names and their rows; ``{"": out_features}`` if there is one weight."""
    if not split:
        return {"": out_features}
    if not isinstance(split, Mapping):
        if out_features % len(split):
            raise ValueError(
                f"parameters_split: {out_features} rows cannot be divided evenly among {list(split)}; pass {{name: "
                f"rows}}"
            )
        split = dict.fromkeys(split, out_features // len(split))
    if sum(split.values()) != out_features:
        raise ValueError(f"parameters_split: the rows of {dict(split)} do not add up to {out_features}")
    return {f"{name.removesuffix('_')}_": rows for name, rows in split.items()}
