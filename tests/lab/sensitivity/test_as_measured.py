"""A recipe that was found converts just what was measured, without ``skip`` and ``include``."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.gemm.operands import GEMMS
from crossgrain.lab import sensitivity

from .small import batches, loss_fn


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(16, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.lm_head = nn.Linear(32, 16)

    def forward(self, tokens):
        return self.lm_head(self.down(torch.relu(self.up(self.table(tokens)))))


@pytest.mark.parametrize("saving", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "choices", [{}, {"skip": "up"}, {"include": "lm_head"}, {"skip": "down", "include": "lm_head"}]
)
def test_converting_with_the_recipe_alone_gives_the_formats_that_were_counted(saving, choices):
    torch.manual_seed(0)
    model = WithHead()
    s = sensitivity(model, batches(), loss_fn, base="mxfp8", candidates=["nvfp4"], groups="kind", **choices)
    assert s.included == (["lm_head"] if "include" in choices else [])
    found = s.search(saving=saving, tokens=16384, scale=64)
    report = cg.convert(model, found.recipe)
    for layer in ("up", "down", "lm_head"):
        formats = found.recipe.layer_formats(layer)
        for gemm, operands in GEMMS.items():
            used = {str(formats.format(gemm, tensor).value) for tensor in operands}
            if layer in s.layers:
                label = found.chosen[layer, gemm]
                assert used == {s.candidates[label][gemm]} and layer in report.converted
            else:
                assert used == {"hp"} or layer not in report.converted
