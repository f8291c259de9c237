"""The lab on a Llama of transformers: predictions against the loss of the forward pass, and converted layers."""

import statistics

import pytest
import torch

import crossgrain as cg
from crossgrain import GemmRecipe
from crossgrain.gpt.data import load_text, random_batch
from crossgrain.lab import sensitivity
from crossgrain.lab.sensitivity.adam import GradientWeights

from ..common.tiny_models import tiny_llama

pytest.importorskip("transformers")

FORMAT, STEPS = "nvfp4", 400


def loss_fn(model, batch):
    return model(**batch).loss


def batches(count, seed):
    data = torch.Generator().manual_seed(seed)
    for _ in range(count):
        values, _ = random_batch(load_text().train, 8, 64, data)
        yield {"input_ids": values, "labels": values}


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=256, hidden_size=64, intermediate_size=128, max_position_embeddings=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step, batch in enumerate(batches(STEPS, 1)):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - step / STEPS)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    used = list(batches(8, 2))
    options = {"base": "hp", "candidates": [FORMAT], "optimizer": optimizer, "groups": "block", "include": "lm_head"}
    return model, optimizer, used, sensitivity(model, used, loss_fn, **options)


def only(layer, gemm):
    return GemmRecipe("hp", "hp", "hp", rules=[(layer, {gemm: FORMAT})])


def test_every_projection_is_measured(measured):
    _, _, _, s = measured
    assert len(s.layers) == 2 * 7 + 1 and not s.left_out
    assert not s.notes  # in particular, transformers' loss lets labels be drawn


def test_fprop_predicts_the_loss_of_the_forward_pass(measured):
    model, _, used, s = measured
    predicted, found = [], []
    with torch.no_grad():
        exact = statistics.fmean(loss_fn(model, batch).item() for batch in used)
        for layer in s.layers:
            cg.convert(model, only(layer, "fprop"), include="lm_head")
            found.append(statistics.fmean(loss_fn(model, batch).item() for batch in used) - exact)
            cg.unconvert(model)
            effect = s.effect(layer, "fprop", FORMAT)
            predicted.append(effect.loss.mean + effect.first.mean)
    # What is left is higher orders, and one draw of labels for each token.
    assert statistics.correlation(predicted, found) >= 0.97
    assert 0.85 <= sum(predicted) / sum(found) <= 1.15


def test_wgrad_noise_is_that_of_single_converted_layers(measured):
    model, optimizer, used, s = measured
    weights = GradientWeights(optimizer, model.parameters())
    roots = [weights.root(parameter) for parameter in model.parameters()]
    for layer in list(s.layers)[::4]:
        noise = []
        for batch in used:
            exact = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
            cg.convert(model, only(layer, "wgrad"), include="lm_head")
            rounded = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
            cg.unconvert(model)
            errors = zip(rounded, exact, roots, strict=True)
            noise.append(sum(float(((a - b) / root).double().square().sum()) for a, b, root in errors))
        expected = statistics.fmean(noise) / s.gradient_variance
        assert s.effect(layer, "wgrad", FORMAT).noise.mean == pytest.approx(expected, rel=0.05)
