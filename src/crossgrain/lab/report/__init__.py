"""Showing: what was measured, searched and verified, as one HTML file that needs nothing else."""

from .distributions import Distribution
from .page import write_report

__all__ = ["Distribution", "write_report"]
