"""Passes over memory that numba compiles for the CPU when they are first used. `passes` has the same in plain torch."""

from __future__ import annotations

import math
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


def sums(numbers, rounded, decoded, factors, limit, high, long, noise, power):
    """See `passes.block_sums`. ``noise`` and ``power``, which are zero, are written."""
    rows, columns = numbers.shape
    one_factor = factors.shape[0] == 1 and factors.shape[1] == 1
    limit = np.float32(limit)
    one, zero = np.float32(1), np.float32(0)  # also for counting: float32 vectorizes
    against, nonzero, lost, cut = 0.0, 0, 0, 0
    for r in range(rows):
        i = r // high
        product, here, gone = zero, zero, zero
        for c in range(columns):
            number, value = numbers[r, c], decoded[r, c]
            product += (value - number) * number
            there = one if rounded[r, c] != 0 else zero
            here += there
            gone += there if value == 0 else zero
        against += product
        nonzero += int(here)
        lost += int(gone)
        for j in range(noise.shape[1]):
            first, last = j * long, min(columns, (j + 1) * long)
            bound = limit * (factors[0, 0] if one_factor else factors[i, j])
            bound = bound if bound > 0 else np.float32(np.inf)
            x, y, z = numbers[r, first:last], rounded[r, first:last], decoded[r, first:last]
            row_noise, row_power, beyond = zero, zero, zero
            for c in range(last - first):
                error = z[c] - x[c]
                row_noise += error * error
                row_power += x[c] * x[c]
                beyond += one if abs(y[c]) > bound else zero
            noise[i, j] += row_noise
            power[i, j] += row_power
            cut += int(beyond)
    return against, nonzero, lost, cut


def exponents(factors, power, counts):
    """Count positive scales by exponent, those of blocks without ``power`` aside; return all, and how many are zero.

    ``counts`` has a place for each exponent from -149 on, and is written.
    """
    there, zero = 0, 0
    for i in range(len(factors)):
        if power[i] > 0:
            there += 1
            factor = factors[i]
            if factor == 0:
                zero += 1
            elif 0 < factor < np.inf:
                counts[math.frexp(factor)[1] - 1 + 149] += 1
    return there, zero


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
