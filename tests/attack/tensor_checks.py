"""Compare a quantized tensor with its model: every byte of every plane, and what it decodes to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from crossgrain.planes import Direction

from . import transcription as tr
from .tensor_model import PlaneModel, TensorModel
from .transcription import Array

BY_NAME = {direction.value: direction for direction in Direction}


def check_plane(what: str, tensor: Any, model: TensorModel, direction: str) -> None:
    """Presence, staleness, codes, scales and amax of a plane; and its numbers, if they may be read."""
    plane, expected = tensor.plane(BY_NAME[direction]), model.planes.get(direction)
    assert (plane is None) == (expected is None), f"{what}: {'missing' if plane is None else 'should not be there'}"
    assert tensor.get_usages()[direction] == (expected is not None), f"{what}: get_usages() tells something else"
    if plane is None or expected is None:
        return
    assert plane.format.name == expected.format.name, f"{what}: is in {plane.format.name}"
    if model.must_be_stale(direction):
        assert plane.stale, f"{what}: missed a write, but is not stale"
    elif not model.may_be_stale(direction):
        assert not plane.stale, f"{what}: is stale, but missed no write"
    if expected.format.element:
        check_bytes(what, plane, expected)
    else:
        numbers = plane.data.float().reshape(model.matrix).numpy()
        assert plane.data.dtype == expected.memory.dtype, f"{what}: keeps {plane.data.dtype}"
        np.testing.assert_array_equal(numbers, expected.codes, err_msg=what)
    if plane.stale:
        try:
            tensor.dequantize(direction=BY_NAME[direction])
        except RuntimeError:
            return
        raise AssertionError(f"{what}: is stale, but can be read")
    numbers = tensor.dequantize(direction=BY_NAME[direction]).float().reshape(model.matrix).numpy()
    wanted = torch.from_numpy(expected.decoded().copy()).to(model.dtype).float().numpy()
    np.testing.assert_array_equal(numbers, wanted, err_msg=f"{what}: decoded")


def check_bytes(what: str, plane: Any, expected: PlaneModel) -> None:
    wanted = expected.operand() if plane.direction.value == expected.direction else turned(expected)
    codes, scales = plane.operand_codes().numpy(), plane.operand_scales().numpy()
    if expected.format.element == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    np.testing.assert_array_equal(codes, wanted.codes, err_msg=f"{what}: codes")
    np.testing.assert_array_equal(scales, repeated(wanted.scales, scales.shape), err_msg=f"{what}: scales")
    if wanted.amax is not None:
        np.testing.assert_array_equal(plane.amax.numpy(), wanted.amax, err_msg=f"{what}: amax")


def turned(plane: PlaneModel) -> tr.Encoded:
    """A plane that serves the other direction too."""
    codes, scales, amax = plane.operand()
    return tr.Encoded(codes.T, scales.T, amax)


def repeated(scales: Array, shape: tuple[int, ...]) -> Array:
    """Scales of tiles as the library stores some of them: again for every row."""
    return scales if scales.shape == shape else scales.repeat(shape[0] // scales.shape[0], 0)
