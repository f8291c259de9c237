"""What must hold of every run."""

from typing import Any

from .allowed import is_allowed
from .device import Wait

# Sums of GEMMs are scaled in another order on a GPU, by a rounding of fp32; that may change a code of 4 bits, and each
# of two layers passes it on. Everything else is the same, bit for bit.
LARGEST_ERROR = 0.03


def check(told: dict[str, Any]) -> None:
    """Raise unless a run has waited only where it may, with results on the device that are those of the CPU."""
    assert "failed" not in told, told["failed"]
    waits = [Wait(**each) for each in told["waits"]]
    assert [wait for wait in waits if not is_allowed(wait)] == []
    assert told["elsewhere"] == [], "results on another device"
    assert told["dtypes"] == [], "results of another dtype"
    assert told["missing"] == [], "results that only one device has"
    assert {name: error for name, error in told["errors"].items() if not error <= LARGEST_ERROR} == {}
