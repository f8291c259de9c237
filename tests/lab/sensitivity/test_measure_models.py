"""`sensitivity` of models and losses of many kinds."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain.lab import sensitivity
from crossgrain.lab.sensitivity import Site

from ...common.experts import Experts, routed
from .small import NEAREST, batches, errors_of, loss_fn, numbers, only, small


def test_a_frozen_layer_has_fprop_and_dgrad_but_no_wgrad():
    model = small()
    model.up.weight.requires_grad_(False)
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=[NEAREST])
    assert Site("up", "fprop") in s.effects and s.effect("up", "fprop", NEAREST).loss.mean > 0
    assert NEAREST not in s.effects.get(Site("up", "wgrad"), {})
    assert "frozen" in s.left_out["up"]
    assert not model.up.weight.requires_grad


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_measured(transposed):
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.experts = nn.Embedding(16, 32), Experts(transposed=transposed)
            self.out = nn.Linear(32, 16)

        def forward(self, tokens):
            x = self.table(tokens)
            torch.manual_seed(int(tokens.sum()))
            return self.out(x + self.experts(x, *routed(len(x), 4)))

    torch.manual_seed(0)
    model = MoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loss_fn(model, batches()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=[NEAREST], optimizer=optimizer, include="out")
    assert list(s.layers) == ["experts.gate_up_proj", "experts.down_proj", "out"]
    assert s.layers["experts.down_proj"].experts == 4 and s.layers["experts.down_proj"].tokens == 128
    for layer in ("experts.gate_up_proj", "experts.down_proj"):
        errors, _ = errors_of(model, optimizer, only(layer, "wgrad"))
        noise = s.effect(layer, "wgrad", NEAREST).noise.mean * s.gradient_variance
        assert noise == pytest.approx(sum(float(e @ e) for e in errors) / 3, rel=1e-4)


def test_experts_with_a_parameter_each_are_counted():
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.experts = nn.Embedding(16, 32), cg.GroupedLinear(4, 32, 16, name="experts")

        def forward(self, tokens):
            return self.experts(self.table(tokens), [16, 32, 16, 0])

    s = sensitivity(MoE(), batches(), loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
    assert s.layers["experts"].experts == 4


@pytest.mark.parametrize("compiled", ["whole", "part"])
def test_a_compiled_model_is_refused(compiled):
    model = small()
    if compiled == "whole":
        model = torch.compile(model)
    else:
        model.up = torch.compile(model.up)
    with pytest.raises(ValueError, match="is compiled, and a compiled graph cannot be seen into"):
        sensitivity(model, batches(), loss_fn, base="hp", candidates=["mxfp8"])


def test_weights_that_are_kept_quantized_are_measured_as_they_are_and_it_is_said():
    with cg.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(nn.Embedding(16, 32), cg.Linear(32, 64, name="1"), nn.ReLU(), cg.Linear(64, 32, name="3"))
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=[NEAREST], include="3")
    assert set(s.layers) == {"1", "3"} and any("kept quantized are decoded" in note for note in s.notes)
    assert all(s.effect(layer, "wgrad", NEAREST).noise.mean > 0 for layer in s.layers)
    assert all(s.effect(layer, "dgrad", NEAREST).noise.mean > 0 for layer in s.layers)


class Recomputed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.table, self.rest = nn.Embedding(16, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.how = how

    def forward(self, tokens):
        x = self.table(tokens)
        return self.rest(x) if self.how is None else torch.utils.checkpoint.checkpoint(self.rest, x, **self.how)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_have_the_same_numbers(reentrant):
    found = []
    for how in (None, {"use_reentrant": reentrant}):
        torch.manual_seed(0)
        options = {"base": "hp", "candidates": ["nvfp4(sr)"], "include": "rest.2"}
        found.append(sensitivity(Recomputed(how), batches(), loss_fn, **options))
    assert numbers(found[0]) == numbers(found[1])


class Pooled(nn.Module):
    """A classifier of sentences: the mean over tokens has one label."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.out = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        return self.out(functional.gelu(self.up(self.table(tokens))).mean(1))


def test_rows_with_a_common_label_are_taken_together():
    torch.manual_seed(0)
    model = Pooled()
    with torch.no_grad():
        model.out.weight *= 8
    data = [(torch.randint(16, (64, 8)), torch.randint(16, (64,))) for _ in range(12)]
    s = sensitivity(model, data, loss_fn, base="hp", candidates=[NEAREST], include="out", groups="kind", count=12)
    assert any("8 rows of a layer have a common label" in note for note in s.notes)
    with torch.no_grad():
        exact = [model(tokens).log_softmax(1) for tokens, _ in data]
        cg.convert(model, only("up", "fprop"), include="out")
        rounded = [model(tokens).log_softmax(1) for tokens, _ in data]
        cg.unconvert(model)
    divergence = sum(float((a.exp() * (a - b)).sum(1).mean()) for a, b in zip(exact, rounded, strict=True)) / 12
    # The quadratic form is the divergence to second order; one draw of a label for each of 768 samples.
    assert s.effect("up", "fprop", NEAREST).loss.mean == pytest.approx(divergence, rel=0.35)


def test_a_layer_that_is_used_twice_is_measured_as_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.up = nn.Embedding(16, 32), nn.Linear(32, 32)
            self.out = nn.Linear(32, 16)

        def forward(self, tokens):
            x = self.table(tokens)
            return self.out(self.up(functional.gelu(self.up(x))))

    torch.manual_seed(0)
    model = Twice()
    with torch.no_grad():
        model.out.weight *= 8
    data = batches(12, tokens=256)
    s = sensitivity(model, data, loss_fn, base="hp", candidates=[NEAREST], include="out", groups="kind", count=12)
    with torch.no_grad():
        exact = [model(batch[0]).log_softmax(1) for batch in data]
        cg.convert(model, only("up", "fprop"), include="out")
        rounded = [model(batch[0]).log_softmax(1) for batch in data]
        cg.unconvert(model)
    divergence = sum(float((a.exp() * (a - b)).sum(1).mean()) for a, b in zip(exact, rounded, strict=True)) / 12
    assert s.effect("up", "fprop", NEAREST).loss.mean == pytest.approx(divergence, rel=0.35)


@pytest.mark.parametrize("name", ["u[0]", "u|w", "u*", "a b", "a:b"])
def test_any_name_of_a_layer_has_its_dgrad_measured(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.k = nn.Embedding(16, 32), nn.ModuleDict({name: nn.Linear(32, 32), "v": nn.Linear(32, 16)})

        def forward(self, tokens):
            return self.k["v"](self.k[name](self.table(tokens)))

    s = sensitivity(Named(), batches(), loss_fn, base="hp", candidates=[NEAREST])
    assert s.effect(f"k.{name}", "dgrad", NEAREST).noise.mean > 0


def test_hooks_that_step_in_backward_do_not_train_the_model():
    model = small()
    calls = []

    def step(parameter):
        calls.append(parameter)
        parameter.data.sub_(0.1 * parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sensitivity(model, batches(), loss_fn, base="hp", candidates=["mxfp8"])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) and not calls
    loss_fn(model, batches()[0]).backward()
    assert len(calls) == len(before)  # and they are there again


def test_another_model_with_the_same_names_in_the_loss_is_not_counted():
    other = small(1)
    cg.convert(other, "all: hp", include="out")
    options = {"base": "hp", "candidates": [NEAREST], "groups": "kind"}
    alone = sensitivity(small(), batches(), loss_fn, **options)

    def with_another(model, batch):
        return loss_fn(model, batch) + 0 * other(batch[0]).sum()

    both = sensitivity(small(), batches(), with_another, **options)
    assert both.layers == alone.layers
    for layer in alone.layers:
        assert both.effect(layer, "fprop", NEAREST).first == alone.effect(layer, "fprop", NEAREST).first


@pytest.mark.parametrize("factor", [1, 64])
def test_a_loss_in_pieces_has_the_same_effects_and_a_sum_is_said(factor):
    def in_pieces(model, batch):
        scores = zip(model(batch[0]).chunk(4), batch[1].chunk(4), strict=True)
        return sum(functional.cross_entropy(a, b, reduction="sum") for a, b in scores) * factor / 64

    options = {"base": "hp", "candidates": [NEAREST], "groups": "kind", "include": "out"}
    whole = sensitivity(small(), batches(), loss_fn, **options)
    pieces = sensitivity(small(), batches(), in_pieces, **options)
    for layer in whole.layers:
        one, other = (s.effect(layer, "fprop", NEAREST) for s in (whole, pieces))
        assert other.first.mean == pytest.approx(factor * one.first.mean, rel=1e-3)
        # Labels are drawn piece by piece, so they are others.
        assert other.loss.mean == pytest.approx(factor * one.loss.mean, rel=0.5)
    assert any("times the mean over its 64 labels" in note for note in pieces.notes) == (factor != 1)


def test_labels_of_the_data_are_used_and_said_if_the_loss_has_none():
    model = small()

    def own_loss(model, batch):
        return -model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None]).mean()

    s = sensitivity(model, batches(), own_loss, base="hp", candidates=[NEAREST], groups="kind")
    assert any("neither cross_entropy nor nll_loss" in note for note in s.notes)
    assert any("no optimizer was given" in note for note in s.notes)
    assert s.layers["up"].tokens == 64


def test_what_could_not_be_seen_has_no_effect_instead_of_an_effect_of_0():
    model = nn.Sequential(
        cg.Linear(32, 64, parameters_split={"q": 32, "k": 32}, name="0"), nn.GELU(), nn.Linear(64, 16)
    )
    data = [(torch.randn(32, 32), torch.randint(16, (32,))) for _ in range(3)]  # an input without a gradient
    s = sensitivity(model, data, loss_fn, base="hp", candidates=[NEAREST], include="*")
    assert "several parameters" in s.left_out["0"]
    assert NEAREST not in s.effects.get(Site("0", "fprop"), {}) and NEAREST not in s.effects.get(Site("0", "wgrad"), {})
    assert s.effect("2", "fprop", NEAREST).loss.mean > 0


def test_parameters_that_are_parts_of_one_buffer_are_told_apart():
    model = small()
    flat_buffer = torch.cat([model.up.weight.detach().flatten(), model.down.weight.detach().flatten()])
    model.up.weight = nn.Parameter(flat_buffer[:2048].view(64, 32))
    model.down.weight = nn.Parameter(flat_buffer[2048:].view(32, 64), requires_grad=False)
    s = sensitivity(model, batches(), loss_fn, base="hp", candidates=[NEAREST], groups="kind")
    assert "frozen" in s.left_out["down"] and s.effect("up", "wgrad", NEAREST).noise.mean > 0


def test_a_model_that_is_nearly_sure_of_its_data_is_noted():
    model = small()
    with torch.no_grad():
        model.out.bias[3] += 20
    data = [torch.stack([each[0], torch.full_like(each[1], 3)]) for each in batches()]
    s = sensitivity(model, data, loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
    assert any("nearly sure of its data" in note for note in s.notes)
    other = sensitivity(small(), batches(), loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
    assert not any("nearly sure" in note for note in other.notes)
