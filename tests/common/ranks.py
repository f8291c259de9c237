"""Work done by several forked processes over gloo, and models to train in them."""

import datetime
import hashlib
import pickle

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import crossgrain as cg
from crossgrain.linear.gathered_weight import GatheredWeight
from crossgrain.tensor.sharding import local_part

# What crossgrain gathers rows with: torch 2.13 has a new name for it.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
PATIENCE = datetime.timedelta(minutes=5)  # to compile kernels; who waits for a rank that raised must not wait for ever


def run(work, ranks, tmp_path, *args):
    """``work(rank, *args)`` of every rank, in order. Processes are forked: what the parent has, they have."""
    folder = tmp_path / f"ranks{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    mp.start_processes(_rank, args=(work, ranks, str(folder), args), nprocs=ranks, start_method="fork")
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(ranks)]


def _rank(rank, work, ranks, folder, args):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    dist.barrier()  # gloo fails in a rank that is still connecting to one that has already done its work and gone
    result = work(rank, *args)
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(result, file)
    dist.destroy_process_group()


def mesh_of(*sizes):
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def error_of(work):
    """The type and text of what ``work`` raises; None if it does not."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


# ---- models ------------------------------------------------------------------------------------------------


def mixed_layers(linear, hidden=128, width=64):
    """Quantized layers among plain ones."""
    return nn.Sequential(
        linear(width, hidden), nn.GELU(), linear(hidden, width), nn.LayerNorm(width), nn.Linear(width, width)
    )


def quantized_model(recipe, seed=0, **sizes):
    """Weights are kept quantized."""
    torch.manual_seed(seed)
    with cg.quantized_model_init(recipe=recipe):
        model = mixed_layers(cg.Linear, **sizes)
    bind(model, recipe)
    return model


def bind(model, recipe):
    for module in model.modules():
        if isinstance(module, cg.Linear):
            module.bound_recipe = cg.recipe.as_recipe(recipe)


def converted_model(recipe, seed=0, **sizes):
    """Weights are in high precision; the last layer is left as it is."""
    torch.manual_seed(seed)
    model = mixed_layers(nn.Linear, **sizes)
    cg.convert(model, recipe, skip="4")
    return model


def shard(model, mesh, **options):
    """Layer by layer, as one does."""
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(steps, width=64, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(32, width, generator=generator) for _ in range(steps)]


def train(model, optimizer, steps=10):
    """The loss of each step."""
    torch.manual_seed(1)  # gradients may be rounded at random
    losses = []
    for x in batches(steps, width=model[0].in_features):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- what ranks hold -------------------------------------------------------------------------------------


def digest(model):
    """A hash of every number the model computes with: of a sharded one, of what has been gathered."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        for tensor in _tensors(parameter):
            found.update(
                tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
            )
    for module in sharded:
        module.reshard()
    return found.hexdigest()


def _tensors(parameter):
    parameter = local_part(parameter)
    if isinstance(parameter, GatheredWeight):
        parameter = parameter.quantized
    if not isinstance(parameter, cg.QuantizedTensorStorage):
        return [parameter]
    return [
        tensor
        for plane in parameter.planes()
        for tensor in (plane.operand_codes(), plane.scale is not None and plane.operand_scales(), plane.amax)
        if isinstance(tensor, torch.Tensor)
    ]


def high_precision(model):
    """The parameters of a model whose shards are in high precision, whole."""
    with torch.no_grad():
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in model.named_parameters()
        }
