"""Many calls of one kernel in one call: a table with the numbers of each, and the address of the kernel.

Groups of rows that are quantized each by itself (the experts of a mixture) are such calls: they differ in
addresses, heights and scales, and in nothing that a kernel is compiled for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .calling import called
from .compiling import kernel
from .tags import Tag

_KINDS = {"i": types.intp, "f": types.float32, "b": types.boolean}

SLOT = 8  # bytes that an argument takes in the table


def work_tag(kinds: str, tags: int) -> Tag:
    """What the arguments of the kernel are - integers, floats or bools, a letter each - and how many tags follow."""
    return Tag(f"{kinds}:{tags}")


@intrinsic
def _call(typing_context, address, row, work):
    """Call the kernel at ``address`` with the arguments in a row of the table."""
    letters, tags = work.tag.split(":")
    kinds = [_KINDS[letter] for letter in letters]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for place, kind in enumerate(kinds):
            at = builder.add(args[1], ir.Constant(args[1].type, place * SLOT))
            read = ir.FloatType() if kind is types.float32 else ir.IntType(64)
            value = builder.load(builder.inttoptr(at, read.as_pointer()))
            values.append(cgutils.is_not_null(builder, value) if kind is types.boolean else value)
        return called(context, builder, args[0], kinds, values, int(tags))

    return types.intp(types.intp, types.intp, work), generate


@intrinsic
def store_i64(typing_context, address, value):
    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@kernel
def jobs(address, table, count, step, results, work):
    """A result for each of ``count`` rows of the table, which are ``step`` bytes apart."""
    for job in range(count):
        store_i64(results + job * 8, _call(address, table + job * step, work))
    return np.int64(0)
