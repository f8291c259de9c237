"""All runs and compiled modules on the emulated device: each way through the library with each kind of recipe."""

import pytest

from .checked import check
from .program import ran
from .runs import RUNS, SHORT

pytestmark = pytest.mark.long


def test_every_step_waits_nowhere_and_is_right(library, tmp_path):
    for name, told in ran(sorted(set(RUNS) - set(SHORT)), library, tmp_path).items():
        print(name)  # shown if the next line fails
        check(told)


def test_compiled_modules_give_the_bits_of_eager(library, tmp_path):
    found = ran(["compiled_models"], library, tmp_path)["compiled_models"]
    assert "failed" not in found, found["failed"]
    assert all(differ == [] for differ in found.values()), found
