"""A fingerprint is different after any change, and the same otherwise."""

import pytest
import torch

from crossgrain import kernels

SHAPES = [(64, 64), (33, 31 * 2), (1, 4), (1, 32), (2, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_change_of_one_number_is_seen(shape, dtype):
    x = torch.randn(shape).to(dtype)
    before = kernels.fingerprint(x)
    assert kernels.fingerprint(x.clone()) == before
    words = x.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
    for at in {0, words.numel() // 2, words.numel() - 1}:
        words[at] ^= 1  # the last bit of one number
        assert kernels.fingerprint(x) != before
        words[at] ^= 1
    assert kernels.fingerprint(x) == before


@pytest.mark.parametrize(
    "change",
    [lambda x: -x, lambda x: x.flip(0), lambda x: x.roll(32, 1), lambda x: x.t().contiguous(), lambda x: x.roll(1, 0)],
    ids=["signs", "rows turned round", "32 columns on", "transposed", "one row on"],
)
def test_order_and_signs_count(change):
    x = torch.randn(96, 96)
    assert kernels.fingerprint(change(x).contiguous()) != kernels.fingerprint(x)


def test_what_cannot_be_read_in_one_piece_has_none():
    assert kernels.fingerprint(torch.randn(8, 8).t()) is None
    assert kernels.fingerprint(torch.randn(8, 8, dtype=torch.float64)) is None
    assert kernels.fingerprint(torch.randn(3, 3, dtype=torch.bfloat16)) is None  # not whole words
    assert kernels.REFERENCE.fingerprint(torch.randn(8, 8)) is None


def test_large_memory_on_several_threads():
    x = torch.randn(1024, 1024)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        before = kernels.fingerprint(x)
        for at in ((0, 0), (511, 1023), (512, 0), (1023, 1023)):
            x[at] += 1
            assert kernels.fingerprint(x) != before
            x[at] -= 1
            before = kernels.fingerprint(x)
    finally:
        torch.set_num_threads(threads)
