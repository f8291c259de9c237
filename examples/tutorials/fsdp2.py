# %% [markdown]
# # Keep weights quantized with FSDP2
#
# Weights that are kept quantized take 8.25 bits for a plane of MXFP8 and 4.5 for one of NVFP4 instead of 32, and FSDP2 gathers those
# bytes. An optimizer cannot add a small update to a 4-bit number, so it keeps float32 *masters*, of which each rank has its shard.
#
# ## What a rank does

# %%
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import crossgrain as cg
from crossgrain.distributed import count_gathered_bytes, gather_by_pass

RECIPE = "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rht), weight.source: dequantized"
STEPS = 4


def train(rank, ranks):
    torch.manual_seed(0)
    with cg.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=True):
        model = torch.nn.Sequential(*(cg.Linear(256, 256, bias=False) for _ in range(3)))
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gather_by_pass(model)  # rows in forward, columns in backward
    gathered = count_gathered_bytes(model)
    optimizer = cg.optim.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)

    losses = []
    for step in range(STEPS):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
        with cg.autocast(recipe=RECIPE):
            loss = (model(x) - x).square().mean()  # every rank has the same batch here, to compare with one process
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gathered.total / STEPS


# %% [markdown]
# ## Two ranks, then one
#
# In a program of yours, `torchrun --nproc-per-node 2 train.py` starts the ranks. On this page they are forked.

# %%
import multiprocessing
import tempfile
from pathlib import Path


def one_rank(rank, ranks, meeting, results):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    results.put((rank, train(rank, ranks)))
    dist.destroy_process_group()


def run(ranks):
    context = multiprocessing.get_context("fork")
    results, meeting = context.Queue(), Path(tempfile.mkdtemp()) / "meeting"
    processes = [context.Process(target=one_rank, args=(rank, ranks, meeting, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return found[0]


two, bytes_of_two = run(2)
one, _ = run(1)
print("the same losses, bit for bit:", two == one)
print("smaller after four steps:", two[-1] < two[0])

# %% [markdown]
# ## What travelled

# %%
numbers = 3 * 256 * 256
print(f"{bytes_of_two / numbers:.2f} bytes for each weight and step; fp32 in both passes would be 8, bf16 4")

# %% [markdown]
# Forward gathers rows (MXFP8), backward gathers columns (NVFP4). [Distributed](../how-to/distributed.md) has all of it: converted
# models, checkpoints that can be loaded on any number of ranks, experts. `examples/train_fsdp2_tp.py` adds tensor parallelism.
