"""float32 inputs of more than 2**31 numbers: 8.6 GB, so they have no other large tensor beside them."""

import pytest
import torch

from crossgrain import COLUMNWISE, ROWWISE

from ..common.encodings import ENCODINGS
from .parts import assert_part_is_right, filled, gigabytes_of, parts, written


@pytest.mark.parametrize("name, way", [("mxfp8", ROWWISE), ("nvfp4_rht_sr", COLUMNWISE)])
def test_encode(name, way, needs, monkeypatch):
    wanted = [(way, ENCODINGS[name](way))]
    needs(8.7 + gigabytes_of(*wanted))
    x = filled(torch.float32)
    (target,) = written(x, wanted)
    for axis, start in parts(x.shape):
        assert_part_is_right(x, target, axis, start, monkeypatch)
