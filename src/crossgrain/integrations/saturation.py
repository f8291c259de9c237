"""How many tensors were beyond the range of FP8 in a forward pass with delayed scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..formats.dtypes import TE_DType_To_Torch, fp8_dtype
from ..nn.state_dicts import StateDicts
from ..recipe import read_extra_state


class Saturation:
    """Compares the amaxes of a forward pass with the scales that were in use in it.

    Delayed scaling chooses a scale before it sees the numbers. What is beyond the largest FP8 number, by more
    than rounding explains, is cut off there.

    Attributes:
        share: the share of the inputs and weights of layers that were cut off; None if nothing was measured.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        self._before: dict[nn.Module, dict[str, Any]] = {}

    def begin(self, model: nn.Module) -> None:
        """Note the scales that the next forward pass uses."""
        self._before = {layer: fields for layer, fields in _histories(model) if "forward.scale" in fields}

    def end(self, model: nn.Module) -> None:
        """Compare them with what was found in it."""
        beyond = whole = 0
        for layer, now in _histories(model):
            before = self._before.get(layer)
            # The last row is the newest. A history of one row is empty after each step.
            if before is None or len(now.get("forward.amax_history", ())) < 2:
                continue
            limit = _limit(TE_DType_To_Torch[fp8_dtype(now["forward.fp8_dtype"])])
            beyond += int((now["forward.amax_history"][-1] * before["forward.scale"] > limit).sum())
            whole += int((now["forward.amax_history"][-1] > 0).sum())
        self.share = beyond / whole if whole else None
        self._before = {}


def _limit(dtype: torch.dtype) -> float:
    """The largest magnitude that is only rounded: half a step beyond the largest number."""
    about = torch.finfo(dtype)
    return about.max + 2.0 ** math.floor(math.log2(about.max)) * about.eps / 2


def _histories(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    layers = [module for module in model.modules() if isinstance(module, StateDicts)]
    return [(layer, read_extra_state(layer.get_extra_state())) for layer in layers]
