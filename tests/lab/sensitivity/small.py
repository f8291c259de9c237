"""A small model, batches and a loss for tests of sensitivity, and its effects computed by converting single layers."""

import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain import GemmRecipe

CLASSES = 16
NEAREST = "nvfp4"


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


def only(layer, gemm, fmt=NEAREST):
    return GemmRecipe("hp", "hp", "hp", rules=[(layer, {gemm: fmt})])


def gradients(model, batch):
    return torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))


def roots(model, optimizer):
    """The fourth roots of Adam's second moments, written down once more."""
    found = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        found.append(((state["exp_avg_sq"] / (1 - 0.95 ** float(state["step"]))).sqrt() + 1e-8).sqrt())
    return found


def errors_of(model, optimizer, recipe):
    """The weighed error of the whole gradient in each batch, by converting the model, and the exact gradients."""
    divided = roots(model, optimizer)
    exact = [gradients(model, batch) for batch in batches()]
    cg.convert(model, recipe, include="out")
    rounded = [gradients(model, batch) for batch in batches()]
    cg.unconvert(model)
    weigh = [flat([g / r for g, r in zip(each, divided, strict=True)]) for each in exact]
    return [
        flat([g / r for g, r in zip(each, divided, strict=True)]) - whole
        for each, whole in zip(rounded, weigh, strict=True)
    ], weigh


def pairs(vectors):
    count = len(vectors)
    found = [float(a @ b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]
    return sum(found) / (count * (count - 1))


def unit(weighed):
    return sum(float(each @ each) for each in weighed) / len(weighed) - pairs(weighed)


def numbers(s):
    return {str(site): s.effects[site] for site in s.sites()}
