""" "cuda" where there is none."""

import pytest
import torch

import crossgrain as cg
from crossgrain import compat
from crossgrain.runtime import devices

from ..common.logs import logged, silent

te = compat.transformer_engine.pytorch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_means_the_cpu_and_one_warning_tells_where():
    makers = [
        lambda: te.Linear(32, 32, device="cuda").weight,
        lambda: te.LayerNorm(32, device=torch.device("cuda")).weight,
        lambda: te.TransformerLayer(32, 64, 2, device="cuda:0").layernorm_mlp.fc1_weight,
        lambda: te.GroupedLinear(2, 32, 32, device=0).weight0,
        lambda: te.ops.Linear(32, 32, device="cuda").weight,
        lambda: te.ops.Bias(32, device="cuda").bias,
        lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3).make_empty([32, 32], device="cuda"),
        lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cuda").scale,
        lambda: te.RotaryPositionEmbedding(8, device="cuda").inv_freq,
        lambda: te.Float8Tensor(
            (2, 4),
            torch.bfloat16,
            data=torch.zeros(2, 4, dtype=torch.uint8),
            fp8_scale_inv=torch.ones(1),
            fp8_dtype=te.DType.kFloat8E4M3,
            device="cuda",
        ),
    ]
    with logged() as caught:
        made = [make() for make in makers]
    assert all(tensor.device.type == "cpu" for tensor in made)
    assert [record.getMessage().split(":")[1] for record in caught] == [
        ' the device "cuda" was requested, but CUDA is not available'
    ]
    assert caught[0].pathname == __file__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_are_compared_by_what_they_mean():
    utils = te.utils
    assert utils.canonicalize_device("cuda") == utils.canonicalize_device(None) == torch.device("cpu")
    assert utils.devices_match("cuda", "cpu") and utils.devices_match("cuda:1", torch.device("cuda"))
    assert not utils.devices_match("meta", "cuda")
    with utils.gpu_autocast_ctx(dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")


def test_where_there_is_cuda_it_is_meant(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with silent():
        assert devices.resolved_device("cuda") == torch.device("cuda", 3), "as tensors on it name it"
        assert devices.resolved_device(1) == torch.device("cuda", 1)
        assert te.utils.canonicalize_device("cuda") == torch.device("cuda", 3)
        assert te.utils.devices_match("cuda", "cuda:3") and not te.utils.devices_match("cuda", "cuda:0")


def test_no_device_is_the_default_device():
    with torch.device("meta"):
        assert devices.resolved_device(None) == torch.device("meta")
        assert cg.Linear(32, 32).weight.is_meta
