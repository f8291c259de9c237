"""`settings`: options of the whole process. They change what is allowed and how it is stored, not the numbers.

    crossgrain.settings.strict = True                    # refuse what Transformer Engine refuses
    with crossgrain.settings.override(strict=True): ...  # only inside this block

They hold for all threads, so that backward, which runs in other threads, has the same settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch


def default_compute_capability() -> tuple[int, int]:
    """The GPU generation whose rules apply if nobody says another one.

    Raises:
        ValueError: CROSSGRAIN_COMPUTE_CAPABILITY is not of the form "10.0".
    """
    chosen = os.environ.get("CROSSGRAIN_COMPUTE_CAPABILITY")
    if chosen:
        major, _, minor = chosen.partition(".")
        if not (major.isdigit() and minor.isdigit()):
            raise ValueError(f"CROSSGRAIN_COMPUTE_CAPABILITY must be of the form 10.0, got {chosen!r}")
        return int(major), int(minor)
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability()
    return 10, 0


@dataclass
class Settings:
    """The options of the process. ``crossgrain.settings`` is the only object of this class that has an effect.

    Attributes:
        strict: refuse what Transformer Engine refuses, with its exceptions, even if crossgrain can do it.
        compute_capability: the GPU generation whose rules apply: that of CROSSGRAIN_COMPUTE_CAPABILITY ("9.0") if this
            environment variable is set, else that of the GPU if there is one, else (10, 0). From (10, 0) on, per-tensor
            FP8 has one buffer for both directions; below, it has a transposed copy for the columnwise direction. It
            also decides which recipe is the default, and in strict mode which recipes are available.
        non_tn_fp8_gemm: whether per-tensor FP8 has one buffer for both directions; None to follow
            ``compute_capability``.
        gemm_operand_dtype: torch.float32 or torch.bfloat16: the dtype to which GEMMs decode their operands. bfloat16
            is used only if it holds the decoded numbers exactly. None to choose what is fast on the device, which may
            also multiply codes without decoding them. On GPUs the format decides whether bfloat16 is exact, and one is
            not quite: numbers of MXFP8 below 2**-126 are rounded to bfloat16. torch.float32 keeps them, too.
        native_gemms: whether GEMMs on GPUs multiply codes by tensor cores, without decoding them. None: where torch and
            the hardware can (see `gemm.native`). False: nowhere, so that GPUs with and without such formats can be
            compared. True: everywhere; what would have to be decoded raises RuntimeError and says why.
        requantize_on_load: allow loading a checkpoint of one format into parameters of another format, which rounds
            the numbers a second time.
        reuse_unchanged_weights: keep the quantized weights of inference, and of layers that are frozen, for the next
            call, as long as the weights do not change. False saves their memory.
        nonfinite: what layers do about NaNs and infinities, unless a recipe says it: "propagate", "raise" or
            "saturate" (see `quantizers.nonfinite`). None for "saturate" in strict mode, otherwise "propagate".
        announce_compiling: tell on the terminal about kernels whose compilation took over a second. Nothing is written
            if stderr is no terminal.

    Examples:
        >>> with cg.settings.override(nonfinite="raise"):
        ...     cg.settings.nonfinite
        'raise'
        >>> cg.settings.nonfinite is None
        True
    """

    strict: bool = False
    compute_capability: tuple[int, int] = field(init=False)  # found when it is first read: asking a GPU starts CUDA
    non_tn_fp8_gemm: bool | None = None
    gemm_operand_dtype: torch.dtype | None = None
    native_gemms: bool | None = None
    requantize_on_load: bool = False
    reuse_unchanged_weights: bool = True
    nonfinite: Literal["propagate", "raise", "saturate"] | None = None
    announce_compiling: bool = True

    def __getattr__(self, name: str) -> Any:
        if name != "compute_capability":
            raise AttributeError(f"there is no setting {name!r}; available: {', '.join(_names())}")
        self.compute_capability = found = default_compute_capability()
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "nonfinite" and value not in (None, "propagate", "raise", "saturate"):
            raise ValueError(f"settings.nonfinite must be None, 'propagate', 'raise' or 'saturate', got {value!r}")
        object.__setattr__(self, name, value)

    def nonfinite_policy(self) -> Literal["propagate", "raise", "saturate"]:
        """The policy of layers whose recipe does not say one."""
        if self.nonfinite is not None:
            return self.nonfinite
        return "saturate" if self.strict else "propagate"

    @contextmanager
    def override(self, **values: object) -> Iterator[Settings]:
        """A context manager that sets options for a block, in all threads, and restores them after it.

        Args:
            **values: options by name.

        Raises:
            TypeError: there is no such option.
        """
        unknown = values.keys() - set(_names())
        if unknown:
            raise TypeError(f"no such setting: {', '.join(sorted(unknown))}; available: {', '.join(_names())}")
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


def _names() -> list[str]:
    return [each.name for each in fields(Settings)]


settings = Settings()


def get_device_compute_capability() -> tuple[int, int]:
    """The GPU generation whose rules apply: ``settings.compute_capability``.

    Examples:
        >>> with cg.settings.override(compute_capability=(9, 0)):
        ...     cg.get_device_compute_capability()
        (9, 0)
    """
    return settings.compute_capability


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether per-tensor FP8 has one buffer for both directions (True), or a transposed copy for the columnwise one.

    Examples:
        >>> with cg.settings.override(compute_capability=(9, 0)):
        ...     cg.is_non_tn_fp8_gemm_supported()
        False
    """
    if settings.non_tn_fp8_gemm is not None:
        return settings.non_tn_fp8_gemm
    return settings.compute_capability >= (10, 0)
