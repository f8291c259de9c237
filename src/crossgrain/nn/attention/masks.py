"""Masks of attention, that is which keys a query may see: mask types, sliding windows, padding.

A query at position i may see the key at position j if ``-left <= j - i <= right``. A causal mask is such a window with
``right = 0``. Positions are counted from the first query and key, so that the diagonal begins in the top left corner of
the matrix of scores; or from the last ones, so that it ends in the bottom right corner and the last query sees all
keys, as decoding with a cache needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


class Mask(NamedTuple):
    """A mask: its type, its window (-1 for no limit), and whether the diagonal ends in the bottom right corner."""

    type: str
    window: Window
    bottom_right: bool

    @property
    def padding(self) -> bool:
        return "padding" in self.type

    @property
    def is_plain_causal(self) -> bool:
        """Whether it is a causal mask from the top left corner and nothing else."""
        return self.type == "causal" and self.window == (-1, 0) and not self.bottom_right


def make_mask(mask_type: str, window: Window | None = None, bottom_right: bool | None = None) -> Mask:
    """Make a mask and check its options. By default the diagonal is top left for causal masks, else bottom right."""
    if mask_type in ("padding,causal", "causal,padding"):
        mask_type = "padding_causal"
    if mask_type not in MASK_TYPES:
        raise ValueError(f"attn_mask_type must be one of {', '.join(MASK_TYPES)}, got {mask_type!r}")
    if bottom_right is None:
        bottom_right = mask_type not in ("causal", "padding_causal")
    return Mask(mask_type, check_set_window_size(mask_type, window), bottom_right)


def check_set_window_size(attn_mask_type: str, window_size: Window | None = None) -> Window:
    """Return the window ``(left, right)`` for a type of mask; ``right`` is 0 for causal masks."""
    left, right = NO_WINDOW if window_size is None else window_size
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be (left, right), each >= 0 or -1 for no limit, got {(left, right)}")
    if "causal" not in attn_mask_type:
        return left, right
    if right > 0:
        raise ValueError(
            f"with a {attn_mask_type} mask, a query sees no keys to the right, but window_size is {(left, right)}; use "
            "right=0"
        )
    return left, 0


def decoding_mask(mask: Mask) -> Mask:
    """The mask for decoding with a cache, where new queries are the last of sequences of different lengths."""
    if mask.type == "arbitrary":
        raise NotImplementedError(
            "attn_mask_type='arbitrary' is not supported with inference_params (a cache of keys and values)"
        )
    causal = "causal" in mask.type
    return Mask("padding_causal_bottom_right" if causal else "padding", mask.window, True)


class Places(NamedTuple):
    """Where queries or keys are in their sequences.

    Attributes:
        positions: the position of each in its sequence, [batch or 1, count].
        lengths: the number of tokens of the sequences: one number, or [batch].
        valid: [batch, count], False at padding; None if there is no padding.
    """

    positions: Tensor
    lengths: Tensor | int
    valid: Tensor | None = None

    @staticmethod
    def from_start(count: int, valid: Tensor | None = None, device: torch.device | None = None) -> Places:
        """The first ``count`` places of sequences that end where ``valid`` says."""
        return Places(torch.arange(count, device=device)[None], count if valid is None else valid.sum(-1), valid)


def allowed_pairs(mask: Mask, queries: Places, keys: Places, excluded: Tensor | None = None) -> Tensor | None:
    """Return a tensor that is True where a query may see a key, or None if every query may see every key.

    Args:
        mask: the mask.
        queries: places of the queries.
        keys: places of the keys.
        excluded: mask of the user, True where it masks.

    Returns:
        A tensor that broadcasts to [batch, heads, queries, keys], or None.
    """
    allowed: Tensor | None = None
    left, right = mask.window
    if (left, right) != NO_WINDOW:
        distance = keys.positions[:, None, None, :] - queries.positions[:, None, :, None]
        if mask.bottom_right:
            distance = distance - _by_batch(keys.lengths) + _by_batch(queries.lengths)
        allowed = distance <= right if right >= 0 else torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            allowed = allowed & (distance >= -left)
    for part in (
        None if keys.valid is None else keys.valid[:, None, None, :],
        None if queries.valid is None else queries.valid[:, None, :, None],
        None if excluded is None else ~excluded,
    ):
        if part is not None:
            allowed = part if allowed is None else allowed & part
    return allowed


def whole_sequence_pairs(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """`allowed_pairs` for q and k [batch, heads, sequence, channels] that are whole sequences without padding."""
    queries, keys = (Places.from_start(x.shape[2], device=x.device) for x in (q, k))
    return allowed_pairs(mask, queries, keys)


def _by_batch(lengths: Tensor | int) -> Tensor | int:
    return lengths if isinstance(lengths, int) else lengths.view(-1, 1, 1, 1)
