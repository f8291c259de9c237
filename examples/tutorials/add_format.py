# %% [markdown]
# # Add a format
#
# A format is data: what its codes mean, how many of them share a scale, and where the scale comes from. This page adds a 4-bit format
# whose sixteen numbers are those of NF4, which follow the normal distribution, with a power-of-two scale for every 32.
#
# ## The numbers

# %%
import numpy as np
import torch

import crossgrain as cg
from crossgrain.formats import Format, ScaleLayout, TableElement, register_format

NUMBERS = (
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
)  # fmt: skip
nf4 = TableElement("nf4", NUMBERS)
register_format(Format("mx_nf4", nf4, block=(1, 32), scale_rule="e8m0_up", layout=ScaleLayout(pad=(128, 4))))

# %% [markdown]
# That is all. Everything that works for built-in formats works for it:

# %%
torch.manual_seed(0)
x = torch.randn(64, 128)
q = cg.quantize(x, "mx_nf4")
print(q.plane(cg.ROWWISE).format.bits_per_element, "bits for each number")
for name in ("mx_nf4", "mxfp4", "nvfp4"):
    decoded = cg.quantize(x, name).dequantize()
    print(f"{name:7} {(decoded - x).norm() / x.norm():.1%}")

# %% [markdown]
# ## Test it against something that shares no code
#
# A page of numpy: the scale is the smallest power of two that is not below the largest magnitude, and each number becomes the nearest
# one of the table.

# %%
blocks = x.numpy().reshape(-1, 32)
scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(axis=1, keepdims=True)))
table = np.array(NUMBERS, dtype=np.float32)
nearest = np.abs((blocks / scale)[..., None] - table).argmin(axis=-1)
expected = (table[nearest] * scale).reshape(x.shape)
print("equal in every number:", np.array_equal(expected, q.dequantize().numpy()))

# %% [markdown]
# ## Train with it
#
# In recipes it has a name like any other. There is no compiled kernel for it, so the reference serves: the same bytes, much slower.

# %%
model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 128))
print(cg.convert(model, "fprop: mx_nf4, dgrad: mxfp8, wgrad: mxfp8"))
model(x).square().mean().backward()

# %% [markdown]
# On the command line, `crossgrain --import my_formats explain --recipe "all: mx_nf4"` first imports the module that registers it.
# To bring a format into crossgrain itself, see *How to add a format* in `CONTRIBUTING.md`;
# [Formats](../reference/formats.md#adding-a-format) has the fields.
