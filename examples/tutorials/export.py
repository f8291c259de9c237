# %% [markdown]
# # Export for inference
#
# Fine-tune a model with the rounding that it will have when it is served, and hand exactly those bytes to the engine. It needs
# `pip install 'crossgrain[safetensors]'`.
#
# ## Train with 4-bit weights

# %%
import json
from pathlib import Path

import torch
from safetensors import safe_open

import crossgrain as cg


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))


model = network()
cg.convert(model, "nvfp4-qat")  # forward in NVFP4, backward in high precision
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(64, 64)
losses = []
for _ in range(20):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.1f} to {losses[-1]:.1f}")

# %% [markdown]
# ## Write it

# %%
print(cg.export(model, "served", format="compressed-tensors"))

# %% [markdown]
# The directory has what vLLM reads: codes, block scales and the scale of the tensor, in the layout of compressed-tensors.

# %%
with safe_open(Path("served") / "model.safetensors", "pt") as file:
    for name in sorted(file.keys()):
        tensor = file.get_tensor(name)
        print(f"{name:22} {tensor.dtype!s:20} {list(tensor.shape)}")
config = json.loads(Path("served/config.json").read_text())
print(config["quantization_config"]["format"])

# %% [markdown]
# ## And back
#
# `load_exported` reads it into a model, whose weights are then those bytes. Both compute the same, bit for bit:

# %%
other = network()
cg.convert(other, "nvfp4-qat")
cg.load_exported(other, "served")
with torch.no_grad():
    print(torch.equal(model(x), other(x)))

# %% [markdown]
# [Export](../how-to/export.md) has the other layouts: ModelOpt for TensorRT-LLM, gpt-oss, GGUF for llama.cpp. For a model of Hugging Face,
# `crossgrain export served --hf Llama-3.2-1B --checkpoint run` does it from the command line.
