"""Kernels touch only the buffers of their call: all formats, directions, options, pairs, groups, decodes, products."""

import itertools
import os
from functools import partial

import pytest
import torch
from numba import njit

from crossgrain import COLUMNWISE, ROWWISE
from crossgrain.kernels import HalfStep, Make, ProductOf
from crossgrain.kernels.cpu import nvfp4_product, products, runtime
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.kernels.cpu.dot_tile import LEFT_BLOCK_BYTES, RIGHT_BLOCK_BYTES, TILE_COLUMNS, TILE_ROWS
from crossgrain.kernels.cpu.known import is_known
from crossgrain.kernels.cpu.simd import load_u8, store_u8
from crossgrain.kernels.cpu.support import tag_of_plane
from crossgrain.kernels.cpu.tags import NO
from crossgrain.kernels.workspaces import free_workspaces
from crossgrain.planes import empty_plane

from ...common.encodings import (
    DIRECTIONS,
    HYBRIDS,
    NAMES,
    SEED,
    encoded,
    encoded_groups,
    encodings_of,
    pair_of,
    that_fit,
)
from ...common.guarded_memory import WRITTEN, all_kernels, guarded_child, name_of

CPU = CpuBackend()
# Tails of rows and columns, one block, less than a block, more than a strip (512 columns) or a tile (128 rows).
SHAPES = [(33, 7), (16, 48), (96, 32), (130, 200), (160, 544)]
HEIGHTS = (32, 0, 96, 160)
PRODUCTS = [(1, 1, 16), (9, 33, 48), (40, 70, 80)]  # rows, columns, summed dimension
PACKED = {"a": (nvfp4_product.pack_left, TILE_ROWS, LEFT_BLOCK_BYTES)}
PACKED["b"] = (nvfp4_product.pack_right, TILE_COLUMNS, RIGHT_BLOCK_BYTES)
WHERE = [("end", 1), ("end", 2), ("start", 2), ("middle", 1)]  # places of buffers, and number of threads
GROUPED = ["fp8", "fp8_block", "mxfp8", "mxfp8_2d", "mxfp6_e3m2", "nvfp4_rht_sr", "nvfp4_row_scaled", "nvfp4_2d"]


def numbers(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def all_bytes(write, x, encodings, own):
    """All that kernels make of ``own(x)``: codes, scales, amaxes and decoded numbers."""
    planes = write(own(x) if x.is_contiguous() else x, encodings)
    for plane in planes:
        yield from plane.buffers()
        yield from (CPU.decode(plane, dtype) for dtype in (torch.float32, torch.bfloat16))
        yield CPU.decode_operand(plane, torch.empty(plane.shape[0] * plane.shape[1], dtype=torch.float32))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def single(x, encodings):
    return encoded(CPU, x, encodings)


def planned(x, encodings):
    """By a plan, as new planes are made; as above where there is none."""
    planes = [empty_plane(encoding.format, way, x.shape, device=x.device) for way, encoding in encodings]
    plan = CPU.plan(x, planes, [encoding for _, encoding in encodings], {})
    if plan is None:
        return single(x, encodings)
    assert plan.run(x, planes, SEED) is False
    return planes


def grouped(x, encodings):
    return encoded_groups(CPU, x, HEIGHTS, encodings)


def operands(rows, columns, inner, direction, own):
    shapes = [(size, inner) if direction is ROWWISE else (inner, size) for size in (rows, columns)]
    return [single(own(numbers(shape)), encodings_of("nvfp4", (direction,)))[0] for shape in shapes]


def panels(rows, columns, inner, direction, own):
    """Both operands as they are packed for a product, which every CPU can do."""
    planes = operands(rows, columns, inner, direction, own)
    free_workspaces()  # what is reused may be larger, and its end is not written
    for (name, (pack, tile, size)), plane in zip(PACKED.items(), planes, strict=True):
        yield products._packed(pack, plane, tile, size, f"panels.{name}", tag_of_plane(plane))


def product(rows, columns, inner, direction, own):
    """A product from codes, into a part of a wider matrix."""
    a, b = operands(rows, columns, inner, direction, own)
    out = own(torch.zeros(rows, columns + 3))
    CPU.multiply(a, b, out[:, 1:-2], 1.5)
    yield out


def plane_cases(ways):
    """The shapes that each way of encoding fits, and a matrix that is not contiguous."""
    turned = numbers((160, 96)).t()
    for encodings in ways:
        for x in (*(numbers(shape, torch.bfloat16) for shape in SHAPES), numbers(SHAPES[-1]), turned):
            if fitting := that_fit(encodings, x.shape):
                yield partial(all_bytes, single, x, fitting)
                yield partial(all_bytes, planned, x, fitting)


def group_cases(name):
    for directions in DIRECTIONS.values():
        x = numbers((sum(HEIGHTS), 96), torch.bfloat16)
        yield partial(all_bytes, grouped, x, encodings_of(name, directions))


def product_cases():
    for way in (panels, product) if products.has_byte_dot_products() else (panels,):
        for sizes, direction in itertools.product(PRODUCTS, (ROWWISE, COLUMNWISE)):
            yield partial(way, *sizes, direction)


def printed(shape, dtype, *, own) -> list[torch.Tensor]:
    """The fingerprint of a tensor."""
    return [torch.frombuffer(bytearray(CpuBackend().fingerprint(own(numbers(shape, dtype)))), dtype=torch.uint8)]


def half_step(row, column, own, scaled=False):
    """Forward of a layer by a plan: the planes to keep, and the product. ``scaled``: scales are given."""
    scales = [own(torch.tensor([number])) if scaled else None for number in (50.0, 70.0)]
    x, w = own(numbers((32, 160))), own(numbers((96, 160)))
    ways = encodings_of(row, (ROWWISE,)) + encodings_of(column, (COLUMNWISE,))
    planes = [[empty_plane(each.format, way, one.shape, device=one.device) for way, each in ways] for one in (x, w)]
    makes = [
        Make(one, made, [each for _, each in ways], (False, True), scale=scale)
        for one, made, scale in zip((x, w), planes, scales, strict=True)
    ]
    plan, total = CPU.step_plan(HalfStep(makes, (), (ProductOf(0, 2),))), own(torch.zeros(32, 96))
    kept = [columns for _, columns in planes]
    running = plan.start((x, w), scales, kept, (), (SEED, SEED), (total,))
    yield from running.product(0) or (total,)
    for plane in kept:
        yield from plane.buffers()


def half_step_cases():
    for pair in (("mxfp8", "mxfp8"), ("mxfp4_sr", "fp8_block"), ("mxfp8", "nvfp4_rht_sr"), ("fp8", "fp8")):
        yield partial(half_step, *pair)
    yield partial(half_step, "fp8", "fp8", scaled=True)
    if products.has_byte_dot_products():
        yield partial(half_step, "nvfp4", "mxfp6_e3m2")


def few(name, rows, columns, inner, own):
    """A product of a few rows with a plane, into a part of a wider matrix."""
    (plane,) = single(own(numbers((columns, inner))), encodings_of(name, (ROWWISE,)))
    out = own(torch.zeros(rows, columns + 3))
    assert CPU.multiply_few(own(numbers((rows, inner))), plane, out[:, 1:-2])
    yield out


def few_rows_cases():
    for name in ("mxfp8", "mxfp4", "nvfp4", "fp8", "fp8_block"):
        for sizes in ((1, 16, 32), (3, 33, 96), (8, 10, 4256)):
            yield partial(few, name, *sizes)


def fingerprint_cases():
    for shape, dtype in (((160, 96), torch.float32), ((33, 66), torch.bfloat16), ((1, 6), torch.float32)):
        yield partial(printed, shape, dtype)


def check(cases, also=lambda guard: None):
    """Run cases in guarded memory, and compare with what they make in ordinary memory."""
    expected = [(case, [each.clone() for each in case(own=lambda x: x)]) for case in cases]

    def work(guard):
        for (case, wanted), (place, threads) in itertools.product(expected, WHERE):
            os.environ["CROSSGRAIN_NUM_THREADS"] = str(threads)  # not torch's, whose own threads would wait busily
            with guard.buffers_at(place):
                for found, same in zip(case(own=guard.copy), wanted, strict=True):
                    assert torch.equal(bits(found), bits(same)), (case, place, threads)
        also(guard)

    guarded_child(work)


# The reference serves the others, without addresses.
COMPILED = [name for name in NAMES if is_known(encodings_of(name, (ROWWISE,))[0][1].format)]


@pytest.mark.parametrize("name", COMPILED)
def test_planes(name):
    check(plane_cases([encodings_of(name, directions) for directions in DIRECTIONS.values()]))


@pytest.mark.parametrize("pair", HYBRIDS)
def test_pairs(pair):
    check(plane_cases([pair_of(pair)]))


@pytest.mark.parametrize("name", GROUPED)
def test_groups(name):
    check(group_cases(name))


def test_products():
    check(product_cases())


def test_half_steps():
    check(half_step_cases())


def test_few_rows():
    check(few_rows_cases())


def test_fingerprints():
    check(fingerprint_cases())


def test_all_kernels_are_among_the_guarded_ones():
    """Every kernel is called by some case above, and the guard knows what it may write."""
    assert set(WRITTEN) == all_kernels()
    x = numbers((160, 96), torch.bfloat16)
    some = ["fp8", "fp8_block", "mxfp8", "mxfp8_2d", "mxfp4", "nvfp4", "nvfp4_2d", "nvfp4_rht", "nvfp4_row_scaled"]
    cases = [
        partial(all_bytes, single, x, encodings_of(name, (way,))) for name in some for way in (ROWWISE, COLUMNWISE)
    ]
    cases += [partial(all_bytes, single, x, encodings_of("nvfp4_4over6_448", (ROWWISE,)))]
    cases += [partial(all_bytes, single, x, encodings_of("nvfp4_2d", (ROWWISE, COLUMNWISE)))]
    cases += [partial(all_bytes, planned, x, encodings_of(name, (ROWWISE,))) for name in ("fp8", "nvfp4")]

    def complete(guard):
        of_codes = {"nvfp4_product.multiply", "programs.joint_factor"}
        missing = set() if products.has_byte_dot_products() else of_codes
        assert guard.seen == set(WRITTEN) - missing

    cases += [*half_step_cases(), *group_cases("mxfp8"), *product_cases(), *few_rows_cases(), *fingerprint_cases()]
    check(cases, also=complete)


# ---- the guard itself --------------------------------------------------------------------------------------


@njit(nogil=True)
def put_byte(out, at, tag):
    store_u8(out + at, 1)


@njit(nogil=True)
def take_byte(x, at, tag):
    return load_u8(x + at)


@njit(nogil=True)
def put_byte_into_input(x, at, tag):
    store_u8(x + at, 1)


WRITTEN_HERE = {name_of(put_byte): {"out"}, name_of(take_byte): set(), name_of(put_byte_into_input): set()}


@pytest.mark.parametrize(
    "kernel, at, place, message",
    [
        (put_byte, 100, "start", r"put_byte wrote 1 bytes after a buffer of 100 bytes"),
        (put_byte, 102, "middle", r"put_byte wrote 3 bytes after a buffer of 100 bytes"),
        (put_byte, -1, "end", r"put_byte wrote 1 bytes before a buffer of 100 bytes"),
        (put_byte, -2, "middle", r"put_byte wrote 2 bytes before a buffer of 100 bytes"),
        (put_byte, 100, "end", r"put_byte touched memory outside of its buffers \(SIGSEGV\)"),
        (put_byte, -1, "start", r"put_byte touched memory outside of its buffers \(SIGSEGV\)"),
        (take_byte, 100, "end", r"take_byte touched memory outside of its buffers \(SIGSEGV\)"),
        (take_byte, -1, "start", r"take_byte touched memory outside of its buffers \(SIGSEGV\)"),
        (put_byte_into_input, 99, "end", r"put_byte_into_input changed what it should only read"),
    ],
)
def test_a_kernel_that_goes_astray_is_caught(kernel, at, place, message, monkeypatch):
    for name, written in WRITTEN_HERE.items():
        monkeypatch.setitem(WRITTEN, name, written)

    def call(address, at):
        return runtime.kernel(kernel, address, at, NO)(address, at, NO)

    def work(guard):
        with guard.buffers_at(place):
            buffer = guard.copy(torch.zeros(100, dtype=torch.uint8))
            call(buffer.data_ptr(), 99)  # the last byte may be touched
            if kernel is put_byte:
                assert buffer[99] == 1
            call(buffer.data_ptr(), at)

    with pytest.raises(AssertionError, match=message):
        guarded_child(work)


def test_memory_that_is_not_guarded_is_noticed(monkeypatch):
    monkeypatch.setitem(WRITTEN, name_of(take_byte), set())

    def work(guard):
        address = bytearray(8)
        call = (torch.frombuffer(address, dtype=torch.uint8).data_ptr(), 0, NO)
        runtime.kernel(take_byte, *call)(*call)

    with pytest.raises(AssertionError, match="x of the kernel test_memory_bounds.take_byte is not the address"):
        guarded_child(work)
