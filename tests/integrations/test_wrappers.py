"""The model inside its wrappers, and when it is too late to convert it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import crossgrain as cg
from crossgrain.integrations.wrappers import is_converted, unwrapped, why_too_late


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model():
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_model_in_its_wrappers():
    inner = model()
    assert unwrapped(inner) is inner
    for wrapped in (torch.compile(inner), nn.DataParallel(inner), torch.compile(nn.DataParallel(inner))):
        assert unwrapped(wrapped) is inner and why_too_late(wrapped) is None


def test_a_model_with_wrapped_parts_is_not_taken_for_a_wrapper():
    outer = nn.ModuleDict({"module": model()})
    assert unwrapped(outer) is outer


def test_shards_are_too_late(one_rank):
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    assert why_too_late(sharded) == "0.weight is cut into shards"


def test_own_copies_of_parameters_are_too_late():
    class DeepSpeedEngine(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    inner = model()
    assert unwrapped(DeepSpeedEngine(inner)) is inner
    assert "wrapped in DeepSpeedEngine" in why_too_late(torch.compile(DeepSpeedEngine(inner)))


def test_converted_models():
    converted = model()
    assert not is_converted(converted)
    cg.convert(converted, "mxfp8")
    assert is_converted(converted)
    cg.unconvert(converted)
    assert not is_converted(converted)
