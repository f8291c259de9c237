"""Hugging Face accelerate, unmodified: `mixed_precision="fp8"` with the Transformer Engine backend, on a CPU."""

from __future__ import annotations

import pytest
import torch

import crossgrain as cg
from crossgrain import compat

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-clients")

from ..common.llama import llama, losses, our_layers, trained, with_our_layers  # noqa: E402


@pytest.fixture(autouse=True)
def transformer_engine():
    compat.install()
    yield
    compat.uninstall()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


RECIPES = {
    "delayed": ({"fp8_format": "HYBRID", "amax_history_len": 4}, cg.recipe.DelayedScaling(amax_history_len=4)),
    "mxfp8": ({"use_mxfp8_block_scaling": True, "fp8_format": "E4M3"}, cg.recipe.MXFP8BlockScaling()),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_llama_trains_as_it_does_without_accelerate(name):
    options, recipe = RECIPES[name]
    handler = accelerate.utils.TERecipeKwargs(**options)
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    assert accelerator.fp8_backend == "TE"
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert our_layers(model) == 15
    found = losses(lambda tokens: model(input_ids=tokens, labels=tokens).loss, optimizer, accelerator.backward)
    expected, parameters = trained(with_our_layers(llama()), recipe, dtype=torch.bfloat16)
    assert found == expected
    assert all(map(torch.equal, model.parameters(), parameters))
    plain, _ = trained(llama(), recipe, dtype=torch.bfloat16)
    assert found != plain


def test_evaluation_is_in_high_precision_unless_asked_for():
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    model = llama()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model.eval()
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = with_our_layers(llama())(input_ids=tokens).logits.float()
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, expected)


def test_without_us_there_is_no_backend():
    compat.uninstall()
    with pytest.raises(ValueError, match="requires `transformer_engine`"):
        accelerate.Accelerator(mixed_precision="fp8", cpu=True)
