"""Weights that are kept quantized: which planes they have."""

import functools

import pytest
import torch

import crossgrain as cg
from crossgrain.recipe import MXFP8BlockScaling

READS_COLUMNS = r"no columnwise plane.*requantize_\(model"


@pytest.mark.parametrize("make", [cg.Linear, cg.ops.Linear, functools.partial(cg.GroupedLinear, 2)])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_weights_of_recipes_that_decode_backward_keep_only_rows(make, override):
    """The same numbers, and half the memory. A recipe that reads columns is told what to do."""
    recipe, both = MXFP8BlockScaling(backward_override=override), MXFP8BlockScaling()
    results = []
    for made_with in (recipe, both):
        torch.manual_seed(0)
        with cg.quantized_model_init(recipe=made_with):
            layer = make(64, 64)
        x = torch.randn(64, 64, requires_grad=True)
        splits = [[32, 32]] if isinstance(layer, cg.GroupedLinear) else []
        with cg.autocast(recipe=recipe):
            y = layer(x, *splits)
        y.square().sum().backward()
        results.append((y, x.grad.clone()))
        columns = [p.get_usages()["columnwise"] for p in layer.parameters() if isinstance(p, cg.QuantizedTensor)]
        assert columns
        assert set(columns) == {made_with is both}
        if made_with is recipe:
            with (
                cg.autocast(recipe=both),
                pytest.raises(RuntimeError, match=READS_COLUMNS),
            ):
                layer(x, *splits)
            if not isinstance(layer, cg.ops.Linear):
                cg.requantize_(layer, both)
                with cg.autocast(recipe=both):
                    layer(x, *splits).sum().backward()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
