"""A small transformer on several ranks: layers shared by tensor parallel ranks, shards over the others by FSDP2.

    torchrun --nproc-per-node 4 examples/train_fsdp2_tp.py --tensor-parallel 2

Weights are kept quantized and updated from float32 masters; FSDP2 gathers the bytes of their planes, rows in forward
and columns in backward. Without torchrun it is one process.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import crossgrain as cg
from crossgrain.distributed import count_gathered_bytes, gather_by_pass
from crossgrain.gpt.data import random_batch
from crossgrain.lab import load_text

WIDTH, CONTEXT, BATCH = 128, 64, 8  # the batch of all ranks together


class Model(nn.Module):
    """Bytes in, bytes out. The ranks of ``mesh`` share the layers; all of them have the embedding and the head."""

    def __init__(self, layers: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(
            cg.TransformerLayer(
                WIDTH, 4 * WIDTH, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
                self_attn_mask_type="causal", attn_input_format="bshd", set_parallel_mode=True,
                tp_group=mesh.get_group(),
            ) for _ in range(layers)
        )  # fmt: skip

    def forward(self, values: Tensor, following: Tensor) -> Tensor:
        x = self.embed(values)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def train(mesh: DeviceMesh, steps: int, recipe: str, layers: int) -> tuple[list[float], float]:
    """The loss of every step, averaged over the ranks, and the bytes that a rank gathers in a step."""
    data, tensor = mesh["data"], mesh["tensor"]
    torch.manual_seed(0)
    with cg.quantized_model_init(recipe=recipe):
        model = Model(layers, tensor)
    for layer in model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    gather_by_pass(model)
    gathered = count_gathered_bytes(model)
    optimizer = cg.optim.FusedAdam(model.parameters(), lr=2e-3, master_weights=True)
    losses = []
    for step in range(steps):
        batch = random_batch(load_text().train, BATCH, CONTEXT, torch.Generator().manual_seed(step))
        mine = [values.chunk(data.size())[data.get_local_rank()] for values in batch]
        with cg.autocast(recipe=recipe):
            loss = model(*mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / mesh.size())
    return losses, gathered.total / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS", help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29501")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if ranks % arguments.tensor_parallel:
        parser.error(f"{ranks} ranks cannot be divided into groups of {arguments.tensor_parallel}")
    sizes = (ranks // arguments.tensor_parallel, arguments.tensor_parallel)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    losses, gathered = train(mesh, arguments.steps, arguments.recipe, arguments.layers)
    if dist.get_rank() == 0:
        print(f"{sizes[0]} shards of layers that {sizes[1]} ranks share: loss {losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"a rank gathers {gathered / 1e6:.2f} MB in a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
