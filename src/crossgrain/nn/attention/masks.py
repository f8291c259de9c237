"""Which keys a query may look at: types of masks, sliding windows, padding.

A query at position i sees the key at position j, seen from the diagonal, if ``-left <= j - i <= right``. A
causal mask is such a window with ``right = 0``. The diagonal begins in the top left corner of the matrix of
scores, or ends in its bottom right corner, where the last query sees all keys: what decoding with a cache needs.
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
    """What a layer is asked to mask. ``window`` has -1 for no limit."""

    type: str
    window: Window
    bottom_right: bool

    @property
    def padding(self) -> bool:
        return "padding" in self.type

    @property
    def is_plain_causal(self) -> bool:
        """Nothing but a causal mask from the top left corner."""
        return self.type == "causal" and self.window == (-1, 0) and not self.bottom_right


def make_mask(mask_type: str, window: Window | None = None, bottom_right: bool | None = None) -> Mask:
    """Checked. By default the diagonal of a causal mask is top left, that of all others bottom right."""
    if mask_type in ("padding,causal", "causal,padding"):
        mask_type = "padding_causal"
    if mask_type not in MASK_TYPES:
        raise ValueError(f"attn_mask_type is one of {', '.join(MASK_TYPES)}, not {mask_type!r}")
    if bottom_right is None:
        bottom_right = mask_type not in ("causal", "padding_causal")
    return Mask(mask_type, check_set_window_size(mask_type, window), bottom_right)


def check_set_window_size(mask_type: str, window: Window | None = None) -> Window:
    """``(left, right)`` for a type of mask: a causal one looks at nothing to the right."""
    left, right = NO_WINDOW if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"window_size is (left, right), each -1 (no limit), 0 or more, not {(left, right)}")
    if "causal" not in mask_type:
        return left, right
    if right > 0:
        raise ValueError(f"a {mask_type} mask looks at nothing to the right, but window_size is {(left, right)}")
    return left, 0


def decoding_mask(mask: Mask) -> Mask:
    """The same with a cache: the new queries are the last of their sequences, which differ in length."""
    if mask.type == "arbitrary":
        raise NotImplementedError("an arbitrary mask cannot be used with a cache of keys and values")
    causal = "causal" in mask.type
    return Mask("padding_causal_bottom_right" if causal else "padding", mask.window, True)


def allowed_pairs(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    valid_queries: Tensor | None = None,
    valid_keys: Tensor | None = None,
    excluded: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """True where a query may look at a key: broadcasts to [batch, heads, queries, keys]. None: everywhere.

    ``valid_queries``, ``valid_keys``  [batch, sequence], False at padding
    ``excluded``                       the user's mask, True where it masks
    """
    allowed: Tensor | None = None
    left, right = mask.window
    if (left, right) != NO_WINDOW:
        distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        distance = distance - _diagonal(mask, queries, keys, valid_queries, valid_keys)
        allowed = distance <= right if right >= 0 else torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            allowed = allowed & (distance >= -left)
    for part in (
        None if valid_keys is None else valid_keys[:, None, None, :],
        None if valid_queries is None else valid_queries[:, None, :, None],
        None if excluded is None else ~excluded,
    ):
        if part is not None:
            allowed = part if allowed is None else allowed & part
    return allowed


def _diagonal(
    mask: Mask, queries: int, keys: int, valid_queries: Tensor | None, valid_keys: Tensor | None
) -> Tensor | int:
    """How far the diagonal is moved to the right: for each sequence, [batch, 1, 1, 1], if lengths differ."""
    if not mask.bottom_right:
        return 0
    lengths = [
        size if valid is None else valid.sum(-1)[:, None, None, None]
        for size, valid in ((keys, valid_keys), (queries, valid_queries))
    ]
    return lengths[0] - lengths[1]
