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
from ...runtime.collectives import AwaitedGroup
from ...runtime.devices import resolved_device
from ...runtime.torch_patches.compiler_marks import constant_in_graphs, eager_only
from ...tensor import QuantizedTensor
from ..base import QuantizedModule
from ..module_interface import Built, Mode
from ..recomputed_part import recomputed
from .arrangement import Inputs, Lengths, MaskTensor, arranged
from .context_parallel import ContextParallel, check_communication, check_supported, context_parallel
from .kv_cache import InferenceParams
from .layout import FORMATS
from .masks import Window, make_mask, whole_sequence_pairs
from .plain_attention import Attended, PlainCall, plain_attention
from .quantized_attention import AttentionCall, AttentionQuantizers, quantized_attention
from .softmax import SOFTMAX_TYPES


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
        cp_group: process group of the ranks that share sequences, see `set_context_parallel_group`.
        cp_global_ranks: the ranks of that group; they are only checked.
        cp_stream: accepted; it has no effect.
        cp_comm_type: "p2p", "all_gather" or "a2a".
        softmax_scale: factor of the scores; by default ``1 / sqrt(channels)``.
        softmax_type: "vanilla"; "off-by-one" adds 1 to the denominator of the softmax, "learnable" the exponential of
            the parameter ``softmax_offset`` [heads], which starts at 0.
        return_max_logit: return a pair of the output and the largest score of each head, [heads].
        name: name of the layer, for recipes and messages.

    Examples:
        >>> attention = cg.DotProductAttention(num_attention_heads=2, kv_channels=16)
        >>> q, k, v = (torch.randn(8, 1, 2, 16) for _ in range(3))  # sequence, batch, heads, channels
        >>> attention(q, k, v).shape
        torch.Size([8, 1, 32])
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
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
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

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Sequence[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks that share sequences. Each has two chunks of every sequence, as in `chunks`.

        Args:
            cp_group: the process group; None if each rank has whole sequences.
            cp_global_ranks: the ranks of that group; they are only checked. None checks nothing.
            cp_stream: accepted; it has no effect.
            cp_comm_type: "p2p" sends keys and values around a ring, "all_gather" gives every rank those of all, "a2a"
                gives every rank whole sequences of some heads.
        """
        if cp_group is not None:
            check_communication(self.layer, cp_group, cp_comm_type)
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream
        self.cp_comm_type = cp_comm_type

    def _context_parallel(self) -> ContextParallel | None:
        return context_parallel(
            self.layer,
            self.cp_group,
            self.cp_global_ranks,
            self.cp_comm_type,
            self.num_attention_heads,
            self.num_gqa_groups,
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles. Process groups do not travel; a copy refuses to run without one."""
        group = self.cp_group if isinstance(self.cp_group, AwaitedGroup) else None
        if group is None and self._context_parallel() is not None:
            group = AwaitedGroup(
                f"{self.layer} is a copy of a layer whose sequences are shared by ranks: call "
                "set_context_parallel_group"
            )
        return {**super().__getstate__(), "cp_group": group, "cp_stream": None}

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

    def _recipe_in_force(self) -> Recipe | None:
        recipe = super()._recipe_in_force()
        return None if recipe is None else recipe.for_attention()

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
            max_seqlen_q: length of the longest sequence of queries. For "thd" on a GPU, it saves the host from waiting
                for ``cu_seqlens_q``.
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
        lengths = (
            Lengths(cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q),
            Lengths(cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv),
        )
        query, key, value = (_plain(x) for x in (query_layer, key_layer, value_layer))
        self._data_device = query.device
        inputs = Inputs(self.layer, query, key, value, fmt, mask, lengths)
        self._check_heads(inputs)
        cp = self._context_parallel()
        if cp is not None:
            check_supported(inputs, attention_mask, dropout=self._dropout(), caches=inference_params is not None)
            attended = _over_ranks(self, inputs, cp, checkpoint_core_attention)
        else:
            attended = self._whole_sequences(
                inputs, attention_mask, inference_params, checkpoint_core_attention, self._sink(inputs.query.device)
            )
        return attended.output if attended.max_logit is None else (attended.output, attended.max_logit)

    def _whole_sequences(
        self,
        inputs: Inputs,
        attention_mask: MaskTensor | None,
        cache: InferenceParams | None,
        recompute: bool,
        sink: Tensor | None,
        amax_group: Any = None,
    ) -> Attended:
        cross = self.attention_type == "cross"
        made = arranged(inputs, attention_mask, cross=cross, cache=cache, layer_number=self.layer_number)
        call = PlainCall(made.mask, made.allowed, self.softmax_scale, self._dropout(), sink, self.return_max_logit)
        attended = self._attend(made.q, made.k, made.v, call, recompute, amax_group)
        return attended._replace(output=made.layout.heads_last(attended.output, inputs.query))

    def _over_ranks(self, inputs: Inputs, cp: ContextParallel, recompute: bool) -> Attended:
        sink = self._sink(inputs.query.device)
        if cp.how == "a2a":
            sink = None if sink is None else cp.own_heads(sink, 1)
            attended = self._whole_sequences(cp.with_whole_sequences(inputs), None, None, recompute, sink, cp.group)
            output = cp.own_tokens(attended.output, inputs.query, inputs.format, inputs.lengths[0])
        elif self._has_formats(cp):
            made = cp.with_whole_keys(inputs)
            call = PlainCall(made.mask, made.allowed, self.softmax_scale, 0.0, sink, self.return_max_logit)
            attended = self._attend(made.q, made.k, made.v, call, recompute, cp.group)
            output = made.layout.heads_last(attended.output, inputs.query)
        else:
            made = cp.arranged(inputs)
            call = PlainCall(made.mask, made.allowed, self.softmax_scale, 0.0, sink, self.return_max_logit)
            again = recompute and torch.is_grad_enabled()
            attended = recomputed(cp.attended, made, call) if again else cp.attended(made, call)
            output = made.layout.heads_last(attended.output, inputs.query)
        return Attended(output, None if attended.max_logit is None else cp.largest(attended.max_logit))

    def _has_formats(self, cp: ContextParallel) -> bool:
        """Whether attention is in formats. Raises if that does not go with how ranks communicate."""
        recipe = self._recipe_in_force()
        if recipe is None or not (recipe.fp8_dpa or recipe.fp8_mha):
            return False
        quantizers: AttentionQuantizers | None = self._prepare(recipe).details
        if quantizers is None:
            return False
        if cp.how == "p2p":
            raise NotImplementedError(
                f"{self.layer}: attention in the formats of a recipe is not supported with cp_comm_type='p2p': it "
                "never has a whole row of the softmax, which would have to be quantized. Use 'a2a' or 'all_gather'"
            )
        if not _keeps_numbers(quantizers.grad_input):
            raise NotImplementedError(
                f"{self.layer}: a format for the gradients of keys and values (fp8_mha, attention.dqkv) is not "
                f"supported with cp_comm_type={cp.how!r}: each rank has only a part of their sum. Use 'a2a'"
            )
        return True

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: PlainCall, recompute: bool, amax_group: Any = None
    ) -> Attended:
        """Compute attention on [batch, heads, sequence, channels].

        Other ranks of ``amax_group`` have the other heads: formats with one scale per tensor have one for all of them.
        """
        if torch.compiler.is_compiling():
            if not recompute and _constant_is_plain(self):
                return plain_attention(q, k, v, call)
            return Attended(*_untraced_attend(self, q, k, v, call, recompute, amax_group))
        return self._attend_eagerly(q, k, v, call, recompute, amax_group)

    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _is_plain(self) -> bool:
        """Whether nothing is quantized, and no tracker of random states is used."""
        recipe = self._recipe_in_force()
        tracked = self.get_rng_state_tracker is not None and self._dropout() > 0.0
        return not tracked and (recipe is None or not (recipe.fp8_dpa or recipe.fp8_mha))

    def _attend_eagerly(
        self, q: Tensor, k: Tensor, v: Tensor, call: PlainCall, recompute: bool, amax_group: Any
    ) -> Attended:
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
            quantized = self._quantized_call(recipe, built, call, amax_group)
            allowed = call.allowed
            if allowed is None and call.mask.is_plain_causal:
                allowed = whole_sequence_pairs(call.mask, q, k)

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

    def _quantized_call(self, recipe: Recipe, built: Built, call: PlainCall, amax_group: Any) -> AttentionCall:
        quantizers: AttentionQuantizers = built.details
        return AttentionCall(
            quantizers=quantizers if amax_group is None else quantizers.reducing(amax_group),
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

    def _check_heads(self, inputs: Inputs) -> None:
        k, v = self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v
        wanted = {
            "queries": (inputs.query, self.num_attention_heads, k),
            "keys": (inputs.key, self.num_gqa_groups, k),
            "values": (inputs.value, self.num_gqa_groups, v),
        }
        for name, (x, heads, channels) in wanted.items():
            if x.dim() != len(inputs.format) or tuple(x.shape[-2:]) != (heads, channels):
                raise ValueError(
                    f"{self.layer}: {name} must be {inputs.format} with {heads} heads of {channels} channels, got a "
                    f"tensor of shape {list(x.shape)}"
                )


@constant_in_graphs
def _constant_is_plain(attention: DotProductAttention) -> bool:
    return attention._is_plain()


@eager_only("crossgrain: attention that is quantized or recomputed in backward runs in eager mode")
def _untraced_attend(attention: DotProductAttention, *arguments: Any) -> Attended:
    return attention._attend_eagerly(*arguments)


@eager_only("crossgrain: attention whose sequences are shared by ranks runs in eager mode")
def _over_ranks(attention: DotProductAttention, *arguments: Any) -> Attended:
    return attention._over_ranks(*arguments)


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
