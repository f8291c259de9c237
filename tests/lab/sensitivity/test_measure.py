"""`sensitivity` as a whole: its numbers against plain computations site by site, files, interruptions and mistakes."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain import GemmRecipe
from crossgrain.lab import Sensitivity, sensitivity
from crossgrain.lab.sensitivity import Site
from crossgrain.lab.sensitivity.labels import Labels

from ...common.experts import Experts, routed
from .small import batches, flat, loss_fn, small, trained

NEAREST = "nvfp4"


@pytest.fixture(scope="module")
def measured():
    model, optimizer = trained()
    options = {"optimizer": optimizer, "include": "out", "count": 3}
    s = sensitivity(model, batches(), loss_fn, base="mxfp8", candidates=[NEAREST], **options)
    return model, optimizer, s


def only(layer, gemm, fmt=NEAREST):
    return GemmRecipe("hp", "hp", "hp", rules=[(layer, {gemm: fmt})])


def gradients(model, batch):
    return torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))


def roots(model, optimizer):
    """The fourth roots of Adam's second moments, written down once more."""
    found = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        found.append(((state["exp_avg_sq"] / (1 - 0.95 ** float(state["step"]))).sqrt() + 1e-8).sqrt())
    return found


def errors_of(model, optimizer, recipe):
    """The weighed error of the whole gradient in each batch, by converting the model, and the exact gradients."""
    divided = roots(model, optimizer)
    exact = [gradients(model, batch) for batch in batches()]
    cg.convert(model, recipe, include="out")
    rounded = [gradients(model, batch) for batch in batches()]
    cg.unconvert(model)
    weigh = [flat([g / r for g, r in zip(each, divided, strict=True)]) for each in exact]
    return [
        flat([g / r for g, r in zip(each, divided, strict=True)]) - whole
        for each, whole in zip(rounded, weigh, strict=True)
    ], weigh


def pairs(vectors):
    count = len(vectors)
    found = [float(a @ b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]
    return sum(found) / (count * (count - 1))


def unit(weighed):
    return sum(float(each @ each) for each in weighed) / len(weighed) - pairs(weighed)


def test_all_sites_are_there_with_base_and_candidates(measured):
    _, _, s = measured
    assert [str(site) for site in s.sites()] == [
        f"{layer} {gemm}" for layer in ("up", "down", "out") for gemm in ("fprop", "dgrad", "wgrad")
    ]
    assert all(set(effects) == {"mxfp8", NEAREST} for effects in s.effects.values())
    assert s.batches == 3 and not s.notes and not s.left_out and not s.interrupted
    assert s.layers["up"].inputs == 32 and s.layers["up"].outputs == 64 and s.layers["up"].tokens == 64
    assert s.loss == pytest.approx(sum(loss_fn(measured[0], b).item() for b in batches()) / 3)


@pytest.mark.parametrize("layer", ["up", "down", "out"])
def test_wgrad_is_that_of_a_converted_layer(measured, layer):
    model, optimizer, s = measured
    errors, exact = errors_of(model, optimizer, only(layer, "wgrad"))
    effect = s.effect(layer, "wgrad", NEAREST)
    noise = [float(e @ e) / unit(exact) for e in errors]
    # The unit is known to about 1 %, because it comes from sketches; noise itself is exact.
    assert effect.noise.mean == pytest.approx(sum(noise) / 3, rel=0.03)
    assert effect.noise.mean * s.gradient_variance == pytest.approx(sum(noise) / 3 * unit(exact), rel=1e-4)
    assert effect.bias.mean == pytest.approx(pairs(errors) / unit(exact), abs=0.03 * effect.noise.mean)


@pytest.mark.parametrize("layer", ["up", "down", "out"])
def test_dgrad_is_that_of_a_converted_layer(measured, layer):
    model, optimizer, s = measured
    errors, exact = errors_of(model, optimizer, only(layer, "dgrad"))
    effect = s.effect(layer, "dgrad", NEAREST)
    noise = sum(float(e @ e) for e in errors) / 3
    assert effect.noise.mean * s.gradient_variance == pytest.approx(noise, rel=1e-4)
    assert effect.bias.mean == pytest.approx(pairs(errors) / unit(exact), abs=0.03 * effect.noise.mean)


@pytest.mark.parametrize("layer", ["up", "down", "out"])
def test_fprop_is_the_fisher_form_of_the_error_of_the_layer(measured, layer):
    model, _, s = measured
    expected = []
    for at, batch in enumerate(batches()):
        seen = {}
        module = model.get_submodule(layer)

        def look(module, inputs, y, seen=seen):
            seen["x"] = inputs[0].detach()
            y.register_hook(lambda dy: seen.update(dy=dy))

        hook = module.register_forward_hook(look)
        with Labels(at):
            loss_fn(model, batch).backward()
        hook.remove()
        x, w = (cg.quantize(each.detach(), NEAREST).dequantize() for each in (seen["x"], module.weight))
        error = x @ w.T - seen["x"] @ module.weight.detach().T
        expected.append(64 / 2 * float((error * seen["dy"]).sum(1).double().square().sum()))
    model.zero_grad()
    assert s.effect(layer, "fprop", NEAREST).loss.mean == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_fprop_predicts_the_measured_loss(measured):
    model, _, s = measured
    more = batches(40)[3:]  # the quadratic form is an expectation: many batches, so that chance does not decide
    with torch.no_grad():
        exact = sum(float(loss_fn(model, b)) for b in more) / len(more)
        predicted, found = 0.0, 0.0
        for layer in s.layers:
            cg.convert(model, only(layer, "fprop"), include="out")
            found += sum(float(loss_fn(model, b)) for b in more) / len(more) - exact
            cg.unconvert(model)
            predicted += s.effect(layer, "fprop", NEAREST).loss.mean
    assert 0.5 < predicted / found < 2


def test_first_and_second_order_are_the_change_of_the_loss_of_these_batches(measured):
    model, _, s = measured
    for layer in s.layers:
        with torch.no_grad():
            exact = [float(loss_fn(model, batch)) for batch in batches()]
            cg.convert(model, only(layer, "fprop"), include="out")
            found = [float(loss_fn(model, batch)) for batch in batches()]
            cg.unconvert(model)
        effect, change = s.effect(layer, "fprop", NEAREST), (sum(found) - sum(exact)) / 3
        # Higher orders, and one draw of labels for each of 192 tokens, are left out.
        assert effect.first.mean + effect.loss.mean == pytest.approx(change, rel=0.1, abs=0.5 * effect.loss.mean)


def test_labels_of_the_data_are_used_and_said_if_the_loss_has_none():
    model = small()

    def own_loss(model, batch):
        return -model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None]).mean()

    s = sensitivity(model, batches(), own_loss, base="hp", candidates=[NEAREST], groups="kind")
    assert any("neither cross_entropy nor nll_loss" in note for note in s.notes)
    assert any("no optimizer was given" in note for note in s.notes)
    assert s.layers["up"].tokens == 64


def test_what_is_in_high_precision_has_no_effect():
    s = sensitivity(small(), batches(), loss_fn, base="hp", candidates=["fprop: nvfp4, dgrad: hp, wgrad: mxfp8"])
    for site in s.sites():
        exact = s.effects[site]["hp"]
        assert all(value.mean == 0 and value.count == 3 for value in vars(exact).values() if value is not None)
    dgrad = s.effect("up", "dgrad", "fprop: nvfp4, dgrad: hp, wgrad: mxfp8")
    assert dgrad.noise.mean == dgrad.bias.mean == 0


def test_layers_that_stay_in_high_precision_by_default_are_named():
    s = sensitivity(small(), batches(), loss_fn, base="hp", candidates=["mxfp8"], skip="down")
    assert set(s.layers) == {"up", "out"} and set(s.left_out) == {"down"}


def test_groups_share_one_dgrad():
    model, optimizer = trained()
    s = sensitivity(
        model, batches(), loss_fn, base="hp", candidates=[NEAREST], optimizer=optimizer, groups=lambda layer: "all"
    )
    errors, _ = errors_of(model, optimizer, GemmRecipe("hp", NEAREST, "hp"))
    total = sum(s.effect(layer, "dgrad", NEAREST).noise.mean for layer in s.layers)
    assert total * s.gradient_variance == pytest.approx(sum(float(e @ e) for e in errors) / 3, rel=1e-4)
    assert {info.group for info in s.layers.values()} == {"all"}


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


# ---- files, interruptions, mistakes --------------------------------------------------------------------------


def numbers(s):
    return {str(site): s.effects[site] for site in s.sites()}


class InterruptedAt:
    """A loss function that is interrupted in one of its calls, as by Ctrl-C."""

    def __init__(self, call):
        self.left = call

    def __call__(self, model, batch):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return loss_fn(model, batch)


@pytest.mark.parametrize("call", [7, 11, 15])
def test_ctrl_c_keeps_what_is_there_and_a_second_call_goes_on(tmp_path, call):
    path, options = tmp_path / "s.json", {"base": "hp", "candidates": [NEAREST], "path": tmp_path / "s.json"}
    whole = sensitivity(small(), batches(), loss_fn, **{**options, "path": None})
    first = sensitivity(small(), batches(), InterruptedAt(call), **options)
    assert first.interrupted and first.effects
    assert Sensitivity.load(path).to_dict() == first.to_dict()
    second = sensitivity(small(), batches(), loss_fn, **options)
    assert not second.interrupted
    assert numbers(second) == numbers(whole)


def test_what_a_file_has_is_not_measured_again(tmp_path):
    options = {"base": "hp", "path": tmp_path / "s.json"}
    first = sensitivity(small(), batches(), loss_fn, candidates=[NEAREST], **options)
    calls = []

    def counted(model, batch):
        calls.append(batch)
        return loss_fn(model, batch)

    second = sensitivity(small(), batches(), counted, candidates=[NEAREST], **options)
    assert numbers(first) == numbers(second) and len(calls) == 3  # only the losses in high precision
    more = sensitivity(small(), batches(), loss_fn, candidates=[NEAREST, "mxfp8"], **options)
    assert all(set(effects) == {"hp", NEAREST, "mxfp8"} for effects in more.effects.values())
    assert set(sensitivity(small(), batches(), loss_fn, candidates=["mxfp8"], **options).candidates) == {
        "hp",
        NEAREST,
        "mxfp8",
    }  # what is there is not lost
    with pytest.raises(ValueError, match="has results for the base 'hp'"):
        sensitivity(small(), batches(), loss_fn, base="mxfp8", candidates=[NEAREST], path=tmp_path / "s.json")


def test_progress_goes_from_0_to_1():
    parts = []
    options = {"base": "hp", "candidates": [NEAREST], "on_progress": lambda part, text: parts.append(part)}
    sensitivity(small(), batches(), loss_fn, **options)
    assert parts == sorted(parts) and 0 < parts[0] < 0.2 and parts[-1] == pytest.approx(1)


def bad_loss(model, batch):
    return loss_fn(model, batch) * (math.nan if batch[0][0] == batches()[1][0][0] else 1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": nn.Embedding(4, 4)}, "no linear layer"),
        ({"batches": batches(1)}, "at least two batches"),
        ({"batches": iter(())}, "at least two batches"),
        ({"count": 1}, "count must be at least 2"),
        ({"candidates": []}, "no candidate"),
        ({"candidates": ["nvfp5"]}, "not a format"),
        ({"candidates": ["nvfp4", "nvfp4"]}, "twice"),
        ({"candidates": ["fp8(delayed)"]}, "delayed scaling"),
        ({"candidates": ["fprop: mxfp8, dgrad: hp, wgrad: hp; up: hp"]}, "a rule"),
        ({"base": "mxfp8, backward_override: dequantized"}, "backward_override"),
        ({"loss_fn": bad_loss}, "the loss of batch 1 is nan"),
        ({"loss_fn": lambda model, batch: 3.0}, "must return one number"),
        ({"loss_fn": lambda model, batch: functional.cross_entropy(Small_table, batch[1])}, "must return one number"),
        ({"batches": [batches()[0]] * 3}, "all batches have the same gradient"),
        ({"groups": "rows"}, "groups must be layer, block, kind"),
        ({"tokens": 0}, "above 0"),
    ],
)
def test_mistakes_are_said(change, message):
    options = {"model": small(), "batches": batches(), "loss_fn": loss_fn, "base": "hp", "candidates": [NEAREST]}
    options |= change
    with pytest.raises(ValueError, match=message):
        sensitivity(options.pop("model"), options.pop("batches"), options.pop("loss_fn"), **options)


Small_table = torch.zeros(64, 16)


def test_fewer_batches_than_asked_for_are_noted():
    s = sensitivity(small(), batches(2), loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
    assert any("only 2 batches instead of 8" in note for note in s.notes)


def test_a_loss_that_does_not_call_the_model_is_said():
    other = small()
    cg.convert(other, "mxfp8")
    with pytest.raises(ValueError, match="no linear layer of this model was seen"):
        sensitivity(
            small(),
            batches(),
            lambda model, batch: functional.cross_entropy(model.table(batch[0])[:, :16], batch[1]),
            base="hp",
            candidates=["mxfp8"],
        )


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


def perturbed():
    model = small()
    with torch.no_grad():
        model.up.weight[0, 0] += 1e-3
    return model


@pytest.mark.parametrize(
    "change",
    [
        {"model": perturbed()},
        {"batches": batches(5)[2:]},
        {"seed": 1},
        {"groups": lambda layer: "all"},
        {"tokens": 32},
        {"skip": "down"},
        {"optimizer": trained()[1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_results_of_something_else_are_refused_and_kept(tmp_path, change):
    options = {"base": "hp", "candidates": ["mxfp8"], "path": tmp_path / "s.json"}
    sensitivity(small(), batches(), loss_fn, **options)
    before = (tmp_path / "s.json").read_text()
    model, data = change.pop("model", small()), change.pop("batches", batches())
    with pytest.raises(ValueError, match="has results of something else"):
        sensitivity(model, data, loss_fn, **{**options, "candidates": ["mxfp8", NEAREST]}, **change)
    assert (tmp_path / "s.json").read_text() == before


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
    assert any("8 rows of up have a common label" in note for note in s.notes)
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


def test_a_loss_function_that_changes_its_batch_is_noticed():
    def shifting(model, batch):
        batch[0].copy_(batch[0].roll(1))
        return loss_fn(model, batch)

    with pytest.raises(ValueError, match="loss_fn must not change its batch"):
        sensitivity(small(), batches(), shifting, base="hp", candidates=["mxfp8"])


def test_experts_with_a_parameter_each_are_counted():
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.experts = nn.Embedding(16, 32), cg.GroupedLinear(4, 32, 16, name="experts")

        def forward(self, tokens):
            return self.experts(self.table(tokens), [16, 32, 16, 0])

    s = sensitivity(MoE(), batches(), loss_fn, base="hp", candidates=["mxfp8"], groups="kind")
    assert s.layers["experts"].experts == 4


def test_a_candidate_with_the_text_of_a_base_that_means_a_preset_is_refused():
    with pytest.raises(ValueError, match="means the preset as a base and the format as a candidate"):
        sensitivity(small(), batches(), loss_fn, base="nvfp4", candidates="nvfp4")
