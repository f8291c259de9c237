"""Lists of tensors: what happens where torch has other functions than the patch knows. DDP itself: test_ddp."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import distributed as ddp

from crossgrain.runtime.torch_patches import lists_of_tensors
from crossgrain.tensor.broadcast import BroadcastHandler

from ...common.logs import warned


def test_torch_calls_the_functions_that_are_replaced():
    assert "dist._broadcast_coalesced(" in inspect.getsource(ddp)
    assert "_check_tensor_list(" in inspect.getsource(distributed_c10d.all_gather)


@pytest.mark.parametrize(
    "module, name", [(dist, "_broadcast_coalesced"), (distributed_c10d, "_check_tensor_list")], ids=["ddp", "lists"]
)
def test_a_torch_without_these_functions_is_left_alone_with_a_warning(monkeypatch, module, name):
    monkeypatch.setattr(lists_of_tensors, "installed", False)
    others = {key: getattr(dist if key.startswith("_b") else distributed_c10d, key) for key in NAMES if key != name}
    monkeypatch.delattr(module, name)
    with warned("Do not wrap quantized parameters in DistributedDataParallel"):
        lists_of_tensors.install(BroadcastHandler())
    for key, value in others.items():
        assert getattr(dist if key.startswith("_b") else distributed_c10d, key) is value


NAMES = ("_broadcast_coalesced", "_check_tensor_list")


def test_installing_twice_wraps_once(monkeypatch):
    before = dist._broadcast_coalesced, distributed_c10d._check_tensor_list
    monkeypatch.setattr(lists_of_tensors, "installed", True)
    lists_of_tensors.install(BroadcastHandler())
    assert before == (dist._broadcast_coalesced, distributed_c10d._check_tensor_list)
