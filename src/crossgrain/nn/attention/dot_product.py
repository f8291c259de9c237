"""`DotProductAttention`: ``softmax(Q·Kᵀ · scale) · V``, in high precision, or in the formats of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...linear.parallel import resolved_group, set_tensor_model_parallel_attributes, share
from ...planes import Direction
from ...quantizers.base import Quantizer
from ...quantizers.hybrid import HybridQuantizer
from ...quantizers.identity import IdentityQuantizer
from ...recipe import QuantizerRole, Recipe
from ...runtime.devices import resolved_device
from ...runtime.torch_patches.compiler_marks import constant_in_graphs, eager_only
from ...tensor import QuantizedTensor
from ..base import QuantizedModule
from ..module_interface import Built, Mode
from ..recomputed_part import recomputed
from .kv_cache import InferenceParams
from .layout import FORMATS, Layout, without_padding
from .masks import Window, allowed_pairs, decoding_mask, make_mask
from .plain_attention import Attended, PlainCall, plain_attention
from .quantized_attention import AttentionCall, AttentionQuantizers, quantized_attention
from .softmax import SOFTMAX_TYPES

MaskTensor = Tensor | tuple[Tensor, Tensor]


class DotProductAttention(QuantizedModule):
    """Attention of queries on keys and values.

    If the recipe asks for it (``fp8_dpa``, ``fp8_mha``, or ``attention: ...`` in a one-line recipe), all operands are
    rounded to the formats of their roles; see `quantized_attention`. Otherwise attention is computed in high precision.

    Args:
        num_attention_heads: number of heads of queries.
        kv_channels: channels per head; ``(keys, values)`` if they differ.
        num_gqa_groups: number of heads of keys and values, each shared by several heads of queries; by default as many
            as there are heads.
        attention_dropout: probability of dropout on the softmax.
        qkv_format: memory layout: "sbhd" (sequence, batch, heads, channels), "bshd" or "thd" (tokens of all sequences
            one after the other).
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
            "padding_causal_bottom_right" or "arbitrary".
        window_size: ``(left, right)``, how many keys before and after its own position a query may see; -1 for no
            limit.
        bottom_right_diagonal: align the diagonal of the mask with the last query and key instead of the first.
        sequence_parallel: accepted; it has no effect here.
        tp_size: number of ranks that share the heads; this rank has its part.
        get_rng_state_tracker: returns a tracker of random states for dropout.
        tp_group: process group of the ranks that share the heads.
        layer_number: number of the layer in the model, for the cache of keys and values.
        attention_type: "self" or "cross".
        cp_group: not supported; must be None.
        cp_global_ranks: accepted; it has no effect.
        cp_stream: accepted; it has no effect.
        cp_comm_type: accepted; it has no effect.
        softmax_scale: factor of the scores; by default ``1 / sqrt(channels)``.
        softmax_type: "vanilla"; "off-by-one" adds 1 to the denominator of the softmax, "learnable" the exponential of
            the parameter ``softmax_offset`` [heads], which starts at 0.
        return_max_logit: return a pair of the output and the largest score of each head, [heads].
        name: name of the layer, for recipes and messages.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self._refuse(cp_group=cp_group)
        self.tp_group, tp_size = resolved_group(self.layer, tp_group, tp_size)
        if softmax_type not in SOFTMAX_TYPES:
            raise ValueError(
                f"{self.layer}: softmax_type must be one of {', '.join(SOFTMAX_TYPES)}, got {softmax_type!r}"
            )
        if attention_type not in ("self", "cross"):
            raise ValueError(f"{self.layer}: attention_type must be 'self' or 'cross', got {attention_type!r}")
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"{self.layer}: {num_attention_heads} heads cannot be divided evenly among num_gqa_groups="
                f"{self.num_gqa_groups} heads of keys and values"
            )
        self.num_attention_heads = share(self.layer, "num_attention_heads", num_attention_heads, tp_size)
        self.num_gqa_groups = share(self.layer, "num_gqa_groups", self.num_gqa_groups, tp_size)
        channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.attention_dropout = attention_dropout
        self.qkv_format = _checked_format(qkv_format)
        make_mask(attn_mask_type, window_size, bottom_right_diagonal)
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type = attention_type
        self.layer_number = 1 if layer_number is None else layer_number
        self.softmax_scale = 1 / math.sqrt(channels[0]) if softmax_scale is None else softmax_scale
        self.get_rng_state_tracker = get_rng_state_tracker
        self.return_max_logit = return_max_logit
        self.softmax_type = softmax_type
        self.softmax_offset: nn.Parameter | None
        self.register_parameter(
            "softmax_offset", self._new_offset(tp_size > 1) if softmax_type == "learnable" else None
        )

    def _new_offset(self, shared: bool) -> nn.Parameter:
        offset = nn.Parameter(torch.zeros(self.num_attention_heads, device=resolved_device(None)))
        if shared:
            set_tensor_model_parallel_attributes(offset, True, 0, 1)
        return offset

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Set the offset of the softmax to 0. On the meta device, it gets memory on the default device."""
        if defer_init or self.softmax_offset is None:
            return
        if self.softmax_offset.is_meta:
            self.softmax_offset = self._new_offset(hasattr(self.softmax_offset, "tensor_model_parallel"))
        nn.init.zeros_(self.softmax_offset)

    def _sink(self, device: torch.device) -> Tensor | None:
        """The score of the sink by head, [1, heads, 1, 1]; None if there is none."""
        if self.softmax_type == "vanilla":
            return None
        if self.softmax_offset is None:
            return torch.zeros(1, self.num_attention_heads, 1, 1, device=device)
        return self.softmax_offset.view(1, -1, 1, 1)

    def _refuse(self, **options: Any) -> None:
        for name, value in options.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"{self.layer}: the option {name} is not supported; leave it out")

    # ---- recipes -------------------------------------------------------------------------------

    @property
    def weight_names(self) -> list[str]:
        return []

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        return []

    def _slot_counts(self) -> Mapping[Mode, int]:
        return {"forward": 9, "backward": 6}

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """The roles of the tensors. Outputs have the role that the owner has set, otherwise one with only a name."""
        name = self.name or ""

        def leaving(end: str) -> QuantizerRole:
            return QuantizerRole(name=f"{name}.{end}" if name else end)

        if fwd:
            output = self._output_role or leaving("dpa_output")
            groups = [QuantizerRole("dpa", "qkv", name), output, QuantizerRole("dpa", "s", name)]
        else:
            grad_input = self._grad_input_role or leaving("dpa_grad_input")
            groups = [grad_input, QuantizerRole("dpa", "do", name), QuantizerRole("dpa", "dp", name)]
        roles: list[QuantizerRole | None] = [role for role in groups for _ in range(3 if fwd else 2)]
        if num_quantizers != len(roles):
            raise ValueError(
                f"{self.layer} has {len(roles)} slots for quantizers in this pass, got num_quantizers={num_quantizers}"
            )
        return roles

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> AttentionQuantizers | None:
        """The quantizers, the first slot of each role; None if none of them would round anything."""
        q, k, v, output, _, _, s, _, _ = quantizers["scaling_fwd"]
        grad_input, _, do, _, dp, _ = quantizers["scaling_bwd"]
        by_tensor = AttentionQuantizers(q, k, v, s, do, dp)
        if recipe.fp8_mha:
            by_tensor = by_tensor._replace(output=output, grad_input=grad_input)
        return None if all(_keeps_numbers(quantizer) for quantizer in by_tensor) else by_tensor

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: MaskTensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = None,
        num_splits: int | None = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention. Queries at padding, and queries that may see no key, give 0.

        Options that are None have the value given to the constructor.

        Args:
            query_layer: queries, in the layout of ``qkv_format``.
            key_layer: keys.
            value_layer: values.
            attention_mask: True where it masks. For padding masks [batch, 1, 1, sequence], or a pair (queries, keys) in
                cross attention. For "arbitrary", a tensor that broadcasts to [batch, heads, queries, keys].
            qkv_format: "sbhd", "bshd" or "thd".
            cu_seqlens_q: where the sequences of queries begin, [batch + 1], as cumulated lengths. It can replace a
                padding mask; "thd" needs it.
            cu_seqlens_kv: the same for keys and values.
            cu_seqlens_q_padded: for "thd" with gaps between sequences: where the tokens of each sequence begin.
            cu_seqlens_kv_padded: the same for keys and values.
            max_seqlen_q: length of the longest sequence of queries.
            max_seqlen_kv: the same for keys and values.
            attn_mask_type: type of the mask.
            window_size: ``(left, right)``, see the constructor.
            bottom_right_diagonal: see the constructor.
            checkpoint_core_attention: recompute attention in backward instead of keeping its intermediate results.
            core_attention_bias_type: only "no_bias" is supported.
            core_attention_bias: not supported; must be None.
            alibi_slopes: not supported; must be None.
            fast_zero_fill: accepted; it has no effect.
            inference_params: cache of keys and values for generating tokens.
            pad_between_seqs: accepted; it has no effect.
            fp8_output: not supported; must be None or False.
            num_splits: accepted; it has no effect.

        Returns:
            [sequence, batch, heads · channels], or in the order of ``qkv_format``; with ``return_max_logit``, a pair of
            it and the largest score of each head, [heads].
        """
        self._refuse(core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes, fp8_output=fp8_output)
        if core_attention_bias_type != "no_bias":
            raise NotImplementedError(
                f"{self.layer}: core_attention_bias_type={core_attention_bias_type!r} is not supported; only 'no_bias' "
                "is"
            )
        fmt = self.qkv_format if qkv_format is None else _checked_format(qkv_format)
        mask = make_mask(
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            self.window_size if window_size is None else window_size,
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        )
        if fmt == "thd" and not mask.padding:
            raise ValueError(
                f"{self.layer}: qkv_format='thd' has sequences of different lengths and needs a padding mask, got "
                f"attn_mask_type={mask.type!r}"
            )
        query, key, value = (_plain(x) for x in (query_layer, key_layer, value_layer))
        self._check_heads(query, key, value, fmt)
        sides = [Layout(fmt), Layout(fmt)]
        excluded = None
        if mask.padding:
            sides = [
                Layout.of_sequences(fmt, query, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q),
                Layout.of_sequences(fmt, key, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv),
            ]
            if inference_params is None:
                sides = self._with_padding(sides, attention_mask)
        elif mask.type == "arbitrary":
            if not isinstance(attention_mask, Tensor):
                raise ValueError(f"{self.layer}: attn_mask_type='arbitrary' needs an attention_mask tensor")
            excluded = attention_mask.to(torch.bool)
        q, k, v = sides[0].heads_first(query), sides[1].heads_first(key), sides[1].heads_first(value)
        valid_queries, valid_keys = (side.valid for side in sides)
        if inference_params is not None:
            mask = decoding_mask(mask)
            cached = inference_params.step(self.layer_number, k.transpose(1, 2), v.transpose(1, 2))
            valid_queries, valid_keys = cached.valid_queries, cached.valid_keys
            q = without_padding(q, valid_queries)
            k, v = (without_padding(x.transpose(1, 2).to(q.dtype), valid_keys) for x in (cached.keys, cached.values))
        allowed = None
        if not mask.is_plain_causal:
            allowed = allowed_pairs(
                mask,
                q.shape[2],
                k.shape[2],
                valid_queries=valid_queries,
                valid_keys=valid_keys,
                excluded=excluded,
                device=q.device,
            )
        call = PlainCall(
            mask, allowed, self.softmax_scale, self._dropout(), self._sink(q.device), self.return_max_logit
        )
        attended = self._attend(q, k, v, call, checkpoint_core_attention)
        output = sides[0].heads_last(attended.output, query)
        return output if attended.max_logit is None else (output, attended.max_logit)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: PlainCall, recompute: bool) -> Attended:
        """Compute attention on [batch, heads, sequence, channels]."""
        if torch.compiler.is_compiling():
            if not recompute and _constant_is_plain(self):
                return plain_attention(q, k, v, call)
            return Attended(*_untraced_attend(self, q, k, v, call, recompute))
        return self._attend_eagerly(q, k, v, call, recompute)

    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _is_plain(self) -> bool:
        """Whether nothing is quantized, and no tracker of random states is used."""
        recipe = self._recipe_in_force()
        tracked = self.get_rng_state_tracker is not None and self._dropout() > 0.0
        return not tracked and (recipe is None or not (recipe.fp8_dpa or recipe.fp8_mha))

    def _attend_eagerly(self, q: Tensor, k: Tensor, v: Tensor, call: PlainCall, recompute: bool) -> Attended:
        recipe = self._recipe_in_force()
        if recipe is not None and not (recipe.fp8_dpa or recipe.fp8_mha):
            recipe = None
        built = self._prepare(recipe)
        tracker = self.get_rng_state_tracker() if self.get_rng_state_tracker is not None and call.dropout else None
        quantizers = None if recipe is None else built.details
        if recipe is None or quantizers is None:

            def attend() -> Attended:
                return plain_attention(q, k, v, call)
        else:
            quantized = self._quantized_call(recipe, built, call)
            allowed = call.allowed
            if call.mask.is_plain_causal:
                allowed = allowed_pairs(call.mask, q.shape[2], k.shape[2], device=q.device)

            def attend() -> Attended:
                return quantized_attention(q, k, v, allowed, quantized, call.sink)

        def compute() -> Attended:
            fork: AbstractContextManager[Any] = nullcontext() if tracker is None else tracker.fork()
            with fork:
                return attend()

        with self._step(recipe, built):
            if recompute and torch.is_grad_enabled():
                state = None if quantizers is None else built.states["forward"]
                return recomputed(compute, state=state, tracker=tracker)
            return compute()

    def _quantized_call(self, recipe: Recipe, built: Built, call: PlainCall) -> AttentionCall:
        return AttentionCall(
            quantizers=built.details,
            scale=call.scale,
            dropout=call.dropout,
            wants_max=call.wants_max,
            backward_override=recipe.backward_override,
            calibrating=self._only_calibrates(),
            on_backward=self._backward_noted(built) if torch.is_grad_enabled() else None,
        )

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, "
            f"channels={self.hidden_size_per_attention_head_k}, qkv_format={self.qkv_format}, "
            f"attn_mask_type={self.attn_mask_type}"
        )

    def _check_heads(self, query: Tensor, key: Tensor, value: Tensor, fmt: str) -> None:
        k, v = self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v
        wanted = {
            "queries": (query, self.num_attention_heads, k),
            "keys": (key, self.num_gqa_groups, k),
            "values": (value, self.num_gqa_groups, v),
        }
        for name, (x, heads, channels) in wanted.items():
            if x.dim() != len(fmt) or tuple(x.shape[-2:]) != (heads, channels):
                raise ValueError(
                    f"{self.layer}: {name} must be {fmt} with {heads} heads of {channels} channels, got a tensor of "
                    f"shape {list(x.shape)}"
                )

    def _with_padding(self, sides: list[Layout], attention_mask: MaskTensor | None) -> list[Layout]:
        """Add padding from the mask, if there is one; otherwise the layouts have it from cu_seqlens already."""
        if attention_mask is None:
            if any(side.valid is None for side in sides):
                raise ValueError(
                    f"{self.layer}: a padding mask needs an attention_mask, or cu_seqlens_q and cu_seqlens_kv"
                )
            return sides
        masks = (attention_mask, attention_mask) if isinstance(attention_mask, Tensor) else attention_mask
        if isinstance(attention_mask, Tensor) and self.attention_type == "cross":
            raise ValueError(
                f"{self.layer}: padding in cross attention needs a pair of masks, for queries and for keys, got one "
                "mask"
            )
        for mask in masks:
            if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
                raise ValueError(
                    f"{self.layer}: a padding mask must be [batch, 1, 1, sequence], got {list(mask.shape)}"
                )
        return [side.with_valid(~mask[:, 0, 0].to(torch.bool)) for side, mask in zip(sides, masks, strict=True)]


@constant_in_graphs
def _constant_is_plain(attention: DotProductAttention) -> bool:
    return attention._is_plain()


@eager_only("crossgrain: attention that is quantized or recomputed in backward runs in eager mode")
def _untraced_attend(attention: DotProductAttention, *arguments: Any) -> Attended:
    return attention._attend_eagerly(*arguments)


def _keeps_numbers(quantizer: Quantizer | None) -> bool:
    if isinstance(quantizer, HybridQuantizer):
        return all(_keeps_numbers(quantizer.child(direction)) for direction in Direction)
    return quantizer is None or (type(quantizer) is IdentityQuantizer and quantizer.dtype is None)


def _plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _checked_format(fmt: str) -> str:
    if fmt not in FORMATS:
        raise ValueError(f"qkv_format must be one of {', '.join(FORMATS)}, got {fmt!r}")
    return fmt
