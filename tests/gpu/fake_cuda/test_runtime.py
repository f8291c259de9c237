"""What `crossgrain.runtime` does on a GPU: seeds by pointer, checks by the device, numbers that arrive later."""

import pytest

pytestmark = pytest.mark.xdist_group("fake_cuda")


def test_seeds_are_copied_without_waiting(told):
    assert told["seeds"]["usual"] == ["cuda:0", "torch.int64", [1], True]
    assert told["seeds"]["waits"] == 0
    assert told["seeds"]["after"], "after a capture, the seed of the host is used again"


def test_a_graph_draws_its_seeds_from_the_device(told):
    is_of_host, shared, collides = told["seeds"]["captured"]
    assert not is_of_host, "a number of the host would be frozen in the graph"
    assert shared, "a recomputation rounds as the first pass did"
    assert not collides
    (message,) = told["seeds"]["warnings"]
    assert "CUDA graph draws its seeds from the generator of the GPU" in message


def test_graphs_do_not_share_draws_and_tables(told):
    assert not told["seeds"]["graphs_share"], "the second graph would round alike in every replay"
    of_capture_is_kept, later_is_kept = told["seeds"]["tables"]
    assert not of_capture_is_kept and later_is_kept
    assert told["seeds"]["several"]


def test_a_flag_on_the_device_undoes_a_write_with_statistics_of_the_host(told):
    assert told["flags"]["found"] == [[1.0], [2.0]]


def test_the_device_checks_by_itself(told):
    assert told["checks"]["error"] == "RuntimeError: x > 0"


def test_numbers_of_the_device_are_told_later(told):
    """What was sent before is told by a later call, when it has arrived, without waiting for it."""
    before, after = told["checks"]["told"]
    assert before == [1.0] and after == [1.0, 2.0]
    assert told["checks"]["waits"] == 0


@pytest.mark.parametrize("recipe", ["fp8", "fp8_line", "fp8_delayed"])
def test_layers_have_their_scales_on_the_device(told, recipe):
    cpu, gpu = told["scales_of_layers"][recipe]
    assert [scale for _, scale in gpu] == [scale for _, scale in cpu]
    assert {device for device, _ in gpu} == {"cuda:0"}
    assert any(scale != [1.0] for _, scale in gpu)


def test_a_run_resumes_on_the_device(told):
    assert told["resumed_runs"] == {"capturable=False": [], "capturable=True": []}
