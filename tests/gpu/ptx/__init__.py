"""Runs PTX without a GPU: every instruction on all threads of many blocks at once, in numpy, bit for bit.

It is exact where PTX is, and refuses what PTX leaves open (``PtxError``): approximate instructions, undefined values
that reach memory, an address or a branch, races, and every instruction and modifier it does not know. Accesses out of
bounds, misaligned ones, and barriers that not all threads reach are errors, too.
"""

from .counting import Access, Conflicts, Report, Sectors
from .errors import PtxError
from .launch import run
from .memory import Pointer

__all__ = ["Access", "Conflicts", "Pointer", "PtxError", "Report", "Sectors", "run"]
