"""The first bad step: NaNs, saturation and bursts of errors, in records and in running programs."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.lab import Inspector, read_inspection
from crossgrain.lab.inspect import first_bad_step


def record(step, layer="fc", **changes):
    usual = {
        "step": step,
        "layer": layer,
        "group": None,
        "tensor": "input",
        "direction": "rowwise",
        "what_if": None,
        "format": "nvfp4",
        "shape": [32, 32],
        "rows": 32,
        "nan": 0,
        "inf": 0,
        "nonfinite": 0.0,
        "saturation": 0.0,
        "relative_error": 0.1,
        "block_error": {"50%": 0.1, "90%": 0.15},
    }
    return {**usual, **changes}


def test_nothing_is_wrong():
    assert first_bad_step([]) is None
    assert first_bad_step([record(step, relative_error=0.1 + 0.01 * step) for step in range(8)]) is None


@pytest.mark.parametrize(
    "change, kind, value",
    [
        ({"nan": 2, "inf": 1}, "nonfinite", 3),
        ({"nonfinite": 0.5}, "nonfinite", 512),
        ({"saturation": 0.05}, "saturation", 0.05),
        ({"relative_error": 0.21}, "error", 0.21),
        ({"block_error": {"90%": 0.31}}, "block_error", 0.31),
    ],
)
def test_the_first_record_that_is_bad_is_named_in_the_order_of_the_step(change, kind, value):
    steps = range(0, 500, 100)
    records = [record(step, layer) for step in steps for layer in ("a", "b", "c")]
    records += [record(500, "a"), record(500, "b", **change), record(500, "c", **change), record(600, "a", nan=1)]
    found = first_bad_step(records)
    assert (found.step, found.looked_before, found.layer, found.kind) == (500, 400, "b", kind)
    assert found.value == pytest.approx(value)
    assert str(found).startswith("step 500: b, input rowwise: ") and "The look before was at step 400." in str(found)


def test_what_is_usual_is_the_median_of_earlier_looks():
    usual = [record(step, saturation=0.03, format="nvfp4(sr)") for step in range(5)]
    assert first_bad_step([*usual, record(5, saturation=0.1)]) is None
    found = first_bad_step([*usual, record(5, saturation=0.13)])
    assert (found.kind, found.usual) == ("saturation", 0.03)
    assert "13.00% of the numbers were cut off, usually 3.00%" in str(found)


def test_early_looks_have_nothing_usual_but_a_given_scale_must_not_saturate():
    assert first_bad_step([record(0, saturation=0.3), record(1, relative_error=0.9)]) is None
    found = first_bad_step([record(0, saturation=0.01, format="fp8(given scale)")])
    assert found.kind == "saturation" and "It was the first look." in str(found)


def test_formats_that_are_not_in_use_do_not_count():
    assert first_bad_step([record(0, nan=1, what_if="mxfp8")]) is None


@pytest.fixture
def run(tmp_path):
    """Train with something that goes wrong in one step: what the Inspector says, and what its file says."""

    def run(recipe, break_it, at):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        cg.convert(model, recipe)
        x = torch.randn(32, 32, requires_grad=True)
        path = tmp_path / "stats.jsonl"
        with Inspector(model, path, every=2) as look:
            for step in range(10):
                if step == at:
                    break_it(model)
                model(x).square().mean().backward()
                look.step()
        assert read_inspection(path).first_bad_step() == look.first_bad_step()
        return look.first_bad_step()

    return run


def test_a_nan_is_found_where_it_begins(run):
    def poison(model):
        model[2].weight.data[3, 3] = float("nan")

    found = run("mxfp8", poison, at=5)
    assert (found.step, found.looked_before, found.layer, found.tensor) == (6, 4, "2", "weight")
    assert (found.kind, found.value) == ("nonfinite", 1)


def test_delayed_scaling_that_is_surprised_saturates(run):
    def blow_up(model):
        model[0].weight.data[:3] *= 1000

    found = run("all: fp8(delayed)", blow_up, at=6)
    assert (found.step, found.layer, found.tensor, found.kind) == (6, "0", "weight", "saturation")


def test_an_outlier_that_takes_the_scales_of_all_blocks_is_a_burst_of_errors(run):
    def plant(model):
        model[2].weight.data[0, 0] = 1e6  # the outlier itself is exact, so the error of the tensor gets smaller

    found = run("all: nvfp4", plant, at=8)
    assert (found.step, found.layer, found.tensor, found.kind, found.value) == (8, "2", "weight", "block_error", 1.0)


def test_training_that_never_fails_has_no_bad_step(run):
    assert run("nvfp4", lambda model: None, at=0) is None
