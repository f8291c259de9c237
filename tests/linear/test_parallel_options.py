"""Options of layers that ranks share: with numbers whose sums are exact, all is as in one process, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import crossgrain as cg
from crossgrain import ops
from crossgrain import recipe as recipes
from crossgrain.distributed import RowwiseParallel, mark_sequence_parallel, reduce_sequence_parallel_gradients
from crossgrain.tensor.sharding import local_part

from ..common.quantizers import E4M3
from ..common.ranks import GATHER, error_of, run
from .test_parallel import exact_numbers, part, parts_of_step, put_together, shared_layer, tensors, with_weights

RANKS = 2
EVEN, RAGGED_COLUMN, RAGGED_ROW = (64, 64, 64), (48, 40, 64), (48, 64, 40)
NVFP4 = recipes.NVFP4BlockScaling()  # which rounds gradients at random
NEAREST = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)


def rounding_inputs(role):
    tensor = None if role is None else role.tensor_type
    if tensor == "weight":
        return cg.NVFP4Quantizer()
    return cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=tensor == "input")


def fp8_inputs(role):
    """Which need no padding of M, where gradients do."""
    if role is not None and role.tensor_type == "input":
        return cg.Float8CurrentScalingQuantizer(E4M3)
    return cg.MXFP8Quantizer(E4M3)


class Mixed(recipes.CustomRecipe):
    allow_mixed = True


def overriding(override):
    return recipes.MXFP8BlockScaling(backward_override=override)


VARIANTS = {
    "microbatches": ("mxfp8", recipes.MXFP8BlockScaling(), EVEN, {}),
    "main_grad": ("mxfp8", recipes.MXFP8BlockScaling(), EVEN, {"fuse_wgrad_accumulation": True}),
    "delayed_wgrad": ("fp8", recipes.Float8CurrentScaling(), EVEN, {"delay_wgrad_compute": True}),
    "original_input": ("mxfp8", recipes.MXFP8BlockScaling(), EVEN, {"save_original_input": True}),
    "kept_quantized": ("mxfp8", recipes.MXFP8BlockScaling(), EVEN, {}),
    "dequantized": ("mxfp8", overriding("dequantized"), EVEN, {}),
    "high_precision": ("mxfp8", overriding("high_precision"), EVEN, {}),
    "at_random": ("nvfp4", NVFP4, EVEN, {}),
    "input_at_random": ("nvfp4", recipes.CustomRecipe(qfactory=rounding_inputs), EVEN, {}),
    "ragged_fp8": ("fp8", recipes.Float8CurrentScaling(), None, {}),
    "ragged_mxfp8": ("mxfp8", recipes.MXFP8BlockScaling(), None, {}),
    "ragged_nvfp4": ("nvfp4", NEAREST, None, {}),
    "ragged_original": ("mxfp8", recipes.MXFP8BlockScaling(), None, {"save_original_input": True}),
    "ragged_mixed": ("fp8", Mixed(qfactory=fp8_inputs), None, {}),
    "ragged_hybrid": ("nvfp4", recipes.as_recipe("fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8"), None, {}),
}
SHARED = [(mode, sequence_parallel) for mode in ("column", "row") for sequence_parallel in (False, True)]


def data(name, mode):
    family, recipe, shape, options = VARIANTS[name]
    shape = shape or (RAGGED_COLUMN if mode == "column" else RAGGED_ROW)
    return tensors(family, exact_numbers, RANKS, shape), recipe, options


def step(name, layer, x, dy, recipe):
    """Two microbatches, the second of which takes what the first has cached."""
    weight = layer.weight
    if name == "main_grad":
        weight.main_grad = torch.zeros(weight.shape)
    for first in (True, False):
        torch.manual_seed(0)
        x = x.detach().clone().requires_grad_()
        with cg.autocast(recipe=recipe):
            y = layer(x, is_first_microbatch=first if name == "microbatches" else None)
        y.backward(dy)
        layer.backward_dw()
    dw = weight.main_grad if name == "main_grad" else weight.grad
    return {"y": y.detach(), "dx": x.grad, "dw": dw, "db": layer.bias.grad}


def made(name, make):
    with cg.quantized_model_init(name == "kept_quantized", recipe=VARIANTS[name][1]):
        return make()


def on_ranks(rank):
    found = {}
    for name in VARIANTS:
        for mode, sequence_parallel in SHARED:
            (x, w, b, dy), recipe, options = data(name, mode)
            layer = made(
                name,
                lambda: shared_layer(rank, RANKS, mode, sequence_parallel, w, b, **options),  # noqa: B023
            )
            x, dy = parts_of_step(rank, RANKS, mode, sequence_parallel, x, dy)
            found[name, mode, sequence_parallel] = step(name, layer, x, dy, recipe)
    return found


def test_options(tmp_path):
    expected = {}
    for name in VARIANTS:
        for mode in ("column", "row"):
            (x, w, b, dy), recipe, options = data(name, mode)
            layer = made(name, lambda: with_weights(cg.Linear(*reversed(w.shape), **options), w, b))  # noqa: B023
            expected[name, mode] = step(name, layer, x, dy, recipe)
    parts = run(on_ranks, RANKS, tmp_path)
    for name, mode, sequence_parallel in parts[0]:
        found = put_together([of_rank[name, mode, sequence_parallel] for of_rank in parts], mode, sequence_parallel)
        for key, mine in found.items():
            assert torch.equal(mine, expected[name, mode][key]), (name, mode, sequence_parallel, key)


# ---- tensors that come quantized -----------------------------------------------------------------------------


def chain(first, second, x, dy):
    x = x.clone().requires_grad_()
    with cg.autocast(recipe=recipes.MXFP8BlockScaling()):
        y = second(first(x, fp8_output=True), fp8_grad=True)
    y.backward(dy)
    return y.detach(), x.grad, first.weight.grad, second.weight.grad


def chained_ranks(rank):
    x, w, b, dy = tensors("mxfp8", exact_numbers, RANKS, EVEN)
    first = cg.Linear(64, 64, bias=False, parallel_mode="row", tp_group=dist.group.WORLD, sequence_parallel=True)
    first.weight.data.copy_(part(w, rank, RANKS, 1))
    second = shared_layer(rank, RANKS, "column", True, w, b)
    return chain(first, second, part(x, rank, RANKS, 1), part(dy, rank, RANKS, 1))


def test_quantized_activations_and_gradients(tmp_path):
    """They come with a rank's rows and are gathered all the same."""
    x, w, b, dy = tensors("mxfp8", exact_numbers, RANKS, EVEN)
    first = cg.Linear(64, 64, bias=False)
    first.weight.data.copy_(w)
    expected = chain(first, with_weights(cg.Linear(64, 64), w, b), x, dy)
    found = run(chained_ranks, RANKS, tmp_path)
    for index, dim in enumerate((1, 1, 1, 0)):
        assert torch.equal(torch.cat([results[index] for results in found], dim), expected[index]), index


# ---- four ranks ----------------------------------------------------------------------------------------------


def on_four_ranks(rank):
    found = {}
    for family, recipe in FOUR.items():
        for mode, sequence_parallel in SHARED:
            x, w, b, dy = tensors(family, exact_numbers, 4, (128, 128, 128))
            layer = shared_layer(rank, 4, mode, sequence_parallel, w, b)
            x, dy = parts_of_step(rank, 4, mode, sequence_parallel, x, dy)
            found[family, mode, sequence_parallel] = step("", layer, x, dy, recipe)
    return found


FOUR = {"fp8": recipes.Float8CurrentScaling(), "mxfp8": recipes.MXFP8BlockScaling(), "nvfp4": NEAREST}


def test_four_ranks(tmp_path):
    expected = {}
    for family, recipe in FOUR.items():
        x, w, b, dy = tensors(family, exact_numbers, 4, (128, 128, 128))
        expected[family] = step("", with_weights(cg.Linear(128, 128), w, b), x, dy, recipe)
    parts = run(on_four_ranks, 4, tmp_path)
    for family, mode, sequence_parallel in parts[0]:
        found = put_together([of_rank[family, mode, sequence_parallel] for of_rank in parts], mode, sequence_parallel)
        for key, mine in found.items():
            assert torch.equal(mine, expected[family][key]), (family, mode, sequence_parallel, key)


# ---- what travels, and what is kept --------------------------------------------------------------------------


def traffic(rank, recipe, mode):
    """What a rank gathers in forward and in backward, and keeps in between: (dtype, bytes) of each."""
    x, w, b, dy = tensors("mxfp8", exact_numbers, RANKS, (64, 128, 64))
    layer = shared_layer(rank, RANKS, mode, True, w, b)
    x, dy = parts_of_step(rank, RANKS, mode, True, x, dy)
    sent, kept, gather = [], [], getattr(dist, GATHER)

    def counting(out, x, **options):
        sent.append((x.dtype, x.numel() * x.element_size()))
        return gather(out, x, **options)

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    setattr(dist, GATHER, counting)
    try:
        with cg.autocast(enabled=recipe is not None, recipe=recipe), saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layer(x.requires_grad_())
        forward = list(sent)
        y.backward(dy)
    finally:
        setattr(dist, GATHER, gather)
    return forward, sent[len(forward) :], kept[0]


def traffic_of_all(rank):
    return {
        (name, mode): traffic(rank, recipe, mode)
        for mode in ("column", "row")
        for name, recipe in (
            ("none", None),
            ("mxfp8", recipes.MXFP8BlockScaling()),
            ("fp8", recipes.Float8CurrentScaling()),
            ("hybrid", recipes.as_recipe("fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4")),
            ("at_random", NVFP4),
        )
    }


def test_bytes(tmp_path):
    mx = 33 / 32
    x, dy = 32 * 128, 32 * 64  # numbers of a rank
    number, byte = torch.float32, torch.uint8
    nvfp4 = 0.5 + 1 / 16
    expected = {
        ("none", "column"): ([(number, 4 * x)], [(number, 4 * x)], 4 * x),
        ("none", "row"): ([], [(number, 4 * dy)], None),
        ("mxfp8", "column"): ([(byte, mx * x)], [(byte, mx * x)], x),
        ("mxfp8", "row"): ([], [(byte, 2 * mx * dy)], None),
        ("fp8", "column"): ([(byte, x + 8)], [(byte, x + 8)], x),
        ("fp8", "row"): ([], [(byte, dy + 8)], None),  # one set of codes serves both directions
        ("hybrid", "column"): ([(byte, mx * x)], [(byte, nvfp4 * x + 8)], x // 2),
        ("hybrid", "row"): ([], [(byte, 2 * nvfp4 * dy + 8)], None),
        ("at_random", "column"): ([(byte, nvfp4 * x + 8)], [(byte, nvfp4 * x + 8)], x // 2),
        ("at_random", "row"): ([], [(byte, 2 * nvfp4 * dy + 8)], None),
    }
    for found in run(traffic_of_all, RANKS, tmp_path):
        for what, (forward, backward, kept) in expected.items():
            assert found[what][:2] == (forward, backward), what
            assert kept is None or found[what][2] == kept, what


# ---- delayed scaling, groups, errors -------------------------------------------------------------------------


def without_reduction(rank):
    x, w, b, _ = tensors("fp8", exact_numbers, RANKS, EVEN)
    recipe = recipes.DelayedScaling(amax_history_len=2, reduce_amax=False)
    layer = shared_layer(rank, RANKS, "column", True, w, b)
    x = part(x, rank, RANKS, 0) * (rank + 1)

    def steps():
        for _ in range(2):
            with cg.autocast(recipe=recipe):
                layer(x)

    return error_of(steps)


def test_scales_that_ranks_do_not_share(tmp_path):
    for kind, text in run(without_reduction, RANKS, tmp_path):
        assert kind == "RuntimeError" and "different rowwise fp8 scales for the whole" in text


def late_group(rank):
    layer = cg.Linear(8, 8, parallel_mode="row", tp_size=RANKS, sequence_parallel=True)
    x = torch.ones(4, 4)
    errors = [error_of(lambda: layer(x))]
    layer.set_tensor_parallel_group(dist.group.WORLD)
    assert layer(x).shape == (2, 8)
    alone = [dist.new_group([other]) for other in range(RANKS)][rank]
    errors += [
        error_of(lambda: layer(torch.ones(3, 4))),
        error_of(lambda: layer.set_tensor_parallel_group(alone)),
        error_of(lambda: cg.Linear(8, 8).set_tensor_parallel_group(dist.group.WORLD)),
        error_of(lambda: cg.Linear(8, 8, parallel_mode="row", tp_group=alone, tp_size=RANKS)),
        error_of(lambda: cg.Linear(7, 8, parallel_mode="row", tp_group=dist.group.WORLD)),
    ]
    return errors


def test_errors(tmp_path):
    for errors in run(late_group, RANKS, tmp_path):
        texts = [text for _, text in errors]
        assert "call set_tensor_parallel_group" in texts[0]
        assert "the first dimension of the input [3, 4] cannot be divided evenly among 2 ranks" in texts[1]
        assert "tp_size=2, but tp_group has 1 ranks" in texts[2]
        assert "made for one rank, but tp_group has 2" in texts[3]
        assert "tp_size=2, but tp_group has 1 ranks" in texts[4]
        assert "in_features=7 cannot be divided evenly among tp_size=2 ranks" in texts[5]


def test_sizes_and_marks():
    """Which needs no other ranks."""
    column = cg.LayerNormLinear(
        8, 12, parallel_mode="column", tp_size=2, sequence_parallel=True, parameters_split={"a": 4, "b": 8}
    )
    assert (column.in_features, column.out_features) == (8, 6)
    assert column.a_weight.shape == (2, 8) and column.b_weight.shape == (4, 8)
    for name in ("a_weight", "b_weight", "a_bias", "b_bias"):
        parameter = getattr(column, name)
        assert (parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride) == (True, 0, 1)
    assert column.layer_norm_weight.sequence_parallel and column.layer_norm_bias.sequence_parallel
    row = cg.Linear(8, 12, parallel_mode="row", tp_size=2, sequence_parallel=True)
    assert row.weight.shape == (12, 4) and row.bias.shape == (12,)
    assert row.weight.partition_dim == 1 and row.bias.sequence_parallel
    with pytest.raises(ValueError, match="rows of a_weight=3 cannot be divided evenly among tp_size=2 ranks"):
        cg.Linear(8, 12, parallel_mode="column", tp_size=2, parameters_split={"a": 3, "b": 9})
    with pytest.raises(ValueError, match="a norm needs whole rows"):
        cg.LayerNormLinear(8, 12, parallel_mode="row", tp_size=2)
    with pytest.raises(ValueError, match="ffn_hidden_size=9 cannot be divided evenly"):
        cg.LayerNormMLP(8, 9, set_parallel_mode=True, tp_size=2)
    with pytest.raises(ValueError, match="num_gqa_groups=1 cannot be divided evenly"):
        cg.MultiheadAttention(8, 2, num_gqa_groups=1, set_parallel_mode=True, tp_size=2)


def gradients_in_shards(rank, sharded):
    """Of ranks that share rows: of norms and biases, after they were added up."""
    meshes = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    group, place = meshes["tensor"].get_group(), meshes.get_local_rank("tensor")
    options = {"tp_group": group, "sequence_parallel": True, "device": "cpu"}
    torch.manual_seed(0)
    layer = cg.TransformerLayer(
        64, 128, 2, set_parallel_mode=True, output_layernorm=True, hidden_dropout=0.0, attention_dropout=0.0,
        qk_norm_type="RMSNorm", **options,
    )  # fmt: skip
    row = {"tensor_parallel_mode": "row", "tensor_parallel_group": group, "sequence_parallel": True}
    styled = parallelize_module(cg.Linear(64, 32), meshes["tensor"], RowwiseParallel(sequence_parallel=True))
    operation, norm = ops.Linear(64, 32, **row), nn.LayerNorm(32)
    model = nn.ModuleDict({"layer": layer, "operation": operation, "styled": styled, "norm": norm})
    mark_sequence_parallel(norm)
    if sharded:
        for module in model.values():
            fully_shard(module, mesh=meshes["data"])
    x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(2))
    hidden = layer(x.chunk(2)[place])[..., :32].contiguous()
    norm(operation(hidden) + styled(hidden)).square().sum().backward()
    before = {name: whole(p.grad) for name, p in model.named_parameters()}
    reduce_sequence_parallel_gradients(model, group)
    after = {name: whole(p.grad) for name, p in model.named_parameters()}
    return after, {name for name, gradient in after.items() if not torch.equal(gradient, before[name])}


def whole(gradient):
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


def test_gradients_of_marked_parameters_are_added_up_in_shards_too(tmp_path):
    expected = run(gradients_in_shards, 2, tmp_path, False)
    summed = expected[0][1]
    kinds = ("layer_norm_weight", "layernorm.weight", "q_norm.weight", "proj.bias", "fc2_bias")
    assert all(
        any(name.endswith(kind) for name in summed) for kind in (*kinds, "operation.bias", "styled.bias", "norm.weight")
    )
    assert not any(name.endswith(("qkv_weight", "fc1_weight", "fc1_bias")) for name in summed)
    for rank, (gradients, names) in enumerate(run(gradients_in_shards, 4, tmp_path, True)):
        assert names == summed
        for name, gradient in expected[rank % 2][0].items():
            assert torch.equal(gradients[name], gradient), name


def with_lost_marks(rank):
    """A norm of torch, between layers that share rows, whose marks FSDP2 forgets."""
    meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    shared = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
    model = nn.Sequential(nn.LayerNorm(64), cg.Linear(64, 64, parallel_mode="column", **shared))
    model[0].weight.sequence_parallel = True
    fully_shard(model, mesh=meshes["data"])
    lost = error_of(lambda: reduce_sequence_parallel_gradients(model))
    model[0].weight.grad = torch.full_like(model[0].weight, rank + 1.0)
    mark_sequence_parallel(model[0])
    reduce_sequence_parallel_gradients(model)
    return lost, local_part(model[0].weight.grad).tolist()


def test_marks_that_fsdp2_has_lost_are_missed(tmp_path):
    for lost, gradient in run(with_lost_marks, 2, tmp_path):
        assert lost[0] == "RuntimeError" and "mark_sequence_parallel(norm) for norms of your own" in lost[1]
        assert gradient == [3.0] * 64
