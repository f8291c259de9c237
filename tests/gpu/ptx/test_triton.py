"""What Triton compiles, run by the emulator against numpy: bit for bit, for every kind of GPU."""

import pytest

from .cases import CASES, TARGETS, runs_on
from .compiled import compiled

_QUICK = {("tile", "sm_90"), ("ragged", "sm_80"), ("transpose", "sm_100")}  # the others take seconds to compile
_ALL = [
    pytest.param(case, target, marks=[] if (case, target) in _QUICK else [pytest.mark.long])
    for case in CASES
    for target in TARGETS
    if runs_on(case, target)
]


@pytest.mark.parametrize("case, target", _ALL)
def test_compiled_kernels_are_right_to_the_last_bit(case: str, target: str) -> None:
    built = compiled(case, target)
    report = CASES[case].check(built.ptx, built.shared)
    assert report.instructions > 100 and not report.races
    assert not built.inexact


def test_a_transposition_by_matrices_has_no_conflicts_worth_mentioning() -> None:
    built = compiled("transpose", "sm_100")
    report = CASES["transpose"].check(built.ptx, built.shared)
    assert report.count("ldmatrix") == 16  # four for each warp
    assert all(each.used == 1 for each in report.sectors.values())
    assert all(each.turns == each.needed for each in report.conflicts.values())


def test_a_wave_is_a_part_of_the_grid_and_nobody_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    built = compiled("ragged", "sm_80")
    monkeypatch.setattr("tests.gpu.ptx.launch._LANES", 256)  # two blocks at once
    CASES["ragged"].check(built.ptx, built.shared)
