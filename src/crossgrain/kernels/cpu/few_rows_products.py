"""Products of a few rows with a plane that is not decoded first: for which planes, and how the kernel is called."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from ...planes import ROWWISE, Plane
from . import few_rows
from .decoders import decoder
from .jobs import jobs, work_tag
from .runtime import address, kernel, kind_of, run_ranges
from .support import is_plain_memory, plane_has_memory, scratch
from .tables import as_word
from .tags import F32, NO

_OUT, _FIRST, _LAST = -3, -2, -1
_CACHE_BYTES = 1 << 14  # part of the first-level cache for decoded rows


def multiply_few(x: Tensor, plane: Plane, out: Tensor) -> bool:
    """Compute ``out`` [rows, N] = ``x`` [rows, K] · planeᵀ, of an operand [N, K]; False if there is no kernel."""
    found = decoder(plane, torch.float32) if plane_has_memory(plane) else None
    if found is None or not (plane.direction is ROWWISE or plane.transposed):
        return False
    if not is_plain_memory(x) or out.stride(1) != 1:
        return False
    height, width = found.shape
    tags, at_once = (*found.tags, NO), max(1, _CACHE_BYTES // (width * 4))

    def work(first: int, last: int, keep: Any = (x, plane, out)) -> None:
        # The arguments that are the address of the result and its range are found by numbers that no other one is.
        given = found.arguments(plane, _OUT, _FIRST, _LAST)
        out_at, first_at = given.index(_OUT), given.index(_FIRST)
        runner = address(jobs, 0, 0, 0, 0, 0, work_tag("".join(map(kind_of, given)), len(tags)))
        decode = address(found.kernel, *given, *tags)
        words = array("q", map(as_word, given))
        memory = scratch(few_rows.RESULT + at_once * width * 4)  # held: a signal's handler may need more
        arguments = (
            runner, decode, words.buffer_info()[0], first_at, out_at, width if found.flat else 1,
            x.data_ptr(), len(x), out.data_ptr(), out.stride(0) * 4, first, last, width, at_once,
            memory.data_ptr(), F32,
        )  # fmt: skip
        kernel(few_rows.multiply, *arguments)(*arguments)

    run_ranges(work, height, height * width)
    return True
