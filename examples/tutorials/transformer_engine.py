# %% [markdown]
# # Run Transformer Engine's and Megatron's code without a GPU
#
# A training program that imports `transformer_engine` needs an NVIDIA GPU. To find out on a laptop whether a change of it is right, let
# crossgrain answer that import. The numbers are those of the formats, bit for bit.
#
# ## Two lines

# %%
import crossgrain.compat

crossgrain.compat.install()  # or, without a change of the program: python -m crossgrain.te train.py

# %% [markdown]
# From here on it is a program for Transformer Engine:

# %%
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Format, MXFP8BlockScaling, NVFP4BlockScaling

torch.manual_seed(0)
x = torch.randn(64, 128, requires_grad=True)
for recipe in (MXFP8BlockScaling(fp8_format=Format.E4M3), NVFP4BlockScaling()):
    layer = te.LayerNormMLP(128, 512, params_dtype=torch.float32)
    with te.autocast(enabled=True, recipe=recipe):
        y = layer(x)
    y.sum().backward()
    print(type(recipe).__name__, list(y.shape), bool(x.grad.isfinite().all()))

# %% [markdown]
# What Transformer Engine has and crossgrain has not raises, and says what to do instead. What works only with CUDA raises
# `NeedsCudaError`. To find the opposite, code that works here and not there, use strict mode:

# %%
from transformer_engine.pytorch import NVFP4Quantizer

columns = NVFP4Quantizer(rowwise=False, columnwise=True)(torch.randn(64, 128, dtype=torch.bfloat16))
print(list(columns.dequantize().shape))
with crossgrain.settings.override(strict=True):
    try:
        columns.dequantize()
    except NotImplementedError as error:
        print(f"NotImplementedError: {error}")

# %% [markdown]
# ## Megatron-core
#
# Megatron-core trains its GPT with these layers. It also calls CUDA directly; `examples/megatron` answers those calls. Three steps of
# its model, optimizer and schedule, as they come from PyPI (`pip install 'crossgrain[megatron]'`):

# %% hidden
import subprocess
import sys
from pathlib import Path

ROOT = Path(crossgrain.__file__).parents[2]

# %% digits vary
command = [sys.executable, ROOT / "examples/megatron/train.py", "--recipe", "mxfp8", "--steps", "3"]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stdout if done.returncode == 0 else done.stderr)

# %% hidden
crossgrain.compat.uninstall()

# %% [markdown]
# [Transformer Engine](../how-to/transformer_engine.md) has the list of what is available, and of what differs.
