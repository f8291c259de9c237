"""What a plan says of FSDP2 is what two ranks measure: bytes that arrive in each pass, parameters and optimizer."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import crossgrain as cg
from crossgrain.distributed import count_gathered_bytes, gather_by_pass, gather_quantized
from crossgrain.gpt.model import GPT, GPTConfig
from crossgrain.tensor import QuantizedTensor
from crossgrain.tensor.sharding import local_part

from ..common.ranks import bind, mesh_of, run

EVEN, UNEVEN = (GPTConfig(layers=2, width=width, heads=2, context=32) for width in (64, 40))
RECIPES = ("hp", "mxfp8", "nvfp4", "nvfp4-plain", "mxfp8-fwd-nvfp4-bwd", "fp8-block; head: hp")
KINDS = ("gather weights for forward", "gather weights for backward", "reduce-scatter gradients")


class Blocks(nn.Module):
    """Layers whose weights are kept quantized, with rows and columns that divide into tiles of scales."""

    def __init__(self, recipe):
        super().__init__()
        with cg.quantized_model_init(recipe=recipe):
            self.blocks = nn.ModuleList(cg.Linear(256, 256, params_dtype=torch.bfloat16) for _ in range(3))
        self.norm = nn.LayerNorm(256, dtype=torch.bfloat16)
        bind(self, recipe)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def converted_gpt(recipe, config):
    model = GPT(config).bfloat16()
    if recipe != "hp":
        cg.convert(model, recipe)
        gather_quantized(model)
    return model


def sharded(model, ranks, reshard):
    mesh = mesh_of(ranks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    gather_by_pass(model)
    return model


class ReducedBytes(DefaultReduceScatter):
    total = 0

    def __call__(self, output_tensor, input_tensor, *args, **options):
        self.total += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, *args, **options)


def arriving(model, loss, ranks):
    """Bytes that come from the other ranks: of weights for forward and for backward, and of gradients."""
    gathered, reduced = count_gathered_bytes(model), ReducedBytes()
    for module in (*model.blocks, model):
        module.set_custom_reduce_scatter(reduced)
    value = loss()
    forward = gathered.total
    value.backward()
    return [size * (ranks - 1) // ranks for size in (forward, gathered.total - forward, reduced.total)]


def planned(model, recipe, ranks, **options):
    made = cg.plan(model, recipe, gpus=ranks, sequence=32, **options)
    sizes = {traffic.kind: traffic.bytes for traffic in made.wire}
    return [sizes.get(kind, 0) for kind in KINDS], made.memory


# ---- weights in high precision -------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Loaded before the process is forked."""
    values = torch.arange(32).view(1, -1)
    for recipe in RECIPES:
        converted_gpt(recipe, EVEN).loss(values, values).backward()


def _gpt(rank, ranks, config, reshard):
    values = torch.arange(config.context).view(1, -1)
    found = {}
    for recipe in RECIPES:
        model = sharded(converted_gpt(recipe, config), ranks, reshard)
        found[recipe] = arriving(model, lambda model=model: model.loss(values, values), ranks)
    return found


@pytest.mark.parametrize("ranks, config, reshard", [(2, EVEN, True), (2, EVEN, False), (3, UNEVEN, True)])
def test_bytes_that_arrive(tmp_path, ranks, config, reshard):
    """Shards may be uneven and end inside blocks, and widths have to be padded."""
    with torch.device("meta"):
        model = GPT(config)
    options = {"parameters": "high_precision", "gather": "planes", "reshard_after_forward": reshard}
    for measured in run(_gpt, ranks, tmp_path, ranks, config, reshard):
        for recipe in RECIPES:
            assert measured[recipe] == planned(model, recipe, ranks, **options)[0], recipe


# ---- weights that are kept quantized -------------------------------------------------------------------


def bytes_of(tensor):
    if isinstance(tensor, QuantizedTensor):
        return sum(buffer.nbytes for plane in tensor.planes() for buffer in plane.buffers())
    return tensor.nbytes


def amaxes_of(tensor):
    planes = tensor.planes() if isinstance(tensor, QuantizedTensor) else []
    return sum(plane.amax.nbytes for plane in planes if plane.amax is not None)


def _kept(rank):
    found = {}
    for recipe in RECIPES[1:5]:
        model = sharded(Blocks(recipe), 2, True)
        sizes = arriving(model, lambda model=model: model(torch.randn(32, 256, dtype=torch.bfloat16)).sum(), 2)
        optimizer = cg.optim.FusedAdam(model.parameters(), master_weights=True)
        optimizer.step()
        parts = [local_part(parameter) for parameter in model.parameters()]
        states = [local_part(state) for by_name in optimizer.state.values() for state in by_name.values()]
        found[recipe] = [sizes, *(sum(map(of, parts)) for of in (bytes_of, amaxes_of)), sum(map(bytes_of, states))]
    return found


def test_weights_and_optimizer_of_a_rank(tmp_path):
    for measured in run(_kept, 2, tmp_path):
        for recipe, (sizes, weights, amaxes, states) in measured.items():
            wire, memory = planned(Blocks(recipe), recipe, 2)
            assert sizes == wire, recipe
            assert weights - amaxes // 2 == sum(memory.weights.values()), "an amax of the whole is on each rank"
            assert states == memory.optimizer, recipe
