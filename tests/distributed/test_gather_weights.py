"""fully_shard on converted models: shards are high precision, what travels is quantized."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import crossgrain as cg
from crossgrain.distributed import count_gathered_bytes, gather_quantized
from crossgrain.distributed.weight_shard import WeightLayout, WeightShard
from crossgrain.linear.gathered_weight import GatheredWeight
from crossgrain.planes import ROWWISE, Direction
from crossgrain.tensor.sharding import local_part

from ..common.quantizers import QUANTIZERS, assert_same_bytes, hybrid_of
from ..common.ranks import batches, converted_model, digest, error_of, high_precision, mesh_of, run, shard, train

# (rows of the weight, as the layer pads them) for four ranks: whole blocks or halves of them, odd rows that split
# bytes, less rows than a block, less rows than ranks
ROWS = ((256, 256), (90, 128), (37, 128), (3, 128))
WIDTH = 32

FORMATS = (
    "mxfp8",
    "mxfp8_2d",
    "nvfp4",
    "nvfp4_2d",
    "mxfp4",
    "mxfp6_e2m3",
    "fp8",
    "fp8_block",
    "fp8_block_2d",
    "fp8_pow2_eps",
)
HYBRIDS = (
    ("mxfp8", "nvfp4", "original"),
    ("mxfp8", "nvfp4", "rowwise_dequantized"),
    ("nvfp4", "fp8_block", "rowwise_dequantized"),
    ("fp8", "identity", "original"),
)
NEED_NEIGHBOURS = ("nvfp4_rht", "nvfp4_4over6_mse")  # codes depend on all numbers of a block


def _quantizers():
    made = {name: QUANTIZERS[name]() for name in (*FORMATS, *NEED_NEIGHBOURS)}
    return made | {"/".join(names): hybrid_of(*names) for names in HYBRIDS}


def _arrivals(rank, weights):
    mesh, found = mesh_of(4), {}
    for name, quantizer in _quantizers().items():
        for weight, padded in zip(weights, ROWS, strict=True):
            plan = WeightLayout("layer", quantizer, tuple(weight.shape), (padded[1], WIDTH), tuple(Direction))
            start, stop = plan.own_rows(4)[rank]
            mine = WeightShard(weight[start:stop], plan)
            (buffer,), gather = mine.fsdp_pre_all_gather(mesh)
            gathered = torch.empty(4, buffer.shape[1], dtype=torch.uint8)
            dist.all_gather_into_tensor(gathered, buffer)
            whole, _ = mine.fsdp_post_all_gather((gathered,), gather, torch.bfloat16)
            found[name, padded] = whole.quantized
    return found


def test_what_arrives_is_what_the_layer_would_quantize(tmp_path):
    """Every plane of every format, wherever shards end."""
    weights = [torch.randn(rows, WIDTH) * torch.logspace(-2, 2, rows).view(rows, 1) for rows, _ in ROWS]
    expected = {}
    for weight, padded in zip(weights, ROWS, strict=True):
        weight[:, ::7] = -0.0  # zeros have signs
        whole = torch.zeros(padded[1], WIDTH)
        whole[: len(weight)] = weight
        expected |= {(name, padded): quantizer(whole) for name, quantizer in _quantizers().items()}
    for found in run(_arrivals, 4, tmp_path, weights):
        for (name, padded), quantized in expected.items():
            assert_same_bytes(found[name, padded], quantized)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


CASES = {
    "mxfp8": {},
    "nvfp4": {},
    "fp8-block": {},
    "mxfp8-fwd-nvfp4-bwd": {"hidden": 90},
}


def _trained(rank):
    found = {}
    for recipe, sizes in CASES.items():
        model = converted_model(recipe, **sizes)
        gather_quantized(model)
        shard(model, mesh_of(2))
        losses = train(model, adamw(model))
        found[recipe] = losses, high_precision(model), digest(model)
    return found


def test_ten_steps_are_those_of_one_process(tmp_path):
    alone = {recipe: converted_model(recipe, **sizes) for recipe, sizes in CASES.items()}
    losses_alone = {recipe: train(model, adamw(model)) for recipe, model in alone.items()}
    found = run(_trained, 2, tmp_path)
    for recipe, model in alone.items():
        losses = losses_alone[recipe]
        for ranks_losses, weights, _ in (ranks[recipe] for ranks in found):
            assert ranks_losses == losses, recipe
            for name, value in high_precision(model).items():
                assert torch.equal(weights[name], value), (recipe, name)
        assert len({hashed for _, _, hashed in (ranks[recipe] for ranks in found)}) == 1, "what ranks compute with"


def _fused_optimizers(rank):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = converted_model("mxfp8").to(dtype)
        gather_quantized(model)
        shard(model, mesh_of(2))
        optimizer = cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        found.append((_train_in(model, optimizer, dtype), high_precision(model)))
        masters = [name for state in optimizer.state_dict()["state"].values() for name in state]
        found[-1] += ("master_param" in masters,)
    return found


def _train_in(model, optimizer, dtype):
    losses = []
    for x in batches(4):
        loss = model(x.to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_fused_adam_with_and_without_masters(tmp_path):
    found = run(_fused_optimizers, 2, tmp_path)
    for at, dtype in enumerate((torch.float32, torch.bfloat16)):
        model = converted_model("mxfp8").to(dtype)
        losses = _train_in(model, cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True), dtype)
        for ranks_losses, weights, has_masters in (ranks[at] for ranks in found):
            assert ranks_losses == losses
            assert all(torch.equal(weights[name], value) for name, value in high_precision(model).items())
            assert has_masters == (dtype == torch.bfloat16)


def _gathered(rank):
    model = converted_model("mxfp8", hidden=90)
    gather_quantized(model)
    shard(model, mesh_of(2))
    count = count_gathered_bytes(model)
    layer = model[0]
    layer.unshard()
    weight, bias = layer.weight, layer.bias
    seen = (type(weight).__name__, list(weight.shape), weight.dtype, weight.dequantize().shape, count.sizes)
    errors = [
        error_of(lambda: weight.detach().mul_(2)),
        error_of(lambda: _high_precision_call(layer)),
        error_of(lambda: _other_recipe_call(layer)),
    ]
    layer.reshard()
    return seen, errors, bias.numel()


def _high_precision_call(layer):
    with cg.autocast(enabled=False):
        layer(torch.randn(32, 64))


def _other_recipe_call(layer):
    with cg.autocast(recipe="nvfp4"):
        layer(torch.randn(32, 64))


def test_a_gathered_weight_is_for_its_recipe_alone(tmp_path):
    for (name, shape, dtype, decoded, sizes), errors, bias in run(_gathered, 2, tmp_path):
        assert name == "GatheredWeight"
        assert shape == [90, 64]
        assert dtype == torch.float32
        assert tuple(decoded) == (90, 64)
        weights = sizes[0] - 4 * bias
        assert weights < 90 * 64 * 3.1, "two planes of bytes, and whole blocks of the rows that ranks share"
        assert "read-only" in errors[0][1]
        assert "0: the weight [90, 64] was gathered quantized, but the layer computes in high" in errors[1][1]
        assert "was gathered as mxfp8 / mxfp8, but the active recipe needs nvfp4_2d / nvfp4_2d" in errors[2][1]


# ---- without other ranks ---------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.fc = nn.Linear(64, 64)
        self.out = nn.Linear(64, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight


def test_the_report_says_what_is_left_and_why():
    model = Tied()
    cg.convert(model, "mxfp8-fwd-nvfp4-bwd; out: hp", include="head")
    report = gather_quantized(model)
    assert report.quantized == {"fc.weight": "rowwise mxfp8 / columnwise nvfp4"}
    assert report.left == {
        "out.weight": "its recipe keeps it in high precision",
        "head.weight": "it is tied to another parameter",
    }
    assert type(model.fc.weight) is WeightShard
    assert isinstance(model.fc.weight, nn.Parameter)
    assert model.head.weight is model.embedding.weight
    assert "head.weight: unquantized because it is tied" in str(report)


def test_layers_without_a_recipe_need_one():
    layer = cg.Linear(64, 64)
    assert list(gather_quantized(layer).left.values()) == [
        "the layer is not bound to a recipe, and no recipe was passed"
    ]
    for _ in range(2):
        assert gather_quantized(layer, "mxfp8").quantized == {"weight": "rowwise mxfp8 / columnwise mxfp8"}
        assert layer.weight.requires_grad


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("fp8(delayed)", "with delayed scaling, quantizing a weight records an amax"),
        (
            "mxfp8, backward_override: high_precision",
            "backward_override='high_precision', but the high-precision weight stays in shards",
        ),
        ("mxfp8, fprop.weight: mxfp4(sr), fprop.input: mxfp4", "cannot be rounded stochastically"),
    ],
)
def test_recipes_that_cannot_be_gathered_are_refused_before_anything_changes(recipe, reason):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    cg.convert(model, f"mxfp8; 1: {recipe}" if "override" not in recipe else recipe)
    first = model[0].weight
    with pytest.raises(NotImplementedError, match=f"weight: .*{reason}"):
        gather_quantized(model)
    assert model[0].weight is first


def test_weights_that_are_not_one_matrix_are_refused():
    for layer in (
        cg.Linear(64, 64, parameters_split=("a", "b")),
        cg.GroupedLinear(2, 64, 64, single_grouped_weight=True),
    ):
        with pytest.raises(
            NotImplementedError, match="needs a weight that is one matrix which its layer quantizes as a whole"
        ):
            gather_quantized(layer, "mxfp8")


def test_a_shard_is_a_tensor_like_others():
    plan = WeightLayout("layer", cg.quantizer_for("mxfp8"), (64, 32), (64, 32), (ROWWISE,))
    plain = torch.randn(64, 32)
    shard_ = nn.Parameter(WeightShard(plain.clone(), plan))
    assert torch.equal(shard_ * 2, plain * 2)
    assert type(shard_ * 2) is torch.Tensor
    pieces = shard_.detach().split(40)
    pieces[1].zero_()
    assert type(pieces[1]) is WeightShard
    assert not local_part(shard_)[40:].any(), "views alias"
    copied = copy.deepcopy(shard_)
    assert type(copied) is WeightShard
    assert isinstance(copied, nn.Parameter)
    file = io.BytesIO()
    torch.save({"weight": shard_.detach(), "parameter": shard_}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["weight"]) is torch.Tensor
    assert type(loaded["parameter"]) is nn.Parameter
    assert torch.equal(loaded["weight"], local_part(shard_))


def _other_data(rank):
    """Data that replaces what was there when the weights were marked."""
    found = []
    for change in (lambda m: m.to(torch.bfloat16), lambda m: setattr(m[0].weight, "data", torch.ones(128, 64))):
        alone, marked = converted_model("mxfp8")[:3], converted_model("mxfp8")[:3]
        gather_quantized(marked)
        for model in (alone, marked):
            change(model)
        shard(marked, mesh_of(2))
        x = batches(1)[0].to(alone[0].weight.dtype)
        found.append((type(marked[0].weight._local_tensor), torch.equal(marked(x), alone(x))))
    return found


def test_data_may_be_replaced_before_a_model_is_sharded(tmp_path):
    for found in run(_other_data, 2, tmp_path):
        assert found == [(WeightShard, True)] * 2


def test_a_model_that_is_not_sharded_yet_trains_as_before():
    alone, marked = converted_model("mxfp8", hidden=90), converted_model("mxfp8", hidden=90)
    gather_quantized(marked)
    marked[0].reset_parameters()
    alone[0].load_state_dict(marked[0].state_dict())
    assert train(marked, adamw(marked), 3) == train(alone, adamw(alone), 3)
    fused = [cg.optim.FusedAdam(model.parameters(), master_weights=True) for model in (marked, alone)]
    assert train(marked, fused[0], 3) == train(alone, fused[1], 3)


def _from_meta(rank):
    with torch.device("meta"):
        model = converted_model("mxfp8-fwd-nvfp4-bwd", hidden=90)[:-1]
    gather_quantized(model)
    shard(model, mesh_of(2)).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return train(model, adamw(model), 4), high_precision(model)


def test_models_made_on_the_meta_device(tmp_path):
    model = converted_model("mxfp8-fwd-nvfp4-bwd", hidden=90)[:-1]
    losses = train(model, adamw(model), 4)
    for found, weights in run(_from_meta, 2, tmp_path):
        assert found == losses
        assert all(torch.equal(weights[name], value) for name, value in high_precision(model).items())


def _saved(rank):
    model = converted_model("mxfp8")
    gather_quantized(model)
    shard(model, mesh_of(2))
    optimizer = adamw(model)
    train(model, optimizer, 2)
    state = model.state_dict()
    whole = {name: value.full_tensor() for name, value in state.items()}
    other = converted_model("mxfp8")
    gather_quantized(other)
    fully_shard(other, mesh=mesh_of(2))
    assert "0.weight is already sharded" in error_of(lambda: gather_quantized(other))[1]
    other.load_state_dict(state)
    return isinstance(state["0.weight"], DTensor), whole, high_precision(other), type(local_part(state["0.weight"]))


def test_state_dicts_are_plain_numbers(tmp_path):
    model = converted_model("mxfp8")
    train(model, adamw(model), 2)
    for sharded, whole, loaded, kind in run(_saved, 2, tmp_path):
        assert sharded
        assert kind is torch.Tensor
        for name, value in model.state_dict().items():
            assert torch.equal(whole[name], value)
            assert torch.equal(loaded[name], value)


def _whole_states(rank, broadcast):
    whole, model = converted_model("mxfp8"), converted_model("mxfp8", seed=1)
    gather_quantized(model)
    shard(model, mesh_of(2))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, whole.state_dict() if rank == 0 or not broadcast else {}, options=options)
    again = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    expected = whole.state_dict()
    return again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize("broadcast", [False, True])
def test_whole_state_dicts_of_torch(tmp_path, broadcast):
    assert run(_whole_states, 2, tmp_path, broadcast) == [True, True]


def test_gathered_weights_hold_both_directions(tmp_path):
    quantizer = cg.quantizer_for("mxfp8")
    weight = GatheredWeight((60, 32), torch.bfloat16, quantizer(torch.randn(64, 32)), quantizer)
    assert weight.used_by(cg.quantizer_for("mxfp8"), "layer") is weight.quantized
    assert weight.t().shape == (32, 60)
    with pytest.raises(RuntimeError, match="gathered as mxfp8 / mxfp8.*needs fp8 / fp8"):
        weight.used_by(cg.quantizer_for("fp8"), "layer")
