"""A fingerprint of memory, to notice that a weight was changed behind the back of its version counter.

Memory is divided into chunks. In each, 128 lanes mix every 128th word into their state. A step is a bijection of the
state and of the word, so a change of a single word always changes the fingerprint; high bits come down again, so that
pairs of changed signs do not cancel; and order counts. It runs at the speed of memory.
"""

from __future__ import annotations

from .compiling import inner, kernel
from .simd import load, splat, store

WORD = 4  # bytes
GROUP = 512  # bytes: a word for each lane
CHUNK = 1024  # groups; the same on any number of threads, so that the fingerprint is too


@inner
def _mixed(state, words):
    mixed = (state ^ words) * 0x01000193
    return mixed ^ (mixed >> 15)


@kernel
def of_chunks(x, out, first, last, groups, tag):
    """Of the chunks ``first:last`` of memory of so many groups; ``out`` gets the states of the lanes of each chunk."""
    for chunk in range(first, last):
        # Four vectors of lanes: mixing one takes so long that memory would wait for it.
        a = splat(0x2545F491, 32, "i32")
        b, c, d = a, a, a
        for group in range(chunk * CHUNK, min((chunk + 1) * CHUNK, groups)):
            at = x + group * GROUP
            a = _mixed(a, load(at, 32, "i32"))
            b = _mixed(b, load(at + 128, 32, "i32"))
            c = _mixed(c, load(at + 256, 32, "i32"))
            d = _mixed(d, load(at + 384, 32, "i32"))
        to = out + chunk * GROUP
        store(to, a)
        store(to + 128, b)
        store(to + 256, c)
        store(to + 384, d)
