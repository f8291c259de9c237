"""Matrices that reach over more than 2**31 numbers, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from crossgrain.kernels import REFERENCE, Target
from crossgrain.kernels.backend import Backend
from crossgrain.kernels.triton import arguments, finishing, reading
from crossgrain.kernels.triton import backend as backend_module
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane

from ..agreement import assert_same, check_case, check_groups
from ..cases import CASES
from ..finishing import QUICK_ENDS, check_end
from ..formats import ALL
from ..group_cases import GROUP_CASES
from ..matrices import matrix

pytestmark = pytest.mark.long


def test_offsets_of_64_bits(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for large matrices, on small ones."""
    for module in (backend_module, reading, finishing):
        assert module.FAR == arguments.FAR
        monkeypatch.setattr(module, "FAR", 1)
    for name in ("mxfp8", "mxfp8 + nvfp4_rht_sr", "mxfp6_e2m3", "fp8_block of [130, 200]"):
        check_case(backend, CASES[name])
    check_groups(backend, GROUP_CASES["groups, mxfp8 + nvfp4_rht_sr"])
    for end in QUICK_ENDS:
        check_end(backend, end)


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_rows_that_are_far_apart(backend: Backend, turned: bool) -> None:
    """160 rows, 2**24 numbers apart. Of these 5 GB only the pages that have numbers are real memory."""
    numbers = matrix("mixed", (160, 32), torch.bfloat16)
    apart = torch.empty(160 * 2**24, dtype=torch.bfloat16).view(160, 2**24)[:, :32].copy_(numbers)
    x, same = (apart.t(), numbers.t()) if turned else (apart, numbers)
    for name in ("mxfp8", "nvfp4_rht", "fp8_sr"):
        for direction in (ROWWISE, COLUMNWISE):
            encoding = ALL[name](direction)
            found = []
            for each, source in ((backend, x), (REFERENCE, same)):
                target = Target(empty_plane(encoding.format, direction, x.shape, device=x.device), encoding)
                target = target.with_amax(each.measure(source, [target])[0])
                each.encode(source, [target], 3)
                found.append(target.plane)
            for mine, theirs in zip(found[0].buffers(), found[1].buffers(), strict=True):
                assert_same(mine, theirs, f"{direction.value} {name}")
