"""Random cases in the interpreter, in search of wrong bits."""

from __future__ import annotations

import pytest

from crossgrain.kernels.backend import Backend

from ..agreement import check_case
from ..random_cases import random_case


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 400, 20))
def test_random_cases(backend: Backend, first: int) -> None:
    for seed in range(first, first + 20):
        case = random_case(seed)
        print(seed, case)  # shown if the next line fails
        check_case(backend, case)
