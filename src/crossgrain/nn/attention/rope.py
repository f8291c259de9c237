"""Rotary position embedding: pairs of channels are rotated by an angle that grows with the position of the token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...runtime.devices import resolved_device
from ...runtime.host_and_device import require
from .chunks import checked_starts, whole_positions


class RotaryPositionEmbedding(nn.Module):
    """Computes the angles for each position, [sequence, 1, 1, channels], for `apply_rotary_pos_emb`.

    Args:
        dim: channels of a head.
        rotary_percent: fraction of the channels that is rotated; the others are unchanged.
        seq_len_interpolation_factor: positions are divided by this factor, for sequences longer than in training.
        pretrained_max_position_embeddings: length of sequences in training. For a sequence longer than this length
            times the factor, positions are divided by the ratio of the lengths instead.
        rotary_base: base of the frequencies.
        interleaved: pairs are neighbouring channels (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
        device: device of the frequencies.

    Examples:
        >>> angles = cg.RotaryPositionEmbedding(16)(8)
        >>> angles.shape
        torch.Size([8, 1, 1, 16])
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent)
        if dim < 2 or dim % 2:
            raise ValueError(
                "RotaryPositionEmbedding rotates pairs of channels, so dim · rotary_percent must be even and >= 2, got "
                f"{dim}"
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=resolved_device(device)) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents, persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of the positions ``offset`` to ``offset + max_seq_len - 1``, in fp32."""
        # A model in bfloat16 has its buffers in bfloat16, whose positions would be a few percent off.
        inv_freq = self.inv_freq.to(torch.float32)
        positions = torch.arange(max_seq_len, device=inv_freq.device, dtype=torch.float32) + offset
        angles = torch.outer(positions / self._stretch(max_seq_len), inv_freq)
        pairs = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return pairs[:, None, None, :]

    def _stretch(self, length: int) -> float:
        if self.seq_len_interpolation_factor is None:
            return 1.0
        known = self.pretrained_max_position_embeddings
        if known is not None and length > known * self.seq_len_interpolation_factor:
            return length / known
        return self.seq_len_interpolation_factor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate queries or keys by the angles of their positions.

    Args:
        t: queries or keys, in the layout of ``tensor_format``.
        freqs: angles [sequence, 1, 1, channels] of `RotaryPositionEmbedding`; further channels of ``t`` are unchanged.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: [batch], the position of the first token of each sequence, for decoding with a cache.
        interleaved: see `RotaryPositionEmbedding`.
        fused: accepted; it has no effect.
        cu_seqlens: [batch + 1], where sequences begin; "thd" needs it. With ``cp_size`` it is for whole sequences.
        cp_size: number of ranks that share sequences; each has two chunks of every sequence, as in `chunks`.
        cp_rank: this rank among them.

    Returns:
        A tensor of the shape and dtype of ``t``.

    Examples:
        >>> angles = cg.RotaryPositionEmbedding(16)(8)
        >>> q = torch.randn(8, 1, 2, 16)  # sequence, batch, heads, channels
        >>> torch.equal(cg.apply_rotary_pos_emb(q, angles)[0], q[0])  # the first position is not rotated
        True
    """
    if cp_size > 1 and start_positions is not None:
        raise NotImplementedError(
            "apply_rotary_pos_emb: start_positions is for decoding with a cache, which is not supported with context "
            f"parallelism, cp_size={cp_size}"
        )
    positions = _positions(t, tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    if positions.numel():
        last, rule = positions.max(), f"has no angle: freqs has angles for {len(freqs)} positions"
        require(last < len(freqs), f"a position {rule}", lambda: f"position {int(last)} {rule}")
    angles = freqs[:, 0, 0].to(torch.float32)[positions].unsqueeze(-2)  # the same for all heads
    turned, rest = t[..., : angles.shape[-1]], t[..., angles.shape[-1] :]
    x = turned.to(torch.float32)
    x = x * angles.cos() + _quarter_turn(x, interleaved) * angles.sin()
    return torch.cat((x.to(t.dtype), rest), -1)


def _positions(
    t: Tensor, fmt: str, start_positions: Tensor | None, cu_seqlens: Tensor | None, ranks: int, rank: int
) -> Tensor:
    """The position of each token; it broadcasts to the dimensions of ``t`` before heads and channels."""
    if fmt == "thd":
        if cu_seqlens is None:
            raise ValueError("tensor_format='thd' needs cu_seqlens, which says where each sequence begins")
        tokens = torch.arange(len(t), device=t.device)
        whole = cu_seqlens.to(tokens)
        starts = whole if ranks == 1 else checked_starts("apply_rotary_pos_emb", whole, ranks) // ranks
        sequence = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=len(starts) - 2)
        positions = whole_positions(tokens - starts[sequence], starts.diff()[sequence], rank, ranks)
        return positions if start_positions is None else positions + start_positions.to(tokens)[sequence]
    if fmt not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format must be one of sbhd, bshd, thd, got {fmt!r}")
    length = t.shape[0 if fmt == "sbhd" else 1]
    if ranks > 1:
        checked_starts("apply_rotary_pos_emb", torch.tensor([0, length * ranks]), ranks)
    places = whole_positions(torch.arange(length, device=t.device), length, rank, ranks)
    starts = places.new_zeros(1) if start_positions is None else start_positions.to(places)
    positions = starts[:, None] + places
    return positions.t() if fmt == "sbhd" else positions


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Map each pair (a, b) to (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)
