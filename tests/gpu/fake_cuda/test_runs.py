"""A training step on a GPU makes the host wait nowhere but where `allowed` says so, and gives what the CPU gives."""

import pytest

from .allowed import ALLOWED
from .checked import check
from .runs import SHORT

pytestmark = pytest.mark.xdist_group("fake_cuda")  # one process of the emulated device serves all of them


@pytest.mark.parametrize("name", SHORT)
def test_a_step_waits_nowhere_and_is_right(told, name):
    check(told[name])


def test_nothing_is_allowed_that_does_not_happen(told):
    seen = {(wait["kind"], wait["place"]) for name in SHORT for wait in told[name].get("waits", ())}
    assert set(ALLOWED) - seen == set()


def test_most_results_are_those_of_the_cpu_bit_for_bit(told):
    exact = [name for name in SHORT if not any(told[name]["errors"].values())]
    assert len(exact) >= 0.9 * len(SHORT), sorted(set(SHORT) - set(exact))


def test_offloading_copies_on_the_stream_of_the_layer(told):
    """The thread that copies has the default stream, which does not wait for others."""
    streams = {wait["stream"] for wait in told["loop offloaded"]["waits"] if wait["place"].startswith("offload/")}
    assert len(streams) == 1 and 0 not in streams
