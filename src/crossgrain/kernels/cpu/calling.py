"""Kernels that call other kernels by their address, so that there is not one of them for each pair.

A kernel that is called by its address gets numbers; its tags were told when it was compiled.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_TAG = ir.IntType(8).as_pointer()  # what a tag is at run time: nothing, in the place of an address


def called(context: Any, builder: Any, address: Any, kinds: list[Any], values: list[Any], tags: int) -> Any:
    """Emit a call of the kernel at ``address``, with ``values`` of the numba types ``kinds``. It returns an integer."""
    arguments = [context.get_value_type(kind) for kind in kinds] + [_TAG] * tags
    function = ir.FunctionType(context.get_value_type(types.intp), arguments)
    kernel = builder.inttoptr(address, function.as_pointer())
    return builder.call(kernel, [*values, *[ir.Constant(_TAG, None)] * tags])


def caller(tags: int) -> Any:
    """A function of an address and a tuple of numbers, which calls the kernel there. It has so many tags."""

    @intrinsic
    def call(typing_context, address, arguments):
        def generate(context, builder, signature, args):
            values = cgutils.unpack_tuple(builder, args[1])
            return called(context, builder, args[0], list(arguments), values, tags)

        return types.intp(types.intp, arguments), generate

    return call
