"""The names under which Hugging Face checkpoints store the parameters of a model.

transformers may keep parameters under other names than files, and in other pieces: the experts of a mixture are one
parameter [experts, out, in] in memory and a matrix for each expert in files. Engines read the names of files. Which
rows go where is not known in advance, so transformers itself is asked: it converts tensors that have the numbers of
their rows as values.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Piece(NamedTuple):
    """Rows of a parameter that are a tensor of their own in files.

    Attributes:
        name: the name in files.
        place: position in the first dimension, if the parameter is a stack that is taken apart; otherwise None.
        start: first row.
        stop: row after the last one.
    """

    name: str
    place: int | None
    start: int
    stop: int

    def of(self, value: Tensor) -> Tensor:
        """The rows of this piece."""
        own = value if self.place is None else value[self.place]
        return own if self.stop - self.start == (own.shape[0] if own.dim() else 1) else own[self.start : self.stop]


def hub_names(model: nn.Module) -> dict[str, list[Piece]]:
    """The pieces of parameters that have other names in files, by key of the state dict.

    Keys that are not listed keep their names: all keys of models that are not of transformers, and those that files
    join with others or store in another order of rows.
    """
    if not any(cls.__module__.partition(".")[0] == "transformers" for cls in type(model).__mro__):
        return {}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # older versions keep the names of files in memory
        return {}
    values = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    rows: dict[str, int] = {}
    probes: dict[str, Tensor] = {}
    first, count = {}, 0
    for key, value in values.items():
        rows[key] = value.shape[:-1].numel() if value.dim() > 1 else value.numel()
        shape = (*value.shape[:-1], 1) if value.dim() > 1 else tuple(value.shape)
        probes[key] = torch.arange(count, count + rows[key], dtype=torch.float64).reshape(shape)
        first[key], count = count, count + rows[key]
    found: dict[str, list[Piece]] = {}
    covered = dict.fromkeys(values, 0)
    keys, starts = list(first), list(first.values())
    converted: dict[str, Any] = revert_weight_conversion(model, probes)
    for name, probe in converted.items():
        ids = probe.flatten().to(torch.int64)
        if not ids.numel() or not bool((ids.diff() == 1).all()):
            continue
        key, size = keys[bisect_right(starts, int(ids[0])) - 1], ids.numel()
        begin = int(ids[0]) - first[key]
        piece = _piece(name, values[key], begin, size)
        if begin + size <= rows[key] and piece is not None:
            found.setdefault(key, []).append(piece)
            covered[key] += size
    return {
        key: pieces
        for key, pieces in found.items()
        if covered[key] == rows[key] and [piece.name for piece in pieces] != [key]
    }


def _piece(name: str, value: Tensor, begin: int, size: int) -> Piece | None:
    """The piece that has ``size`` rows from row ``begin``; None if it is no part of one matrix of a stack."""
    if value.dim() != 3 or size == value.shape[0] * value.shape[1]:
        return Piece(name, None, begin, begin + size) if begin == 0 or value.dim() <= 2 else None
    place, start = divmod(begin, value.shape[1])
    return Piece(name, place, start, start + size) if start + size <= value.shape[1] else None
