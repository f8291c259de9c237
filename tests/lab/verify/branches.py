"""Small training loops that tests verify recipes with."""

import torch

from crossgrain import convert


def tiny(recipe, seed, steps=None):
    """A small regression, a few milliseconds for ten steps: weights by torch's generator, data by the seed."""
    data = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(32, 32, bias=False)
    if recipe is not None:
        convert(model, recipe)
    target = torch.randn(32, 32, generator=data)
    step = 0
    while steps is None or step < steps:
        x = torch.randn(32, 32, generator=data)
        loss = (model(x) - x @ target).square().mean()
        (gradient,) = torch.autograd.grad(loss, model.weight)
        with torch.no_grad():
            model.weight -= 0.2 * gradient
        yield loss
        step += 1


def made_of(losses):
    """A branch that yields what ``losses(recipe, seed)`` returns. The recipe is given as text, None for none."""

    def branch(recipe, seed):
        yield from losses(None if recipe is None else str(recipe), seed)

    return branch
