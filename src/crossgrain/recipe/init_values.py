"""What a quantized parameter was made from, for whoever makes master weights."""

from __future__ import annotations

from torch import Tensor


class InitValue:
    """A CPU copy that can be let go."""

    def __init__(self, value: Tensor) -> None:
        self._value: Tensor | None = value.detach().to("cpu", copy=True)

    def get(self) -> Tensor | None:
        return self._value

    def clear(self) -> None:
        self._value = None


def keep_high_precision_init_val(parameter: Tensor, value: Tensor) -> None:
    """Give ``parameter`` the methods ``get_high_precision_init_val`` and ``clear_high_precision_init_val``."""
    kept = InitValue(value)
    parameter.get_high_precision_init_val = kept.get  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = kept.clear  # type: ignore[attr-defined]
