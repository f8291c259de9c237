"""Replay: which operand of which GEMM made the difference in a step that went wrong."""

from .outcome import MEASURES, Outcome
from .replaying import replay
from .result import Operand, Replay
from .running import ReplayError
from .step import ReplayStep

__all__ = ["MEASURES", "Operand", "Outcome", "Replay", "ReplayError", "ReplayStep", "replay"]
