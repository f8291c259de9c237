"""What a plan adds up, by hand, and what it does not accept."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.planning import DEVICES, MODELS, Device, Transformer, device_of, model_names
from crossgrain.planning.network import network_of, unit_of

SMALL = Transformer(layers=4, width=256, heads=8, mlp=512, vocab=1024, kv_heads=4, context=128)
EXPERTS = Transformer(layers=2, width=128, heads=4, mlp=256, vocab=1000, experts=4, active=2, context=128)


def plan(model=SMALL, recipe="mxfp8", **options):
    return cg.plan(model, recipe, **options)


def wire(made):
    return {traffic.kind: traffic.bytes for traffic in made.wire}


# ---- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, billions",
    [
        ("gpt2", 0.1244),
        ("gpt2-xl", 1.558),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("mixtral-8x7b", 46.70),
        ("mixtral-8x22b", 140.6),
    ],
)
def test_named_models_have_as_many_parameters_as_they_are_known_for(name, billions):
    made = plan(name, "mxfp8", sequence=64)
    assert made.parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_dimensions_as_text():
    assert plan("layers=4, width=256, heads=8, mlp=512, vocab=1024, kv_heads=4, context=128").memory == plan().memory
    assert plan("llama3-8b, layers=2").parameters < plan("llama3-8b, layers=3").parameters


def test_a_module_and_the_same_dimensions_agree():
    with torch.device("meta"):
        module = nn.ModuleDict({"fc1": nn.Linear(64, 128, bias=False), "fc2": nn.Linear(128, 64, bias=False)})
    made = plan(module, sequence=128)
    assert made.parameters == 2 * 64 * 128
    assert {work.flops for work in made.work} == {2 * 2 * 128 * 64 * 128}


@pytest.mark.parametrize(
    "make, work",
    [
        (lambda: cg.LayerNormMLP(64, 128), 2 * 64 * 128),
        (lambda: cg.GroupedLinear(3, 64, 32), 64 * 32),  # each token goes to one of them
        (lambda: cg.Linear(64, 96, parameters_split=("q", "k", "v")), 64 * 96),
    ],
)
def test_our_modules(make, work):
    module = make()
    made = plan(module, sequence=96, parameters="high_precision")
    assert made.parameters == sum(p.numel() for p in module.parameters())
    assert sum(w.flops for w in made.work if w.gemm == "fprop") == 2 * 96 * work


def test_converted_models_are_planned_as_before():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    before = plan(model, sequence=32)
    cg.convert(model, "mxfp8")
    assert plan(model, sequence=32) == before


def test_conv1d_has_its_weight_the_other_way_round():
    conv = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})()
    conv.weight = nn.Parameter(torch.empty(64, 96, device="meta"))
    (layer,) = network_of(conv).layers
    assert (layer.inputs, layer.outputs) == (64, 96)


def test_units_are_the_blocks():
    assert unit_of("layers.3.mlp.fc1") == "layers.3"
    assert unit_of("0.weight") == "0"
    assert unit_of("mlp.fc1") == unit_of("lm_head") == ""


# ---- recipes ---------------------------------------------------------------------------------------


def formats(made, gemm="fprop"):
    return {work.format for work in made.work if work.gemm == gemm}


def test_lm_head_stays_in_high_precision_unless_a_rule_is_for_it():
    assert formats(plan()) == {"mxfp8", "bf16"}
    assert formats(plan(recipe="mxfp8; lm_head: nvfp4")) == {"mxfp8", "nvfp4"}
    assert formats(plan(recipe="mxfp8; first 2 blocks: nvfp4; last 1 block: hp")) == {"mxfp8", "nvfp4", "bf16"}


def test_what_stays_in_high_precision_is_no_quantized_parameter():
    """It has a master only if it is not fp32, and bf16 needs but a remainder."""
    numbers = 1024 * 256
    quantized = plan().parameters - 2 * numbers - 9 * 256  # but for embedding, lm_head and norms
    assert plan(dtype="fp32").memory.masters == 4 * quantized
    plain = plan().parameters - quantized
    assert plan(master="remainder").memory.masters == 4 * quantized + 2 * plain


def test_a_tied_weight_is_quantized_by_its_layer():
    """The embedding keeps it in high precision, so the output layer saves the plane that backward reads."""
    tied = replace(SMALL, tied=True)
    assert plan(tied).parameters == plan().parameters - 1024 * 256
    assert plan(tied).memory.saved_weights == 0
    assert plan(tied, "mxfp8; lm_head: mxfp8").memory.saved_weights == 1024 * 256 * 33 // 32
    assert plan(SMALL, "mxfp8; lm_head: mxfp8").memory.saved_weights == 0


def test_attention_follows_the_recipe():
    assert formats(plan(), "attention forward") == {"bf16"}
    quantized, plain = plan(recipe="nvfp4-fp8-attention"), plan(recipe="nvfp4")
    assert formats(quantized, "attention backward") == {"fp8"}
    tokens, channels = 128, (8 + 2 * 4 + 8) * 32
    scales = 2 * 4  # of qkv and o
    assert plain.memory.saved_others - quantized.memory.saved_others == 4 * (tokens * channels - scales)


def test_the_output_of_attention_is_kept_once():
    """By the core and by a projection in high precision; a projection that is quantized keeps a plane of it."""
    width, tokens = 256, 128
    plain = tokens * (width + width + 512) * 2  # of qkv, gate_up and down, in one block
    assert plan(recipe="hp").memory.saved_inputs == 4 * plain + tokens * width * 2
    quantized_core = "hp, attention: fp8"
    assert plan(recipe=quantized_core).memory.saved_inputs == 4 * (plain + tokens * width * 2) + tokens * width * 2


def test_experts_are_a_grouped_layer():
    assert formats(plan(EXPERTS, "mxfp8; type=grouped_linear: nvfp4")) == {"mxfp8", "nvfp4", "bf16"}
    work = sum(w.flops for w in plan(EXPERTS, "hp").work if w.gemm == "fprop")
    active = 128 * (3 * 128 + 128) + 2 * 128 * 3 * 256 + 128 * 4
    assert work == 2 * 128 * (2 * active + 128 * 1000)


@pytest.mark.parametrize(
    "device, recipe, kind",
    [
        ("b200", "nvfp4", "fp4"),
        ("b200", "mxfp8", "fp8"),
        ("b200", "mxfp6_e2m3", "fp6"),
        ("gb200", "mxfp4", "fp4"),
        ("h100", "fp8", "fp8"),
        ("h100", "fp8-block", "fp8"),
        ("h100", "mxfp8", "bf16"),
        ("h100", "nvfp4", "bf16"),
        ("a100", "fp8", "bf16"),
        ("b200", "fprop: fp8, dgrad: hp, wgrad: hp, fprop.weight: mxfp8, allow_mixed: true", "bf16"),
    ],
)
def test_formats_that_a_device_does_not_multiply_are_decoded(device, recipe, kind):
    line = recipe if recipe in cg.recipe.PRESETS or ":" in recipe else f"all: {recipe}"
    made = plan(recipe=f"{line}; lm_head: hp", device=f"{device}, bandwidth=1e9", sequence=1024)
    fprop = made.work[0]
    assert fprop.kind == kind
    assert fprop.seconds == pytest.approx(fprop.flops / 1e12 / DEVICES[device].rate(kind))
    said = any("not multiplied natively" in text for text in made.assumptions)
    assert said == (kind == "bf16" and "allow_mixed" not in recipe)


# ---- sharding --------------------------------------------------------------------------------------


def test_what_one_linear_layer_costs_by_hand():
    layer = nn.Sequential(nn.Linear(4096, 4096, bias=False))
    numbers, tokens = 4096**2, 8192
    device = Device(
        "d", (("fp8", 1000), ("bf16", 500), ("tf32", 250)), ("MX",), memory=80, bandwidth=4000, link=400, network=50
    )
    made = plan(layer, "mxfp8", gpus=8, device=device, sequence=tokens)
    memory, plane = made.memory, numbers * 33 // 32
    assert memory.weights == {"mxfp8 rowwise": plane // 8, "mxfp8 columnwise": plane // 8}
    assert (memory.gradients, memory.masters, memory.moments) == (numbers // 4, numbers // 2, numbers)
    assert (memory.saved_inputs, memory.saved_weights) == (tokens * 4096 * 33 // 32, 0)
    assert wire(made) == {
        "gather weights for forward": plane * 7 // 8,
        "gather weights for backward": plane * 7 // 8,
        "reduce-scatter gradients": numbers * 2 * 7 // 8,
    }
    assert made.wire_seconds == pytest.approx((2 * plane + 2 * numbers) * 7 / 8 / 400e9)
    assert made.gemm_seconds == pytest.approx(3 * 2 * tokens * numbers / 1000e12)
    read_and_written = 2 * (2 * tokens * 4096 + 2 * tokens * 4096 * 33 // 32)  # x and dy, in both directions
    assert made.quantize_seconds == pytest.approx(read_and_written / 4000e9)
    assert made.seconds_together == max(made.compute_seconds, made.wire_seconds)
    assert made.seconds_in_turn == made.compute_seconds + made.wire_seconds


def test_a_small_gemm_takes_as_long_as_its_operands():
    made = plan(nn.Linear(4096, 4096, bias=False), "hp", sequence=1)
    read = (4096 + 4096**2 + 4096) * 2
    assert made.gemm_seconds == pytest.approx(3 * read / 8000e9)


BLOCK = 256 * (512 + 256 + 1024 + 512)  # numbers of qkv, proj, gate_up and down of the small model
NORMS = 2 * 256  # of a block
OUTSIDE = 2 * 1024 * 256 + 256  # embedding, lm_head and the last norm


def test_what_is_gathered_at_a_time():
    rows = BLOCK * 33 // 32 + 2 * NORMS
    workspace = plan(gpus=8).memory.workspace
    assert workspace["gathered weights"] == 2 * OUTSIDE + 2 * rows
    assert workspace["gradients before they are reduced"] == 2 * (BLOCK + NORMS)
    both = 2 * BLOCK * 33 // 32 + 2 * NORMS
    workspace = plan(gpus=8, reshard_after_forward=False).memory.workspace
    assert workspace["gathered weights"] == 2 * OUTSIDE + 4 * both


def test_a_backward_that_decodes_gathers_rows_again():
    rows, override = BLOCK * 33 // 32 + 2 * NORMS, ", backward_override: dequantized"
    made = plan(recipe=f"mxfp8-fwd-nvfp4-bwd{override}", gpus=8)
    assert wire(made)["gather weights for forward"] == (4 * rows + 2 * OUTSIDE) * 7 // 8
    assert wire(made)["gather weights for backward"] == 4 * rows * 7 // 8
    columns = BLOCK * 9 // 16 + 2 * NORMS + 4 * 8 * 8  # and an amax of each of four weights, from each rank
    assert wire(plan(recipe="mxfp8-fwd-nvfp4-bwd", gpus=8))["gather weights for backward"] == 4 * columns * 7 // 8


def test_kept_gathers_are_fewer_and_take_room():
    again, once = plan(gpus=8), plan(gpus=8, reshard_after_forward=False)
    assert "gather weights for backward" not in wire(once)
    assert once.memory.workspace["gathered weights"] > again.memory.workspace["gathered weights"]
    assert (
        plan(recipe="nvfp4", gpus=8, reshard_after_forward=False).wire_bytes < plan(recipe="nvfp4", gpus=8).wire_bytes
    )


def test_high_precision_parameters_travel_as_they_are_kept_or_quantized():
    kept = plan(gpus=8, parameters="high_precision")
    sent = plan(gpus=8, parameters="high_precision", gather="planes")
    quantized = plan(gpus=8)
    assert (
        wire(sent) == wire(quantized)
        and wire(kept)["gather weights for forward"] > wire(sent)["gather weights for forward"]
    )
    assert kept.memory.saved_weights > 0 == sent.memory.saved_weights
    assert kept.memory.weights == sent.memory.weights == {"bf16": kept.parameters * 2 // 8}


def test_replicas_reduce_gradients_once():
    made = plan(gpus=8, sharding="replicated", micro_batches=4, reduce_dtype="fp32")
    assert wire(made) == {"all-reduce gradients": 2 * made.parameters * 4 * 7 // 8}
    assert sum(made.memory.weights.values()) == sum(plan().memory.weights.values())


def test_micro_batches_repeat_work_and_gathers():
    one, three = plan(gpus=8), plan(gpus=8, micro_batches=3)
    assert three.memory == one.memory and three.tokens_per_step == 3 * one.tokens_per_step
    assert three.wire_bytes == pytest.approx(3 * one.wire_bytes)
    assert three.compute_seconds == pytest.approx(3 * one.compute_seconds)


def test_tensor_parallelism_divides_layers():
    alone, two = plan(), plan(gpus=2, tensor_parallel=2)
    assert sum(work.flops for work in two.work) * 2 == sum(work.flops for work in alone.work)
    assert two.memory.saved_inputs * 2 == pytest.approx(alone.memory.saved_inputs, rel=0.02)
    assert two.memory.saved_others * 2 == alone.memory.saved_others
    tokens = 128 * 2  # bytes per channel
    # x, x again and dx of qkv, gate_up and lm_head; y and dy of proj, down and the embedding
    expected = (4 * (3 * 256 + 2 * 256 + 3 * 256 + 2 * 256) + 3 * 256 + 2 * 256) * tokens // 2
    assert wire(two) == {"activations (tensor parallel)": expected}


def test_the_network_of_a_node_serves_a_ring():
    """Eight GPUs of a node share a ring; with tensor parallelism in the node, one of them is in each."""
    assert "at 400 GB/s" in " ".join(plan(gpus=64).assumptions)
    assert "at 900 GB/s" in " ".join(plan(gpus=8).assumptions)
    assert "at 100 GB/s" in " ".join(plan(gpus=64, tensor_parallel=4).assumptions)


def test_recomputation_trades_memory_for_work():
    kept, again = plan(gpus=8), plan(gpus=8, recompute=True)
    assert again.memory.activations < kept.memory.activations
    assert again.memory.saved_others == kept.memory.saved_others - 4 * _others_of_a_block() + 4 * 128 * 256 * 2
    before, after = ({(work.gemm, work.format): work.flops for work in made.work} for made in (kept, again))
    assert after["fprop", "mxfp8"] == 2 * before["fprop", "mxfp8"]
    assert after["attention forward", "bf16"] == 2 * before["attention forward", "bf16"]
    assert after["fprop", "bf16"] == before["fprop", "bf16"], "lm_head is no part of a block"
    assert after["dgrad", "mxfp8"] == before["dgrad", "mxfp8"]
    norms = 4 * 2 * 256 * 2  # which serve both passes as they are
    both = 2 * wire(kept)["gather weights for backward"] - norms * 7 // 8
    assert wire(again)["gather weights for backward"] == both


def test_recomputation_quantizes_and_sends_again():
    kept, again = (plan(gpus=2, tensor_parallel=2, recompute=recompute) for recompute in (False, True))
    layers = 4 * (256 + 256 + 256 + 256) * 128 * 2  # x of qkv and gate_up, y of proj and down
    assert again.wire_bytes - kept.wire_bytes == layers // 2
    kept, again = plan(), plan(recompute=True)
    inputs, outputs = 256 + 256 + 256 + 512, 512 + 256 + 1024 + 256
    assert again.quantize_seconds / kept.quantize_seconds == pytest.approx((2 * inputs + outputs) / (inputs + outputs))


def _others_of_a_block():
    channels = 8 * 32 + 2 * 4 * 32 + 8 * 32  # q, k, v and o
    return 128 * (2 * (channels + 2 * 512 + 2 * 256) + 4 * (8 + 2))  # and sums of heads, statistics of norms


# ---- the result ------------------------------------------------------------------------------------


def test_a_plan_says_whether_it_fits():
    assert plan().fits and "\nfits: " in str(plan())
    crowded = plan(device="b200, memory=0.01")
    assert not crowded.fits and "\ndoes not fit: " in str(crowded) and "too much" in str(crowded)


def test_a_plan_is_printed_with_its_assumptions():
    made = plan(gpus=16, tensor_parallel=2, recompute=True)
    text = str(made)
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.replace("- ", "").split())
    for sentence in made.assumptions:
        assert sentence.replace("- ", "") in flat


def test_a_plan_as_plain_data():
    data = json.loads(json.dumps(plan(gpus=8).to_dict()))
    assert data["memory"]["total"] == plan(gpus=8).memory.total and data["fits"] is True
    assert data["setup"]["device"]["name"] == "b200" and data["work"][0]["gemm"] == "fprop"


def test_devices_may_be_changed():
    device = device_of("b200, memory=192, fp4=8000, node=4")
    assert (device.memory, device.rate("fp4"), device.node) == (192, 8000, 4)
    assert device.rate("fp8") == DEVICES["b200"].rate("fp8") and device_of(device) is device


# ---- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "lama3-70b"}, "no model 'lama3-70b'; did you mean 'llama3-70b'?"),
        ({"model": "lab-tinny"}, "did you mean 'lab-tiny'?"),
        ({"model": "llama3-8b, layer=4"}, "no setting 'layer'; did you mean 'layers'?"),
        ({"model": "llama3-8b, layers=many"}, "layers must be a whole number, got 'many'"),
        ({"model": "llama3-8b, layers=2.5"}, "layers must be a whole number, got '2.5'"),
        ({"model": "llama3-8b, kv_heads=-8"}, "kv_heads of a transformer must be 0 or more, got -8"),
        ({"model": "llama3-8b, layers=0"}, "layers of a transformer must be at least 1, got 0"),
        ({"model": "llama3-8b, 4"}, "'4' is not a setting"),
        ({"model": "layers=4, width=64, heads=2, mlp=128"}, "vocab is missing"),
        ({"model": "llama3-8b, heads=5"}, "heads=5 must be a multiple of kv_heads=8"),
        ({"model": "llama3-8b, width=100"}, "width=100 must be a multiple of heads=32"),
        ({"model": "mixtral-8x7b, active=9"}, "active, .* must be between 1 and experts=8, got 9"),
        ({"model": nn.LayerNorm(8)}, "this LayerNorm has no linear layer"),
        ({"device": "b2000"}, "no device 'b2000'; did you mean 'b200'?"),
        ({"device": "memory=3"}, "must begin with the name of a device"),
        ({"device": "b200, node=2.5"}, "node must be a whole number"),
        ({"device": "b200, memory=lots"}, "memory must be a number, got 'lots'"),
        ({"device": "b200, fp4=0"}, "the rate of fp4 must be above 0"),
        ({"device": "b200, link=-1"}, "link must be above 0"),
        ({"gpus": 0}, "gpus must be a whole number of at least 1, got 0"),
        ({"gpus": True}, "gpus must be a whole number of at least 1, got True"),
        ({"moments": ("fp32",)}, "moments must be one dtype for both moments, or a pair"),
        ({"gpus": 6, "tensor_parallel": 4}, "6 GPUs cannot be divided into groups of tensor_parallel=4"),
        ({"gpus": 8, "tensor_parallel": 8}, "4 kv_heads cannot be divided evenly among tensor_parallel=8"),
        ({"gpus": 2, "tensor_parallel": 2, "sequence": 127}, "127 tokens .* cannot be divided evenly among"),
        ({"gpus": 2, "tensor_parallel": 2, "model": nn.Linear(32, 32)}, "not known which of its layers are divided"),
        ({"model": nn.Linear(32, 32), "recompute": True}, "the size of the input of its blocks is not known"),
        ({"sharding": "fdsp"}, "sharding cannot be 'fdsp'; did you mean 'fsdp'?"),
        ({"parameters": "quantised"}, "did you mean 'quantized'?"),
        ({"gather": "plane"}, "did you mean 'planes'?"),
        ({"dtype": "fp8"}, "dtype cannot be 'fp8'"),
        ({"master": "none"}, "parameters='quantized' cannot be used with master='none'"),
        ({"gather": "high_precision"}, "parameters='quantized' cannot be used with gather='high_precision'"),
        ({"moments": "int8"}, "moments cannot be 'int8'"),
        ({"gemm_efficiency": 1.5}, "gemm_efficiency must be above 0 and at most 1"),
        ({"recipe": "mxfp8; lm_haed: hp"}, "near misses: lm_head"),
        (
            {"model": "llama3-8b, mlp=100"},
            r"gate_up: its weight cannot be kept quantized: .*\[200, 4096\]",
        ),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_things_that_are_no_models_or_recipes():
    with pytest.raises(TypeError, match="a model must be a name, dimensions"):
        plan(3)
    with pytest.raises(TypeError, match="needs a GemmRecipe or its text"):
        plan(recipe=cg.recipe.MXFP8BlockScaling())


def test_names():
    assert [*MODELS] == model_names()[: len(MODELS)] and "lab-tiny" in model_names()
    assert network_of("lab-tiny").context == 64
