"""Groups of layers by their names."""

import pytest

from crossgrain.lab.sensitivity.groups import groups_of

LAYERS = ["model.layers.0.mlp.up_proj", "model.layers.0.q_proj", "model.layers.1.mlp.up_proj", "lm_head", "fc1"]


def test_layers_blocks_kinds_and_functions():
    assert list(groups_of(LAYERS, "layer")) == LAYERS
    assert groups_of(LAYERS, "block") == {
        "model.layers.0": LAYERS[:2],
        "model.layers.1": [LAYERS[2]],
        "lm_head": ["lm_head"],
        "fc1": ["fc1"],
    }
    assert groups_of(LAYERS, "kind") == {
        "model.layers.*.mlp.up_proj": [LAYERS[0], LAYERS[2]],
        "model.layers.*.q_proj": [LAYERS[1]],
        "lm_head": ["lm_head"],
        "fc1": ["fc1"],
    }
    assert groups_of(LAYERS, lambda name: "one") == {"one": LAYERS}
    assert groups_of(["0.weight", "12"], "block") == {"0": ["0.weight"], "12": ["12"]}


def test_mistakes():
    with pytest.raises(ValueError, match="layer, block, kind or a function, got 'rows'"):
        groups_of(LAYERS, "rows")
    with pytest.raises(TypeError, match="returned 3 for model"):
        groups_of(LAYERS, lambda name: 3)
