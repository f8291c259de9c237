"""Which candidate for which GEMM of which layer: the recipe with the least predicted harm for what it saves."""

from .finder import Point
from .found import Found, Tie
from .search import frontier, search

__all__ = ["Found", "Point", "Tie", "frontier", "search"]
