"""Stochastic rounding: right on average, and the same bits for the same seed however the work is cut up."""

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import E2M1, E2M3, E4M3, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels.reference.elements import element_values, round_stochastically
from crossgrain.kernels.reference.packing import unpack
from crossgrain.kernels.reference.random_bits import hash_counter, random_bytes, stream_keys
from crossgrain.planes import COLUMNWISE, ROWWISE

from ..common.golden_cases import encoded

CPU = torch.device("cpu")
STOCHASTIC, NEAREST = Encoding(nvfp4_format(), stochastic=True), Encoding(nvfp4_format())
ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
BOTH_DIRECTIONS = pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)


def rounded(v, element, random):
    return element_values(round_stochastically(torch.as_tensor(v, dtype=torch.float32), element, random), element)


@pytest.mark.parametrize(
    "v, r, expected",
    [
        (0.3, 102, 0.0),
        (0.3, 103, 0.5),
        (5.0, 127, 4.0),
        (5.0, 128, 6.0),
        (-5.0, 128, -6.0),
        (1.9, 200, 2.0),
        (6.0, 255, 6.0),
    ],
)
def test_documented_examples(v, r, expected):
    assert rounded([v], E2M1, torch.tensor([r], dtype=torch.uint8)).item() == expected


@pytest.mark.parametrize("element", [E2M1, E2M3, E4M3], ids=lambda element: element.name)
def test_numbers_on_the_grid_stay_whatever_the_random_byte(element):
    codes = torch.arange(element.max_code + 1, dtype=torch.int32)
    codes = torch.cat([codes, codes | element.sign_bit]).to(torch.uint8)
    values = element_values(codes, element)
    result = round_stochastically(values[:, None].expand(-1, 256), element, ALL_BYTES.expand(len(codes), -1))
    assert torch.equal(result, codes[:, None].expand(-1, 256))


def test_beyond_the_maximum_and_nan_saturate_whatever_the_random_byte():
    v = torch.tensor([7.0, -7.0, torch.inf, -torch.inf, torch.nan])
    result = round_stochastically(v[:, None].expand(-1, 256), E2M1, ALL_BYTES.expand(5, -1))
    assert torch.equal(result, torch.tensor([[7], [15], [7], [15], [7]], dtype=torch.uint8).expand(-1, 256))


def test_mean_over_all_random_bytes_is_short_of_the_number_by_less_than_a_256th_of_a_step():
    v = torch.linspace(-6, 6, 3001)
    mean = rounded(v[:, None].expand(-1, 256), E2M1, ALL_BYTES.expand(len(v), -1)).double().mean(dim=1)
    magnitude = v.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    short = (v.double() - mean) * v.sign()
    rounding = 1e-6  # v + r/256 * step is rounded to fp32
    assert (short > -rounding * step).all()
    assert (short < step / 256 + rounding).all()


def on_unit_scale(shape):
    """Numbers whose NVFP4 encode factor is exactly 1: every block has a 6, as has the tensor."""
    x = torch.empty(shape).uniform_(-6, 6, generator=torch.Generator().manual_seed(3))
    x[:, ::16] = 6.0
    x[::16, :] = 6.0
    return x


@BOTH_DIRECTIONS
def test_a_plane_is_unbiased_over_many_seeds(direction):
    """The mean over n seeds has a standard deviation of at most step / (2 sqrt n), and a bias of step / 256 towards 0.

    With 1024 numbers, all within 5 deviations; their mean error, in steps, within 5 / (2 sqrt(1024 n)) + 1/256.
    """
    x, seeds = on_unit_scale((16, 64)), 256
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(seeds):
        total += kernels.decode(encoded(x, STOCHASTIC, direction, seed=seed), torch.float32)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0)).double()
    error = (total / seeds - x) / step
    assert error.abs().max() < 5 / (2 * seeds**0.5) + 1 / 256
    assert error.mean().abs() < 5 / (2 * (seeds * x.numel()) ** 0.5) + 1 / 256
    assert error.abs().max() > 0


@BOTH_DIRECTIONS
def test_a_plane_of_grid_numbers_does_not_change(direction):
    grid = torch.tensor(E2M1.values())
    x = grid[torch.randint(16, (32, 64), generator=torch.Generator().manual_seed(0))]
    x[::16, :], x[:, ::16] = 6.0, 6.0
    assert torch.equal(kernels.decode(encoded(x, STOCHASTIC, direction, seed=5), torch.float32), x)


@BOTH_DIRECTIONS
def test_only_codes_are_random_and_they_are_neighbours_of_the_number(direction):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    stochastic, nearest = encoded(x, STOCHASTIC, direction, seed=1), encoded(x, NEAREST, direction)
    assert torch.equal(stochastic.scale, nearest.scale) and torch.equal(stochastic.amax, nearest.amax)
    steps = unpack(stochastic.data, 4).int() - unpack(nearest.data, 4).int()
    assert steps.any()
    assert (steps.abs() <= 1).all()


@BOTH_DIRECTIONS
def test_a_plane_uses_the_byte_of_each_element(direction):
    x = on_unit_scale((16, 64))
    plane = encoded(x, STOCHASTIC, direction, seed=11)
    operand = x if direction is ROWWISE else x.t()
    bytes_ = random_bytes(11, direction, tuple(operand.shape), CPU)
    assert torch.equal(unpack(plane.operand_codes(), 4), round_stochastically(operand.contiguous(), E2M1, bytes_))


def hash_in_plain_integers(counter, key0, key1):
    mask = 2**32 - 1

    def mix(h):
        h ^= h >> 16
        h = h * 0x7FEB352D & mask
        h ^= h >> 15
        h = h * 0x846CA68B & mask
        return h ^ h >> 16

    return mix(mix(counter & mask ^ key0) ^ counter >> 32 ^ key1)


def test_hash_is_32_bit_arithmetic():
    counters = [0, 1, 2, 12345, 2**31, 2**32 - 1, 2**32, 2**40 + 17, 2**62]
    keys = stream_keys(0xDEADBEEF_CAFEF00D, COLUMNWISE)
    assert all(0 <= key < 2**32 for key in keys)
    expected = [hash_in_plain_integers(counter, *keys) for counter in counters]
    assert hash_counter(torch.tensor(counters), *keys).tolist() == expected
    assert len(set(expected)) == len(counters)


@pytest.mark.parametrize("shape", [(6, 16), (5, 7), (1, 1), (3, 4)])
def test_every_byte_follows_from_its_place_alone(shape):
    """Element (m, k) of the logical tensor, hashed by itself: nothing depends on what is computed along with it."""
    m_count, k_count = shape
    row = random_bytes(9, ROWWISE, (m_count, k_count), CPU)
    column = random_bytes(9, COLUMNWISE, (k_count, m_count), CPU)
    row_keys, column_keys = stream_keys(9, ROWWISE), stream_keys(9, COLUMNWISE)
    for m in range(m_count):
        for k in range(k_count):
            row_word = hash_in_plain_integers(m * -(-k_count // 4) + k // 4, *row_keys)
            column_word = hash_in_plain_integers((m // 4) * k_count + k, *column_keys)
            assert row[m, k] == row_word >> 8 * (k % 4) & 0xFF
            assert column[k, m] == column_word >> 8 * (m % 4) & 0xFF


@BOTH_DIRECTIONS
def test_the_first_rows_of_a_tensor_have_the_same_bytes_alone(direction):
    """Cutting a tensor along M, as a tiled kernel does first, leaves the bytes of the first piece as they are."""
    rows, cols, piece = 64, 48, 16
    whole = random_bytes(2, direction, (rows, cols) if direction is ROWWISE else (cols, rows), CPU)
    part = random_bytes(2, direction, (piece, cols) if direction is ROWWISE else (cols, piece), CPU)
    assert torch.equal(part, whole[:piece] if direction is ROWWISE else whole[:, :piece])


@BOTH_DIRECTIONS
def test_bytes_do_not_depend_on_the_number_of_threads(direction):
    threads = torch.get_num_threads()
    many = random_bytes(4, direction, (512, 512), CPU)
    try:
        torch.set_num_threads(1)
        assert torch.equal(random_bytes(4, direction, (512, 512), CPU), many)
    finally:
        torch.set_num_threads(threads)


@BOTH_DIRECTIONS
def test_same_seed_same_bits_other_seed_other_bits(direction):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    first, again, other, high = (encoded(x, STOCHASTIC, direction, seed=s).data for s in (7, 7, 8, 7 + 2**32))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, high), "all 64 bits of the seed count"


@pytest.mark.parametrize(
    "a, b",
    [((1, ROWWISE), (1, COLUMNWISE)), ((1, ROWWISE), (2, ROWWISE)), ((1, ROWWISE), (1 + 2**32, ROWWISE))],
    ids=["planes", "seeds", "seeds that differ in the high half"],
)
def test_streams_are_uncorrelated(a, b):
    """Two independent streams of n bytes agree in n/256 places, within 5 standard deviations."""
    shape = (512, 512)  # square, so that both planes count the same way
    first, second = (random_bytes(seed, direction, shape, CPU) for seed, direction in (a, b))
    if a[1] is not b[1]:
        second = second.t()  # the same logical element
    n = first.numel()
    agreements = (first == second).sum().item()
    assert abs(agreements - n / 256) < 5 * (n / 256) ** 0.5
    correlation = np.corrcoef(first.flatten(), second.flatten())[0, 1]
    assert abs(correlation) < 5 / n**0.5


@BOTH_DIRECTIONS
def test_bytes_are_uniform(direction):
    """Chi-squared over 256 values has mean 255 and variance 510; neighbours do not correlate."""
    bytes_ = random_bytes(0, direction, (1024, 1024), CPU)
    counts = torch.bincount(bytes_.flatten().int(), minlength=256).double()
    expected = bytes_.numel() / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - 255) < 5 * 510**0.5
    for left, right in ((bytes_[:, :-1], bytes_[:, 1:]), (bytes_[:-1], bytes_[1:])):
        assert abs(np.corrcoef(left.flatten(), right.flatten())[0, 1]) < 5 / bytes_.numel() ** 0.5


def test_the_bits_do_not_depend_on_the_dtype_or_the_global_generator():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    before = torch.get_rng_state()
    narrow, wide = encoded(x, STOCHASTIC, ROWWISE, seed=3), encoded(x.float(), STOCHASTIC, ROWWISE, seed=3)
    assert torch.equal(narrow.data, wide.data)
    assert torch.equal(torch.get_rng_state(), before)
