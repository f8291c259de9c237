# %% [markdown]
# # Debug a divergence
#
# A run goes wrong at some step. Which layer, which tensor, which direction? This page makes a run go wrong on purpose, then finds the
# cause with two tools: an `Inspector` that looks at every tensor, and `replay`, which repeats one step with operands in high precision.
#
# ## A run with a mistake in it
#
# Somebody has given one GEMM delayed scaling: its scale comes from earlier steps. And at step 4 the loss scale jumps from 1 to 512, so
# that gradients are 512 times as large as any that the history has seen.

# %%
import torch

import crossgrain as cg
from crossgrain import files, lab
from crossgrain.gpt import PRESETS, Trainer

recipe = cg.GemmRecipe.load("mxfp8; blocks.1.mlp.fc2: dgrad: fp8(delayed(history=16))")
trainer = Trainer(PRESETS["tiny"], recipe, seed=0)
trainer.train_to(40)
model, optimizer = trainer.model, trainer.optimizer

# %% [markdown]
# ## Watch it
#
# `every=1` looks at every step. In a long run, look every few hundred steps, and with `every=1` from a checkpoint before the trouble.

# %%
with lab.Inspector(model, "stats.jsonl", every=1) as look:
    for step in range(6):
        batch, scale = trainer.next_batch(), 512.0 if step == 4 else 1.0
        if step == 4:
            files.save_checkpoint("run", step, model=model, optimizer=optimizer)
            bad_batch = batch
        loss = scale * model.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        look.step()

# %% [markdown]
# One loss says little about one step. The Inspector says more:

# %% digits vary
print(look.first_bad_step())

# %% [markdown]
# Nearly all numbers of one gradient were cut off: they are larger than the largest number of FP8 under a scale that was made for
# smaller ones.
#
# ## Repeat it
#
# Is that the cause, or only something that looks bad? Load the checkpoint before the step, and let `replay` repeat the step: as it was,
# in high precision, and with operands raised to high precision one by one.

# %% digits vary
files.load_checkpoint("run", model=model, optimizer=optimizer)  # also the random numbers
result = lab.replay(model, [bad_batch], lambda model, batch: 512.0 * model.loss(*batch), optimizer=optimizer)
print(result)

# %% [markdown]
# One operand explains nearly all of the difference, and the remedy is a rule for the recipe.
#
# ## Mend it
#
# MXFP8 takes its scales from the tensor itself, so it cannot be surprised:

# %% digits vary
cg.convert(model, "mxfp8")
again = lab.replay(model, [bad_batch], lambda model, batch: 512.0 * model.loss(*batch), optimizer=optimizer)
print(next(line for line in str(again).splitlines() if "differs" in line))

# %% [markdown]
# [Inspect](../how-to/inspect.md) and [replay](../how-to/replay.md) say what else they can do, also for `transformers.Trainer` and Lightning.
