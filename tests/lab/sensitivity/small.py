"""A small model, batches and a loss for tests of sensitivity."""

import torch
from torch import nn
from torch.nn import functional

CLASSES = 16


class Small(nn.Module):
    """Two layers and a head over embeddings; positions do not mix, so that each token is a sample of its own."""

    def __init__(self, width=32):
        super().__init__()
        self.table = nn.Embedding(CLASSES, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.out(x + self.down(functional.gelu(self.up(x))))


def small(seed=0):
    torch.manual_seed(seed)
    return Small()


def batches(count=3, tokens=64):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(CLASSES, (2, tokens), generator=generator) for _ in range(count)]


def loss_fn(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def trained(steps=30):
    """A model and its optimizer after some steps."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for batch in batches(steps):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat(gradients):
    return torch.cat([each.flatten() for each in gradients]).double()
