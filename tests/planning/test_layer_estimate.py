"""The cost of one layer is what a plan adds up."""

from collections import defaultdict

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.planning import LayerEstimate, gemm_seconds, layer_estimate
from crossgrain.recipe import PRESETS, GemmRecipe

SIZES = {"0.up": (256, 512), "0.down": (512, 256), "1.up": (256, 520), "1.down": (520, 256)}  # some need padding


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        blocks = [
            nn.ModuleDict({part: nn.Linear(*SIZES[f"{i}.{part}"], bias=False) for part in ("up", "down")})
            for i in range(2)
        ]
    return nn.ModuleList(blocks)


def estimates(recipe: str, blocks: int = 2, **options) -> list[LayerEstimate]:
    bound = GemmRecipe.load(recipe)
    return [
        layer_estimate(bound, name, tokens=192, inputs=inputs, outputs=outputs, **options)
        for name, (inputs, outputs) in list(SIZES.items())[: 2 * blocks]
    ]


@pytest.mark.parametrize("device", ["b200", "h100"])
@pytest.mark.parametrize("recipe", [*PRESETS, "mxfp8; *.down: fprop: nvfp4; 1.*: wgrad: hp", "all: mxint8"])
def test_the_layers_add_up_to_the_plan(recipe: str, device: str, model: nn.Module) -> None:
    options = {"device": device, "gemm_efficiency": 0.5}
    made = cg.plan(model, recipe, sequence=192, parameters="high_precision", **options)
    found = estimates(recipe, **options)
    seconds, flops = defaultdict(float), defaultdict(int)
    for each in found:
        for work in each.gemms.values():
            seconds[work.gemm, work.format, work.kind] += work.seconds
            flops[work.gemm, work.format, work.kind] += work.flops
    for work in made.work:
        assert work.flops == flops.pop((work.gemm, work.format, work.kind))
        assert work.seconds == seconds[work.gemm, work.format, work.kind]  # added up in the same order
    assert not flops
    assert made.memory.saved_inputs == sum(each.saved_input for each in found)
    assert made.memory.saved_weights == sum(each.saved_weight for each in found)
    assert set(made.without_rate) == {fmt for each in found for fmt in each.without_rate}
    for fmt in {fmt for each in found for fmt in each.decoded}:
        assert any("not multiplied natively" in text and fmt in text for text in made.assumptions)


@pytest.mark.parametrize(
    "recipe", ["mxfp8-fwd-nvfp4-bwd", "fp8", "nvfp4", "hp", "mxfp8, backward_override: dequantized"]
)
@pytest.mark.parametrize("options", [{"parameters": "high_precision", "gather": "planes"}, {}])
def test_gathered_bytes_are_those_of_the_wire(recipe: str, options: dict, model: nn.Module) -> None:
    if not options:  # weights that are kept quantized are not padded
        model = nn.ModuleList([model[0]])
    made = cg.plan(model, recipe, sequence=192, gpus=4, **options)
    wire = {traffic.kind: traffic.bytes for traffic in made.wire}
    found = estimates(recipe, len(model), ranks=4, weight_is_quantized=not options)
    assert wire["gather weights for forward"] == sum(each.gathered.forward for each in found) * 3 // 4
    assert wire["gather weights for backward"] == sum(each.gathered.backward for each in found) * 3 // 4


def test_a_gemm_takes_the_longer_of_two_times() -> None:
    large = gemm_seconds("fprop: mxfp8, dgrad: nvfp4, wgrad: hp", tokens=8192, inputs=4096, outputs=4096)
    work = 2 * 8192 * 4096 * 4096
    assert large == {"fprop": work / 4500e12, "dgrad": work / 9000e12, "wgrad": work / 2250e12}
    small = gemm_seconds("hp", tokens=128, inputs=128, outputs=128, device="b200, bandwidth=1")
    assert small == dict.fromkeys(large, 3 * 128 * 128 * 2 / 1e9)


def test_experts_share_the_tokens() -> None:
    one = layer_estimate("mxfp8", tokens=100, inputs=128, outputs=256)
    four = layer_estimate("mxfp8", tokens=398, inputs=128, outputs=256, module_type="grouped_linear", experts=4)
    assert four.seconds == {gemm: 4 * seconds for gemm, seconds in one.seconds.items()}
    assert four.saved_input == 4 * one.saved_input and four.gathered.forward == 4 * one.gathered.forward


def test_rules_are_for_the_layer() -> None:
    sizes = {"tokens": 4096, "inputs": 4096, "outputs": 4096}
    recipe = "mxfp8; lm_head: hp; type=grouped_linear: nvfp4"
    assert gemm_seconds(recipe, "lm_head", **sizes) == gemm_seconds("hp", **sizes)
    assert gemm_seconds(recipe, "fc", module_type="grouped_linear", **sizes) == gemm_seconds("nvfp4", **sizes)
    assert layer_estimate("mxfp8", weight_is_quantized=True, **sizes).saved_weight == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"experts": 0}, "experts must be at least 1"),
        ({"dtype": "bf61"}, "dtype cannot be 'bf61'; did you mean 'bf16'"),
        ({"device": "b201"}, "there is no device 'b201'; did you mean 'b200'"),
    ],
)
def test_wrong_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_estimate("mxfp8", **{"tokens": 128, "inputs": 128, "outputs": 128, **options})
