"""Labels that a loss gets are counted, and replaced by what the model predicts."""

import torch
from torch.nn import functional

from crossgrain.lab.sensitivity.labels import Labels


def test_labels_that_count_are_counted():
    scores, target = torch.randn(6, 5), torch.tensor([0, 1, -100, 4, -100, 2])
    with Labels() as labels:
        loss = functional.cross_entropy(scores, target)
    assert labels.count == 4
    assert torch.equal(loss, functional.cross_entropy(scores, target))
    with Labels() as labels:
        functional.nll_loss(scores.log_softmax(1), target.clamp(min=0), ignore_index=0)
    assert labels.count == 3
    with Labels() as labels:
        torch.nn.CrossEntropyLoss()(input=scores, target=target)
    assert labels.count == 4


def test_probabilities_as_targets_are_left_alone():
    scores, target = torch.randn(6, 5), torch.rand(6, 5)
    with Labels(seed=0) as labels:
        loss = functional.cross_entropy(scores, target)
    assert labels.count == 0 and torch.equal(loss, functional.cross_entropy(scores, target))


def drawn(scores, target, **options):
    """The labels that are used, from the gradient: only the drawn class has a negative one."""
    scores = scores.clone().requires_grad_()
    with Labels(seed=3):
        functional.cross_entropy(scores, target, **options).backward()
    return scores.grad.argmin(1)


def test_labels_are_drawn_as_the_model_predicts_and_ignored_ones_stay():
    scores = torch.log(torch.tensor([0.5, 0.3, 0.2])).repeat(20_000, 1)
    found = drawn(scores, torch.zeros(20_000, dtype=torch.long))
    shares = torch.bincount(found, minlength=3) / 20_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015)  # four standard deviations
    ignored = torch.full((20_000,), -100)
    ignored[0] = 1
    scores.requires_grad_()
    with Labels(seed=3):
        functional.cross_entropy(scores, ignored).backward()
    assert not scores.grad[1:].any() and scores.grad[0].any()


def test_the_same_seed_draws_the_same_and_images_work():
    scores, target = torch.randn(2, 5, 4, 4), torch.randint(5, (2, 4, 4))
    assert torch.equal(drawn(scores, target), drawn(scores, target))
    assert drawn(scores, target).shape == (2, 4, 4)


def test_smoothing_is_left_out_when_labels_are_drawn():
    scores, target = torch.randn(6, 5), torch.randint(5, (6,))
    scores.requires_grad_()
    with Labels(seed=1):
        smoothed = functional.cross_entropy(scores, target, label_smoothing=0.3)
    with Labels(seed=1):
        plain = functional.cross_entropy(scores, target)
    assert torch.equal(smoothed, plain)
