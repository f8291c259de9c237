"""What clients of the field read from modules, under the names they know."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..recipe import active
from ..runtime.collectives import group_rank


class FieldNames(nn.Module):
    """Attributes of a quantized module that say what is known elsewhere.

    ``ub_name``  of a buffer for communication that overlaps with GEMMs; it has no effect
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
        """Whether there are quantizers."""
        quantizers: dict[str, list[Any]] = self.quantizers  # type: ignore[assignment]
        return any(quantizers.values())

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """The same; set to False: the next forward builds them again. Histories stay."""
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
        """This rank's place among those that share the layer. Of a layer without a group it may be said."""
        return self._tp_rank if self.tp_group is None else group_rank(self.tp_group)

    @tp_rank.setter
    def tp_rank(self, rank: int) -> None:
        self._tp_rank = rank
