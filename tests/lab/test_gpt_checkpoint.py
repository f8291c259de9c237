"""Checkpoints of the small GPT: everything starts from the same bits, and nothing changes them."""

import pytest
import torch

from crossgrain import GemmRecipe
from crossgrain.gpt import GPTConfig
from crossgrain.lab.gpt_checkpoint import GPTCheckpoint

CONFIG = GPTConfig(layers=1, width=32, heads=2, context=16)


@pytest.fixture(scope="module")
def start():
    start = GPTCheckpoint(CONFIG, batch=4, learning_rate=1e-2, include=("head",))
    start.train(8)
    return start


def test_training_goes_down_and_counts_steps(start):
    losses = []
    other = GPTCheckpoint(CONFIG, batch=4, learning_rate=1e-2)
    other.train(30, lambda step, loss: losses.append(loss))
    assert len(losses) == other.steps == 30 and losses[-1] < losses[0]
    assert other.validation_loss() < 5.6


def test_branches_with_the_same_seed_are_the_same_and_leave_the_checkpoint_alone(start):
    branch = start.branch(4)
    first = list(branch(None, 3))
    assert list(branch(GemmRecipe.load("nvfp4"), 3)) != first
    assert list(branch(None, 3)) == first  # neither weights nor the optimizer's moments have moved
    assert list(branch(None, 4)) != first


def test_batches_and_losses(start):
    one, two = start.batches(2), start.batches(2)
    assert all(torch.equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))
    model, _ = start.restored()
    assert float(start.loss(model, one[0]).detach()) > 0


def test_a_file_gives_back_the_checkpoint(start, tmp_path):
    start.save(tmp_path / "gpt.pt")
    other = GPTCheckpoint(CONFIG, batch=4, learning_rate=1e-2)
    other.load(tmp_path / "gpt.pt")
    assert other.steps == 8
    assert list(other.branch(3)(None, 1)) == list(start.branch(3)(None, 1))


def test_a_start_has_all_that_the_lab_needs(start):
    made = start.start(batches=2, steps=5)
    assert made.name == "GPT of 1 layers of 32, after 8 steps" and made.include == ("head",) and made.steps == 5
    assert len(list(made.batches)) == 2 and made.optimizer is not None and made.branch is not None
