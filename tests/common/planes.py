"""Formats by name, and planes taken apart and compared, for tests of kernels."""

import pytest
import torch

from crossgrain.formats import DEFAULT_SIGN_MASK, formats, nvfp4_format
from crossgrain.kernels.reference.packing import unpack
from crossgrain.planes import Direction

CPU = torch.device("cpu")
RHT = nvfp4_format(rotation=DEFAULT_SIGN_MASK)
UNROTATED = [fmt for fmt in formats() if not fmt.is_identity]
QUANTIZED = [*UNROTATED, RHT]

by_name = {"ids": lambda fmt: fmt.name}
EVERY_FORMAT = pytest.mark.parametrize("fmt", QUANTIZED, **by_name)
EVERY_UNROTATED_FORMAT = pytest.mark.parametrize("fmt", UNROTATED, **by_name)
EVERY_BLOCK_FORMAT = pytest.mark.parametrize("fmt", [fmt for fmt in UNROTATED if fmt.block], **by_name)
BOTH_DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(plane):
    """One code per element, as an operand."""
    return unpack(plane.operand_codes(), plane.format.element.bits)


def assert_same_plane(a, b):
    """Equal bytes; ``a`` may be the plane of a tensor with more dimensions."""
    assert a.format == b.format and a.direction is b.direction
    assert torch.equal(a.data.reshape(b.data.shape), b.data)
    assert torch.equal(a.scale, b.scale)
    assert (a.amax is None) == (b.amax is None)
    assert a.amax is None or torch.equal(a.amax, b.amax)
