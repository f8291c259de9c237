"""GEMMs on the GPU."""

from __future__ import annotations

import pytest

from ..gpu.native.operands import FAMILIES
from .products import check_forced, check_products

pytestmark = pytest.mark.usefixtures("triton_backend")


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_as_exact_as_sums_of_fp32(gpu, tell, family):
    tell(check_products(family, gpu))


def test_native_gemms_can_be_demanded(gpu, tell):
    tell(check_forced(gpu))
