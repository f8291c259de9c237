"""The reference works strip by strip: the same bytes, and memory that does not grow with the matrix."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crossgrain.formats import DEFAULT_SIGN_MASK, IDENTITY, nvfp4_format
from crossgrain.formats.built_in import BUILT_IN
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE, Target, Within
from crossgrain.kernels.reference import strips
from crossgrain.kernels.reference.encode import encode, measure
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane

FORMATS = [*(fmt for fmt in BUILT_IN if fmt != IDENTITY), nvfp4_format(rotation=DEFAULT_SIGN_MASK)]
ENCODINGS = [
    *(Encoding(fmt, stochastic=stochastic) for fmt in FORMATS for stochastic in (False, True)),
    Encoding(nvfp4_format(scale_bound=256), four_over_six="MSE"),
    Encoding(nvfp4_format(scale_bound=256, two_d=True), four_over_six="MAE"),
]


def written(x, encoding, direction, within):
    plane = empty_plane(encoding.format, direction, x.shape, device=x.device)
    target = Target(plane, encoding, within=within)
    target = target.with_amax(REFERENCE.measure(x, [target])[0])
    REFERENCE.encode(x, [target], seed=7)
    return target, REFERENCE.decode(plane, torch.float32)


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: f"{e.format.name}-{e.stochastic}")
def test_strips_have_the_bytes_of_the_whole(encoding, direction, monkeypatch):
    shape = (3, 128, 160) if encoding.format.ragged else (2, 64, 96)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    within = Within(8, 4, 400)
    whole, decoded = written(x, encoding, direction, within)
    monkeypatch.setattr(strips, "MOST_NUMBERS", 48 * 128)
    assert len(list(strips.row_ranges(whole.plane))) > 1
    parts, parts_decoded = written(x, encoding, direction, within)
    for one, other in zip(whole.plane.buffers(), parts.plane.buffers(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(decoded, parts_decoded)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.bytes = max(self.bytes, made.numel() * made.element_size())
        return made


@pytest.mark.parametrize(
    "encoding", [ENCODINGS[0], Encoding(FORMATS[-1], stochastic=True)], ids=lambda e: e.format.name
)
def test_memory_does_not_grow_with_the_matrix(encoding, monkeypatch):
    monkeypatch.setattr(strips, "MOST_NUMBERS", 1024)
    for rows in (256, 2048):
        x = torch.ones(rows, 64, dtype=torch.bfloat16)
        plane = empty_plane(encoding.format, ROWWISE, x.shape, device=x.device)
        target = Target(plane, encoding, amax=torch.ones(1))
        with Largest() as mode:
            encode(x, target, seed=7)
            measure(x, target)
        assert 0 < mode.bytes <= 8 * 1024 * 4  # int64 for each number of a strip, and room for four of them
