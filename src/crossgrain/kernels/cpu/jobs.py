"""Many calls of one kernel in one call: a table with the numbers of each, and a tag that says which kernel.

Groups of rows that are quantized each by itself (the experts of a mixture) are such calls: they differ in
addresses, heights and scales, and in nothing that a kernel is compiled for.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from . import fp8_tiles, measure, nvfp4_columns, nvfp4_rows, rows, transposed
from .columns import mx_columns, mx_tiles
from .elements import kernel
from .tags import Tag

_KERNELS = {
    dispatcher.__name__: dispatcher
    for dispatcher in (
        fp8_tiles.tiles,
        measure.of_all,
        measure.of_columns,
        measure.of_rotated,
        measure.of_rows,
        mx_columns,
        mx_tiles,
        nvfp4_columns.columns,
        nvfp4_rows.block_rows,
        nvfp4_rows.tile_rows,
        rows.cast,
        rows.encode_rows,
        transposed.encode_columns,
    )
}

_KINDS = {"i": types.intp, "f": types.float32, "b": types.boolean}

SLOT = 8  # bytes that an argument takes in the table


def work_tag(name: str, kinds: str, tags: list[str]) -> Tag:
    """The kernel, what its arguments are - integers, floats or bools, a letter each - and the tags it takes after."""
    return Tag(f"{name}:{kinds}:{','.join(tags)}")


@intrinsic
def _arguments(typing_context, address, work):
    """A tuple of the arguments in a row of the table."""
    kinds = [_KINDS[kind] for kind in work.tag.split(":")[1]]
    result = types.BaseTuple.from_types(kinds)

    def generate(context, builder, signature, args):
        values = []
        for place, kind in enumerate(kinds):
            at = builder.add(args[0], ir.Constant(args[0].type, place * SLOT))
            read = ir.FloatType() if kind is types.float32 else ir.IntType(64)
            value = builder.load(builder.inttoptr(at, read.as_pointer()))
            values.append(cgutils.is_not_null(builder, value) if kind is types.boolean else value)
        return context.make_tuple(builder, signature.return_type, values)

    return result(types.intp, work), generate


@intrinsic
def _store_i64(typing_context, address, value):
    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _call(address, work):
    """The kernel that the tag names, with the arguments at ``address``."""


@overload(_call)
def _overload_call(address, work):
    name, _, names = work.tag.split(":")
    function, tags = _KERNELS[name], tuple(map(Tag, names.split(",")))
    return lambda address, work: int(_or_zero(function(*(_arguments(address, work) + tags))))


def _or_zero(result):
    """What a kernel returns; 0 if that is nothing."""


@overload(_or_zero)
def _overload_or_zero(result):
    if isinstance(result, types.NoneType):
        return lambda result: 0
    return lambda result: result


@kernel
def jobs(table, count, step, results, work):
    """A result for each of ``count`` rows of the table, which are ``step`` bytes apart."""
    for job in range(count):
        _store_i64(results + job * 8, _call(table + job * step, work))
