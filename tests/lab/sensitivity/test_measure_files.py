"""`sensitivity`: files, interruptions and mistakes."""

import math

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain.lab import Sensitivity, sensitivity

from .small import NEAREST, batches, loss_fn, numbers, small, trained


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


def test_progress_goes_from_0_to_1():
    parts = []
    options = {"base": "hp", "candidates": [NEAREST], "on_progress": lambda part, text: parts.append(part)}
    sensitivity(small(), batches(), loss_fn, **options)
    assert parts == sorted(parts) and 0 < parts[0] < 0.2 and parts[-1] == pytest.approx(1)


def bad_loss(model, batch):
    return loss_fn(model, batch) * (math.nan if batch[0][0] == batches()[1][0][0] else 1)


CONSTANT = torch.zeros(64, 16)


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
        ({"loss_fn": lambda model, batch: functional.cross_entropy(CONSTANT, batch[1])}, "must return one number"),
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


def test_a_loss_function_that_changes_its_batch_is_noticed():
    def shifting(model, batch):
        batch[0].copy_(batch[0].roll(1))
        return loss_fn(model, batch)

    with pytest.raises(ValueError, match="loss_fn must not change its batch"):
        sensitivity(small(), batches(), shifting, base="hp", candidates=["mxfp8"])


def test_a_candidate_with_the_text_of_a_base_that_means_a_preset_is_refused():
    with pytest.raises(ValueError, match="means the preset as a base and the format as a candidate"):
        sensitivity(small(), batches(), loss_fn, base="nvfp4", candidates="nvfp4")
