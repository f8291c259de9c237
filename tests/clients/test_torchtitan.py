"""The converter for torchtitan on its debug model, as `examples/torchtitan_converter.py` uses it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import crossgrain

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-clients")
pytest.importorskip("triton", reason="torchtitan's models import triton, which is not installed: make test-clients")

from crossgrain.integrations.torchtitan import CrossgrainConverter

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "torchtitan_converter.py"


@pytest.fixture(scope="module")
def example():
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture
def losses(monkeypatch, capsys):
    def train(*arguments):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "3", "--length", "32", *arguments])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]

    return train


def model(example, recipe, skip=()):
    torch.manual_seed(0)
    return example.debug_model(recipe, list(skip))


def test_high_precision_is_torchtitan_bit_for_bit(example):
    tokens = torch.randint(2048, (2, 16))
    plain, ours = model(example, None), model(example, "hp")
    assert any(isinstance(layer, crossgrain.Linear) for layer in ours.modules())
    results = []
    for each in (plain, ours):
        loss = each(tokens).logsumexp(-1).mean()
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in each.parameters())])
    assert all(map(torch.equal, *results))


def test_layers_are_bound_and_named_by_their_paths(example):
    layers = dict(model(example, "mxfp8", ["lm_head", "first 1 blocks"]).named_modules())
    assert type(layers["layers.1.feed_forward.w2"]).__name__ == "CrossgrainLinear"
    assert layers["layers.1.feed_forward.w2"].name == "layers.1.feed_forward.w2"
    assert layers["layers.1.feed_forward.w2"].bound_recipe is not None
    for path in ("lm_head", "layers.0.feed_forward.w2", "layers.0.attention.wo"):
        assert not isinstance(layers[path], crossgrain.Linear), path


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd"])
def test_a_layer_computes_what_a_converted_one_computes(example, recipe):
    ours = model(example, recipe).layers["0"].feed_forward.w1
    plain = torch.nn.Linear(256, 768, bias=False)
    plain.load_state_dict({"weight": ours.weight.detach()})
    named = torch.nn.ModuleDict({"w1": plain})
    crossgrain.convert(named, recipe)
    x = torch.randn(32, 256)
    results = []
    for layer in (ours, plain):
        own = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = layer(own)
        y.square().sum().backward()
        results.append((y, own.grad, layer.weight.grad))
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], torch.nn.functional.linear(x, ours.weight))


def test_the_debug_model_learns(losses):
    plain, quantized = losses(), losses("--recipe", "mxfp8")
    assert quantized[-1] < quantized[0] - 0.5
    assert quantized != plain
    # A rounding error of 2^-4 per number moves a mean over 64 tokens by far less than a hundredth.
    assert quantized == pytest.approx(plain, abs=0.05)


def test_what_cannot_be_converted_is_refused(example):
    with pytest.raises(ValueError, match="autocast"):
        CrossgrainConverter.Config(recipe="fp8-delayed").build()
    with pytest.raises(ValueError, match="nowhere"):
        model(example, "mxfp8", ["nowhere"])
