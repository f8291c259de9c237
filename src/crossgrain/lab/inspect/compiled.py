"""Passes over memory that numba compiles for the CPU when they are first used. `passes` has the same in plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


@cache
def compiled(function: Any) -> Any:
    """Compile a pass when it is first needed, or load it from the disk."""
    import numba

    from ...kernels.cpu.disk_cache import cached_on_disk

    # Sums may be added in any order; the rotation must give the bits of the reference.
    options: Any = {} if function is rotation else {"fastmath": {"reassoc", "contract"}}
    return cached_on_disk(numba.njit(nogil=True, **options)(function))


def sums(numbers, rounded, decoded, bounds, high, long, noise, power):
    """See `passes.block_sums`. ``noise`` and ``power`` are written."""
    rows, columns = numbers.shape
    one_bound = bounds.shape[0] == 1 and bounds.shape[1] == 1
    against, nonzero, lost, cut = 0.0, 0, 0, 0
    for i in range(noise.shape[0]):
        for j in range(noise.shape[1]):
            bound = bounds[0, 0] if one_bound else bounds[i, j]
            bound = bound if bound > 0 else np.float32(np.inf)
            of_noise, of_power = 0.0, 0.0
            for r in range(i * high, min(rows, (i + 1) * high)):
                # Sums of a row in fp32, which vectorizes, and sums of rows in fp64.
                row_noise, row_power, row_product = np.float32(0), np.float32(0), np.float32(0)
                here, gone, beyond = np.int32(0), np.int32(0), np.int32(0)
                for c in range(j * long, min(columns, (j + 1) * long)):
                    number, value, rounded_number = numbers[r, c], decoded[r, c], rounded[r, c]
                    error = value - number
                    row_noise += error * error
                    row_power += number * number
                    row_product += error * number
                    here += np.int32(rounded_number != 0)
                    gone += np.int32((value == 0) & (rounded_number != 0))
                    beyond += np.int32(abs(rounded_number) > bound)
                of_noise += row_noise
                of_power += row_power
                against += row_product
                nonzero += here
                lost += gone
                cut += beyond
            noise[i, j], power[i, j] = of_noise, of_power
    return against, nonzero, lost, cut


def add(total, decoded, numbers):
    """See `passes.add_error`."""
    rows, columns = numbers.shape
    squares = 0.0
    for r in range(rows):
        of_row = np.float32(0)
        for c in range(columns):
            error = decoded[r, c] - numbers[r, c]
            total[r, c] += error
            of_row += error * error
        squares += of_row
    return squares


def rotation(groups, signs, out):
    """Sums and differences at distances 1, 2, 4, 8, in the order of the reference."""
    here, there = np.empty(16, np.float32), np.empty(16, np.float32)
    for g in range(groups.shape[0]):
        for i in range(16):
            here[i] = groups[g, i] * signs[i]
        distance = 1
        while distance < 16:
            for start in range(0, 16, 2 * distance):
                for i in range(start, start + distance):
                    low, high = here[i], here[i + distance]
                    there[i], there[i + distance] = low + high, low - high
            here, there = there, here
            distance *= 2
        for i in range(16):
            out[g, i] = here[i] * np.float32(0.25)
