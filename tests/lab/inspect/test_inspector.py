"""The Inspector in running programs: it sees everything, says what it does not see, and changes no bit."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain.lab import Inspector
from crossgrain.optim import FusedAdam
from crossgrain.quantizers import observer
from crossgrain.quantizers.observer import ObserverError
from crossgrain.recipe.presets import PRESETS

from ...common.experts import Experts, routed
from ...common.logs import warned
from ...common.recomputation import RECIPES, Attention, Grouped, Mlp, Odd, Operations, Run, checkpoints, direct
from .small import HYBRID, by_place, looked, net, step

WHAT_IF = ["nvfp4(rht, sr)", "mxfp8-fwd-nvfp4-bwd"]
DIRECTIONS = ("rowwise", "columnwise")


# ---- no bit changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_losses_weights_and_generator_are_the_same_for_every_preset(preset):
    def run(looks):
        model, tokens = net(preset)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        with Inspector(model, every=1, what_if=WHAT_IF if looks else ()) as look:
            if not looks:
                look.close()
            for _ in range(3):
                losses.append(step(model, tokens, optimizer))
                if looks:
                    look.step()
        assert bool(look.report().records) is (looks and preset != "hp")
        state = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
        return [*losses, *state, torch.get_rng_state()]

    assert all(torch.equal(one, other) for one, other in zip(run(False), run(True), strict=True))


def all_modules(recipe, how, quantized):
    makers = (Mlp, Odd, Grouped, Attention, Operations) if not quantized else (Mlp, Grouped, Operations)
    return Run(makers, RECIPES[recipe](), how, quantized=quantized)


HOOKS, REENTRANT = checkpoints("ours", False), checkpoints("torch", True)


@pytest.mark.parametrize(
    "recipe, how, quantized",
    [
        ("hybrid", direct, False),
        ("hybrid", HOOKS, False),
        ("hybrid", REENTRANT, False),
        ("delayed", direct, False),
        ("delayed", REENTRANT, False),
        ("delayed_columns_of_rows", HOOKS, False),
        ("hybrid", direct, True),
        ("nvfp4", HOOKS, True),
        ("delayed", REENTRANT, True),
    ],
)
def test_modules_and_operations_compute_and_learn_the_same(recipe, how, quantized):
    plain = all_modules(recipe, how, quantized).train().all()
    run = all_modules(recipe, how, quantized)
    with Inspector(run.model, every=1, what_if=WHAT_IF) as look:
        for _ in range(2):
            run.train(steps=1)
            look.step()
    assert all(torch.equal(one, other) for one, other in zip(run.all(), plain, strict=True))
    found = by_place(look.report().records)
    layers = {place[0] for place in found if place[4] is None}
    assert {"0.norm_linear", "0.mlp.fc1", "0.mlp.fc2", "0.out"} <= layers  # paths: these modules have no names
    tensors = ("input", "grad_output") if quantized else ("input", "weight", "grad_output")
    missing = [(layer, t, d) for layer in layers for t in tensors for d in DIRECTIONS if not _has(found, layer, t, d)]
    assert [place for place in missing if not _is_core(place)] == []


def _has(found, layer, tensor, direction):
    return any(place[0] == layer and place[2:4] == (tensor, direction) and place[4] is None for place in found)


def _is_core(place):
    return "attention" in place[0] or "core" in place[0]  # its tensors have other names


def test_kept_weights_are_seen_when_the_optimizer_writes_them_and_train_the_same():
    def run(looks):
        torch.manual_seed(0)
        with cg.quantized_model_init(recipe=HYBRID):
            model = nn.Sequential(cg.Linear(64, 64), cg.Linear(64, 64))
        optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        x, losses = torch.randn(32, 64), []
        with Inspector(model, every=1, what_if=WHAT_IF) as look:
            for _ in range(3):
                with cg.autocast(recipe=HYBRID):
                    loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if looks:
                    look.step()
                elif look.is_looking:
                    look.close()
        weights = [parameter.dequantize() for parameter in model.parameters() if hasattr(parameter, "dequantize")]
        return [*losses, *weights, torch.get_rng_state()], look.report()

    (plain, _), (seen, report) = run(False), run(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
    found = by_place(report.records)
    assert {(layer, d) for layer in "01" for d in DIRECTIONS} <= {(p[0], p[3]) for p in found if p[2] == "weight"}


@pytest.mark.parametrize("recipe", ["all: mxfp8", "all: fp8", "all: nvfp4(rht, sr)", "all: fp8_block"])
def test_memory_that_was_looked_at_can_still_be_freed_as_fsdp_does_it(recipe):
    model, tokens = net(recipe)
    buffers = list(model.parameters())

    def keep(event):
        buffers.append(event.source)
        buffers.extend(buffer for made in event.made for buffer in made.plane.buffers())

    with observer.observe(keep):
        looked(model, lambda: step(model, tokens), what_if=WHAT_IF)
    assert len(buffers) > 20 and all(buffer.untyped_storage().resizable() for buffer in buffers)


def test_fused_experts_are_seen_group_by_group():
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Experts()})
    cg.convert(model, HYBRID)
    x, (index, weights) = torch.randn(40, 32), routed(40, 4)

    def run():
        model["experts"](x, index, weights).square().sum().backward()
        return model["experts"].gate_up_proj.grad.clone()

    plain = run()
    model.zero_grad()
    gradients = []
    found = by_place(looked(model, lambda: gradients.append(run()), what_if=["mxfp8"]))
    assert not torch.equal(plain, gradients[0])  # other draws of dy
    assert {place[1] for place in found if place[0] == "experts.down_proj" and place[2] == "grad_output"} == {0, 1, 2}
    assert ("experts.gate_up_proj", 0, "weight", "columnwise", "mxfp8") in found


def test_compiled_models_are_seen_as_eager_ones():
    model, tokens = net()
    eager = by_place(looked(model, lambda: step(model, tokens), what_if=["mxfp8"]))
    model.zero_grad()
    torch.compiler.reset()
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(7)
    step(graph, tokens)
    state = torch.get_rng_state()
    for inspected in (model, graph):
        model.zero_grad()
        torch.manual_seed(7)
        compiled = by_place(looked(inspected, lambda: step(graph, tokens), what_if=["mxfp8"]))
        assert compiled.keys() == eager.keys()
        assert torch.equal(torch.get_rng_state(), state)
    torch.compiler.reset()


# ---- what is recorded ----------------------------------------------------------------------------------------


def test_records_of_a_step_have_the_numbers_of_the_tensors():
    model, tokens = net("all: mxfp8")
    inputs = {}
    model.fc2.register_forward_pre_hook(lambda module, args: inputs.update(x=args[0].detach()))
    found = by_place(looked(model, lambda: step(model, tokens), what_if=["nvfp4"], rows=None))
    assert len(found) == 2 * 3 * 2 * 2
    record = found["fc2", None, "input", "rowwise", None]
    x = inputs["x"]
    decoded = cg.quantize(x, "mxfp8", columnwise=False).dequantize()
    error = ((decoded - x).double().norm() / x.double().norm()).item()
    assert record["relative_error"] == pytest.approx(error, rel=1e-6)
    assert (record["format"], record["gemm"], record["calls"]) == ("mxfp8", "fprop", 1)
    assert (record["bias"], record["noise"]) == (record["relative_error"], 0.0)
    decoded = cg.quantize(x, "nvfp4", columnwise=False).dequantize()
    error = ((decoded - x).double().norm() / x.double().norm()).item()
    assert found["fc2", None, "input", "rowwise", "nvfp4"]["relative_error"] == pytest.approx(error, rel=1e-6)
    # 40 tokens are padded to 64 rows for the columns; the zeros are counted and have no part in the means.
    assert record["shape"] == [64, 96] and record["zero_rows"] == 24
    kept = x.double()[:, x.abs().sum(0) > 0]
    assert record["kurtosis"] == pytest.approx((kept.pow(4).mean() / kept.square().mean() ** 2).item(), rel=1e-6)


def test_bias_is_apart_from_noise_where_rounding_is_stochastic():
    model, tokens = net()
    found = by_place(looked(model, lambda: step(model, tokens), draws=16))
    dy = found["fc2", None, "grad_output", "rowwise", None]
    assert dy["format"] == "nvfp4(sr)" and dy["noise"] > 3 * dy["bias"]
    without = by_place(looked(model, lambda: step(model, tokens), draws=0))
    assert without["fc2", None, "grad_output", "rowwise", None]["bias"] is None


def test_the_gain_of_the_rotation_is_that_of_the_operands_of_wgrad():
    model, tokens = net("fprop: nvfp4, dgrad: nvfp4, wgrad: nvfp4(rht)")
    plain, _ = net("all: nvfp4")
    model.embedding.weight.data[:, 3] *= 100  # an outlier channel
    plain.load_state_dict(model.state_dict(), strict=False)
    rotated, not_rotated = (by_place(looked(each, lambda e=each: step(e, tokens))) for each in (model, plain))
    place = ("fc1", None, "input", "columnwise", None)
    gain = rotated[place]["snr_db"] - not_rotated[place]["snr_db"]
    assert rotated[place]["rotation_gain_db"] == pytest.approx(gain, rel=1e-4)
    assert not_rotated[place]["rotation_gain_db"] == pytest.approx(gain, rel=1e-4)
    assert rotated["fc1", None, "input", "rowwise", None]["rotation_gain_db"] is None


def test_of_several_calls_the_first_is_recorded_and_all_are_counted():
    model, tokens = net("all: mxfp8")
    amax = []
    model.fc1.register_forward_pre_hook(lambda module, args: amax.append(args[0].abs().max().item()))

    def accumulate():
        for part in tokens.split(20):
            step(model, part)

    found = by_place(looked(model, accumulate))
    record = found["fc1", None, "input", "rowwise", None]
    assert record["calls"] == 2 and record["amax"] == pytest.approx(amax[0]) and amax[0] != amax[1]


def test_validation_is_not_recorded():
    model, tokens = net("all: mxfp8")

    def run():
        with torch.no_grad():
            model(tokens[:8])
        step(model, tokens)

    with Inspector(model, every=1) as look:
        run()
        look.step()
    report = look.report()
    assert all(record["calls"] == 1 for record in report.records)
    assert by_place(report.records)["fc1", None, "input", "rowwise", None]["shape"] == [64, 64]
    assert report.looks[-1]["left_out"] == {"planes of passes without gradients": 4}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_adds_only_what_the_first_pass_did_not_make(reentrant):
    model, tokens = net()

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            x = self.model.embedding(tokens)
            hidden = checkpoint(lambda x: self.model.fc2(self.model.fc1(x)), x, use_reentrant=reentrant)
            return self.model.head(hidden)

    found = by_place(looked(Recomputed(), lambda: step(Recomputed(), tokens)))
    assert len(found) == 2 * 3 * 2
    assert all(record["calls"] == 1 for record in found.values())
    columns = found["fc1", None, "input", "columnwise", None]
    assert columns["recomputed"] is reentrant  # its first pass has no gradients, and makes rows only


def test_rows_are_sampled_and_the_record_says_how_many():
    model, _ = net("all: mxfp8")
    tokens = torch.randint(16, (1000,))
    found = by_place(looked(model, lambda: step(model, tokens), rows=96))
    record = found["fc1", None, "input", "rowwise", None]
    assert (record["shape"], record["rows"]) == ([1024, 64], 96)
    assert record["amax"] == pytest.approx(model.embedding.weight.detach()[tokens].abs().max().item())


def test_layers_can_be_chosen():
    model, tokens = net("all: mxfp8")
    assert {record["layer"] for record in looked(model, lambda: step(model, tokens), layers="*2")} == {"fc2"}


def test_a_pattern_that_matches_no_layer_is_named():
    model, tokens = net("all: mxfp8")
    with warned("no layer that quantized has a name like zzz or yyy"):
        looked(model, lambda: step(model, tokens), layers=["zzz", "yyy"])


def test_a_format_that_is_in_use_is_not_measured_twice():
    model, tokens = net("all: mxfp8")
    found = by_place(looked(model, lambda: step(model, tokens), what_if=["mxfp8"]))
    for place, record in found.items():
        if place[4] is not None:
            in_use = found[(*place[:4], None)]
            assert all(record[name] == in_use[name] for name in ("relative_error", "underflow", "scale_histogram"))


def test_a_hybrid_what_if_makes_columns_from_decoded_rows():
    model, tokens = net("all: nvfp4")
    weight = model.fc1.weight.detach()
    found = by_place(looked(model, lambda: step(model, tokens), what_if=["mxfp8-fwd-nvfp4-bwd"]))
    record = found["fc1", None, "weight", "columnwise", "mxfp8-fwd-nvfp4-bwd"]
    rows = cg.quantize(weight, "mxfp8", columnwise=False).dequantize()
    columns = cg.quantize(rows, "nvfp4", rowwise=False).dequantize()
    error = ((columns - rows).double().norm() / rows.double().norm()).item()
    assert record["source"] == "decoded rows"
    assert record["relative_error"] == pytest.approx(error, rel=1e-6)


def test_columns_of_decoded_rows_have_no_what_if_because_they_are_not_the_tensor():
    model, tokens = net("all: nvfp4, weight.source: dequantized")
    step(model, tokens)
    columns = model.fc1.quantizers["scaling_fwd"][1].columnwise_quantizer

    def make_columns():
        columns.make_planes(torch.randn(96, 64), rowwise=False, columnwise=True)

    found = looked(model, make_columns, what_if="mxfp8", layers="fc1")
    assert [(record["what_if"], record["source"]) for record in found] == [(None, "decoded rows")]


# ---- steps ---------------------------------------------------------------------------------------------------


def test_nothing_is_observed_between_looks_and_after_the_end():
    model, tokens = net("all: mxfp8")
    with Inspector(model, every=3) as look:
        observed = []
        for _ in range(5):
            observed.append(bool(observer.observers))
            step(model, tokens)
            look.step()
    assert observed == [True, False, False, True, False]
    assert observer.observers == ()
    look.close()
    with pytest.raises(RuntimeError, match="this Inspector was closed"):
        look.open()


def test_a_resumed_run_counts_on():
    model, tokens = net("all: mxfp8")
    with Inspector(model, every=10, first_step=95) as look:
        for _ in range(7):
            step(model, tokens)
            look.step()
    assert look.report().steps == [100]


def test_a_step_that_fails_is_written_and_no_longer_observed():
    model, tokens = net("all: mxfp8")
    look = Inspector(model, every=1)

    def fail():
        with look:
            model(tokens)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert observer.observers == ()
    assert look.report().looks[0]["ended_with_an_error"] and len(look.report().records) == 8


def test_a_look_that_fails_raises_at_the_end_of_the_step_and_not_in_the_middle(monkeypatch):
    model, tokens = net("all: mxfp8")
    look = Inspector(model, every=1)
    monkeypatch.setattr(look, "_look_at", lambda *arguments: 1 / 0)
    look.open()
    loss = step(model, tokens)
    with pytest.raises(
        ObserverError, match="crossgrain.lab.Inspector raised ZeroDivisionError when it was shown fc1, input"
    ):
        look.step()
    assert loss.isfinite() and observer.observers == ()


def test_two_inspectors_see_their_own_models():
    (one, tokens), (other, _) = net("all: mxfp8"), net("all: nvfp4")
    with Inspector(one, every=1) as of_one, Inspector(other, every=1) as of_other:
        step(one, tokens)
        step(other, tokens)
        of_one.step()
        of_other.step()
    assert {record["format"] for record in of_one.report().records} == {"mxfp8"}
    assert {record["format"] for record in of_other.report().records} == {"nvfp4"}
    assert of_one.report().looks[0]["left_out"] == {"planes of no layer of the model": 6}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"every": 0}, "every must be at least 1"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"draws": 1}, "draws must be 0, or at least 2"),
        ({"what_if": "nvfp5"}, "nvfp5"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Inspector(net()[0], **options)
