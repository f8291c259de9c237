"""A fingerprint of memory, to notice that a weight was changed behind the back of its version counter.

Memory is divided into chunks. In each, 32 lanes mix every 32nd word into their state. A step is a bijection of both the
state and the word, so a change of a single word always changes the fingerprint; high bits come down again, so that
pairs of changed signs do not cancel; and order counts. It runs at the speed of memory.
"""

from __future__ import annotations

from .compiling import kernel
from .simd import load, splat, store

WORD = 4  # bytes
GROUP = 128  # bytes: a word for each lane
CHUNK = 4096  # groups; the same on any number of threads, so that the fingerprint is too


@kernel
def of_chunks(x, out, first, last, groups, tag):
    """Of the chunks ``first:last`` of memory of so many groups; ``out`` gets the states of the lanes of each chunk."""
    for chunk in range(first, last):
        state = splat(0x2545F491, 32, "i32")
        for group in range(chunk * 4096, min((chunk + 1) * 4096, groups)):
            state = (state ^ load(x + group * 128, 32, "i32")) * 0x01000193
            state = state ^ (state >> 15)
        store(out + chunk * 128, state)
