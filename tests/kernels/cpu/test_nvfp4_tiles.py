"""Both planes of NVFP4 with 16x16 tiles in one pass. That it gives the bytes of the reference is in `test_backend`."""

from dataclasses import replace

import pytest
import torch

from crossgrain import COLUMNWISE, ROWWISE
from crossgrain.kernels import REFERENCE, Target
from crossgrain.kernels.cpu import nvfp4_columns, nvfp4_rows, nvfp4_tiles
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.kernels.cpu.encoders import chosen_work
from crossgrain.planes import empty_plane

from ...common.encodings import SEED, encoded, encodings_of

CPU = CpuBackend()
BOTH = (ROWWISE, COLUMNWISE)


def targets(name="nvfp4_2d", shape=(64, 96), amaxes=(3.0, 3.0)):
    found = []
    for (direction, encoding), amax in zip(encodings_of(name, BOTH), amaxes, strict=True):
        plane = empty_plane(encoding.format, direction, shape, device="cpu")
        for buffer in plane.buffers():
            buffer.zero_()  # also what no kernel writes
        found.append(Target(plane, encoding, amax=torch.tensor([amax])))
    return found


def kernels_for(wanted):
    return {step.work.kernel for step in chosen_work(torch.float32, wanted).steps}


def test_planes_with_the_same_codes_are_written_in_one_pass():
    assert kernels_for(targets()) == {nvfp4_tiles.both}


@pytest.mark.parametrize(
    "unlike",
    [
        targets(amaxes=(3.0, 2.0)),
        targets("nvfp4_2d_sr"),  # each plane draws its own numbers
        targets("nvfp4_2d_4over6_448"),  # errors are added up along blocks, in another order
        [targets()[0], targets("nvfp4")[1]],
        [targets()[0], replace(targets()[1], amax=None)],
    ],
    ids=["amaxes", "stochastic", "4over6", "formats", "no amax"],
)
def test_planes_with_other_codes_are_written_one_by_one(unlike):
    assert kernels_for(unlike) == {nvfp4_rows.tile_rows, nvfp4_columns.columns}


def test_work_of_equal_scales_is_not_used_for_others():
    """Which kernels are for a kind of work is remembered."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    for amaxes in ((4.0, 4.0), (4.0, 3.0), (4.0, 4.0)):
        fast, slow = targets(amaxes=amaxes), targets(amaxes=amaxes)
        CPU.encode(x, fast, SEED)
        REFERENCE.encode(x, slow, SEED)
        for mine, theirs in zip(fast, slow, strict=True):
            assert torch.equal(mine.plane.data, theirs.plane.data)
            assert torch.equal(mine.plane.scale.view(torch.uint8), theirs.plane.scale.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(16, 32), (112, 48), (144, 512), (128, 528), (272, 1040)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_strips_and_tiles_that_are_not_full(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for mine, theirs in zip(
        *(encoded(each, x, encodings_of("nvfp4_2d", BOTH)) for each in (CPU, REFERENCE)), strict=True
    ):
        for found, wanted in zip(mine.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
