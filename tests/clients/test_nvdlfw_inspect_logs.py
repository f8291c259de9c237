"""Transformer Engine's debug features that log statistics, with the package nvdlfw_inspect."""

import math

import pytest
import torch

import crossgrain as cg
from crossgrain import compat
from crossgrain.planes import COLUMNWISE
from crossgrain.quantizers.observer import observe

from .inspecting import batch, converted, debug_api, equal, plain, session, trained

te = compat.transformer_engine.pytorch
recipes = compat.transformer_engine.common.recipe
HYBRID = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"
OPERANDS, RESULTS = ["activation", "weight", "gradient"], ["output", "dgrad", "wgrad"]
PLAIN = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
BLOCKWISE = [{"max_blockwise_dynamic_range": {"block_size": 16, "dims": dims}} for dims in (1, 2)]
ALL_LOGS = {
    "LogTensorStats": {"tensors": OPERANDS + RESULTS, "stats": PLAIN + BLOCKWISE},
    "LogFp8TensorStats": {
        "tensors": OPERANDS,
        "stats": ["fp8_current_scaling_mse", "mxfp8_underflows%", "mxfp8_mse_columnwise", "fp8_block_scaling_mse"],
    },
}


def one_step(layer, x, splits=()):
    """All six tensors of a step of a layer."""
    x = x.clone().requires_grad_()
    y = layer(x, *splits)
    y.retain_grad()
    y.square().sum().backward()
    found = {"activation": x, "weight": layer.weight, "gradient": y.grad}
    return found | {"output": y, "dgrad": x.grad, "wgrad": layer.weight.grad}


# ---- tensors in high precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "mxfp8", HYBRID])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_those_of_the_tensors(recipe, dtype, tmp_path):
    model = converted(recipe or "hp", dtype)
    with session({"LogTensorStats": {"tensors": OPERANDS + RESULTS, "stats": PLAIN}}, tmp_path) as logged:
        tensors = one_step(model.fc1, batch(dtype=dtype))
        assert not logged.values  # before the step is over
        debug_api.step()
    assert logged.names() == {f"fc1_{name}_{stat}" for name in tensors for stat in PLAIN}
    for name, tensor in tensors.items():
        for stat, value in plain(tensor).items():  # sums are in float64 on both sides, in another order
            assert logged[f"fc1_{name}_{stat}", 0] == pytest.approx(float(value), rel=1e-9, abs=1e-12), (name, stat)


@pytest.mark.parametrize("dims", [1, 2])
def test_the_blockwise_range_is_the_largest_of_a_block(dims, tmp_path):
    stat = {"max_blockwise_dynamic_range": {"block_size": 16, "dims": dims}}
    features = {"LogTensorStats": {"tensors": ["activation", "gradient"], "stats": [stat]}}
    layer = te.Linear(64, 32, name="fc1")
    with session(features, tmp_path) as logged:
        tensors = one_step(layer, batch(48))
        debug_api.step()

    def largest(matrix):
        tall = 16 if dims == 2 else 1
        blocks = [
            matrix[i : i + tall, j : j + 16].abs()
            for i in range(0, matrix.shape[0], tall)
            for j in range(0, matrix.shape[1], 16)
        ]
        return max(math.log2(block.max()) - math.log2(block[block > 0].min()) for block in blocks)

    name = f"max_blockwise_dynamic_range_block_size_16_dims_{dims}"
    x, dy = tensors["activation"].detach(), tensors["gradient"]
    both = max(largest(x), largest(x.t()))
    assert logged[f"fc1_activation_{name}_max_over_orientations", 0] == pytest.approx(both, rel=1e-6)
    assert logged[f"fc1_gradient_{name}", 0] == pytest.approx(largest(dy), rel=1e-6)


def test_microbatches_are_one_tensor_and_weights_count_once(tmp_path):
    layer, halves = te.Linear(64, 32, name="fc1"), (batch(24, seed=3), batch(40, seed=4) + 1)
    with session({"LogTensorStats": {"tensors": ["activation", "weight"], "stats": PLAIN}}, tmp_path) as logged:
        for half in halves:
            layer(half)
        debug_api.step()
    for name, tensor in (("activation", torch.cat(halves)), ("weight", layer.weight)):
        for stat, value in plain(tensor).items():
            assert logged[f"fc1_{name}_{stat}", 0] == pytest.approx(float(value), rel=1e-9), (name, stat)


def test_what_a_checkpoint_recomputes_counts_once(tmp_path):
    features = {"LogTensorStats": {"tensors": OPERANDS + RESULTS, "stats": ["l1_norm"]}}
    logs = []
    for checkpointed in (False, True):
        model, x = converted("mxfp8"), batch().requires_grad_()
        with session(features, tmp_path) as logged:
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            y.sum().backward()
            debug_api.step()
        logs.append(logged.values)
    assert logs[0] == logs[1] and len(logs[0]) == 6


def test_gradients_that_are_added_to_main_grad_are_logged_alone(tmp_path):
    layer = te.Linear(64, 32, name="fc1", fuse_wgrad_accumulation=True, bias=False)
    layer.weight.main_grad = torch.full((32, 64), 7.0)
    with session({"LogTensorStats": {"tensors": ["wgrad"], "stats": ["max"]}}, tmp_path) as logged:
        layer(batch()).sum().backward()
        debug_api.step()
    assert logged["fc1_wgrad_max", 0] == pytest.approx(float((layer.weight.main_grad - 7).max()), rel=1e-4)


# ---- quantized tensors -----------------------------------------------------------------------------------------


def made_by(layer, x, recipe):
    """The planes that a step of a layer makes of its tensors, decoded: by tensor and direction."""
    found = {}

    def look(event):
        for made in event.made:
            for direction in made.directions:
                decoded = made.plane.read(direction)
                found[event.tensor, direction] = cg.kernels.decode(decoded, torch.float32), decoded

    with observe(look):
        tensors = one_step(layer, x)
    names = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
    return tensors, {(name, d): found[own, d] for name, own in names.items() for d in cg.Direction if (own, d) in found}


QUANTIZED = [
    "mxfp8",
    "fp8",
    "fp8(delayed)",
    "fp8_block",
    "mxfp6_e3m2",
    HYBRID,
    "fprop: fp8_block, dgrad: mxfp8, wgrad: mxfp8",
]


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("suffix, direction", [("", cg.ROWWISE), ("_columnwise", COLUMNWISE)])
def test_statistics_of_planes_are_those_of_what_training_has_made(recipe, suffix, direction, tmp_path):
    """Also of hybrids, for which Transformer Engine raises: 8 bits by one feature, 4 bits by the other."""
    model = converted(recipe)
    torch.manual_seed(5)
    tensors, planes = made_by(model.fc1, batch(), recipe)
    model = converted(recipe)
    kinds = ["underflows%", "mse", "scale_inv_min", "scale_inv_max"]
    fp4 = {name for name in OPERANDS if planes[name, direction][1].format.name.startswith("nvfp4")}
    features = {
        "LogFp8TensorStats": {"tensors": sorted(set(OPERANDS) - fp4), "stats": [kind + suffix for kind in kinds]},
        "LogNvfp4TensorStats": {"tensors": sorted(fp4), "stats": [kind + suffix for kind in kinds[:2]]},
    }
    with session({name: each for name, each in features.items() if each["tensors"]}, tmp_path) as logged:
        torch.manual_seed(5)
        one_step(model.fc1, batch())
        debug_api.step()
    for name in OPERANDS:
        x = tensors[name].detach().float()
        decoded, plane = planes[name, direction]
        decoded, prefix = decoded[: x.shape[0], : x.shape[1]], "nvfp4_" if name in fp4 else ""
        value = {kind: logged.values.get((f"fc1_{name}_{prefix}{kind}{suffix}", 0)) for kind in kinds}
        assert value["mse"] == pytest.approx(float((decoded - x).double().square().mean()), rel=1e-5)
        if plane.format.rotation is None:
            lost = 100 * int(((decoded == 0) & (x != 0)).sum()) / x.numel()
            assert value["underflows%"] == pytest.approx(lost, abs=1e-9)
        if name not in fp4:
            stored = plane.operand_scales()
            scales = stored if stored.dtype == torch.float32 else torch.exp2(stored.float() - 127)
            assert (value["scale_inv_min"], value["scale_inv_max"]) == (float(scales.min()), float(scales.max()))


def test_rotated_numbers_underflow_where_they_are_rounded(tmp_path):
    """Tiny numbers beside a large one are lost, but not if the large one is spread over all of them."""
    x = torch.full((32, 64), 1e-6)
    x[::16] = 1.0
    settings = {"tensors": ["activation"], "stats": ["underflows%_columnwise", "mse_columnwise"]}
    shares = {}
    for wgrad in ("nvfp4(rht)", "nvfp4"):
        layer = te.Linear(64, 32, name="fc1", bias=False)
        layer.bound_recipe = cg.GemmRecipe.load(f"fprop: mxfp8, dgrad: mxfp8, wgrad: {wgrad}")
        with session({"LogNvfp4TensorStats": settings}, tmp_path) as logged:
            layer(x.clone()).sum().backward()
            debug_api.step()
        shares[wgrad] = logged["fc1_activation_nvfp4_underflows%_columnwise", 0]
    assert shares["nvfp4(rht)"] == 0 and shares["nvfp4"] == pytest.approx(100 * 15 / 16)


def test_other_recipes_can_be_tried_on_the_same_tensors(tmp_path):
    """The names of Transformer Engine's test of all statistics, and a recipe that it has not: high precision."""
    formats = {"fp8_current_scaling": "fp8", "mxfp8": "mxfp8", "fp8_block_scaling": "fp8_block_2d"}
    stats = [f"{recipe}_mse{suffix}" for recipe in formats for suffix in ("", "_columnwise")]
    for own in ("hp", "nvfp4", "mxfp8"):
        model = converted(own)
        with session({"LogFp8TensorStats": {"tensors": ["activation"], "stats": stats}}, tmp_path) as logged:
            one_step(model.fc1, batch(128))
            debug_api.step()
        for recipe, fmt in formats.items():
            for suffix, direction in (("", cg.ROWWISE), ("_columnwise", COLUMNWISE)):
                quantized = cg.quantize(torch.nn.functional.pad(batch(128), (0, 64)), fmt)
                error = (quantized.dequantize(direction=direction)[:, :64] - batch(128)).double().square().mean()
                assert logged[f"fc1_activation_{recipe}_mse{suffix}", 0] == pytest.approx(float(error), rel=1e-5)


def test_delayed_scaling_knows_what_was_cut_off(tmp_path):
    layer, x = te.Linear(64, 32, name="fc1"), batch(32)
    stats = ["overflows%", "fp8_delayed_scaling_overflows%", "fp8_delayed_scaling_underflows%"]
    with session({"LogFp8TensorStats": {"tensors": ["activation"], "stats": stats}}, tmp_path) as logged:
        for factor in (1.0, 4.0):  # the second step has the scale of the first
            with te.autocast(recipe=recipes.DelayedScaling()):
                layer(factor * x)
            debug_api.step()
    cut = 100 * float((4 * x.abs() > x.abs().max()).double().mean())
    assert logged["fc1_activation_overflows%", 0] == 0
    for name in stats[:2]:
        assert logged[f"fc1_activation_{name}", 1] == pytest.approx(cut)


def test_errors_are_those_against_what_was_quantized(tmp_path):
    """Under torch.autocast that is the tensor in bfloat16, not the one that came in."""
    layer, x = te.Linear(64, 32, name="fc1"), batch(32)
    with session({"LogFp8TensorStats": {"tensors": ["activation"], "stats": ["mse"]}}, tmp_path) as logged:
        with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=recipes.MXFP8BlockScaling()):
            layer(x)
        debug_api.step()
    rounded = x.bfloat16()
    error = (cg.quantize(rounded, "mxfp8").dequantize().float() - rounded.float()).double().square().mean()
    assert logged["fc1_activation_mse", 0] == pytest.approx(float(error), rel=1e-6)


def test_planes_that_training_has_made_are_not_made_again(tmp_path):
    def planes_made(features):
        made = []
        with session(features, tmp_path), observe(made.append):
            trained(converted(HYBRID), steps=1, step=debug_api.step)
        return len(made)

    names = {
        "LogFp8TensorStats": {"tensors": ["activation", "weight"], "stats": ["mse", "mxfp8_mse", "mxfp8_underflows%"]}
    }
    four = {"LogNvfp4TensorStats": {"tensors": OPERANDS, "stats": ["mse_columnwise", "underflows%_columnwise"]}}
    quiet = planes_made({"DisableQuantizationGEMM": {"enabled": False, "gemms": ["fprop"]}})
    assert planes_made(names | four) == quiet
    assert (
        planes_made({"LogFp8TensorStats": {"tensors": ["activation"], "stats": ["fp8_current_scaling_mse"]}})
        == quiet + 1
    )


@pytest.mark.parametrize("recipe", ["hp", "mxfp8", "fp8(delayed)", HYBRID])
def test_logging_changes_no_bit(recipe, tmp_path):
    expected = trained(converted(recipe), steps=3)
    with session(ALL_LOGS, tmp_path, layers=".*") as logged:
        assert equal(trained(converted(recipe), steps=3, step=debug_api.step), expected)
    assert len(logged.values) == 3 * 2 * (6 * 10 + 3 * 4)
