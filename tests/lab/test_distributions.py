"""Distributions of tensors against a plain computation."""

import math

import torch

from crossgrain.lab import sensitivity
from crossgrain.lab.distributions import distributions_of
from crossgrain.lab.start import Start

from .sensitivity.small import batches, loss_fn, small


def test_each_tensor_has_its_exponents_in_both_directions():
    model = small()
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=["mxfp8"], groups="kind", include="out")
    found = distributions_of(Start(model, batches(), loss_fn, include="out"), s)
    assert [one.layer for one in found] == [name for name in ("up", "down", "out") for _ in range(6)]
    by = {(one.layer, one.tensor, one.direction): one for one in found}
    weight = model.up.weight.detach()
    for direction, operand in (("rowwise", weight), ("columnwise", weight.T)):
        expected = {}
        for block in operand.reshape(-1, 16):
            exponent = math.floor(math.log2(float(block.abs().max())))
            expected[exponent] = expected.get(exponent, 0) + 1
        assert by["up", "weight", direction].histogram == expected
    statistics = by["up", "weight", "rowwise"].statistics
    assert math.isclose(statistics["largest magnitude"], float(weight.abs().max()))
    assert math.isclose(statistics["root mean square"], float(weight.square().mean().sqrt()), rel_tol=1e-5)
    assert statistics["zeros"] == "0 %"


def test_a_used_up_iterator_has_no_distributions():
    model = small()
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
    assert distributions_of(Start(model, iter(()), loss_fn), s) == []


def test_outliers_show_in_one_direction_only():
    model = small()
    with torch.no_grad():
        model.up.weight[:, 0] *= (
            64  # a column: every rowwise block of the first 16 has it, one columnwise row of blocks
        )
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
    by = {(d.layer, d.tensor, d.direction): d for d in distributions_of(Start(model, batches(), loss_fn), s)}
    crest = "largest over root mean square in a block"
    rows, columns = (by["up", "weight", direction].statistics[crest] for direction in ("rowwise", "columnwise"))
    assert rows > columns + 0.5
