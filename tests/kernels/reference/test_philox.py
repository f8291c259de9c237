"""Philox against published vectors, and its words against a walk through the threads of a GPU kernel."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.formats import get_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.kernels.reference.philox import philox4x32, philox_words
from crossgrain.kernels.reference.random_bits import random_bytes

from ...common.encodings import SEED, encoded, encoded_groups
from ...common.quantizers import assert_same_bytes

CPU = torch.device("cpu")
ONES = 0xFFFFFFFF
# counter, key and result of the known-answer tests of Random123
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(word.item() for word in words) == expected
    assert of_numbers(counter, key) == expected


def of_numbers(counter, key):
    """Philox4x32-10 of Python numbers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & ONES, (p >> 32) ^ d ^ m, p & ONES
        k, m = (k + 0x9E3779B9) & ONES, (m + 0xBB67AE85) & ONES
    return a, b, c, d


class Thread:
    """A thread with its own sequence of words, as curand's generators have it."""

    def __init__(self, seed, sequence):
        self.key = (seed & ONES, seed >> 32)
        self.counter, self.sequence, self.left = 0, sequence, []

    def draw(self):
        if not self.left:
            self.left = list(of_numbers((self.counter, 0, self.sequence & ONES, self.sequence >> 32), self.key))
            self.counter += 1
        return self.left.pop(0)


def walk(seed, rows, columns):
    """Words by the place of their first number, in the order in which a kernel with both planes draws them."""
    row_words, column_words = {}, {}
    across = -(-columns // 128)
    for block_y in range(-(-rows // 128)):
        for block_x in range(across):
            for tid in range(128):
                thread = Thread(seed, tid + (block_x + block_y * across) * 128)
                warp, lane = divmod(tid, 32)
                for stage_y in range(2):
                    for stage_x in range(2):
                        top, left = block_y * 128 + stage_y * 64, block_x * 128 + stage_x * 64
                        for iteration in range(2):
                            for wave in range(2):
                                start = tid % 4 * 16 + (wave + lane // 16) * 8 % 16
                                for four in range(2):
                                    place = (top + tid // 4 + 32 * iteration, left + start + 4 * four)
                                    row_words[place] = thread.draw()
                        for column in range(2):
                            for four in range(4):
                                place = (top + (lane % 4 + warp) % 4 * 16 + 4 * four, left + 2 * lane + column)
                                column_words[place] = thread.draw()
    return row_words, column_words


def words_of(direction, rows, columns):
    lines, length = (rows, columns) if direction is ROWWISE else (columns, rows)
    return philox_words(SEED, direction, torch.arange(lines).unsqueeze(1), torch.arange(-(-length // 4)), columns)


def test_words_are_those_that_threads_of_the_kernel_draw():
    rows, columns = 160, 192
    row_words, column_words = walk(SEED, rows, columns)
    found = words_of(ROWWISE, rows, columns)
    assert found.tolist() == [[row_words[m, k] for k in range(0, columns, 4)] for m in range(rows)]
    found = words_of(COLUMNWISE, rows, columns)
    assert found.tolist() == [[column_words[m, k] for m in range(0, rows, 4)] for k in range(columns)]


def test_the_lowest_byte_of_a_word_is_for_the_first_number():
    words = words_of(ROWWISE, 3, 48)
    bytes_ = random_bytes(SEED, ROWWISE, (3, 48), CPU, "philox").to(torch.int64).view(3, 12, 4)
    assert torch.equal(sum(bytes_[..., i] << 8 * i for i in range(4)), words)


NAMES = ["nvfp4", "mxfp4", "mxint8"]


def encodings(name, ways=(ROWWISE, COLUMNWISE)):
    return [(way, Encoding(get_format(name), stochastic=True, random="philox")) for way in ways]


@pytest.mark.parametrize("name", NAMES)
def test_backends_agree(name):
    """Kernels draw hashes: the reference must be asked, for tensors and for groups of rows."""
    x, fast = torch.randn(96, 160), CpuBackend()
    hashed = [(way, Encoding(get_format(name), stochastic=True)) for way in (ROWWISE, COLUMNWISE)]
    for write in (encoded, lambda backend, x, ways: encoded_groups(backend, x, (32, 64), ways)):
        for mine, theirs in zip(write(fast, x, encodings(name)), write(REFERENCE, x, encodings(name)), strict=True):
            assert torch.equal(mine.data, theirs.data) and torch.equal(mine.scale, theirs.scale)
        for mine, other in zip(write(fast, x, encodings(name)), write(fast, x, hashed), strict=True):
            assert torch.equal(mine.scale, other.scale) and not torch.equal(mine.data, other.data)


def test_a_plane_does_not_depend_on_the_other():
    x = torch.randn(64, 96)
    both = encoded(CpuBackend(), x, encodings("nvfp4"))
    for plane in both:
        (alone,) = encoded(CpuBackend(), x, encodings("nvfp4", (plane.direction,)))
        assert torch.equal(plane.data, alone.data)
    # Nor does it become the other's: the directions of a symmetric matrix have different words.
    row, column = encoded(CpuBackend(), x[:, :64] + x[:, :64].t(), encodings("nvfp4"))
    assert torch.equal(row.scale, column.scale) and not torch.equal(row.data, column.data)


def quantizer(**options):
    return cg.NVFP4Quantizer(stochastic_rounding=True, random_source="philox", **options)


def test_a_hybrid_of_one_format_gives_its_bytes():
    x, made = torch.randn(64, 96), []
    options = {"with_rht": True, "with_post_rht_amax": True}
    hybrid = cg.HybridQuantizer(rowwise_quantizer=quantizer(**options), columnwise_quantizer=quantizer(**options))
    for each in (quantizer(**options), hybrid):
        torch.manual_seed(3)
        made.append(each(x))
    assert_same_bytes(*made)


def test_the_seed_decides():
    x = torch.randn(32, 64)
    first, second = quantizer()(x), quantizer()(x)
    assert not torch.equal(first._rowwise_data, second._rowwise_data)


def test_rounding_has_no_bias():
    """With 8 random bits, the mean of many roundings of 1.25 is off by at most 1/256 of the step (0.5), and noise."""
    x = torch.full((256, 256), 1.25)
    x[:, ::16] = 6.0  # the scales of all blocks are one
    decoded = quantizer()(x).dequantize()[:, 1:16]
    assert set(decoded.unique().tolist()) == {1.0, 1.5}
    assert abs(decoded.mean().item() - 1.25) < 0.5 / 256 + 5 * 0.25 / decoded.numel() ** 0.5


def test_options_are_checked():
    with pytest.raises(
        ValueError, match="the random source 'philox' is an option of stochastic rounding, which is off"
    ):
        cg.NVFP4Quantizer(random_source="philox")
    with pytest.raises(
        ValueError, match="the random source 'philox' is an option of stochastic rounding, which is off"
    ):
        cg.FormatQuantizer("mxfp4", random_source="philox")
    with pytest.raises(ValueError, match="the random source must be 'hash' or 'philox', got 'mt19937'"):
        cg.NVFP4Quantizer(stochastic_rounding=True, random_source="mt19937")
    assert quantizer() != cg.NVFP4Quantizer(stochastic_rounding=True)


def test_recipes_can_ask_for_it():
    layer, x = torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.randn(32, 64, requires_grad=True)
    cg.convert(layer, "all: nvfp4(2d, rht, sr(philox))")
    seen = []
    spy = kernels.reference.random_bits.philox_words
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.reference.random_bits, "philox_words", lambda *args: seen.append(args[1]) or spy(*args))
        layer(x).square().mean().backward()
    assert seen == [ROWWISE, COLUMNWISE], "both planes of the gradient, and nothing else"
