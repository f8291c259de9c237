"""The state of debug features, for clients that read or reset it."""

from __future__ import annotations

from typing import ClassVar


class TEDebugState:
    """Whether debug features are active, and how they count and reduce.

    Attributes:
        layer_count: number of the next layer without a name.
        layers_initialized: has no effect; for clients that clear it.
        debug_enabled: whether debug features are active; None if nobody has asked.
        weight_tensor_tp_group_reduce: statistics of weights are merged over the ranks that share a layer.
    """

    layer_count = 1
    layers_initialized: ClassVar[dict[str, bool]] = {}
    debug_enabled: bool | None = None
    weight_tensor_tp_group_reduce = True

    @classmethod
    def initialize(cls) -> None:
        """Note that debug features are not active, unless ``nvdlfw_inspect`` was initialized. Layers do not ask."""
        cls.debug_enabled = bool(cls.debug_enabled)

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
        """Set whether statistics of weights are merged over the ranks that share a layer."""
        cls.weight_tensor_tp_group_reduce = enabled


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """See `TEDebugState.set_weight_tensor_tp_group_reduce`."""
    TEDebugState.set_weight_tensor_tp_group_reduce(enabled)
