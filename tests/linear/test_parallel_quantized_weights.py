"""Weights that are kept quantized and that tensor parallel ranks share: parts of the whole quantized weight."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import crossgrain as cg
from crossgrain import ops
from crossgrain.distributed import gather_quantized
from crossgrain.optim.weight_update import quantize_master_weights
from crossgrain.tensor.sharding import local_part

from ..common.quantizers import assert_same_bytes
from ..common.ranks import error_of, run

RANKS = 2
INPUTS, OUTPUTS = 64, 128
RECIPES = (
    "fp8",
    "all: nvfp4",
    "all: nvfp4(2d)",
    "mxfp8",
    "fprop: fp8, dgrad: nvfp4, wgrad: nvfp4(rht)",
)


def numbers(seed=0):
    """The largest ones are in one corner: parts have other amaxes than the whole."""
    spread = torch.logspace(-1, 1, OUTPUTS).view(-1, 1) * torch.logspace(-1, 1, INPUTS)
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed)) * spread


def part(whole, mode, rank):
    return whole.chunk(RANKS, {"column": 0, "row": 1}[mode])[rank]


def layer_of(recipe, **options):
    with cg.quantized_model_init(recipe=recipe):
        return cg.Linear(INPUTS, OUTPUTS, bias=False, **options)


def shared_layer(recipe, mode, rank, **options):
    init = {"init_method": lambda weight: weight.copy_(part(numbers(), mode, rank)), "parallel_mode": mode}
    return layer_of(recipe, **init, **options)


def whole_weights(recipe):
    """As it is made, and after each write of the test below."""
    layer = layer_of(recipe, init_method=lambda weight: weight.copy_(numbers()))
    made = [layer.weight.detach().clone()]
    with torch.no_grad():
        layer.weight.copy_(numbers(1))
    made.append(layer.weight.detach().clone())
    optimizer = cg.optim.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
    layer.weight.grad = numbers(2)
    optimizer.step()
    made.append(layer.weight.detach().clone())
    quantize_master_weights([layer.weight], [numbers(3)], [0])
    made.append(layer.weight.detach().clone())
    return made


def _compare(rank, expected):
    for (recipe, mode), wholes in expected.items():
        layer = shared_layer(recipe, mode, rank, tp_group=dist.group.WORLD)
        found = [layer.weight.detach().clone()]
        with torch.no_grad():
            layer.weight.copy_(part(numbers(1), mode, rank))
        found.append(layer.weight.detach().clone())
        optimizer = cg.optim.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
        layer.weight.grad = part(numbers(2), mode, rank).contiguous()
        optimizer.step()
        found.append(layer.weight.detach().clone())
        quantize_master_weights([layer.weight], [part(numbers(3), mode, rank).contiguous()], [0])
        found.append(layer.weight.detach().clone())
        for mine, whole in zip(found, wholes, strict=True):
            assert_same_bytes(mine, part(whole, mode, rank).clone())


def test_parts_are_those_of_the_whole_quantized_weight(tmp_path):
    """When they are made, written, updated from masters, and from masters that ranks have."""
    wholes = {recipe: whole_weights(recipe) for recipe in RECIPES}
    run(_compare, RANKS, tmp_path, {(recipe, mode): wholes[recipe] for recipe in RECIPES for mode in ("column", "row")})


def _in_pieces(rank, expected):
    """Two tensor parallel ranks, for each of which two others have halves of the masters."""
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    others = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    place, half = rank % 2, rank // 2
    for recipe, whole in expected.items():
        layer = shared_layer(recipe, "column", place, tp_group=pairs[half])
        master = part(numbers(3), "column", place).flatten()
        cut = master.numel() // 2 + 8  # within a row, and a block
        piece, start = (master[:cut], 0) if half == 0 else (master[cut:], cut)
        quantize_master_weights([layer.weight], [piece], [start], group=others[place])
        mine, theirs = layer.weight.detach().planes()[0], part(whole, "column", place).planes()[0]
        assert torch.equal(mine.operand_scales(), theirs.operand_scales()), recipe
        assert mine.amax is None or torch.equal(mine.amax, theirs.amax), recipe


def test_masters_in_pieces_follow_the_amax_of_all_parts(tmp_path):
    expected = {}
    for recipe in ("fp8", "all: nvfp4", "fprop: nvfp4(4over6), dgrad: mxfp8, wgrad: mxfp8"):
        layer = layer_of(recipe, init_method=lambda weight: weight.copy_(numbers()))
        quantize_master_weights([layer.weight], [numbers(3)], [0])
        expected[recipe] = layer.weight.detach()
    run(_in_pieces, 4, tmp_path, expected)


def _groups_that_come_later(rank):
    kept = error_of(lambda: shared_layer("fp8", "column", rank, tp_size=RANKS))
    blocks = shared_layer("mxfp8", "column", rank, tp_size=RANKS)
    later = shared_layer("fp8", "column", rank, tp_size=RANKS, device="meta")
    later.set_tensor_parallel_group(dist.group.WORLD)
    later.reset_parameters()
    copied = copy.deepcopy(later)
    copied.set_tensor_parallel_group(dist.group.WORLD)
    with torch.no_grad():
        copied.weight.copy_(part(numbers(1), "column", rank))
    return kept, type(blocks.weight).__name__, later.weight.detach(), copied.weight.detach()


def test_a_scale_in_common_needs_the_group(tmp_path):
    made, written = whole_weights("fp8")[:2]
    for rank, (kept, blocks, mine, copied) in enumerate(run(_groups_that_come_later, RANKS, tmp_path)):
        assert kept[0] == "RuntimeError"
        assert "under scales that tp_size=2 ranks have in common, but the process group is not set yet" in kept[1]
        assert blocks == "MXFP8Tensor"
        assert_same_bytes(mine, part(made, "column", rank).clone())
        assert_same_bytes(copied, part(written, "column", rank).clone())


def _of_other_modules(rank):
    torch.manual_seed(rank)
    group = dist.group.WORLD
    with cg.quantized_model_init(recipe="fp8"):
        mlp = cg.LayerNormMLP(64, 128, set_parallel_mode=True, tp_group=group)
        operation = ops.Linear(64, 128, tensor_parallel_mode="row", tensor_parallel_group=group)
    weights = {"fc1": mlp.fc1_weight, "fc2": mlp.fc2_weight, "operation": operation.weight}
    return {name: weight.planes()[0].scale.item() for name, weight in weights.items()}


def test_other_modules_have_one_scale_too(tmp_path):
    first, second = run(_of_other_modules, RANKS, tmp_path)
    assert first == second
    assert len(set(first.values())) == 3


def test_without_ranks_nothing_is_reduced():
    assert not layer_of("fp8").weight._quantizer.with_amax_reduction


# ---- in shards of FSDP2 --------------------------------------------------------------------------------------


def trained(layer, recipe, x, dy):
    """The last output."""
    layer.bound_recipe = cg.recipe.as_recipe(recipe)
    optimizer = cg.optim.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
    for _ in range(2):
        y = layer(x)
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def given():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(32, INPUTS, generator=generator), torch.randn(32, OUTPUTS, generator=generator)


def plain_layer(**options):
    return cg.Linear(INPUTS, OUTPUTS, bias=False, **options)


def _in_shards(rank, expected):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    place, shard = mesh.get_local_rank("tensor"), mesh.get_local_rank("shard")
    for (recipe, mode, kept), (output, whole) in expected.items():
        make = layer_of if kept else lambda recipe, **options: plain_layer(**options)
        init = {"init_method": lambda weight, mode=mode: weight.copy_(part(numbers(), mode, place))}
        layer = make(recipe, parallel_mode=mode, tp_group=mesh["tensor"].get_group(), **init)
        if not kept:
            gather_quantized(layer, recipe)
        fully_shard(layer, mesh=mesh["shard"])
        x, dy = given()
        if mode == "column":
            dy = part(dy, "row", place)
        else:
            x = part(x, "row", place)
        y = trained(layer, recipe, x, dy)
        if mode == "column":
            assert torch.equal(y, part(output, "row", place)), recipe
        else:  # a sum over ranks
            assert torch.allclose(y, output, rtol=1e-5, atol=1e-5 * output.abs().max()), recipe
        mine, theirs = local_part(layer.weight).detach(), part(whole, mode, place).chunk(2)[shard]
        if kept:
            assert_same_bytes(mine, theirs.clone())
        else:
            assert torch.equal(mine, theirs), (recipe, mode)


def test_shards_of_parts(tmp_path):
    expected = {}
    for recipe in RECIPES:
        for kept in (True, False):
            make = layer_of if kept else lambda recipe, **options: plain_layer(**options)
            layer = make(recipe, init_method=lambda weight: weight.copy_(numbers()))
            found = trained(layer, recipe, *given()), layer.weight.detach()
            expected |= {(recipe, mode, kept): found for mode in ("column", "row")}
    run(_in_shards, 4, tmp_path, expected)
