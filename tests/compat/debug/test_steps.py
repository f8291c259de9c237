"""In which steps a feature is active. With nvdlfw_inspect itself: tests/clients/test_nvdlfw_inspect_steps.py."""

import pytest

from crossgrain.compat.debug.steps import next_enabled_iter


@pytest.mark.parametrize(
    "settings",
    [
        (None, None, None, 1),
        (3, None, None, 4),
        (3, 9, None, 3),
        (0, -1, None, 5),
        (5, 6, None, 10),
        (None, None, [[0, 2], [7, 9]], 2),
        (None, None, [[7, 9], [0, 2]], 1),
        (1, 2, [[4, 4]], 2),
    ],
)
def test_the_next_step_is_the_first_that_is_active(settings):
    start, end, spans, freq = settings

    def active(step):
        if spans:
            within = any(first <= step <= last for first, last in spans)
        else:
            within = (start or 0) <= step and (end in (None, -1) or step <= end)
        return within and step % freq == 0

    for step in range(15):
        now, later = next_enabled_iter(start, end, spans, freq, step)
        assert now == active(step)
        assert later == next((after for after in range(step + 1, 40) if active(after)), None)
