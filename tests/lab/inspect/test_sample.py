"""Samples of rows: whole blocks, with the bytes that the whole tensor has for them."""

import pytest
import torch

import crossgrain as cg
from crossgrain.lab.inspect.encode import Given, encoded, measured
from crossgrain.lab.inspect.sample import sample_of
from crossgrain.planes import COLUMNWISE, ROWWISE


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize(
    "name",
    ["mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_2d", "fp8", "fp8_block", "fp8_block_2d", "nvfp4_row_scaled", "mxfp6_e2m3"],
)
def test_a_plane_of_a_sample_has_the_bytes_of_these_rows(name, direction):
    x = torch.randn(660, 128, generator=torch.Generator().manual_seed(1))
    x = x if name.startswith("fp8_block") else x[:640]  # the last block may be partial
    quantizer = cg.quantizer_for(name)
    plane = quantizer.make_planes(x, rowwise=True, columnwise=True).plane(direction)
    encoding = quantizer.encoding(direction)
    sample = sample_of(x, 256, [(encoding, direction)])
    assert sample.numbers.shape == (256, 128) and torch.equal(sample.numbers[-1], x[639])
    own = sample.plane(plane)
    given = measured(x, encoding, direction).for_rows(sample, encoding, direction)
    alone = encoded(sample.numbers, encoding, direction, given)
    assert torch.equal(own.operand_codes(), alone.operand_codes())
    assert torch.equal(own.operand_scales(), alone.operand_scales())
    assert own.amax is None or torch.equal(own.amax, alone.amax)
    whole = cg.kernels.decode(plane, torch.float32)
    assert torch.equal(cg.kernels.decode(own, torch.float32), sample.chosen(whole))


def test_samples_are_whole_pieces_and_small_tensors_are_looked_at_as_a_whole():
    x, tiles = torch.arange(1000)[:, None], cg.quantizer_for("fp8_block_2d").encoding(ROWWISE)

    def rows(height, *arguments):
        return sample_of(x[:height], *arguments).numbers.view(-1).tolist()

    assert rows(250, 256) == list(range(250))
    assert rows(1000, None) == list(range(1000))
    assert rows(1000, 1) == list(range(32))
    assert rows(1000, 64) == [*range(32), *range(960, 992)]
    assert rows(1000, 100, [(tiles, ROWWISE)]) == list(range(128))
    assert rows(1000, 256, [(tiles, ROWWISE)]) == [*range(128), *range(768, 896)]
    assert rows(100, 50, [(tiles, ROWWISE)]) == list(range(100))


def test_high_precision_planes_have_samples_too():
    x = torch.randn(128, 32)
    plane = cg.IdentityQuantizer().make_planes(x, rowwise=True, columnwise=True).plane(COLUMNWISE)
    sample = sample_of(x, 32)
    assert torch.equal(sample.plane(plane).data, x[:32])


def test_a_given_amax_is_used():
    encoding = cg.NVFP4Quantizer().encoding(ROWWISE)
    plane = encoded(torch.randn(16, 16), encoding, ROWWISE, Given(torch.tensor([3000.0])))
    assert plane.amax.item() == 3000.0
