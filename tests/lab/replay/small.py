"""Small models, and steps in which one operand goes wrong."""

import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain.lab.replay.looking import Site

CLASSES = 16


class Block(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Small(nn.Module):
    """Some blocks over embeddings. With ``recompute``, blocks are recomputed in backward."""

    def __init__(self, width=32, blocks=3, dropout=0.0):
        super().__init__()
        self.table = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.out = nn.Linear(width, CLASSES)
        self.recompute = None

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.recompute)
        return self.out(x)


def loss_fn(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def batches(count, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(CLASSES, (2, 64), generator=generator) for _ in range(count)]


def trained(recipe, steps=3, **options):
    """A converted model and its optimizer after some steps, and the batch of the next step."""
    torch.manual_seed(0)
    model = Small(**options)
    cg.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    *past, batch = batches(steps + 1)
    for each in past:
        optimizer.zero_grad()
        loss_fn(model, each).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, batch


DELAYED_DGRAD = "fprop: mxfp8, dgrad: fp8(delayed(history=4)), wgrad: mxfp8"
DELAYED_AND_RANDOM = f"{DELAYED_DGRAD}, wgrad.grad_output: mxint8(sr), allow_mixed: true"


def with_stale_scale(*layers, recipe=DELAYED_DGRAD, states=("scaling_bwd",), **options):
    """The scales of dy of some layers are those of much smaller gradients, so that all its numbers are cut off."""
    model, optimizer, batch = trained(recipe, **options)
    for layer in layers:
        for state in states:
            delayed = model.get_submodule(layer).fp8_meta[state].delayed
            if delayed is not None:
                delayed.scale.mul_(1e4)
    return model, optimizer, batch


def site(text):
    layer, _, operand = text.partition(": ")
    return Site(layer, operand)


class Roots(nn.Module):
    """Square roots of sums that are a little larger than 0, and in four bits smaller: NaN.

    The weights 0.58, -0.42 and -0.13 become 0.5, -0.5 and -0.167 in a block whose largest number is 1.
    """

    def __init__(self, *names, width=32):
        super().__init__()
        self.names = names
        weight = torch.zeros(width, width)
        weight[:, 0:3] = torch.tensor([0.58, -0.42, -0.13])
        weight[:, 15] = 1.0
        for name in names:
            layer = nn.Linear(width, width, bias=False)
            with torch.no_grad():
                layer.weight.copy_(weight)
            self.add_module(name, layer)

    def forward(self, x):
        return sum(getattr(self, name)(x).sqrt() for name in self.names)


def ones_but_one(rows=32, width=32):
    """An input of ones, and zeros for the largest weight."""
    x = torch.ones(rows, width)
    x[:, 15] = 0
    return x


def mean_loss(model, x):
    return model(x).mean()
