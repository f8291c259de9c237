"""Layers that an Inspector does not see are listed with the reason, and those that it should see are warned about."""

import torch
from torch import nn

import crossgrain as cg
from crossgrain.lab import Inspector

from ...common.logs import warned
from .small import Net, net, step


def test_layers_that_are_not_seen_are_listed_with_the_reason():
    model, tokens = net("all: mxfp8; fc2: hp")
    model.unused = nn.Linear(8, 8)
    cg.convert(model, "all: mxfp8; fc2: hp", skip="head")
    with Inspector(model, every=1) as look:
        step(model, tokens)
        look.step()
    report = look.report()
    assert report.not_seen() == {"fc2": "in high precision, by its recipe", "unused": "never called"}
    assert report.not_quantized() == {"head": "Linear"}
    assert "not seen: fc2 (in high precision, by its recipe)" in str(report)


def test_frozen_weights_and_products_that_do_not_run_are_listed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    cg.convert(model, "mxfp8")
    model[1].weight.requires_grad_(False)
    x = torch.randn(32, 32)
    model(x)
    with Inspector(model, every=1) as look:
        model(x).sum().backward()
        look.step()
    missing = look.report().not_seen()
    assert missing["0"] == "weight: no columnwise plane was made; grad_output: no rowwise plane was made"
    assert missing["1"] == (
        "input: no columnwise plane was made; weight: it was not quantized in this step: it is frozen or cached, or "
        "it is kept quantized and was not written; grad_output: no columnwise plane was made"
    )


def test_a_model_that_does_not_run_or_does_not_quantize_is_warned_about():
    model, tokens = net("all: mxfp8")
    look = Inspector(model, every=1)
    look.open()
    with warned("saw no plane in step 0. No layer of the model has quantized anything"):
        look.step()
    step(model, tokens)
    look.close()
    look = Inspector(Net(), every=1)
    look.open()
    with warned("the model has no module that quantizes. Convert it first"):
        look.close()


def test_layers_that_ran_and_were_not_seen_are_warned_about_by_name():
    model, tokens = net("all: mxfp8")
    step(model, tokens)  # its quantizers are there
    other, _ = net("all: mxfp8")
    step(other, tokens)
    both = nn.ModuleList([model, other])
    with Inspector(both, every=1) as look:
        step(model, tokens)
        with warned("saw nothing of some layers that quantize, in step 0: 1.fc1: "):
            look.step()
    assert "1.fc2" in look.report().not_seen() and "0.fc2" not in look.report().not_seen()
