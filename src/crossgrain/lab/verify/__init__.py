"""Proving: paired training runs of recipes on a user's own loop, and what they show."""

from .paired import ABOVE, DIVERGED, NOT_ABOVE, NOT_RESOLVED, Paired, paired
from .result import BranchRun, Row, Verification
from .running import Branch, BranchError, verify

__all__ = [
    "ABOVE",
    "DIVERGED",
    "NOT_ABOVE",
    "NOT_RESOLVED",
    "Branch",
    "BranchError",
    "BranchRun",
    "Paired",
    "Row",
    "Verification",
    "paired",
    "verify",
]
