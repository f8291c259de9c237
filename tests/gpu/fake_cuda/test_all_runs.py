"""All runs and compiled modules on the emulated device: each way through the library with each kind of recipe."""

import pytest

from .allowed import REFERENCE
from .checked import check
from .program import ran
from .runs import RUNS, SHORT

pytestmark = pytest.mark.long

# A few seconds each
TRITON = [
    ("Linear fp8", "Linear fp8_delayed", "Linear fp8_block"),
    ("Linear mxfp8", "Linear 2d", "Linear mxfp4", "Linear mxfp6", "GroupedLinear mxfp8"),
    ("Linear nvfp4", "Linear hybrid", "Linear row_scaled"),
    ("attention fp8", "LayerNormMLP fp8_line", "optimizers FusedAdam capturable nvfp4", "loop saturate nvfp4"),
]


def test_every_step_waits_nowhere_and_is_right(library, tmp_path):
    for name, told in ran(sorted(set(RUNS) - set(SHORT)), library, tmp_path).items():
        print(name)  # shown if the next line fails
        check(told)


@pytest.mark.parametrize("names", TRITON, ids=" and ".join)
def test_steps_with_triton_kernels_wait_nowhere_and_are_right(library, tmp_path, names):
    """Interpreted kernels of the Triton backend: nothing is left to the reference, which would upload its tables."""
    for name, told in ran(names, library, tmp_path, "triton").items():
        print(name)
        check(told)
        assert [wait["calls"] for wait in told["waits"] if wait["place"].startswith(REFERENCE)] == []
        assert not any(told["errors"].values())


def test_compiled_modules_give_the_bits_of_eager(library, tmp_path):
    found = ran(["compiled_models"], library, tmp_path)["compiled_models"]
    assert "failed" not in found, found["failed"]
    assert all(differ == [] for differ in found.values()), found
