"""Rows of planes as bytes, and back."""

import pytest
import torch

from crossgrain import ROWWISE
from crossgrain.planes.rows import bytes_of_rows, plane_of_rows, rows_stand_alone

from ..common.planes import normal
from ..common.quantizers import QUANTIZERS


def made(name):
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer


NAMES = [
    name for name in QUANTIZERS if rows_stand_alone(made(name).encoding(ROWWISE).format) and "identity" not in name
]


@pytest.mark.parametrize("name", NAMES)
def test_every_row_comes_back_from_its_bytes(name):
    """Also single rows, no rows, and rows with a single scale."""
    for shape in ((1, 32), (1, 128), (5, 128), (0, 128), (5, 32)):
        plane = made(name).quantize(normal(*shape)).plane(ROWWISE)
        rows = bytes_of_rows(plane)
        assert rows.shape[0] == shape[0]
        back = plane_of_rows(torch.cat([rows, rows])[shape[0] :], plane)
        assert torch.equal(back.operand_codes(), plane.operand_codes()), shape
        assert torch.equal(back.operand_scales(), plane.operand_scales()), shape
        if plane.amax is not None:
            assert torch.equal(back.amax, plane.amax), shape
