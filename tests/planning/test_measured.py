"""What a plan says is what is measured: bytes saved, kept and gathered, states of the optimizer, FLOPs."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import crossgrain as cg
from benchmarks.gpt import bytes_saved_by_linear_layers
from crossgrain.gpt.model import GPT, GPTConfig
from crossgrain.gpt.training import PRESETS as SIZES
from crossgrain.planes import COLUMNWISE, ROWWISE
from crossgrain.planning import gathered_bytes
from crossgrain.recipe.presets import PRESETS
from crossgrain.tensor import QuantizedTensor
from crossgrain.tensor.row_shards import m_major_buffers

OTHERS = (
    "mxfp8, backward_override: high_precision",
    "mxfp8, backward_override: dequantized",
    "nvfp4; head: hp; *.fc1: mxfp8",
    "mxfp8; head: bf16",
    "nvfp4, dgrad: bf16",
    "mxfp8, wgrad: hp",
    "mxfp8, dgrad: hp",
    "fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8, input.source: dequantized_late, weight.source: dequantized_late",
)
CONFIG = GPTConfig(layers=2, width=48, heads=2, context=19)  # sizes that have to be padded


def tokens(config, batch):
    return torch.randint(0, 256, (batch, config.context), generator=torch.Generator().manual_seed(0))


def on_meta(make):
    with torch.device("meta"):
        return make()


def memory(model, recipe, **options):
    return cg.plan(model, recipe, **{"dtype": "fp32", **options}).memory


# ---- saved for backward ----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*PRESETS, *OTHERS])
def test_bytes_that_linear_layers_save(recipe):
    model, values = GPT(CONFIG), tokens(CONFIG, 2)
    cg.convert(model, recipe)
    measured = bytes_saved_by_linear_layers(model, values, values)
    planned = memory(
        on_meta(lambda: GPT(CONFIG)), recipe, sequence=CONFIG.context, batch=2, parameters="high_precision"
    )
    assert planned.saved_inputs + planned.saved_weights == measured


def test_sizes_of_the_lab_by_name():
    config = SIZES["tiny"].model
    model, values = GPT(config), tokens(config, 3)
    cg.convert(model, "mxfp8-fwd-nvfp4-bwd")
    planned = memory("lab-tiny", "mxfp8-fwd-nvfp4-bwd", batch=3, parameters="high_precision")
    measured = bytes_saved_by_linear_layers(model, values, values)
    assert planned.saved_inputs + planned.saved_weights == measured
    assert sum(planned.weights.values()) == sum(p.nbytes for p in model.parameters())


# ---- parameters and optimizer ----------------------------------------------------------------------


def quantized_model(recipe, dtype=torch.bfloat16):
    with cg.quantized_model_init(recipe=cg.GemmRecipe.load(recipe)):
        layers = [cg.Linear(64, 128, params_dtype=dtype), cg.Linear(128, 32, bias=False, params_dtype=dtype)]
    return nn.Sequential(layers[0], nn.LayerNorm(128, dtype=dtype), layers[1])


def kept_bytes(model):
    buffers = {}
    for parameter in model.parameters():
        planes = parameter.planes() if isinstance(parameter, QuantizedTensor) else []
        tensors = [buffer for plane in planes for buffer in plane.buffers()] or [parameter]
        buffers |= {id(tensor): tensor.nbytes for tensor in tensors}
    return sum(buffers.values())


@pytest.mark.parametrize("recipe", PRESETS)
def test_bytes_of_quantized_parameters(recipe):
    model = quantized_model(recipe)
    planned = memory(model, recipe, dtype="bf16", sequence=32)
    assert sum(planned.weights.values()) == kept_bytes(model)
    assert planned.saved_weights == 0


def test_planes_of_parameters_are_told_apart():
    model = quantized_model("mxfp8-fwd-nvfp4-bwd")
    planned = memory(model, "mxfp8-fwd-nvfp4-bwd", dtype="bf16", sequence=32).weights
    for direction, name in ((ROWWISE, "mxfp8 rowwise"), (COLUMNWISE, "nvfp4 columnwise")):
        planes = [model[i].weight.plane(direction) for i in (0, 2)]
        assert planned[name] == sum(buffer.nbytes for plane in planes for buffer in plane.buffers())


@pytest.mark.parametrize("master", ["fp32", "fp16", "remainder"])
@pytest.mark.parametrize("moments", [("fp32", "fp32"), ("bf16", "fp16"), ("fp8", "fp8")])
def test_states_of_the_optimizer(master, moments):
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
    model = quantized_model("mxfp8")
    optimizer = cg.optim.FusedAdam(
        model.parameters(),
        master_weights=True,
        master_weight_dtype=torch.float16 if master == "fp16" else torch.float32,
        store_param_remainders=master == "remainder",
        exp_avg_dtype=dtypes[moments[0]],
        exp_avg_sq_dtype=dtypes[moments[1]],
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
    optimizer.step()
    measured = 0
    for parameter in model.parameters():
        for state in optimizer.state[parameter].values():
            is_quantized = isinstance(state, QuantizedTensor)
            buffers = [b for plane in state.planes() for b in plane.buffers()] if is_quantized else [state]
            measured += sum(buffer.nbytes for buffer in buffers)
        measured += sum(scale.nbytes for scale in optimizer._scales.get(parameter, {}).values())
    planned = memory(model, "mxfp8", dtype="bf16", sequence=32, master=master, moments=moments)
    assert planned.optimizer == measured


def test_a_model_in_fp32_has_no_masters():
    assert memory(nn.Linear(32, 32), "mxfp8", parameters="high_precision").masters == 0


# ---- the wire --------------------------------------------------------------------------------------


def test_bytes_of_a_gathered_weight():
    shape = (512, 256)
    forward, backward, both = gathered_bytes("mxfp8-fwd-nvfp4-bwd", shape, ranks=4)
    assert forward == 512 * 256 * (1 + 1 / 32)
    assert backward == 512 * 256 * (1 / 2 + 1 / 16) + 4 * 8  # and an amax, from each rank, in whole words
    assert both - forward - backward <= 0 and both >= forward + backward - 4 * 8
    assert gathered_bytes("hp", shape, ranks=4) == (2 * 512 * 256,) * 3


@pytest.mark.parametrize("recipe", ["mxfp8-2d", "nvfp4", "fp8"])
def test_what_serves_both_directions_is_gathered_once(recipe):
    forward, backward, both = gathered_bytes(recipe, (256, 128), ranks=2)
    assert forward == backward == both


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4-plain", "fp8-block", "mxfp8-fwd-nvfp4-bwd"])
def test_gathered_bytes_are_those_of_the_shards(recipe):
    """Each rank's rows of a real weight, as they would be sent."""
    ranks, weight = 2, torch.randn(256, 128)
    quantizer = cg.GemmRecipe.load(recipe).layer_formats("").quantizer("weight")
    quantizer.set_usage(rowwise=True, columnwise=True)
    whole = quantizer(weight)
    planned = gathered_bytes(recipe, weight.shape, ranks=ranks, dtype=torch.float32)
    for direction, size in ((ROWWISE, planned.forward), (COLUMNWISE, planned.backward)):
        sent = 0
        for shard in whole.split(128):
            plane = shard.plane(direction)
            shared = plane.scale_across((0,))
            parts = [buffer.contiguous().nbytes for _, buffer in m_major_buffers(plane)]
            sent += -(-(sum(parts) + (0 if shared is None else shared.nbytes)) // 8) * 8
        assert size == sent


# ---- work ------------------------------------------------------------------------------------------


def test_flops_of_linear_layers():
    model, values = GPT(CONFIG), tokens(CONFIG, 2)
    with FlopCounterMode(display=False) as counter:
        model.loss(values, values).backward()
    measured = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    work = cg.plan(model, "hp", dtype="fp32", sequence=CONFIG.context, batch=2).work
    assert sum(gemm.flops for gemm in work) == measured
