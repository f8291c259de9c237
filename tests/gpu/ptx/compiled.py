"""The test kernels, compiled by the Triton that is installed."""

from functools import cache

from ..offline import Built, build
from . import kernels
from .cases import CASES


@cache
def compiled(case: str, target: str) -> Built:
    """PTX and machine code of a case."""
    each = CASES[case]
    return build(getattr(kernels, each.kernel), each.signature, each.constants, target, divisible=each.divisible)
