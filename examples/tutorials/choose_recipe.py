# %% [markdown]
# # Choose a recipe for your own model
#
# The lab measures what each GEMM of each layer costs in 4 bits, searches a recipe for a budget, and tests it by paired training.
# Here the model is the built-in small GPT, and all of it takes half a minute on one core. Yours needs the same four things: a
# model at a checkpoint, batches, a loss, and a loop that trains from that checkpoint.
#
# ## A checkpoint
#
# Numbers of an untrained model say nothing, so train first. Everything afterwards starts from these weights.

# %%
import copy

import torch

import crossgrain as cg
from crossgrain import lab
from crossgrain.gpt import PRESETS, Trainer

trainer = Trainer(PRESETS["tiny"], recipe=None, seed=0)
trainer.train_to(120)
start = copy.deepcopy(trainer.model.state_dict())
batches = [trainer.next_batch() for _ in range(8)]
print(f"loss {trainer.validate():.1f} nats per byte")

# %% [markdown]
# ## What does each GEMM cost?
#
# `base` is what a GEMM has if nothing else is chosen; `candidates` are what it might have instead.


# %% digits vary
def loss_fn(model, batch):
    return model.loss(*batch)


options = {"base": "mxfp8", "candidates": ["nvfp4(2d, rht, sr)"], "optimizer": trainer.optimizer}
s = lab.sensitivity(trainer.model, batches, loss_fn, **options)
print(s)

# %% [markdown]
# Read the second table. In forward, `fc1` of the first block costs most; the second block costs next to nothing. In backward, bias is
# within its interval nearly everywhere, so NVFP4 does no harm there that could be measured. That is the usual picture: the forward pass
# decides. [The lab](../how-to/lab.md#what-is-measured) says what each number means.
#
# ## A recipe for a budget
#
# NVFP4 everywhere would save some GEMM time. Which recipe saves 80 % of that at the least harm?

# %% digits vary
found = s.search(saving=0.8, device="b200")
print(found.recipe)

# %% [markdown]
# ## Does it hold?
#
# Predictions are for choosing. To claim something, train: the same start, the same data, with each recipe and in high precision.


# %% digits vary
def branch(recipe, seed):
    model = copy.deepcopy(trainer.model)
    model.load_state_dict(start)
    if recipe is not None:  # None is high precision
        cg.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    data = Trainer(PRESETS["tiny"], None, seed=1000 + seed)
    while True:
        loss = model.loss(*data.next_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


proof = lab.verify(branch, [found.recipe, "nvfp4", "mxfp8"], seeds=3, steps=40, tolerance=0.01)
print(str(proof).partition("\n\n")[0])

# %% [markdown]
# `print(proof)` says more: what may be claimed, and what these runs do not show. Forty steps of a tiny model are an example, not a proof.
#
# ## A report
#
# One HTML file without anything from elsewhere, to send to colleagues:

# %%
lab.write_report("report.html", s, frontier=lab.frontier(s), found=found, verification=proof)

# %% [markdown]
# `crossgrain search --from train:start` does all of this for a `start()` of your `train.py` ([search](../how-to/lab_search.md)).
