"""The training text: Python's own documentation, which every Python installation has. Nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_VALIDATION = 10  # one of so many bytes


class Text(NamedTuple):
    """The text as bytes, uint8 [n]. ``validation`` is the end of the text, which is not used for training.

    Examples:
        >>> text = cg.gpt.load_text()
        >>> len(text.train) > len(text.validation)
        True
    """

    train: Tensor
    validation: Tensor


@cache
def load_text() -> Text:
    """Return the text: half a megabyte of English and Python.

    Examples:
        >>> text = cg.gpt.load_text()
        >>> text.train.dtype
        torch.uint8
    """
    from pydoc_data.topics import topics

    content = "\n".join(topics[name] for name in sorted(topics)).encode()
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    end = len(values) - len(values) // _VALIDATION
    return Text(values[:end], values[end:])


def random_batch(values: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pieces of the text from random places: [batch, length] bytes, and the byte that follows each byte."""
    starts = torch.randint(len(values) - length, (batch,), generator=generator)
    return _windows(values, starts, length)


def even_batch(values: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Like `random_batch`, but always from the same places, evenly spread over the text."""
    starts = torch.linspace(0, len(values) - length - 1, batch).long()
    return _windows(values, starts, length)


def _windows(values: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = values[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
