"""How undefined bytes travel through the instructions that pick bytes apart; elsewhere one spoils the whole result."""

import numpy as np

from .values import Array, Bits, Undefined, every_byte, undefined_mask


def of_whole(bits: int) -> Undefined:
    """Any undefined byte spoils all."""
    return lambda sources: np.where(_union(sources), every_byte(bits), 0).astype(np.uint8)


def of_halves(bits: int) -> Undefined:
    """Two numbers in a register of ``bits``, computed one by one: one half does not spoil the other."""
    low = every_byte(bits // 2)
    high = low << (bits // 16)

    def rule(sources: tuple[Bits, ...]) -> Array:
        found = _union(sources)
        return (np.where(found & low, low, 0) | np.where(found & high, high, 0)).astype(np.uint8)

    return rule


def of_packed(each: int, count: int) -> Undefined:
    """The first source goes to the highest ``each`` bits, and so on; sources after ``count`` go everywhere."""

    def rule(sources: tuple[Bits, ...]) -> Array:
        out = np.zeros((), np.uint8)
        for place, source in enumerate(sources):
            first = (count - 1 - place) * each // 8
            last = ((count - place) * each - 1) // 8
            reached = every_byte(each * count) if place >= count else sum(1 << b for b in range(first, last + 1))
            out = out | np.where(undefined_mask(source), reached, 0).astype(np.uint8)
        return out

    return rule


def of_halves_narrowed(sources: tuple[Bits, ...]) -> Array:
    """Two numbers of 16 bits to two bytes."""
    found = _union(sources)
    return (np.where(found & 0b0011, 1, 0) | np.where(found & 0b1100, 2, 0)).astype(np.uint8)


def of_bytes_widened(sources: tuple[Bits, ...]) -> Array:
    """Two bytes to two numbers of 16 bits."""
    found = _union(sources)
    return (np.where(found & 1, 0b0011, 0) | np.where(found & 2, 0b1100, 0)).astype(np.uint8)


def of_and(bits: int) -> Undefined:
    """A zero byte of the one hides what the other has there."""
    return _hidden_by(bits, 0x00)


def of_or(bits: int) -> Undefined:
    """A byte 0xFF of the one hides what the other has there."""
    return _hidden_by(bits, 0xFF)


def of_bytes(sources: tuple[Bits, ...]) -> Array:
    """Byte by byte."""
    return _union(sources)


def of_resize(source_bits: int, bits: int, signed: bool) -> Undefined:
    """A longer or shorter integer: the sign is in the highest byte that there was."""

    def rule(sources: tuple[Bits, ...]) -> Array:
        found = _union(sources) & every_byte(min(source_bits, bits))
        if signed and bits > source_bits:
            top = 1 << (source_bits // 8 - 1)
            found = found | np.where(found & top, every_byte(bits) & ~every_byte(source_bits), 0).astype(np.uint8)
        return found

    return rule


def of_shift_left(bits: int) -> Undefined:
    """Whole bytes move; a part of a byte touches two."""

    def rule(sources: tuple[Bits, ...]) -> Array:
        found, by = _shifted(sources, bits)
        return np.asarray(((found << (by // 8) | found << ((by + 7) // 8)) & every_byte(bits)).astype(np.uint8))

    return rule


def of_shift_right(bits: int, signed: bool) -> Undefined:
    """The same, downwards; a sign that is undefined is everywhere above."""

    def rule(sources: tuple[Bits, ...]) -> Array:
        found, by = _shifted(sources, bits)
        if signed:
            found = np.where(found >> (bits // 8 - 1) & 1, found | every_byte(bits) << (bits // 8), found)
        return np.asarray(((found >> (by // 8) | found >> ((by + 7) // 8)) & every_byte(bits)).astype(np.uint8))

    return rule


def of_prmt(sources: tuple[Bits, ...]) -> Array:
    """The bytes that the selector picks; an undefined selector spoils all."""
    first, second, selector = sources
    both = undefined_mask(first).astype(np.uint32) | undefined_mask(second).astype(np.uint32) << 4
    out: Array = np.zeros((), np.uint32)
    for place in range(4):
        picked = (selector.value >> np.uint32(4 * place)) & np.uint32(7)
        out = out | (both >> picked & 1) << place
    return np.where(undefined_mask(selector), every_byte(32), out).astype(np.uint8)


def of_field(sources: tuple[Bits, ...]) -> Array:
    """bfe: any undefined byte from which the field takes bits."""
    value, position, length = sources
    start, size = (np.minimum(each.value & np.uint32(255), 64).astype(np.int64) for each in (position, length))
    last = np.maximum(start + size - 1, start)
    taken = (1 << np.minimum(last // 8 + 1, 8)) - (1 << np.minimum(start // 8, 8))
    spoiled = (undefined_mask(value) & taken) | undefined_mask(position) | undefined_mask(length)
    return np.where(spoiled, 0xFF, 0).astype(np.uint8)


def of_selection(sources: tuple[Bits, ...]) -> Array:
    """selp: what the chosen one has."""
    yes, no, which = sources
    return np.where(which.value, undefined_mask(yes), undefined_mask(no)).astype(np.uint8)


def _union(sources: tuple[Bits, ...]) -> Array:
    out = undefined_mask(sources[0])
    for each in sources[1:]:
        out = out | undefined_mask(each)
    return out


def _shifted(sources: tuple[Bits, ...], bits: int) -> tuple[Array, Array]:
    value, by = sources
    amount = np.minimum(by.value, bits).astype(np.int64)
    found = np.where(undefined_mask(by), every_byte(bits), undefined_mask(value)).astype(np.int64)
    return found, np.where(undefined_mask(by), 0, amount)


def _hidden_by(bits: int, byte: int) -> Undefined:
    def rule(sources: tuple[Bits, ...]) -> Array:
        first, second = sources
        out = np.zeros((), np.uint8)
        for place in range(bits // 8):
            shift = np.asarray(first.value).dtype.type(8 * place)
            for one, other in ((first, second), (second, first)):
                hides = ((other.value >> shift & 0xFF) == byte) & (undefined_mask(other) >> place & 1 == 0)
                out = out | (np.where(hides, 0, undefined_mask(one) >> place & 1) << place).astype(np.uint8)
        return out

    return rule
