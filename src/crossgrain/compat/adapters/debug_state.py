"""The state of debug features. crossgrain has none; this exists for clients that reset it."""

from __future__ import annotations

from typing import ClassVar


class TEDebugState:
    """Counts layers and steps of debug features."""

    layer_count = 1
    layers_initialized: ClassVar[dict[str, bool]] = {}
    debug_enabled: bool | None = None
    weight_tensor_tp_group_reduce = True

    @classmethod
    def initialize(cls) -> None:
        cls.debug_enabled = False

    @classmethod
    def _reset(cls) -> None:
        cls.layer_count = 1
        cls.layers_initialized.clear()
        cls.debug_enabled = None
        cls.weight_tensor_tp_group_reduce = True

    @classmethod
    def get_layer_count(cls) -> int:
        """Return the next layer number."""
        number = cls.layer_count
        cls.layer_count += 1
        return number

    @classmethod
    def set_weight_tensor_tp_group_reduce(cls, enabled: bool) -> None:
        """Set whether statistics of weights are reduced over tensor-parallel ranks; there are none here."""
        cls.weight_tensor_tp_group_reduce = enabled


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """See `TEDebugState.set_weight_tensor_tp_group_reduce`."""
    TEDebugState.set_weight_tensor_tp_group_reduce(enabled)
