"""Which way attention is computed, of which there is one."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from ...nn.attention import DotProductAttention, apply_rotary_pos_emb
from .utils import SplitAlongDim

_SplitAlongDim = SplitAlongDim
UnfusedDotProductAttention = DotProductAttention

_attention_backends: dict[str, Any] = {
    "attention_params": None,
    "use_flash_attention": False,
    "flash_attention_backend": None,
    "use_fused_attention": False,
    "fused_attention_backend": None,
    "use_unfused_attention": True,
    "backend_selection_requires_update": False,
}
"""What was chosen last; it is never anything else."""


class FusedAttnBackend(enum.IntEnum):
    """Kernels that a GPU may have."""

    F16_max512_seqlen = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2
    No_Backend = -1


class AttentionParams(SimpleNamespace):
    """What a choice would depend on, by any name."""


class AttentionLogging:
    """Messages about the choice."""

    _log_level = logging.WARNING
    _is_logging_setup = False

    @classmethod
    def setup_logging(cls) -> None:
        cls._is_logging_setup = True


class FlashAttentionUtils:
    """There is no flash-attn."""

    is_installed: ClassVar[bool] = False
    v3_is_installed: ClassVar[bool] = False
    v4_is_installed: ClassVar[bool] = False


def get_attention_backend(attention_params: AttentionParams | None = None) -> tuple[Any, ...]:
    """Flash and which, fused and which, unfused, and all three as a list: unfused."""
    return False, None, False, None, True, [False, False, True]


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``qkv`` [..., groups, q + k + v channels] divided into heads, with queries and keys turned by their angles."""
    q, k, v = qkv.split(list(qkv_split_arg_list), dim=-1)
    channels = k.shape[-1]
    q = q.reshape(*q.shape[:-2], -1, channels)
    options: dict[str, Any] = {
        "tensor_format": tensor_format,
        "start_positions": start_positions,
        "interleaved": interleaved,
        "cu_seqlens": cu_seqlens,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    return apply_rotary_pos_emb(q, q_freqs, **options), apply_rotary_pos_emb(k, k_freqs, **options), v
