"""Presets in training: bit for bit what the recipe classes of the same meaning do."""

import pytest
import torch
from torch import nn

from crossgrain.nn import Linear, name_layers
from crossgrain.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GemmRecipe,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)


def trained(recipe: object, steps: int = 3) -> list[torch.Tensor]:
    """Outputs, and the gradients of the last step."""
    torch.manual_seed(7)
    model = nn.Sequential(Linear(64, 128), nn.GELU(), Linear(128, 32)).to(torch.bfloat16)
    name_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(steps):
        x = torch.randn(128, 64, dtype=torch.bfloat16)
        with autocast(recipe=recipe):  # type: ignore[arg-type]
            y = model(x)
        optimizer.zero_grad()
        y.float().square().mean().backward()
        optimizer.step()
        outputs.append(y.detach())
    return outputs + [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "preset, recipe",
    [
        ("fp8", Float8CurrentScaling()),
        ("fp8-delayed", DelayedScaling()),
        ("fp8-block", Float8BlockScaling()),
        ("mxfp8", MXFP8BlockScaling()),
        ("nvfp4", NVFP4BlockScaling()),
        ("mxfp8, backward_override: dequantized", MXFP8BlockScaling(backward_override="dequantized")),
    ],
)
def test_a_preset_trains_like_the_recipe_class(preset: str, recipe: object) -> None:
    for mine, theirs in zip(trained(preset), trained(recipe), strict=True):
        assert torch.equal(mine, theirs)


def test_a_rule_changes_its_layer_and_no_other() -> None:
    plain, ruled = trained("mxfp8; 2: hp", steps=1), trained("mxfp8", steps=1)
    first_layer = trained("mxfp8; 0: hp", steps=1)
    assert not torch.equal(plain[0], ruled[0]) and not torch.equal(first_layer[0], plain[0])
    assert all(torch.equal(a, b) for a, b in zip(trained("hp; *: mxfp8", 1), ruled, strict=True))


def test_formats_that_meet_only_decoded_need_allow_mixed() -> None:
    line = "mxfp8, fprop.weight: nvfp4"
    with pytest.raises(ValueError, match="allow_mixed"):
        trained(line, steps=1)
    assert all(tensor.isfinite().all() for tensor in trained(f"{line}, allow_mixed: true"))


def test_the_same_recipe_again_builds_no_new_quantizers() -> None:
    layer = Linear(32, 32, name="fc")
    seen = []
    for recipe in (GemmRecipe.load("mxfp8"), GemmRecipe.load("all: mxfp8"), GemmRecipe.load("nvfp4")):
        with autocast(recipe=recipe):
            layer(torch.randn(32, 32))
        seen.append(layer.quantizers["scaling_fwd"][0])
    assert seen[0] is seen[1] and seen[1] is not seen[2]
