"""fully_shard on models whose weights are kept quantized: bitwise what one process does."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import crossgrain as cg
from crossgrain.tensor.sharding import local_part

from ..common.ranks import batches, bind, digest, error_of, mesh_of, quantized_model, run, shard, train

RECIPES = (
    "mxfp8",
    "nvfp4",
    "nvfp4-1d-weight",
    "fp8",
    "fp8-delayed",
    "fp8-block",
    "mxfp8-fwd-nvfp4-bwd",
    "fprop: fp8, dgrad: mxfp8, wgrad: mxfp8",
    "fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8, input.source: dequantized_late, weight.source: dequantized_late",
)


def fused(model):
    return cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)


def adamw(model):
    return cg.optim.with_masters(torch.optim.AdamW, model.parameters(), lr=1e-2, fused=True)


def adamw_unfused(model):
    """Fused kernels compute the last few numbers of a tensor one by one, which rounds differently."""
    return cg.optim.with_masters(torch.optim.AdamW, model.parameters(), lr=1e-2)


def made_for(recipe):
    sizes = {"hidden": 256, "width": 256} if recipe == "fp8-block" else {}  # shards of whole tiles
    return quantized_model(recipe, **sizes)


def trained_alone(recipe, optimizer):
    model = made_for(recipe)
    return train(model, optimizer(model)), digest(model)


def _trained_in_shards(rank, cases):
    found = {}
    for recipe, optimizer in cases:
        model = shard(made_for(recipe), mesh_of(2))
        found[recipe] = train(model, optimizer(model)), digest(model)
    return found


def test_ten_steps_are_those_of_one_process(tmp_path):
    """Losses, and all bytes of all weights, on both ranks."""
    cases = [(recipe, (fused, adamw)[at % 2]) for at, recipe in enumerate(RECIPES)]
    alone = {recipe: trained_alone(recipe, optimizer) for recipe, optimizer in cases}
    assert len({digest for _, digest in alone.values()}) == len(RECIPES), "the test can tell recipes apart"
    assert run(_trained_in_shards, 2, tmp_path, cases) == [alone, alone]


def _from_meta(rank, recipes):
    found = {}
    for recipe in recipes:
        with torch.device("meta"):
            model = quantized_model(recipe)[:-1]  # torch draws numbers of its own for sharded parameters
        assert model[0].weight.is_meta and isinstance(model[0].weight, cg.QuantizedTensor)
        shard(model, mesh_of(2))
        refused = error_of(model[0].reset_parameters)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        found[recipe] = (train(model, adamw(model)), digest(model)), refused
    return found


def test_models_made_on_the_meta_device(tmp_path):
    recipes = ("mxfp8-fwd-nvfp4-bwd", "fp8", "fp8-delayed")
    alone = {}
    for recipe in recipes:
        model = quantized_model(recipe)[:-1]
        alone[recipe] = train(model, adamw(model)), digest(model)
    for found in run(_from_meta, 2, tmp_path, recipes):
        assert {recipe: result for recipe, (result, _) in found.items()} == alone
        assert all("call model.to_empty() first" in refused[1] for _, refused in found.values())


def _under_another_recipe(rank):
    found = []
    for stays in (False, True):
        model = shard(quantized_model("fp8"), mesh_of(2), reshard_after_forward=not stays)
        bind(model, "all: fp8(pow2)")
        found.append((train(model, fused(model), 4), digest(model)))
    return found


def test_quantizers_of_a_new_recipe_reach_the_shards(tmp_path):
    """Weights are written under scales that are powers of two as soon as the recipe says so."""
    model = quantized_model("fp8")
    as_before = train(model, fused(model), 4)
    model = quantized_model("fp8")
    bind(model, "all: fp8(pow2)")
    alone = train(model, fused(model), 4), digest(model)
    assert alone[0] != as_before
    assert run(_under_another_recipe, 2, tmp_path) == [[alone, alone]] * 2


def _uneven(rank):
    model = shard(quantized_model("fp8", hidden=90, width=62), mesh_of(4))
    rows = local_part(model[0].weight).shape[0]
    return rows, (train(model, adamw_unfused(model), 4), digest(model))


def test_uneven_shards(tmp_path):
    """Per-tensor FP8 has no blocks: four ranks have 23, 23, 23 and 21 of 90 rows, and 16, 16, 16 and 14 of 62."""
    model = quantized_model("fp8", hidden=90, width=62)
    alone = train(model, adamw_unfused(model), 4), digest(model)
    assert run(_uneven, 4, tmp_path) == [(rows, alone) for rows in (23, 23, 23, 21)]


def _partial_block(rank):
    model = shard(quantized_model("fp8-block", hidden=255, width=256), mesh_of(2))
    return train(model, adamw_unfused(model), 4), digest(model)


def test_a_shard_may_end_in_the_partial_block_of_the_whole(tmp_path):
    """FP8 in blocks of 128 takes 255 rows; the second rank has 127 of them."""
    model = quantized_model("fp8-block", hidden=255, width=256)
    alone = train(model, adamw_unfused(model), 4), digest(model)
    assert run(_partial_block, 2, tmp_path) == [alone, alone]


def _more_ranks_than_rows(rank):
    torch.manual_seed(0)
    with cg.quantized_model_init(recipe="fp8"):
        layer = cg.Linear(8, 3, bias=False)
    layer.bound_recipe = cg.recipe.as_recipe("fp8")
    model = fully_shard(layer, mesh=mesh_of(4))
    optimizer = fused(model)
    for x in batches(3, width=8):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def test_ranks_without_rows_take_part(tmp_path):
    assert len(set(run(_more_ranks_than_rows, 4, tmp_path))) == 1


def test_only_zeros_may_be_cut_inside_a_block():
    zeros = cg.quantizer_for("fp8_block")(torch.randn(256, 128)).new_zeros(128, 128)
    assert zeros[:100].shape == (100, 128)
    zeros.copy_(torch.randn(128, 128))
    with pytest.raises(RuntimeError, match="columnwise fp8_block plane can only be cut at multiples of 128"):
        zeros[:100].zero_()


def _split_block(rank):
    model = quantized_model("mxfp8", hidden=96)
    before, weight = digest(model), model[0].weight
    error = error_of(lambda: shard(model, mesh_of(2)))
    return error, digest(model) == before, model[0].weight is weight


def test_shards_that_split_a_block_are_refused_on_all_ranks(tmp_path):
    for (kind, text), unchanged, same_parameter in run(_split_block, 2, tmp_path):
        assert kind == "ValueError"
        assert "columnwise mxfp8 plane can only be cut at multiples of 32 along M, and 48 is not one" in text
        assert unchanged
        assert same_parameter


def _refused(rank):
    found = []
    stochastic = cg.NVFP4Quantizer(stochastic_rounding=True)
    by_rows = cg.NVFP4Quantizer(row_scaled_nvfp4=True)
    for quantizer in (stochastic, by_rows):
        layer = torch.nn.Linear(64, 64, bias=False)
        layer.weight = torch.nn.Parameter(quantizer(layer.weight.detach()))
        fully_shard(layer, mesh=mesh_of(2))
        found.append(error_of(lambda layer=layer: layer(torch.randn(4, 64))))
    return found


def test_formats_whose_shards_are_not_parts_of_a_whole_are_refused_on_all_ranks(tmp_path):
    for stochastic, by_rows in run(_refused, 2, tmp_path):
        assert stochastic[0] == by_rows[0] == "NotImplementedError"
        assert "cannot be rounded stochastically (NVFP4Quantizer)" in stochastic[1]
        assert "cannot be in the format nvfp4_row_scaled" in by_rows[1]


def _disagreeing(rank):
    x = torch.randn(32, 64)
    written_alone, with_fewer_planes = (shard(quantized_model("nvfp4"), mesh_of(2)) for _ in range(2))
    written_alone(x)
    part = local_part(written_alone[0].weight)
    part._quantizer.leave_group()
    part.quantize_(torch.randn(part.shape) * (1 + rank))
    if rank == 1:
        local_part(with_fewer_planes[0].weight).update_usage(columnwise_usage=False)
    return [error_of(lambda model=model: model(x)) for model in (written_alone, with_fewer_planes)]


def test_shards_that_do_not_agree_are_noticed_on_all_ranks(tmp_path):
    for scales, planes in run(_disagreeing, 2, tmp_path):
        assert "different rowwise nvfp4_2d scales for the whole" in scales[1]
        assert "have different planes on different ranks" in planes[1]


def _freed(rank):
    model = shard(quantized_model("mxfp8-fwd-nvfp4-bwd"), mesh_of(2))
    layer = model[0]
    layer.unshard()
    weight = layer.weight
    before = weight.dequantize().sum()
    layer.reshard()
    errors = [error_of(lambda read=read: read(weight)) for read in (torch.clone, lambda w: w.dequantize(), torch.sum)]
    layer.unshard()
    return errors, layer.weight is weight, torch.equal(weight.dequantize().sum(), before)


def test_weights_whose_memory_was_let_go_raise_and_come_back(tmp_path):
    for errors, same_object, same_numbers in run(_freed, 2, tmp_path):
        assert all("has no memory" in text for _, text in errors)
        assert same_object
        assert same_numbers


def _misused(rank):
    model = shard(quantized_model("mxfp8"), mesh_of(2))
    requantized = error_of(lambda: cg.requantize_(model, "nvfp4"))
    model[0].delay_wgrad_compute = True
    return requantized, error_of(lambda: model(torch.randn(32, 64)))


def test_what_would_miss_other_ranks_is_refused(tmp_path):
    for requantized, delayed in run(_misused, 2, tmp_path):
        assert requantized == (
            "NotImplementedError",
            "requantize_: 0.weight is sharded; call requantize_ before sharding the model",
        )
        assert "would not reach the other ranks; switch that option off for this layer" in delayed[1]


def _late_optimizers(rank):
    """Made when the model is gathered, as after a forward pass for validation."""
    found = []
    for recipe in ("mxfp8", "mxfp8-fwd-nvfp4-bwd"):
        model = shard(quantized_model(recipe), mesh_of(2), reshard_after_forward=False)
        with torch.no_grad():
            model(torch.randn(32, 64))
        for late in (fused(model), cg.optim.with_masters(torch.optim.SGD, model.parameters(), lr=1.0)):
            found.append(error_of(lambda model=model, late=late: train(model, late, 1)))
    return found


def test_optimizers_of_gathered_weights_are_refused(tmp_path):
    """They would never see a gradient."""
    for found in run(_late_optimizers, 2, tmp_path):
        assert all("that FSDP2 had gathered when the optimizer was made" in text for _, text in found)


def _state(rank):
    model = shard(quantized_model("mxfp8-fwd-nvfp4-bwd"), mesh_of(2))
    optimizer = fused(model)
    train(model, optimizer, 3)
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    after = train(model, optimizer, 3)
    sharded = [value for entry in state["state"].values() for value in entry.values()]
    model.load_state_dict(saved)
    again = fused(model)
    again.load_state_dict(state)
    return (
        isinstance(saved["0.weight"], DTensor) and isinstance(local_part(saved["0.weight"]), cg.QuantizedTensor),
        all(isinstance(value, DTensor) for value in sharded),
        sharded[0].shape,
        after == train(model, again, 3),
    )


def test_state_dicts_are_sharded_and_go_back(tmp_path):
    for weights_sharded, states_sharded, shape, same in run(_state, 2, tmp_path):
        assert weights_sharded
        assert states_sharded
        assert shape == (128, 64), "of the whole"
        assert same
