"""Statistics that wait for the end of a step. Logging them: tests/clients/test_nvdlfw_inspect_steps.py."""

import torch

from crossgrain.compat.debug.buffers import StatsBuffers, gathered
from crossgrain.compat.debug.stat_names import tensor_stat
from crossgrain.compat.debug.statistics import parts_of_tensor, statistic_of_tensor

KEY = ("fc1", "activation", "LogTensorStats")
MEAN = tensor_stat("mean", "activation")


def test_tensors_of_one_name_are_added_up_until_they_are_forgotten():
    buffers, statistic = StatsBuffers(), statistic_of_tensor(MEAN)
    assert len(buffers) == 0 and not buffers.has(KEY)
    for number, rows in ((1.0, 1), (4.0, 3)):
        buffers.feed(KEY, [statistic], parts_of_tensor(torch.full((rows, 8), number), [MEAN]), 5)
    assert len(buffers) == 1 and buffers.has(KEY)
    assert statistic.value(buffers.parts(KEY)) == (1 * 1 + 3 * 4) / 4
    buffers.reset()
    assert len(buffers) == 0 and not buffers.has(KEY)


def test_one_process_has_only_its_own():
    assert gathered({"a": 1}) == [{"a": 1}]
