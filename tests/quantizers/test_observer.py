"""Observers see every plane where it is made, and change nothing."""

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain import kernels
from crossgrain.optim import FusedAdam
from crossgrain.optim.weight_update import quantize_master_weights
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane
from crossgrain.quantizers import observer
from crossgrain.quantizers.observer import ObserverError, observe
from crossgrain.recipe.presets import PRESETS

WIDTH, ROWS = 64, 32
HYBRID = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"


def seen(run):
    events = []
    with observe(events.append):
        run()
    return events


def named(events):
    return [(event.layer, event.tensor, *(d.value for made in event.made for d in made.directions)) for event in events]


def converted(recipe, *, width=WIDTH):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    cg.convert(model, recipe)
    return model, torch.randn(ROWS, width)


def train(model, x, steps=1):
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def test_a_step_shows_each_tensor_of_each_layer_once_with_its_directions():
    model, x = converted(HYBRID)
    assert named(seen(lambda: train(model, x.requires_grad_()))) == [
        ("0", "input", "rowwise", "columnwise"),
        ("0", "weight", "rowwise", "columnwise"),
        ("2", "input", "rowwise", "columnwise"),
        ("2", "weight", "rowwise", "columnwise"),
        ("2", "grad_output", "rowwise", "columnwise"),
        ("0", "grad_output", "rowwise", "columnwise"),
    ]


def test_source_and_target_of_an_event_give_the_bytes_of_the_plane_again():
    model, x = converted("nvfp4")
    checked = []

    def encode_again(event):
        for made in event.made:
            plane = made.plane
            new = empty_plane(plane.format, plane.direction, plane.shape, device=plane.data.device)
            target = kernels.Target(new, made.encoding, made.target.amax, made.target.scale, made.target.within)
            kernels.encode(event.source, [target], event.seed)
            assert torch.equal(new.data, plane.data) and torch.equal(new.scale, plane.scale)
            checked.append(event.seed)

    with observe(encode_again):
        train(model, x)
    assert sum(seed is not None for seed in checked) == 3  # dy: rows and columns of layer 2, columns of layer 0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("recompute", [None, False, True])
def test_bits_and_generator_are_the_same_with_and_without(preset, recompute):
    def run():
        model, x = converted(preset)
        x.requires_grad_()
        forward = model if recompute is None else lambda x: checkpoint(model, x, use_reentrant=recompute)
        losses = train(forward, x, steps=2)
        return [*losses, x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]

    expected, found = run(), []
    seen(lambda: found.extend(run()))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_events_of_a_recomputation_say_so_and_those_of_a_validation_are_not_training():
    model, x = converted(HYBRID)
    x.requires_grad_()
    events = seen(lambda: train(lambda x: checkpoint(model, x, use_reentrant=False), x))
    assert [event.recomputed for event in events if event.tensor == "input"] == [False, False, True, True]
    assert not any(event.recomputed for event in events if event.tensor == "grad_output")
    assert all(event.training for event in events)

    def validate():
        with torch.no_grad():
            model(x)

    assert [event.training for event in seen(validate)] == [False] * 4


def test_the_first_pass_of_a_reentrant_checkpoint_is_training():
    model, x = converted(HYBRID)
    x.requires_grad_()
    events = seen(lambda: train(lambda x: checkpoint(model, x, use_reentrant=True), x))
    first = [event for event in events if event.tensor == "input" and not event.recomputed]
    assert len(first) == 2 and all(event.training for event in first)


def test_one_plane_of_fp8_serves_both_directions():
    model, x = converted("fp8")
    events = seen(lambda: train(model, x.requires_grad_()))
    assert all(len(event.made) == 1 for event in events)
    assert {name[2:] for name in named(events)} == {("rowwise", "columnwise")}
    kept = cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3)(x.detach())
    (event,) = seen(lambda: kept.copy_(x.detach()))
    assert event.made[0].directions == (ROWWISE, COLUMNWISE)


def test_children_of_a_hybrid_of_fp8_serve_a_direction_each():
    quantizer = cg.HybridQuantizer(
        rowwise_quantizer=cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3),
        columnwise_quantizer=cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E5M2),
    )
    x = torch.randn(32, 32)
    for run in (lambda: quantizer.make_planes(x, rowwise=True, columnwise=True), lambda: quantizer(x)):
        (event,) = seen(run)
        assert [made.directions for made in event.made] == [(ROWWISE,), (COLUMNWISE,)]
        assert not event.subject


def test_columns_of_decoded_rows_say_so_and_their_source_are_the_rows():
    model, x = converted("all: nvfp4, input.source: dequantized")
    rows, columns = [event for event in seen(lambda: train(model, x)) if (event.layer, event.tensor) == ("0", "input")]
    assert (rows.subject.from_rows, columns.subject.from_rows) == (False, True)
    assert torch.equal(columns.source, kernels.decode(rows.made[0].plane, torch.float32))
    assert columns.made[0].directions == (COLUMNWISE,)


def test_high_precision_of_one_direction_is_seen_too():
    model, x = converted("hp-fwd-mxfp8-bwd")
    names = named(event for event in seen(lambda: train(model, x)) if event.layer == "2")
    assert ("2", "input", "rowwise") in names and ("2", "input", "columnwise") in names
    events = seen(grouped("hp-fwd-mxfp8-bwd", [32, 64]))
    assert ("experts", "input", "rowwise") in named(events) and ("experts", "input", "columnwise") in named(events)


def grouped(recipe, sizes):
    torch.manual_seed(0)
    model = cg.GroupedLinear(2, WIDTH, WIDTH, name="experts", bias=False)
    x = torch.randn(sum(sizes), WIDTH, requires_grad=True)

    def run():
        with cg.autocast(recipe=recipe):
            y = model(x, sizes)
        y.square().sum().backward()

    return run


def test_groups_are_seen_one_by_one_or_all_at_once_and_say_which():
    events = seen(grouped("nvfp4-plain", [32, 64]))
    assert [event.group for event in events if event.tensor == "input"] == [0, 1]
    assert [len(event.source) for event in events if event.tensor == "grad_output"] == [32, 64]
    assert [event.group for event in events if event.tensor == "weight"] == [0, 1]
    events = seen(grouped("mxfp8", [32, 64]))  # one call quantizes the rows of both
    assert [(event.group, len(event.source)) for event in events if event.tensor == "input"] == [(None, 96)]
    assert [event.group for event in events if event.tensor == "weight"] == [0, 1]


def test_groups_with_stochastic_rounding_have_a_seed_each_that_gives_their_bytes():
    for event in seen(grouped(HYBRID, [32, 64])):
        for made in event.made:
            plane = made.plane
            new = empty_plane(plane.format, plane.direction, plane.shape, device=plane.data.device)
            kernels.encode(event.source, [kernels.Target(new, made.encoding, made.target.amax)], event.seed)
            assert torch.equal(new.operand_codes(), plane.operand_codes())


def test_weights_that_are_kept_quantized_are_seen_when_the_optimizer_writes_them():
    torch.manual_seed(0)
    with cg.quantized_model_init(recipe=HYBRID):
        model = cg.Linear(WIDTH, WIDTH, name="fc")
    optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    x = torch.randn(ROWS, WIDTH)

    def step():
        with cg.autocast(recipe=HYBRID):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    step()
    events = [event for event in seen(step) if event.tensor == "weight"]
    assert named(events) == [("fc", "weight", "rowwise", "columnwise")]
    masters = optimizer.get_unscaled_state(model.weight, "master_param")
    assert torch.equal(events[0].source, masters.view(WIDTH, WIDTH))


def test_pieces_of_masters_are_seen_as_incomplete():
    weight = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)(torch.randn(32, 64))
    master = torch.randn(32 * 64)
    (event,) = seen(lambda: quantize_master_weights([weight], [master[:100]], [0]))
    assert not event.complete
    (event,) = seen(lambda: quantize_master_weights([weight], [master], [0]))
    assert event.complete


def test_operators_of_a_compiled_graph_are_seen():
    model, x = converted(HYBRID)
    eager = named(seen(lambda: train(model, x)))
    torch.compiler.reset()
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(graph, x)
    events = seen(lambda: train(graph, x))
    assert named(events) == eager and all(event.training for event in events)
    torch.compiler.reset()


def test_an_error_of_an_observer_is_raised_when_it_ends_and_leaves_tensors_whole():
    x = torch.randn(32, 64)
    kept = cg.quantize(x, "mxfp8")
    calls = []

    def fail(event):
        calls.append(event)
        raise ZeroDivisionError("my mistake")

    def write_twice():
        with observe(fail, "watcher"):
            kept.copy_(2 * x)
            kept.copy_(3 * x)

    with pytest.raises(ObserverError, match="the observer watcher raised ZeroDivisionError .*my mistake"):
        write_twice()
    assert len(calls) == 1
    expected = cg.quantize(3 * x, "mxfp8")
    for direction in (ROWWISE, COLUMNWISE):
        assert torch.equal(kept.dequantize(direction=direction), expected.dequantize(direction=direction))
    assert observer.observers == ()


def test_several_observers_see_the_same_and_do_not_see_what_others_quantize():
    one, other, x = [], [], torch.randn(32, 32)

    def quantizes(event):
        one.append(event)
        cg.quantize(event.source, "nvfp4")

    with observe(quantizes), observe(other.append):
        cg.quantize(x, "mxfp8")
    assert len(one) == len(other) == 1 and one[0] is other[0]


def test_planes_without_memory_are_not_shown():
    def quantize():
        cg.IdentityQuantizer()(torch.randn(32, 32, device="meta"))
        with FakeTensorMode():
            cg.IdentityQuantizer()(torch.randn(32, 32))

    assert seen(quantize) == []


def test_other_threads_are_seen():
    events, x = [], torch.randn(32, 32)
    with observe(events.append):
        thread = threading.Thread(target=lambda: cg.quantize(x, "mxfp8"))
        thread.start()
        thread.join()
    assert len(events) == 1


def test_nothing_is_observed_before_and_after():
    events = seen(lambda: None)
    cg.quantize(torch.randn(32, 32), "mxfp8")
    assert events == [] and observer.observers == ()
