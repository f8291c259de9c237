"""The memory layouts of queries, keys and values, and which of their positions are padding.

    sbhd  [sequence, batch, heads, channels]
    bshd  [batch, sequence, heads, channels]
    thd   [tokens, heads, channels]: sequences one after the other, at the offsets ``cu_seqlens``

Attention itself is computed on [batch, heads, sequence, channels], shorter sequences padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ...runtime.host_and_device import require

QKVFormat = Literal["sbhd", "bshd", "thd"]
FORMATS: tuple[str, ...] = get_args(QKVFormat)


@dataclass(frozen=True)
class Layout:
    """The layout of queries, or of keys and values.

    Attributes:
        format: "sbhd", "bshd" or "thd".
        valid: [batch, sequence], False at padding; None if there is no padding.
        tokens: for "thd", the index of the token for each place of [batch, sequence]; arbitrary at padding.
    """

    format: str
    valid: Tensor | None = None
    tokens: Tensor | None = None

    @staticmethod
    def of_sequences(
        fmt: str, x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, longest: int | None
    ) -> Layout:
        """The layout of ``x``. Without ``cu_seqlens`` all sequences have the same length."""
        if cu_seqlens is None:
            if fmt == "thd":
                raise ValueError(
                    "qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv, which say where each sequence begins"
                )
            return Layout(fmt)
        lengths = cu_seqlens.diff().to(device=x.device, dtype=torch.int64)
        if fmt != "thd":
            size, batch = x.shape[:2] if fmt == "sbhd" else (x.shape[1], x.shape[0])
            check_fits(lengths, batch, size)
            return Layout(fmt, _before(lengths, size))
        starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[:-1].to(lengths)
        beyond = f"cu_seqlens goes beyond the last of {len(x)} tokens"
        require(((starts + lengths) <= len(x)).all(), beyond, lambda: f"{beyond}: {cu_seqlens.tolist()}")
        if longest is None:
            size = int(lengths.max())
        else:
            size, short = longest, f"max_seqlen is {longest}, but cu_seqlens has a"
            require(
                (lengths <= size).all(),
                f"{short} longer sequence",
                lambda: f"{short} sequence of {int(lengths.max())} tokens",
            )
        valid = _before(lengths, size)
        places = starts[:, None] + torch.arange(size, device=x.device)
        return Layout(fmt, valid, places.where(valid, 0))

    def with_valid(self, valid: Tensor | None) -> Layout:
        return Layout(self.format, valid, self.tokens)

    def heads_first(self, x: Tensor) -> Tensor:
        """Return [batch, heads, sequence, channels], with 0 at padding, so that padding does not change scales."""
        if self.tokens is not None:
            x = x[self.tokens].transpose(1, 2)
        else:
            x = x.permute(1, 2, 0, 3) if self.format == "sbhd" else x.transpose(1, 2)
        return without_padding(x, self.valid)

    def heads_last(self, x: Tensor, like: Tensor) -> Tensor:
        """Convert [batch, heads, sequence, channels] back to the layout of ``like``, with heads and channels joined."""
        if self.tokens is None:
            return x.permute(2, 0, 1, 3).flatten(2) if self.format == "sbhd" else x.transpose(1, 2).flatten(2)
        assert self.valid is not None
        places, covered = self._places_of_tokens(len(like))
        values = x.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, places)
        return values.masked_fill(~covered[:, None], 0)

    def _places_of_tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """For each of ``count`` tokens, its place in [batch · sequence], and whether it is in a sequence at all."""
        assert self.tokens is not None and self.valid is not None
        tokens = self.tokens.where(self.valid, count).flatten()  # places of padding belong to a token after the last
        places = tokens.new_full((count + 1,), -1).scatter(0, tokens, torch.arange(len(tokens), device=tokens.device))
        places = places[:count]
        return places.clamp(min=0), places >= 0


def without_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Set x [batch, heads, sequence, channels] to 0 where ``valid`` [batch, sequence] is False."""
    return x if valid is None else x.masked_fill(~valid[:, None, :, None], 0)


def check_fits(lengths: Tensor, batch: int, size: int, before: str = "", after: str = "") -> None:
    """Raise unless there is a length for each sequence of a batch, and all are within ``size``."""
    room = f"which do not fit a batch of {batch} sequences of at most {size} tokens{after}"
    known = f"{before}cu_seqlens has sequences of lengths"

    def details() -> str:
        return f"{known} {lengths.tolist()}, {room}"

    if len(lengths) != batch:
        raise ValueError(details())
    require((lengths <= size).all(), f"{known}, {room}", details)


def _before(lengths: Tensor, size: int) -> Tensor:
    """A tensor [batch, size] that is True at the first ``lengths`` places."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def to_groups(x: Tensor, groups: int) -> Tensor:
    """Reshape [batch, heads, R, C] to [batch, groups, heads/groups · R, C]: heads that share keys form one matrix."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def to_heads(x: Tensor, like: torch.Size) -> Tensor:
    """Reshape back to the heads and queries of the shape ``like``."""
    return x.reshape(*like[:3], x.shape[-1])
