"""What may stand in for a quantizer until the state it needs exists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizerRequest:
    """A quantizer that needs state which others keep (a scaling history): it is made when that exists."""
