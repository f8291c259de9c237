"""Switches that change what is allowed or how it is stored, never what the numbers are.

    crossgrain.settings.strict = True                    # refuse what Transformer Engine refuses
    with crossgrain.settings.override(strict=True): ...  # for a while

They are process-wide, so that backward passes on other threads see the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Settings:
    """``strict``: refuse what Transformer Engine refuses, with its exceptions, even where crossgrain can.

    ``compute_capability``: the GPU generation whose layout rules apply; from (10, 0) on, per-tensor
    FP8 keeps one buffer for both directions, below it keeps a transposed copy for columnwise use.
    ``non_tn_fp8_gemm`` decides that directly when it is not None.

    ``gemm_operand_dtype``: float32 or bfloat16, what GEMM operands are decoded to; None asks the device,
    which may also multiply codes without decoding them. bfloat16 is used only where the decoded numbers are
    exact in it.

    ``requantize_on_load``: a checkpoint of one format may be loaded into parameters of another, whose numbers
    are then rounded a second time.
    """

    strict: bool = False
    compute_capability: tuple[int, int] = (10, 0)
    non_tn_fp8_gemm: bool | None = None
    gemm_operand_dtype: torch.dtype | None = None
    requantize_on_load: bool = False

    @contextmanager
    def override(self, **values: object) -> Iterator[Settings]:
        """Set fields for the duration of a ``with`` block."""
        unknown = values.keys() - vars(self).keys()
        if unknown:
            raise TypeError(f"no such setting: {', '.join(sorted(unknown))}; there are {', '.join(vars(self))}")
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


settings = Settings()


def get_device_compute_capability() -> tuple[int, int]:
    """The GPU generation whose layout rules apply (pretended where there is no GPU)."""
    return settings.compute_capability


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether one FP8 buffer serves both directions (True), or columnwise use needs a transposed copy."""
    if settings.non_tn_fp8_gemm is not None:
        return settings.non_tn_fp8_gemm
    return settings.compute_capability >= (10, 0)
