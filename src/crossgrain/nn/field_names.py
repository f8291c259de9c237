"""Attributes of modules with the names of Transformer Engine, for programs that read them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..recipe import active
from ..runtime.collectives import group_rank


class FieldNames(nn.Module):
    """Base class with attributes that Transformer Engine's modules have.

    Attributes:
        ub_name: name of a communication buffer; it has no effect.
    """

    fp8: bool
    tp_group: Any
    ub_name: str | None = None
    _tp_rank: int = 0

    @property
    def fp8_calibration(self) -> bool:
        return active().calibrating

    @property
    def fp8_initialized(self) -> bool:
        """Whether the module has quantizers."""
        quantizers: dict[str, list[Any]] = self.quantizers  # type: ignore[assignment]
        return any(quantizers.values())

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Whether the module has quantizers. Set it to False to build them again in the next forward."""
        return self.fp8_initialized

    @fp8_meta_tensors_initialized.setter
    def fp8_meta_tensors_initialized(self, initialized: bool) -> None:
        if not initialized:
            self._forget_quantizers()  # type: ignore[operator]

    @property
    def fp8_parameters(self) -> bool:
        return bool(self.primary_weights_in_fp8)

    @property
    def tp_rank(self) -> int:
        """The index of this rank in the group that shares the layer. It may be set if there is no group."""
        return self._tp_rank if self.tp_group is None else group_rank(self.tp_group)

    @tp_rank.setter
    def tp_rank(self, rank: int) -> None:
        self._tp_rank = rank
