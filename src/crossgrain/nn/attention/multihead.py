"""`MultiheadAttention`: projections to queries, keys and values, attention, and an output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...linear.parallel import resolved_group
from ...runtime.devices import resolved_device
from ..base import QuantizedModule
from ..layernorm_linear import LayerNormLinear
from ..linear import Linear, SingleLinear
from ..linear_module import InitMethod
from ..norm import Normalization
from .arrangement import MaskTensor
from .dot_product import DotProductAttention
from .kv_cache import InferenceParams
from .masks import Window
from .projection import Heads, as_pair, by_heads, make_head_norm, split_kv, split_qkv
from .rope import apply_rotary_pos_emb

RotaryAngles = Tensor | tuple[Tensor, Tensor]


# What Transformer Engine calls the projections in roles, by the names that they have in state dicts.
_ROLE_NAMES = {
    "layernorm_qkv": "layernorm_linear_qkv",
    "qkv": "linear_qkv",
    "layernorm_query": "layernorm_linear_q",
    "query_layer": "linear_q",
    "key_value": "linear_kv",
}


class MultiheadAttention(nn.Module):
    """Self attention, or cross attention on the output of an encoder.

    Args:
        hidden_size: features of the input and output.
        num_attention_heads: number of heads.
        kv_channels: channels per head; ``(keys, values)`` if they differ; by default
            ``hidden_size / num_attention_heads``.
        attention_dropout: probability of dropout on the softmax.
        layernorm_epsilon: epsilon of the norm.
        init_method: initializes the weights of the first projections.
        output_layer_init_method: initializes the weight of the output projection.
        layer_number: number of the layer in the model, for the cache of keys and values.
        attn_mask_type: see `DotProductAttention`.
        window_size: see `DotProductAttention`.
        bottom_right_diagonal: see `DotProductAttention`.
        tp_group: process group of the ranks that share the heads.
        tp_size: number of these ranks, if the group is set later.
        num_gqa_groups: number of heads of keys and values; by default as many as there are heads.
        fuse_wgrad_accumulation: add weight gradients to ``weight.main_grad``, which the caller provides.
        get_rng_state_tracker: returns a tracker of random states for initialization and dropout.
        sequence_parallel: each rank has only its part of the rows of the input and output.
        params_dtype: dtype of the parameters.
        return_bias: return the bias of the output projection as an extra result instead of adding it.
        return_layernorm_output: return the normalized input as an extra result.
        input_layernorm: normalize the input first; the first projection is then named ``layernorm_qkv`` instead of
            ``qkv``.
        attention_type: "self", or "cross" for attention on ``encoder_output``.
        set_parallel_mode: divide the heads among the ranks of ``tp_group``. Of a fused weight that is not interleaved,
            a rank has its part of the queries, then of the keys, then of the values.
        fuse_qkv_params: have one weight for queries, keys and values, as weights that are kept quantized need;
            otherwise ``query_weight``, ``key_weight`` and ``value_weight``.
        zero_centered_gamma: the weight of the norm is stored as its difference from 1.
        qkv_weight_interleaved: the rows of a fused weight are grouped by head; otherwise all queries come first, then
            keys, then values.
        bias: add biases in the projections.
        normalization: "LayerNorm" or "RMSNorm".
        device: device of the parameters.
        qkv_format: layout of the input: "sbhd", "bshd" or "thd".
        name: name of the layer for recipes; parts are named ``<name>.qkv``, ``<name>.core_attention``, ``<name>.proj``.
        qk_norm_type: normalize queries and keys of each head: "L2Normalization", "RMSNorm" or "LayerNorm".
        qk_norm_eps: epsilon of that norm.
        qk_norm_before_rope: apply that norm before rotary positions instead of after.
        seq_length: accepted; it has no effect.
        micro_batch_size: accepted; it has no effect.
        rotary_pos_interleaved: see `RotaryPositionEmbedding`.
        softmax_type: see `DotProductAttention`.
        **gpu_options: options of GPU communication; they must be off.

    Examples:
        >>> attention = cg.MultiheadAttention(32, 2)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = attention(torch.randn(32, 1, 32))  # sequence, batch, features
        >>> y.shape
        torch.Size([32, 1, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int] | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        device: torch.device | str | int | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        rotary_pos_interleaved: bool = False,
        softmax_type: str = "vanilla",
        **gpu_options: Any,
    ) -> None:
        super().__init__()
        if return_layernorm_output and not input_layernorm:
            raise ValueError(
                "return_layernorm_output=True needs input_layernorm=True: without it there is no normalized input to "
                "return"
            )
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size={hidden_size} cannot be divided evenly among {num_attention_heads} heads; pass "
                "kv_channels"
            )
        self.name = name
        self.hidden_size = hidden_size
        tp_group, tp_size = resolved_group(type(self).__name__, tp_group, tp_size)
        if tp_size > 1 and not set_parallel_mode:
            raise ValueError(f"{type(self).__name__}: tp_size={tp_size} needs set_parallel_mode=True")
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        channels = kv_channels or hidden_size // num_attention_heads
        qk, v = (channels, channels) if isinstance(channels, int) else channels
        self.hidden_size_per_attention_head, self.hidden_size_per_attention_head_v = qk, v
        self.attention_type = attention_type
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.fuse_qkv_params = fuse_qkv_params
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.qkv_format = qkv_format
        self.qk_norm_before_rope = qk_norm_before_rope
        self.rotary_pos_interleaved = rotary_pos_interleaved
        with resolved_device(device):  # the core has no option for it
            self.core_attention = DotProductAttention(
                num_attention_heads,
                channels,
                num_gqa_groups=num_gqa_groups,
                attention_dropout=attention_dropout,
                qkv_format=qkv_format,
                attn_mask_type=attn_mask_type,
                window_size=window_size,
                bottom_right_diagonal=bottom_right_diagonal,
                get_rng_state_tracker=get_rng_state_tracker,
                tp_group=tp_group,
                tp_size=tp_size,
                layer_number=layer_number,
                attention_type=attention_type,
                softmax_type=softmax_type,
                name=self._name_of("core_attention"),
            )
        shared: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "get_rng_state_tracker": get_rng_state_tracker,
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            **gpu_options,
        }
        norm_options = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        column = "column" if set_parallel_mode else None
        projections = {"init_method": init_method, "parallel_mode": column, **shared}
        self._make_projections(projections, norm_options if input_layernorm else None)
        self.proj = Linear(
            num_attention_heads * v,
            hidden_size,
            init_method=output_layer_init_method or init_method,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            name=self._name_of("proj"),
            **shared,
        )
        # Shared by the heads of all ranks: each has a part of the gradient.
        marked = True if tp_size > 1 else None
        parameters = {"params_dtype": params_dtype, "device": device, "sequence_parallel": marked}
        for side in ("q_norm", "k_norm"):
            norm = make_head_norm(qk_norm_type, self.hidden_size_per_attention_head, qk_norm_eps, **parameters)
            self.add_module(side, norm)

    # ---- making --------------------------------------------------------------------------------

    def _name_of(self, child: str) -> str | None:
        """The name of a part; None if this module has no name."""
        return None if self.name is None else f"{self.name}.{child}"

    def _make_projections(self, options: dict[str, Any], norm: dict[str, Any] | None) -> None:
        qk, v = self.hidden_size_per_attention_head, self.hidden_size_per_attention_head_v
        kv_sizes = {"key": self.num_gqa_groups * qk, "value": self.num_gqa_groups * v}
        sizes = {"query": self.num_attention_heads * qk}
        if self.attention_type == "self":
            sizes |= kv_sizes
            name = "qkv" if norm is None else "layernorm_qkv"
        else:
            name = "query_layer" if norm is None else "layernorm_query"
            self.key_value = self._projection(Linear, "key_value", kv_sizes, options)
        if norm is None:
            self.add_module(name, self._projection(Linear, name, sizes, options))
        else:
            self.add_module(name, self._projection(LayerNormLinear, name, sizes, {**options, **norm}))

    def _projection(
        self, cls: Callable[..., SingleLinear], name: str, sizes: dict[str, int], options: dict[str, Any]
    ) -> SingleLinear:
        """A projection to all ``sizes`` together, with separate weights unless they are fused."""
        split = None if self.fuse_qkv_params else sizes
        total = sum(sizes.values())
        made = cls(self.hidden_size, total, parameters_split=split, name=self._name_of(name), **options)
        made._role_name = _ROLE_NAMES[name]
        if self.fuse_qkv_params and not self.qkv_weight_interleaved:
            made._fused = tuple(size * made.out_features // total for size in sizes.values())
        return made

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the process group of the ranks that share the heads."""
        for module in self.children():
            if isinstance(module, QuantizedModule):
                module.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Sequence[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks that share sequences; see `DotProductAttention.set_context_parallel_group`."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    @property
    def cp_size(self) -> int:
        """Number of ranks that share sequences."""
        cp = self.core_attention._context_parallel()
        return 1 if cp is None else cp.ranks

    @property
    def cp_rank(self) -> int:
        """The index of this rank among them."""
        cp = self.core_attention._context_parallel()
        return 0 if cp is None else cp.rank

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskTensor | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        **core_options: Any,
    ) -> Any:
        """Compute the layer.

        Args:
            hidden_states: [sequence, batch, hidden], [batch, sequence, hidden] or [tokens, hidden], by ``qkv_format``.
            attention_mask: see `DotProductAttention.forward`.
            encoder_output: output of the encoder, for cross attention only.
            attn_mask_type: see `DotProductAttention.forward`.
            window_size: see `DotProductAttention.forward`.
            bottom_right_diagonal: see `DotProductAttention.forward`.
            is_first_microbatch: see `Linear.forward`.
            checkpoint_core_attention: recompute attention in backward.
            inference_params: cache of keys and values for generating tokens.
            rotary_pos_emb: angles of `RotaryPositionEmbedding` for queries and keys, or a pair of them.
            **core_options: further options of `DotProductAttention.forward`, such as ``cu_seqlens_q``.

        Returns:
            The output; with ``return_bias`` or ``return_layernorm_output`` a tuple of the output, the bias and the
            normalized input.
        """
        if (encoder_output is None) == (self.attention_type == "cross"):
            raise ValueError(
                f"{type(self).__name__}: {self.attention_type} attention was called "
                f"with{'out' * (encoder_output is None)} encoder_output, which only cross attention takes"
            )
        q, k, v, normalized = self._projected(hidden_states, encoder_output, is_first_microbatch)
        if self.qk_norm_before_rope:
            q, k = self._normalized_heads(q, k)
        if rotary_pos_emb is not None:
            q, k = self._rotated(q, k, as_pair(rotary_pos_emb), inference_params, core_options)
        if not self.qk_norm_before_rope:
            q, k = self._normalized_heads(q, k)
        context = self.core_attention(
            q,
            k,
            v,
            attention_mask,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params if self.attention_type == "self" else None,
            **core_options,
        )
        output = self.proj(context, is_first_microbatch=is_first_microbatch)
        outputs = [*output] if self.return_bias else [output]
        outputs += [normalized] * self.return_layernorm_output
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _projected(
        self, x: Tensor, encoder_output: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v with a dimension of heads, and the normalized input if it is to be returned."""
        core, qk, v = self.core_attention, self.hidden_size_per_attention_head, self.hidden_size_per_attention_head_v
        sizes = Heads(core.num_attention_heads, core.num_gqa_groups, qk, v)
        names = ("layernorm_qkv", "qkv") if encoder_output is None else ("layernorm_query", "query_layer")
        projection = getattr(self, names[0] if self.input_layernorm else names[1])
        projected = projection(x, is_first_microbatch=is_first_microbatch)
        mixed, normalized = projected if self.return_layernorm_output else (projected, None)
        if encoder_output is None:
            return *split_qkv(mixed, sizes, self.qkv_weight_interleaved), normalized
        kv = self.key_value(encoder_output, is_first_microbatch=is_first_microbatch)
        return by_heads(mixed, qk), *split_kv(kv, sizes, self.qkv_weight_interleaved), normalized

    def _normalized_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q_norm, k_norm = self._modules["q_norm"], self._modules["k_norm"]
        return (q, k) if q_norm is None or k_norm is None else (q_norm(q), k_norm(k))

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        angles: tuple[Tensor, Tensor],
        inference_params: InferenceParams | None,
        core_options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        fmt = core_options.get("qkv_format") or self.qkv_format
        starts = None if inference_params is None else inference_params.get_seqlens_pre_step()
        turned = []
        for x, freqs, side in ((q, angles[0], "q"), (k, angles[1], "kv")):
            offsets = core_options.get(f"cu_seqlens_{side}_padded")
            offsets = core_options.get(f"cu_seqlens_{side}") if offsets is None else offsets
            at = None if side == "kv" and self.attention_type == "cross" else starts  # an encoder's output is whole
            shared: dict[str, Any] = {"cu_seqlens": offsets, "cp_size": self.cp_size, "cp_rank": self.cp_rank}
            turned.append(apply_rotary_pos_emb(x, freqs, fmt, at, self.rotary_pos_interleaved, **shared))
        return turned[0], turned[1]
