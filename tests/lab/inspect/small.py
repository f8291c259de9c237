"""A small model to look at."""

import torch
from torch import nn

import crossgrain as cg
from crossgrain.lab import Inspector

HYBRID = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.fc1, self.fc2, self.head = nn.Linear(width, 96), nn.Linear(96, width), nn.Linear(width, 16)

    def forward(self, tokens):
        return self.head(self.fc2(torch.relu(self.fc1(self.embedding(tokens)))))


def net(recipe=HYBRID, **options):
    torch.manual_seed(0)
    model = Net()
    cg.convert(model, recipe, skip="head", **options)
    return model, torch.randint(16, (40,))


def step(model, tokens, optimizer=None):
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def looked(model, run, steps=1, **options):
    """The records of the last step."""
    with Inspector(model, every=1, **options) as look:
        for _ in range(steps):
            run()
            look.step()
    return look.report().records


def by_place(records):
    return {
        (record["layer"], record["group"], record["tensor"], record["direction"], record["what_if"]): record
        for record in records
    }
