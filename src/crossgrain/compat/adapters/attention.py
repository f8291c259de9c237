"""Attention functions and the selection of attention backends; there is only one backend here, unfused."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from ...nn.attention import DotProductAttention, apply_rotary_pos_emb
from ...recipe import FP8Format
from .utils import SplitAlongDim

_SplitAlongDim = SplitAlongDim
UnfusedDotProductAttention = DotProductAttention

# What Transformer Engine has read from the environment, as clients find and replace it. `environment` takes from here
# what is not as it is here, and everything else from the environment at the time of use.
_dpa_fp8_recipe = ""
_dpa_fp8_recipe_dpa = False
_dpa_fp8_recipe_mha = False
_dpa_fp8_format = FP8Format.HYBRID
_dpa_fp8ds_amax_algo = "most_recent"
_dpa_fp8ds_amax_histlen = 1
_dpa_fp8ds_reduce_amax = True

_attention_backends: dict[str, Any] = {
    "attention_params": None,
    "use_flash_attention": False,
    "flash_attention_backend": None,
    "use_fused_attention": False,
    "fused_attention_backend": None,
    "use_unfused_attention": True,
    "backend_selection_requires_update": False,
}
"""The selected backend, as Transformer Engine stores it. It is always unfused."""


class FusedAttnBackend(enum.IntEnum):
    """Names of fused attention kernels of GPUs; none of them is available here."""

    F16_max512_seqlen = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2
    No_Backend = -1


class AttentionParams(SimpleNamespace):
    """Parameters for the selection of a backend; any attribute is accepted."""


class AttentionLogging:
    """Settings of messages about the selection; nothing is logged here."""

    _log_level = logging.WARNING
    _is_logging_setup = False

    @classmethod
    def setup_logging(cls) -> None:
        cls._is_logging_setup = True


class FlashAttentionUtils:
    """Reports that flash-attn is not installed."""

    is_installed: ClassVar[bool] = False
    v3_is_installed: ClassVar[bool] = False
    v4_is_installed: ClassVar[bool] = False


def get_attention_backend(attention_params: AttentionParams | None = None) -> tuple[Any, ...]:
    """Return the selected backend, which is always unfused.

    Returns:
        ``(use_flash, flash_backend, use_fused, fused_backend, use_unfused, available)``.
    """
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
    """Split ``qkv`` [..., groups, q + k + v channels] into heads, and apply rotary positions to queries and keys."""
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
