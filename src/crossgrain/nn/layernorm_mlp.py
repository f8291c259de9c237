"""`LayerNormMLP`: a norm, and two linear layers with an activation between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..gemm.activations import Activation, activation
from ..linear.parallel import ParallelMode, share
from ..recipe import QuantizerRole
from .compiled import compilable
from .forward_pass import ForwardPass, TracedPass
from .linear_module import InitMethod, LinearModule, LinearSlots, default_init
from .module_interface import Mode
from .norm import Normalization
from .norm_first import NormFirst
from .options import options_for, parameter_options
from .recomputed_part import recomputed

_FC1 = LinearSlots(input=0, weight=1, output=2, grad_output=0, grad_input=1)
_FC2 = LinearSlots(input=3, weight=4, output=5, grad_output=2, grad_input=3)


class LayerNormMLP(NormFirst):
    """``y = f(norm(x) · W₁ᵀ + b₁) · W₂ᵀ + b₂`` for x [..., hidden_size].

    Options that are not listed here are those of `Linear`.

    Args:
        hidden_size: features of the input and output.
        ffn_hidden_size: features between the two layers, of the whole layer.
        eps: epsilon of the norm.
        return_bias: return b₂ as an extra result instead of adding it.
        init_method: initializes W₁, and W₂ unless ``output_layer_init_method`` is given.
        normalization: "LayerNorm", or "RMSNorm", which has no bias.
        activation: one of `crossgrain.gemm.activations.ACTIVATIONS`; a gated activation doubles the rows of W₁.
        activation_params: options of the activation, such as ``{"limit": 7.0}`` for clamped_swiglu.
        output_layer_init_method: initializes W₂.
        return_layernorm_output: return norm(x) too, as the last result.
        return_layernorm_output_gathered: with sequence parallelism, return norm(x) of the rows of all ranks.
        seq_length: accepted; it has no effect.
        micro_batch_size: accepted; it has no effect.
        set_parallel_mode: divide the rows of W₁ and the columns of W₂ among the ranks of ``tp_group``. With a gated
            activation, each rank has its part of both halves of W₁.
        zero_centered_gamma: ``layer_norm_weight`` is stored as its difference from 1.
        checkpoint: keep only the input for backward and recompute everything else there, bit for bit.
        name: name of the layer for recipes; the linear layers are ``<name>.fc1`` and ``<name>.fc2``.

    Examples:
        >>> layer = cg.LayerNormMLP(32, 128)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = layer(torch.randn(32, 32))
        >>> y.shape
        torch.Size([32, 32])
        >>> y.sum().backward()
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        name: str | None = None,
        **gpu_options: Any,
    ) -> None:
        super().__init__(**options_for(LinearModule.__init__, locals()))
        self.set_parallel_mode = set_parallel_mode
        if self.tp_size > 1 and not set_parallel_mode:
            raise ValueError(f"{self.layer}: tp_size={self.tp_size} needs set_parallel_mode=True")
        self.hidden_size = hidden_size
        ffn_hidden_size = self.ffn_hidden_size = share(self.layer, "ffn_hidden_size", ffn_hidden_size, self.tp_size)
        self.activation = activation
        self.activation_params = dict(activation_params or {})
        self.return_layernorm_output = return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        fc1_rows = ffn_hidden_size * (2 if self._activation().gated else 1)
        factory = parameter_options(params_dtype, device)
        self._make_norm(hidden_size, eps, normalization, zero_centered_gamma, factory)
        self._add_weight("fc1_weight", (fc1_rows, hidden_size), init_method or default_init, factory, self._mode(0))
        self._add_bias("fc1_bias", fc1_rows, factory, present=bias, mode=self._mode(0))
        init_output = output_layer_init_method or init_method or default_init
        self._add_weight("fc2_weight", (hidden_size, ffn_hidden_size), init_output, factory, self._mode(1))
        self._add_bias("fc2_bias", hidden_size, factory, present=bias, mode=self._mode(1))

    def _mode(self, index: int) -> ParallelMode | None:
        if not self.set_parallel_mode:
            return None
        return "column" if index == 0 else "row"

    def _segments(self, index: int) -> tuple[int, ...]:
        return (self.ffn_hidden_size,) * 2 if index == 0 and self._activation().gated else ()

    def _activation(self) -> Activation:
        return activation(self.activation, **self.activation_params)

    # ---- recipes -------------------------------------------------------------------------------

    @property
    def weight_names(self) -> list[str]:
        return ["fc1_weight", "fc2_weight"]

    @property
    def bias_names(self) -> list[str]:
        return ["fc1_bias", "fc2_bias"]

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        fc1, fc2 = (f"{self.name}.{layer}" if self.name else layer for layer in ("fc1", "fc2"))
        fc2_input = QuantizerRole("linear", "input", fc2)  # also what fc1 puts out
        fc1_grad = QuantizerRole("linear", "grad_output", fc1)  # also what fc2 hands back
        roles: list[QuantizerRole | None]
        if fwd:
            fc1_operands = [QuantizerRole("linear", tensor, fc1) for tensor in ("input", "weight")]
            roles = [*fc1_operands, fc2_input, fc2_input, QuantizerRole("linear", "weight", fc2), self._output_role]
        else:
            roles = [fc1_grad, self._grad_input_role, QuantizerRole("linear", "grad_output", fc2), fc1_grad]
        return self._counted(roles, num_quantizers)

    def _slot_counts(self) -> Mapping[Mode, int]:
        return {"forward": 6, "backward": 4}

    def _linear_slots(self) -> Sequence[LinearSlots]:
        return [_FC1, _FC2]

    # ---- forward -------------------------------------------------------------------------------

    def _traceable(self) -> bool:
        return not self.checkpoint and super()._traceable()

    @compilable
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Compute the layer.

        Args:
            inp: x, [..., hidden_size].
            is_first_microbatch: see `Linear.forward`.

        Returns:
            y; with ``return_bias`` or ``return_layernorm_output`` a tuple of y, b₂ and norm(x).
        """
        this = self._forward_pass(inp, is_first_microbatch)
        with this.step:
            if self.checkpoint and torch.is_grad_enabled():
                y, x = self._recomputed(inp, this)
            else:
                y, x = self._computed(inp, this)
        extras: list[Any] = [self.fc2_bias] * self.return_bias
        if self.return_layernorm_output:
            extras.append(self._normalized_for_caller(x))
        return (y, *extras) if extras else y

    def _computed(self, inp: Tensor, this: ForwardPass | TracedPass) -> tuple[Tensor, Tensor]:
        """Return y and norm(x)."""
        x = self._normalized(inp, this)
        hidden = self._linear(0, x, self.fc1_weight, self.fc1_bias, this)
        activated: Tensor = _ActivationFunction.apply(hidden, self._activation())
        y = self._linear(1, activated, self.fc2_weight, self.fc2_bias if self.apply_bias else None, this)
        return y, x

    def _recomputed(self, inp: Tensor, this: ForwardPass) -> tuple[Tensor, Tensor]:
        """Return y and norm(x); backward recomputes them with the same random numbers, scales and cached weights."""
        state = None if this.recipe is None else this.built.states["forward"]
        return recomputed(lambda x: self._computed(x, this), inp, state=state)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation}, "
            f"bias={self.use_bias}, normalization={self.normalization}"
        )


class _ActivationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function.forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.function.backward(dy, x), None  # autograd sees its operations, if a graph is asked for
