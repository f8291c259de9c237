"""Lightning Fabric, unmodified: the precisions `transformer-engine` and `transformer-engine-float16` on a CPU."""

from __future__ import annotations

import pytest
import torch

import crossgrain as cg
from crossgrain import compat

fabric_package = pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed: make test-clients")

from ..common.llama import llama, losses, our_layers, trained, with_our_layers  # noqa: E402


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    from lightning_fabric.plugins.precision import transformer_engine as plugin

    compat.install()
    # Lightning remembers for the process whether the package was there when it was first asked.
    requirement = type(plugin._TRANSFORMER_ENGINE_AVAILABLE)("transformer_engine>=0.11.0")
    monkeypatch.setattr(plugin, "_TRANSFORMER_ENGINE_AVAILABLE", requirement)
    yield
    compat.uninstall()


def fabric(**options):
    return fabric_package.Fabric(accelerator="cpu", devices=1, **options)


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_a_llama_trains_as_it_does_without_lightning():
    this = fabric(precision="transformer-engine")
    model = this.setup_module(llama())  # first: Lightning replaces layers, and an optimizer would keep the old ones
    optimizer = this.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    assert our_layers(model) == 15
    found = losses(lambda tokens: model(input_ids=tokens, labels=tokens).loss, optimizer, this.backward)

    expected, parameters = trained(with_our_layers(llama()).bfloat16(), cg.recipe.DelayedScaling())
    assert found == expected
    assert all(map(torch.equal, model.parameters(), parameters))


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_a_recipe_as_a_dictionary():
    from lightning_fabric.plugins.precision import TransformerEnginePrecision

    options = {"fp8_format": "E4M3", "amax_history_len": 2, "amax_compute_algo": "most_recent"}
    precision = TransformerEnginePrecision(weights_dtype=torch.float32, recipe=options)
    this = fabric(plugins=precision)
    model = this.setup(llama())
    tokens = torch.arange(32).view(2, 16)
    recipe = cg.recipe.DelayedScaling(
        fp8_format=cg.recipe.FP8Format.E4M3, amax_history_len=2, amax_compute_algo="most_recent"
    )
    with cg.autocast(recipe=recipe):
        expected = with_our_layers(llama())(input_ids=tokens).logits
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_layers_are_made_as_ours():
    from lightning_fabric.plugins.precision import TransformerEnginePrecision

    this = fabric(plugins=TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=True))
    with this.init_module():
        model = llama()
    assert our_layers(model) == 15
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
