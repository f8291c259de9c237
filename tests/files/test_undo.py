"""States that are remembered: restored as often as one likes, bit for bit."""

import torch
from torch import nn

import crossgrain as cg
from crossgrain.files.undo import remembered


def trained(steps, recipe="fp8(delayed(history=4))"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
    cg.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps, seed=1):
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(32, 32, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_steps_can_be_repeated_any_number_of_times():
    model, optimizer = trained(3)
    restores = [remembered(model), remembered(optimizer)]
    first = train(model, optimizer, 3, seed=2)
    for _ in range(2):
        for restore in restores:
            restore()
        assert train(model, optimizer, 3, seed=2) == first
    assert train(model, optimizer, 3, seed=2) != first


def test_histories_that_were_not_there_begin_again():
    model, optimizer = trained(0)
    restores = [remembered(model), remembered(optimizer)]
    first = train(model, optimizer, 3)
    for restore in restores:
        restore()
    assert train(model, optimizer, 3) == first
