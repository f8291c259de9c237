"""The part of the Inspector callbacks that needs no training program, with a stand-in for one."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.integrations.inspection import InspectedTraining
from crossgrain.lab import read_inspection
from crossgrain.quantizers import observer


class Wrapper(nn.Module):
    """What a data-parallel wrapper looks like."""

    def __init__(self, module):
        super().__init__()
        self.module = module


Wrapper.__name__ = "DistributedDataParallel"


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    cg.convert(model, "mxfp8")
    return model


def train(training, model, steps):
    x = torch.randn(32, 32, requires_grad=True)
    for _ in range(steps):
        model(x).sum().backward()
        training.end_step()


def test_the_steps_of_a_program_are_those_of_the_inspector(model, tmp_path):
    training = InspectedTraining(tmp_path / "stats.jsonl", {"every": 2})
    assert training.inspector is None
    training.end_step()  # before training begins nothing happens
    training.begin(Wrapper(model), 5)
    train(training, model, 4)
    training.end()
    read = read_inspection(tmp_path / "stats.jsonl")
    assert read.steps == [6, 8] and read.end["steps"] == 9
    assert {record["layer"] for record in read.records} == {"0", "1"}  # without the wrapper


def test_a_run_that_failed_is_ended_by_the_next(model, tmp_path):
    training = InspectedTraining(tmp_path / "stats.jsonl", {"every": 1})
    training.begin(model, 0)
    train(training, model, 2)
    model(torch.randn(32, 32, requires_grad=True))  # and then an error, of which nobody tells
    training.begin(model, 2)
    assert len(observer.observers) == 1
    train(training, model, 1)
    training.end()
    training.end()
    assert observer.observers == ()
    read = read_inspection(tmp_path / "stats.jsonl")
    assert read.runs == 2 and read.steps == [2]


def test_wrong_options_are_refused_before_training():
    with pytest.raises(ValueError, match="every must be at least 1"):
        InspectedTraining(None, {"every": 0})
    with pytest.raises(TypeError, match="evry"):
        InspectedTraining(None, {"evry": 5})
