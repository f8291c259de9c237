"""Casts on vectors: each way to round gives the codes of the reference, at every code, every tie and beside them."""

from functools import cache

import numpy as np
import pytest
import torch
from numba import njit

from crossgrain.kernels.cpu import known
from crossgrain.kernels.cpu.elements import (
    decode_element,
    element_tag,
    encode_element,
    loose_bytes,
    loose_codes,
    rounded_to_grid,
    saturated_codes,
    up_to_max,
)
from crossgrain.kernels.cpu.nvfp4_blocks import divided
from crossgrain.kernels.cpu.simd import load, narrow, side_by_side, store
from crossgrain.kernels.cpu.tags import NO
from crossgrain.kernels.reference.elements import round_to_nearest

EIGHT_BITS = [known.E4M3, known.E5M2]
by_name = {"ids": lambda element: element.name}


def numbers(element):
    """Codes, ties between them, the neighbours of both, tiny numbers; both signs; a multiple of 64."""
    values = np.array([v for v in element.values() if np.isfinite(v) and v >= 0], np.float32)
    exact = np.sort(np.concatenate([values, (values[1:] + values[:-1]) / 2, [1e-45, 1e-38, 1e-20]])).astype(np.float32)
    found = np.concatenate([np.nextafter(exact, np.float32(-np.inf)), exact, np.nextafter(exact, np.float32(np.inf))])
    found = np.concatenate([found, -found])
    return np.resize(found, -(-len(found) // 64) * 64)


@cache
def _loose_of_64(tag):
    return njit(lambda x, out: store(out, loose_bytes(load(x, 64, "f32"), tag)))


@cache
def _loose_of_32(tag):
    return njit(lambda x, out: store(out, loose_bytes(load(x, 32, "f32"), tag)))


@cache
def _loose_of_halves(tag):
    def work(x, out):
        store(out, loose_bytes(side_by_side(load(x, 32, "f32"), load(x + 128, 32, "f32")), tag))

    return njit(work)


@cache
def _careful(tag):
    return njit(lambda x, out: store(out, narrow(encode_element(load(x, 32, "f32"), tag, NO))))


@pytest.mark.parametrize(
    "make, lanes", [(_loose_of_64, 64), (_loose_of_32, 32), (_loose_of_halves, 64), (_careful, 32)]
)
@pytest.mark.parametrize("element", EIGHT_BITS, **by_name)
def test_numbers_are_rounded_as_in_the_reference(element, make, lanes):
    x = numbers(element)
    out = np.empty(len(x), np.uint8)
    work = make(element_tag(element))
    for start in range(0, len(x), lanes):
        work(x[start:].ctypes.data, out[start:].ctypes.data)
    np.testing.assert_array_equal(out, round_to_nearest(torch.from_numpy(x), element).numpy())


@pytest.mark.parametrize("element", known.ELEMENTS.values(), **by_name)
def test_the_lowest_bits_are_the_code(element):
    x = numbers(element)
    out, tag = np.empty(len(x), np.int32), element_tag(element)
    work = njit(lambda x, out: store(out, loose_codes(load(x, 32, "f32"), tag)))
    for start in range(0, len(x), 32):
        work(x[start:].ctypes.data, out[start:].ctypes.data)
    expected = round_to_nearest(torch.from_numpy(x), element).numpy()
    np.testing.assert_array_equal((out & ((1 << element.bits) - 1)).astype(np.uint8), expected)


@pytest.mark.parametrize("lanes", [1, 8, 16, 32])
@pytest.mark.parametrize("element", known.ELEMENTS.values(), **by_name)
def test_every_code_is_decoded(element, lanes):
    """By however many instructions: those of 16 lanes may be looked up."""
    codes, tag = np.arange(1 << element.bits, dtype=np.int32), element_tag(element)
    codes = np.resize(codes, max(len(codes), lanes))
    out = np.empty(len(codes), np.float32)
    work = njit(lambda codes, out: store(out, decode_element(load(codes, lanes, "i32"), tag)))
    for start in range(0, len(codes), lanes):
        work(codes[start:].ctypes.data, out[start:].ctypes.data)
    expected = np.resize(np.array(element.values(), np.float32), len(codes))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.array_equal(np.nan_to_num(out).view(np.int32), np.nan_to_num(expected).view(np.int32))


@pytest.mark.parametrize("bound", [6.0 * 448, 6.0 * 256])
def test_quotients_by_the_reciprocal_are_those_of_a_division(bound):
    """For every mantissa; an exponent changes nothing as long as neither number nor quotient is tiny or huge."""
    x = np.arange(1 << 23, dtype=np.int32) | np.int32(127 << 23)
    out = np.empty(len(x), np.float32)

    @njit
    def work(x, out, count, bound, safe):
        for i in range(0, count, 16):
            store(out + i * 4, divided(load(x + i * 4, 16, "f32"), bound, safe))

    for safe in (True, False):
        work(x.ctypes.data, out.ctypes.data, len(x), np.float32(bound), safe)
        assert np.array_equal(out, x.view(np.float32) / np.float32(bound))


@pytest.mark.parametrize("element", known.ELEMENTS.values(), **by_name)
def test_magnitudes_are_rounded_to_numbers(element):
    """To the number of the code that is found with it, and to the largest one if they are larger."""
    x = np.abs(numbers(element)) * np.resize(np.float32([1, 4]), len(numbers(element)))
    codes, out, tag = np.empty(len(x), np.int32), np.empty(len(x), np.float32), element_tag(element)

    @njit
    def work(x, codes, out):
        found, number = rounded_to_grid(up_to_max(load(x, 16, "f32"), tag), tag)
        store(codes, found)
        store(out, number)

    for start in range(0, len(x), 16):
        work(*(array[start:].ctypes.data for array in (x, codes, out)))
    expected = round_to_nearest(torch.from_numpy(x), element).numpy()
    np.testing.assert_array_equal((codes & ((1 << element.bits) - 1)).astype(np.uint8), expected)
    np.testing.assert_array_equal(out, np.array(element.values(), np.float32)[expected])


@pytest.mark.parametrize("element", known.ELEMENTS.values(), **by_name)
def test_loose_codes_are_saturated_if_asked(element):
    x = numbers(element) * np.resize(np.float32([1, 4, 1e30]), len(numbers(element)))
    out, tag = np.empty(len(x), np.int32), element_tag(element)
    work = njit(lambda x, out: store(out, saturated_codes(load(x, 16, "f32"), tag)))
    for start in range(0, len(x), 16):
        work(x[start:].ctypes.data, out[start:].ctypes.data)
    expected = round_to_nearest(torch.from_numpy(x), element).numpy()
    np.testing.assert_array_equal((out & ((1 << element.bits) - 1)).astype(np.uint8), expected)
