"""Where queries, keys and values of a sequence lie in memory, and which of them are padding.

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

QKVFormat = Literal["sbhd", "bshd", "thd"]
FORMATS: tuple[str, ...] = get_args(QKVFormat)


@dataclass(frozen=True)
class Layout:
    """One of the two sides of attention: queries, or keys and values.

    ``valid``   [batch, sequence], False where there is padding; None if there is none
    ``tokens``  of thd: for each place of [batch, sequence] the token that goes there; of padding, any
    """

    format: str
    valid: Tensor | None = None
    tokens: Tensor | None = None

    @staticmethod
    def of_sequences(
        fmt: str, x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, longest: int | None
    ) -> Layout:
        """Of ``x``; without offsets, all sequences have the same length."""
        if cu_seqlens is None:
            if fmt == "thd":
                raise ValueError("thd needs cu_seqlens_q and cu_seqlens_kv: where in the tokens each sequence begins")
            return Layout(fmt)
        lengths = cu_seqlens.diff().to(device=x.device, dtype=torch.int64)
        if fmt != "thd":
            size, batch = x.shape[:2] if fmt == "sbhd" else (x.shape[1], x.shape[0])
            if len(lengths) != batch or int(lengths.max()) > size:
                raise ValueError(f"cu_seqlens of lengths {lengths.tolist()} in a batch of {batch} times {size} tokens")
            return Layout(fmt, _before(lengths, size))
        starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[:-1].to(lengths)
        if int((starts + lengths).max()) > len(x):
            raise ValueError(f"cu_seqlens ends behind the last of {len(x)} tokens: {cu_seqlens.tolist()}")
        size = int(lengths.max()) if longest is None else longest
        if size < int(lengths.max()):
            raise ValueError(f"max_seqlen={longest}, but there is a sequence of {int(lengths.max())} tokens")
        valid = _before(lengths, size)
        places = starts[:, None] + torch.arange(size, device=x.device)
        return Layout(fmt, valid, places.where(valid, 0))

    def with_valid(self, valid: Tensor | None) -> Layout:
        return Layout(self.format, valid, self.tokens)

    def heads_first(self, x: Tensor) -> Tensor:
        """[batch, heads, sequence, channels], 0 at padding: what is there must not reach a scale."""
        if self.tokens is not None:
            x = x[self.tokens].transpose(1, 2)
        else:
            x = x.permute(1, 2, 0, 3) if self.format == "sbhd" else x.transpose(1, 2)
        return without_padding(x, self.valid)

    def heads_last(self, x: Tensor, like: Tensor) -> Tensor:
        """From [batch, heads, sequence, channels] back to the layout of ``like``, heads and channels as one."""
        if self.tokens is None:
            return x.permute(2, 0, 1, 3).flatten(2) if self.format == "sbhd" else x.transpose(1, 2).flatten(2)
        assert self.valid is not None
        values = x.transpose(1, 2).flatten(2)[self.valid]
        return values.new_zeros(len(like), values.shape[-1]).index_copy(0, self.tokens[self.valid], values)


def without_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [batch, heads, sequence, channels] with 0 where ``valid`` [batch, sequence] is False."""
    return x if valid is None else x.masked_fill(~valid[:, None, :, None], 0)


def _before(lengths: Tensor, size: int) -> Tensor:
    """[batch, size], True at the first ``lengths`` places."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]
