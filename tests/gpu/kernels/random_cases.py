"""Random formats, encodings, matrices and layouts for kernels. A seed gives the same case on every machine."""

from __future__ import annotations

import random

import torch

from crossgrain.formats import E2M1, E4M3, E5M2, UE5M3, Element, Format, ScaleLayout
from crossgrain.formats.encoding import Encoding
from crossgrain.formats.mxint8 import INT8
from crossgrain.kernels import Within

from .cases import Case
from .formats import ENCODINGS
from .matrices import NUMBERS


def random_case(seed: int) -> Case:
    """A case in which everything is random, and at least one plane fits."""
    rng = random.Random(seed)
    while True:
        case = _case(rng)
        if case.encodings():
            return case


def _case(rng: random.Random) -> Case:
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    shape = (_size(rng), _size(rng))
    layouts = ["contiguous", "part of rows", "every second column", "transposed", "at an odd place"]
    return Case(
        rows=tuple(_encoding(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))),
        columns=tuple(_encoding(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))),
        shape=shape,
        dtype=dtype,
        numbers=rng.choice(sorted(NUMBERS)),
        layout=rng.choice(layouts + ["negated later"] * (dtype == torch.float32)),
        offset=rng.choice((64, 64, 16, 12, 8, 4, 2, 1)),
        amax=rng.choice((None, None, None, 0.0, 1e-42, 1e-20, 1.0, 1e20)),
        within=_within(rng, shape) if rng.random() < 0.3 else None,
        seed=rng.getrandbits(64) - (1 << 63),
        blocked_columns=rng.random() < 0.3,
    )


def _size(rng: random.Random) -> int:
    whole = rng.choice((16, 32, 64, 128)) * rng.randint(1, 3)
    return rng.choice((whole, whole, whole, rng.randint(1, 150)))


def _within(rng: random.Random, shape: tuple[int, int]) -> Within:
    step = rng.choice((1, 4, 16))
    row, column = (step * rng.choice((rng.randint(0, 20), rng.getrandbits(rng.choice((10, 28))))) for _ in range(2))
    return Within(row, column, column + shape[1] + rng.randint(0, 100))


def _encoding(rng: random.Random) -> Encoding | str:
    if rng.random() < 0.5:
        return rng.choice(sorted(set(ENCODINGS) - {"fp8_delayed"}))
    while True:
        try:
            return _of(_format(rng), rng)
        except ValueError:  # parts that do not fit together
            continue


def _of(fmt: Format, rng: random.Random) -> Encoding:
    fp32 = fmt.scale_rule == "fp32"
    stochastic = rng.random() < 0.4
    return Encoding(
        fmt,
        stochastic=stochastic,
        power_of_two=fp32 and rng.random() < 0.4,
        epsilon=rng.choice((0.0, 1e-3, 1e-40)) if fp32 else 0.0,
        four_over_six=rng.choice((None, "MAE", "MSE"))
        if fmt.global_amax and fmt.rotation is None and not stochastic
        else None,
    )


def _format(rng: random.Random) -> Format:
    """A format that nobody has. Its name tells all of it, because formats of one name are taken for the same."""
    rule = rng.choice(("fp32", "e8m0_up", "e8m0_floor", "two_level"))
    element = _element(rng, bits=4 if rule == "two_level" else rng.choice((4, 6, 8, 8)))
    if rule == "two_level":
        block = rng.choice(((1, 16), (1, 16), (16, 16)))
    else:
        block = (rng.choice((1, 1, 1, 2, 32, 64)), rng.choice((4, 8, 16, 32, 64, 128)))
    parts = {
        "element": element,
        "block": None if rule == "fp32" and rng.random() < 0.3 else block,
        "scale_rule": rule,
        "layout": ScaleLayout(rng.choice(((1, 1), (128, 4))), rng.random() < 0.3, rng.random() < 0.3),
        "transposes": element.bits < 8 or rng.random() < 0.5,
        "ragged": element.bits == 8 and rng.random() < 0.4,
        "global_amax": rng.choice(("tensor", "tensor", "row")) if rule == "two_level" else None,
        "scale_bound": rng.choice((448, 256, 100, 1)) if rule == "two_level" else 448,
        "rotation": rng.choice((None, None, 0, rng.getrandbits(16))) if rule == "two_level" else None,
        "scale_element": rng.choice((E4M3, E5M2, UE5M3)) if rule == "two_level" else E4M3,
    }
    return Format(f"random {parts}", **parts)  # type: ignore[arg-type]


def _element(rng: random.Random, bits: int) -> Element | object:
    if rng.random() < 0.3:
        return {4: E2M1, 6: _made(rng, 6), 8: rng.choice((E4M3, E5M2, INT8))}[bits]
    return _made(rng, bits)


def _made(rng: random.Random, bits: int) -> Element:
    exponent = rng.randint(1, bits - 2)
    mantissa = bits - 1 - exponent
    bias = rng.randint(-2, 30)
    specials = rng.choice(("none", "nan", "ieee")) if bits == 8 and exponent > 1 else "none"
    top = (1 << (exponent + mantissa)) - 1 - {"none": 0, "nan": 1, "ieee": 1 << mantissa}[specials]
    code = top - rng.choice((0, 0, 1))  # the largest number need not have the last code
    numbers = Element("", exponent, mantissa, bias, 1.0, specials)
    largest = abs(numbers.value(code))
    return Element(f"e{exponent}m{mantissa} {bias} {largest} {specials}", exponent, mantissa, bias, largest, specials)
