# %% [markdown]
# # Convert a Llama and train it
#
# A small Llama of transformers learns to predict bytes of a text, first in fp32, then with MXFP8 in forward and NVFP4 in
# backward. It needs `pip install 'crossgrain[hf]'`, and takes a quarter of a minute on one core.
#
# ## The model
#
# Nothing about it is special. A real one comes from `LlamaForCausalLM.from_pretrained(...)`.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import crossgrain as cg
from crossgrain.gpt import load_text


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


# %% [markdown]
# ## The recipe
#
# `convert` changes the model in place and reports what it did. The output head stays in high precision, unless you ask for it.

# %%
model = llama()
print(cg.convert(model, "mxfp8-fwd-nvfp4-bwd"))

# %% [markdown]
# Parameters and their names are what they were, so nothing else of your program changes:

# %%
print(model.model.layers[0].mlp.up_proj)
print(sorted(model.state_dict()) == sorted(llama().state_dict()))

# %% [markdown]
# ## Training
#
# The loop is a plain one. Both runs start from the same weights and see the same data.

# %%
text = load_text().train


def train(model, steps=120):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (16,), generator=data)
        batch = torch.stack([text[start : start + 64] for start in starts]).long()
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


plain, quantized = train(llama()), train(model)
for step in (0, 39, 79, 119):
    print(f"step {step:3}: fp32 {plain[step]:.1f}, quantized {quantized[step]:.1f}")

# %% hidden
from matplotlib import pyplot as plt

from docs.pictures.style import BLUE, RED, save

figure, axes = plt.subplots(figsize=(7.6, 3.2))
axes.plot(plain, color=BLUE, label="fp32")
axes.plot(quantized, color=RED, label="MXFP8 forward, NVFP4 backward", linestyle="--")
axes.set_xlabel("step")
axes.set_ylabel("loss, nats per byte")
axes.legend()
save(figure, "tutorial-llama")

# %% [markdown]
# ![Two curves of the loss over 120 steps, of fp32 and of the recipe, which lie on top of each other and fall from 5.5 to about 2.4](../images/tutorial-llama.svg)
#
# ## What was saved
#
# Between forward and backward a layer keeps its input in the format that wgrad will read: 4.5 bits for each number instead of
# 32. `crossgrain explain` shows which formats those are:

# %%
print(cg.GemmRecipe.load("mxfp8-fwd-nvfp4-bwd").explain())

# %% [markdown]
# ## Where next
#
# - [Which recipe for your own model](choose_recipe.md)
# - [What convert leaves alone, and how to change that](../how-to/convert.md#what-stays-in-high-precision)
# - [The same with `transformers.Trainer`](../how-to/integrations.md)
