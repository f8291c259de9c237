"""Elements that are a table of numbers: data, rounding by their tie rule, and what is refused."""

import copy
import math
import pickle
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crossgrain as cg
from crossgrain.formats import E2M1, E2M3, E3M2, E4M3, Format, ScaleLayout, TableElement
from crossgrain.kernels.reference.elements import element_values, round_stochastically, round_to_nearest

# Sixteen numbers with nothing regular about them: no zero, other distances everywhere, more below zero than above.
ODD = TableElement("odd", (*(-x for x in (9, 7.5, 5, 3.25, 2, 1.5, 1, 0.7, 0.1)), 0.2, 0.4, 0.5, 1, 1.1, 4, 30.0))


def nearest_by_search(v: float, element: TableElement) -> int:
    """The code of the number nearest to ``v``, by exact fractions and by looking at all of them."""
    usable = [(Fraction(x), code) for code, x in enumerate(element.table) if math.isfinite(x)]
    distances = [(abs(x - Fraction(v)), x, code) for x, code in usable if code not in element.unused]
    least = min(distance for distance, _, _ in distances)
    best = [(x, code) for distance, x, code in distances if distance == least]
    if len({x for x, _ in best}) > 1:
        by_rule = {
            "even": lambda x, code: code % 2,
            "away": lambda x, code: -abs(x),
            "zero": lambda x, code: abs(x),
        }[element.ties]
        wanted = min(by_rule(x, code) for x, code in best)
        best = [(x, code) for x, code in best if by_rule(x, code) == wanted]
    return min(code for _, code in best)


TIES = ("even", "away", "zero")
numbers = st.floats(-40, 40, width=32)


@settings(max_examples=60, deadline=None)
@given(table=st.lists(numbers, min_size=16, max_size=16, unique_by=abs), extra=st.lists(numbers, max_size=40))
@pytest.mark.parametrize("ties", ["away", "zero"])
def test_any_table_rounds_to_the_nearest_number(ties, table, extra):
    if not any(value > 0 for value in table):
        return
    element = TableElement("any", tuple(table), ties)
    ordered = sorted(element.table)
    middles = [np.float32((a + b) / 2) for a, b in pairwise(ordered)]
    v = np.array([*extra, *middles, *ordered, 0.0], dtype=np.float32)
    expected = [nearest_by_search(float(x), element) for x in v]
    assert round_to_nearest(torch.tensor(v), element).tolist() == expected


@pytest.mark.parametrize("ties", TIES)
def test_ties_go_where_the_element_says(ties):
    element = TableElement("ints", tuple(float(i - 8) for i in range(16)), ties)
    v = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    expected = {
        "even": [-2, -2, 0, 0, 2, 2],  # the codes of even numbers are even here
        "away": [-3, -2, -1, 1, 2, 3],
        "zero": [-2, -1, 0, 0, 1, 2],
    }[ties]
    assert element_values(round_to_nearest(v, element), element).tolist() == expected


def test_numbers_beside_a_tie_are_not_ties():
    """Also where the middle of two numbers is no float32: it lies between 5e29 and the next number up."""
    tiny = TableElement("wide", (0.0, 1e-30, 1e30, *(2e30 + i * 1e29 for i in range(13))), "away")
    middle = np.float32(1e30) / 2
    assert round_to_nearest(torch.tensor([middle, np.nextafter(middle, np.float32(1e31))]), tiny).tolist() == [1, 2]


@pytest.mark.parametrize("element", [E2M1, E2M3, E3M2, E4M3], ids=lambda element: element.name)
def test_the_table_of_a_sign_exponent_mantissa_element_is_that_element(element):
    """Nearest and stochastic, on any bits: the special case has the bits of the general rule."""
    table = TableElement(element.name, element.values())
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (20000,), generator=generator).to(torch.int32).view(torch.float32)
    near = torch.randn(20000, generator=generator) * (element.max / 3)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, element.max, 1e-45, -1e-45])
    v = torch.cat([any_bits, near, special, element_values(torch.arange(1 << element.bits), element)])
    assert torch.equal(round_to_nearest(v, table), round_to_nearest(v, element))
    random = torch.randint(0, 256, v.shape, generator=generator)
    assert torch.equal(round_stochastically(v, table, random), round_stochastically(v, element, random))
    for name in ("bits", "max", "max_exponent", "max_code", "nan_code"):
        assert getattr(table, name) == getattr(element, name)


def test_stochastic_rounding_is_unbiased_and_leaves_table_numbers_alone():
    v = torch.linspace(-9, 30, 79).repeat(256, 1)
    random = torch.arange(256).view(-1, 1).expand_as(v)
    mean = element_values(round_stochastically(v, ODD, random), ODD).mean(0)
    gaps = torch.tensor(sorted(ODD.table)).diff().max()
    torch.testing.assert_close(mean, v[0], rtol=0, atol=float(gaps) / 256)
    exact = torch.tensor(ODD.table).repeat(256, 1)
    assert torch.equal(element_values(round_stochastically(exact, ODD, random[:, :16]), ODD), exact)


def test_what_scales_aim_at_fits_both_signs():
    assert (ODD.max, ODD.max_exponent, ODD.bits) == (9.0, 3, 4)
    assert ODD.value(ODD.max_code) == 30.0


def test_overflow_saturates_or_becomes_infinite():
    values = (*range(14), math.inf, math.nan)
    saturating = TableElement("saturating", values)
    infinite = TableElement("infinite", values, infinite_from=13.5)
    v = torch.tensor([13.25, 13.5, 1e30, torch.inf, torch.nan, -5.0])
    assert round_to_nearest(v, saturating).tolist() == [13, 13, 13, 13, 15, 0]
    assert round_to_nearest(v, infinite).tolist() == [13, 14, 14, 14, 15, 0]
    assert round_stochastically(v, infinite, torch.full(v.shape, 255)).tolist() == [13, 14, 14, 14, 15, 0]


def test_nan_without_a_code_is_the_largest_number():
    assert round_to_nearest(torch.tensor([torch.nan]), ODD).item() == ODD.max_code


def test_zeros_keep_their_sign_if_the_table_has_both():
    one, two = (TableElement("z", (0.0, *range(1, 15), last)) for last in (15.0, -0.0))
    v = torch.tensor([0.0, -0.0, -0.2])
    assert round_to_nearest(v, one).tolist() == [0, 0, 0]
    assert round_to_nearest(v, two).tolist() == [0, 15, 15]
    other_way_round = TableElement("z", (-0.0, *range(1, 15), 0.0), ties="away")
    assert round_to_nearest(v, other_way_round).tolist() == [15, 0, 0]
    assert one != two and TableElement("z", (-0.0, *one.table[1:])) != one


def test_codes_that_are_unused_are_read_and_never_written():
    element = TableElement("u", tuple(map(float, range(16))), unused=(15, 3), ties="away")
    v = torch.tensor([15.0, 3.0, 2.9])
    assert round_to_nearest(v, element).tolist() == [14, 4, 2]
    assert element.max == 14.0 and element_values(torch.tensor([15, 3]), element).tolist() == [15.0, 3.0]


def test_a_table_is_a_value_also_with_nan_in_it():
    element = TableElement("n", (*map(float, range(15)), math.nan), ties="away")
    again = TableElement("n", (*map(float, range(15)), math.copysign(math.nan, -1)), ties="away")
    for other in (again, pickle.loads(pickle.dumps(element)), copy.deepcopy(element)):
        assert other == element and hash(other) == hash(element)
    assert TableElement("n", element.table, "zero") != element != E2M1


def test_numbers_are_rounded_to_float32():
    element = TableElement("f", (*map(float, range(15)), 0.1), ties="away")
    assert element.table[15] == float(np.float32(0.1))
    assert element_values(torch.arange(16), element).tolist() == list(element.values())


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"table": (1.0, 2.0)}, "16, 64 or 256 numbers, got 2"),
        ({"ties": "up"}, "'even', 'away' or 'zero', got 'up'"),
        ({"table": (1e300,) * 16}, "1e\\+300 is outside of the range of float32"),
        ({"table": (-1.0,) * 16}, "must have a number above zero"),
        ({"unused": (16,)}, "unused codes must be between 0 and 15, got 16"),
        ({"infinite_from": 3.0}, "infinite_from must be larger than all numbers of the table"),
        ({"infinite_from": 99.0}, "needs infinities in the table"),
        ({"table": (0.0, 2.0, 1.0, *range(3, 16)), "ties": "even"}, "0.0 and 1.0 .* codes 0 and 2 are both even"),
    ],
)
def test_tables_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(ValueError, match=f"element 'bad': .*{complaint}"):
        TableElement(**{"name": "bad", "table": tuple(map(float, range(16))), "ties": "away", **options})


@pytest.mark.parametrize("size, bits", [(16, 4), (64, 6), (256, 8)])
def test_a_format_of_a_table_needs_no_code(size, bits):
    generator = torch.Generator().manual_seed(size)
    table = torch.randn(size, generator=generator).sort().values.tolist()
    element = TableElement("t", tuple(table), "away")
    fmt = Format("of_a_table", element, (1, 32), "e8m0_up", ScaleLayout(pad=(128, 4)))
    x = torch.randn(64, 96, generator=generator)
    q = cg.quantize(x, fmt)
    assert q._rowwise_data.numel() == x.numel() * bits // 8
    for direction in cg.Direction:
        plane = q.plane(direction)
        scale = 2.0 ** (plane.operand_scales().double() - 127).repeat_interleave(32, 1)
        operand = x.double() if direction is cg.ROWWISE else x.double().t()
        choices = scale.unsqueeze(-1) * torch.tensor(element.table).double()
        best = (operand.unsqueeze(-1) - choices).abs().amin(-1)
        found = (operand - cg.kernels.decode_operand(plane).double()).abs()
        torch.testing.assert_close(found, best, rtol=0, atol=1e-7)  # of float32 products
