"""`QuantizerRequest`: what a factory may return instead of a quantizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerRequest:
    """Base class of requests for a quantizer that needs a state, such as a history of amaxes.

    The state of a recipe makes the quantizer.

    Examples:
        >>> issubclass(cg.DelayedScalingRequest, cg.QuantizerRequest)
        True
    """
