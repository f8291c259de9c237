"""`TransformerLayer`: attention and a feed-forward network, each with a norm and a residual connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .attention import InferenceParams, MultiheadAttention
from .attention.arrangement import MaskTensor
from .attention.layout import FORMATS
from .attention.masks import Window
from .attention.multihead import RotaryAngles
from .layernorm_mlp import LayerNormMLP
from .linear_module import InitMethod
from .norm import LayerNorm, Normalization, RMSNorm


class TransformerLayer(nn.Module):
    """A transformer layer: self attention, in a decoder also cross attention, and an MLP.

    It computes ``x + attention(norm(x))``, then in a decoder ``x + cross_attention(norm(x), encoder_output)``, then
    ``x + mlp(norm(x))``. Options that are not listed here are those of `MultiheadAttention` and `LayerNormMLP`.

    Args:
        hidden_size: features of the input and output.
        ffn_hidden_size: features between the two layers of the MLP.
        num_attention_heads: number of heads.
        num_gqa_groups: number of heads of keys and values; by default as many as there are heads.
        layernorm_epsilon: epsilon of the norms.
        hidden_dropout: probability of dropout before each residual connection.
        attention_dropout: probability of dropout on the softmax.
        layer_number: number of the layer in the model, for the cache of keys and values.
        self_attn_mask_type: mask of self attention, see `DotProductAttention`.
        window_size: window of self attention.
        enc_dec_attn_mask_type: mask of cross attention.
        enc_dec_window_size: window of cross attention.
        apply_residual_connection_post_layernorm: residual connections start from the outputs of the norms, not from
            their inputs.
        output_layernorm: put the norm at the end of the layer instead of before self attention.
        parallel_attention_mlp: compute ``x + attention(norm(x)) + mlp(norm(x))``.
        layer_type: "encoder" has self attention only; "decoder" has cross attention too.
        drop_path_rate: probability that a part of the layer is skipped for a whole sample.
        set_parallel_mode: divide heads and hidden units among the ranks of ``tp_group``; with ``sequence_parallel``,
            also the rows of everything in between.
        attn_input_format: layout of the input: "sbhd" [sequence, batch, hidden], "bshd" or "thd".
        name: name of the layer for recipes; parts are named ``<name>.self_attention.qkv`` and so on.

    Examples:
        >>> layer = cg.TransformerLayer(32, 64, 2)
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = layer(torch.randn(32, 1, 32))  # sequence, batch, features
        >>> y.shape
        torch.Size([32, 1, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | tuple[int, int] | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: Normalization = "LayerNorm",
        device: torch.device | str | int | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        softmax_type: str = "vanilla",
        **gpu_options: Any,
    ) -> None:
        super().__init__()
        self._check(layer_type, attn_input_format, drop_path_rate)
        if parallel_attention_mlp and (
            layer_type == "decoder" or apply_residual_connection_post_layernorm or output_layernorm
        ):
            raise ValueError(
                "parallel_attention_mlp=True works only for layer_type='encoder', without "
                "apply_residual_connection_post_layernorm and output_layernorm"
            )
        self.name = name
        self.layer_type = layer_type
        self.layer_number = layer_number
        self.hidden_dropout = hidden_dropout
        self.drop_path_rate = drop_path_rate
        self.attn_input_format = attn_input_format
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.output_layernorm = output_layernorm
        shared: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "sequence_parallel": sequence_parallel,
            "params_dtype": params_dtype,
            "bias": bias,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_bias": not parallel_attention_mlp,
            "set_parallel_mode": set_parallel_mode,
            "device": device,
            **gpu_options,
        }
        attention: dict[str, Any] = {
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "softmax_type": softmax_type,
            **shared,
        }
        self.self_attention = MultiheadAttention(
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
            return_layernorm_output=apply_residual_connection_post_layernorm and not output_layernorm,
            name=self._name_of("self_attention"),
            **attention,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                input_layernorm=True,
                return_layernorm_output=apply_residual_connection_post_layernorm,
                attention_type="cross",
                name=self._name_of("inter_attention"),
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            name=self._name_of("layernorm_mlp"),
            **shared,
        )
        self._sequence_parallel = self.layernorm_mlp.sequence_parallel
        self._rng_tracker = get_rng_state_tracker
        if output_layernorm:
            norm = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = norm(
                hidden_size,
                layernorm_epsilon,
                params_dtype=params_dtype,
                zero_centered_gamma=zero_centered_gamma,
                sequence_parallel=self._sequence_parallel or None,
                device=device,
            )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the process group of the ranks that share the layer."""
        for module in self.children():
            if isinstance(module, MultiheadAttention | LayerNormMLP):
                module.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Sequence[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks that share sequences; see `DotProductAttention.set_context_parallel_group`."""
        for module in self.children():
            if isinstance(module, MultiheadAttention):
                module.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    @staticmethod
    def _check(layer_type: str, attn_input_format: str, drop_path_rate: float) -> None:
        if layer_type not in ("encoder", "decoder"):
            raise ValueError(f"layer_type must be 'encoder' or 'decoder', got {layer_type!r}")
        if attn_input_format not in FORMATS:
            raise ValueError(f"attn_input_format must be one of {', '.join(FORMATS)}, got {attn_input_format!r}")
        if drop_path_rate and attn_input_format == "thd":
            raise NotImplementedError(
                "drop_path_rate is not supported with attn_input_format='thd', which has no dimension of samples: use "
                "sbhd or bshd"
            )

    def _name_of(self, child: str) -> str | None:
        return None if self.name is None else f"{self.name}.{child}"

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskTensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: MaskTensor | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        **core_options: Any,
    ) -> Tensor:
        """Compute the layer. Options that are not listed here are those of `MultiheadAttention.forward`.

        Args:
            hidden_states: [sequence, batch, hidden], or in the order of ``attn_input_format``.
            attention_mask: mask of self attention.
            self_attn_mask_type: type of that mask.
            window_size: window of self attention.
            encoder_output: output of the encoder; only for decoders, which need it.
            enc_dec_attn_mask: mask of cross attention.
            enc_dec_attn_mask_type: type of that mask.
            enc_dec_window_size: window of cross attention.
            **core_options: further options of `DotProductAttention.forward` for self attention.

        Returns:
            A tensor of the shape of ``hidden_states``.
        """
        if (encoder_output is None) == (self.layer_type == "decoder"):
            raise ValueError(
                f"layer_type is {self.layer_type!r}: a decoder needs encoder_output and an encoder takes none, got "
                f"{type(encoder_output).__name__}"
            )
        common: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
        }
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            **common,
            **core_options,
        )
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
            return self._added(attended + mlp, None, hidden_states)
        x = self._joined(attended, hidden_states, self.self_attention.return_layernorm_output)
        if self.layer_type == "decoder":
            attended = self.inter_attention(
                x,
                enc_dec_attn_mask,
                encoder_output=encoder_output,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                **common,
            )
            x = self._joined(attended, x, self.inter_attention.return_layernorm_output)
        mlp = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
        x = self._joined(mlp, x, self.layernorm_mlp.return_layernorm_output)
        return self.layernorm(x) if self.output_layernorm else x

    def _joined(self, outputs: Any, x: Tensor, normalized_residual: bool) -> Tensor:
        """Add the output and bias of a part of the layer to its input, or to its normalized input."""
        output, bias, *normalized = outputs
        return self._added(output, bias, normalized[0] if normalized_residual else x)

    def _added(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        x = x if bias is None else x + bias
        # Ranks that have other rows drop other numbers of them.
        tracked = self._sequence_parallel and self._rng_tracker is not None and self.training
        with self._rng_tracker().fork() if tracked and self._rng_tracker is not None else nullcontext():
            x = nn.functional.dropout(x, self.hidden_dropout, self.training)
        return residual + self._with_dropped_samples(x)

    def _with_dropped_samples(self, x: Tensor) -> Tensor:
        if not (self.drop_path_rate and self.training):
            return x
        keep = 1 - self.drop_path_rate
        batch = 1 if self.attn_input_format == "sbhd" else 0
        shape = [size if axis == batch else 1 for axis, size in enumerate(x.shape)]
        return x * x.new_empty(shape).bernoulli_(keep) / keep
