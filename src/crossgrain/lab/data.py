"""A real text that every Python has: its own documentation, byte by byte. Nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_VALIDATION = 10  # one of so many bytes


class Text(NamedTuple):
    """Bytes as uint8 [n]; validation is the end of the text, which training never sees."""

    train: Tensor
    validation: Tensor


@cache
def load_text() -> Text:
    """Half a megabyte of English and Python."""
    from pydoc_data.topics import topics

    content = "\n".join(topics[name] for name in sorted(topics)).encode()
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    end = len(values) - len(values) // _VALIDATION
    return Text(values[:end], values[end:])


def random_batch(values: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``batch`` places of the text: [batch, length] bytes, and the byte after each."""
    starts = torch.randint(len(values) - length, (batch,), generator=generator)
    return _windows(values, starts, length)


def even_batch(values: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """The same, at places that are the same every time, spread over the text."""
    starts = torch.linspace(0, len(values) - length - 1, batch).long()
    return _windows(values, starts, length)


def _windows(values: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = values[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
