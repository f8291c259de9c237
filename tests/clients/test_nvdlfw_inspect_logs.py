"""Transformer Engine's debug features that log statistics, with the package nvdlfw_inspect."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import compat
from crossgrain.compat.debug import FEATURES
from crossgrain.planes import COLUMNWISE
from crossgrain.quantizers.observer import observe

from ..common import ranks
from .inspecting import batch, converted, debug_api, equal, session, trained

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


def plain(tensor):
    """The statistics of a tensor in torch's own words."""
    x = tensor.detach().double()
    magnitudes = x.abs()
    return {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": x.norm(p=1),
        "l2_norm": x.norm(p=2),
        "cur_amax": magnitudes.max(),
        "dynamic_range": torch.log2(magnitudes.max()) - torch.log2(magnitudes[magnitudes > 0].min()),
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


# ---- steps, files and ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when, steps",
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"freq": 3}, [0, 3, 6]),
        ({"freq": 2, "start_step": 1, "end_step": 4}, [2, 4]),
        ({"start_step": 5, "end_step": -1}, [5, 6]),
        ({"freq": 2, "start_end_list": [[0, 1], [3, 4]], "start_step": 6}, [0, 4]),
    ],
)
def test_statistics_are_logged_in_the_steps_that_were_asked_for(when, steps, tmp_path):
    struct = [{"tensor": "activation", "stats": ["max"], **when}, {"tensor": "weight", "stats": ["min"]}]
    layer = te.Linear(64, 32, name="fc1")
    with session({"LogTensorStats": {"tensors_struct": struct}}, tmp_path) as logged:
        for _ in range(7):
            layer(batch())
            debug_api.step()
    assert logged.iterations("fc1_activation_max") == steps
    assert logged.iterations("fc1_weight_min") == list(range(7))


def test_steps_are_counted_from_where_training_begins(tmp_path):
    features = {"LogTensorStats": {"tensors": ["activation"], "stats": ["max"], "freq": 10}}
    with session(features, tmp_path, init_training_step=19) as logged:
        for _ in range(3):
            te.Linear(64, 32, name="fc1")(batch())
            debug_api.step()
    assert logged.iterations("fc1_activation_max") == [20]


def test_steps_may_be_counted_anew(tmp_path):
    features = {"LogTensorStats": {"tensors": ["activation"], "stats": ["max"], "end_step": 1}}
    layer = te.Linear(64, 32, name="fc1")
    with session(features, tmp_path, init_training_step=5) as logged:
        for start in (5, 0):
            debug_api.initialize_training_step(start)
            layer(batch())
            debug_api.step()
    assert logged.iterations("fc1_activation_max") == [0]


def test_files_are_those_of_nvdlfw_inspect(tmp_path):
    """Found by the directory beside ``transformer_engine.__file__``, as clients look for it."""
    beside = Path(compat.transformer_engine.__file__).parent / "debug" / "features"
    assert str(beside) == FEATURES and Path(compat.transformer_engine.debug.features.__file__).parent == beside
    config = """
log:
  enabled: True
  layers:
    layer_types: [fc1]
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [activation], stats: [max]}
    DisableQuantizationGEMM: {enabled: True, gemms: [fprop]}
"""
    (tmp_path / "config.yaml").write_text(config)
    debug_api.initialize(
        str(tmp_path / "config.yaml"), feature_dirs=str(beside), log_dir=str(tmp_path), default_logging_enabled=True
    )
    try:
        te.Linear(64, 32, name="fc1")(batch())
        debug_api.step()
    finally:
        debug_api.end_debug()
    numbers = (tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    found = re.search(r"INFO - fc1_activation_max \s+iteration=000000 \s+value=([\d.]+)", numbers)
    assert found is not None and found[1] == f"{batch().max():.4f}"
    messages = (tmp_path / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert "LAYER=fc1: Tensor: activation, gemm fprop - high precision" in messages
    assert "LAYER=fc1: Tensor: activation, gemm wgrad - recipe" in messages


def merged_on_ranks(rank, folder):
    """Ranks have other rows, share a weight by columns, and only rank 1 has a second layer."""
    layer = te.Linear(64, 64, name="fc1", parallel_mode="column", tp_group=dist.group.WORLD, tp_size=2, bias=False)
    alone = te.Linear(64, 32, name="only.fc1")
    with torch.no_grad():
        layer.weight.copy_(whole_weight()[32 * rank : 32 * rank + 32])
    features = {"LogTensorStats": {"tensors": ["activation", "weight"], "stats": PLAIN}}
    folder = Path(folder) / str(rank)
    folder.mkdir()
    found = {}
    with session(features, folder) as logged:
        layer(batch(16 + 8 * rank, seed=rank) + rank)
        if rank:
            alone(batch())
        debug_api.step()
    found["together"] = logged.values
    compat.transformer_engine.debug.set_weight_tensor_tp_group_reduce(False)
    with session(features, folder) as logged:
        compat.transformer_engine.debug.set_weight_tensor_tp_group_reduce(False)
        debug_api.set_tensor_reduction_group(dist.new_subgroups(1)[0])
        layer(batch(16 + 8 * rank, seed=rank) + rank)
        debug_api.step()
    found["apart"] = logged.values
    return found


def whole_weight():
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(9))


def test_statistics_of_ranks_are_merged(tmp_path):
    (tmp_path / "logs").mkdir()
    results = ranks.run(merged_on_ranks, 2, tmp_path, str(tmp_path / "logs"))
    rows = [batch(16 + 8 * rank, seed=rank) + rank for rank in range(2)]
    expected = {"activation": torch.cat(rows), "weight": whole_weight()}
    for rank, found in enumerate(results):
        for name, tensor in expected.items():
            for stat, value in plain(tensor).items():
                assert found["together"][f"fc1_{name}_{stat}", 0] == pytest.approx(float(value), rel=1e-9)
        own = {"activation": rows[rank], "weight": whole_weight()[32 * rank : 32 * rank + 32]}
        for name, tensor in own.items():
            for stat, value in plain(tensor).items():
                assert found["apart"][f"fc1_{name}_{stat}", 0] == pytest.approx(float(value), rel=1e-9)
    assert not any(name.startswith("only") for name, _ in results[0]["together"])
    assert results[1]["together"]["only.fc1_activation_max", 0] == pytest.approx(float(batch().max()), rel=1e-9)


def sequence_parallel_on_ranks(rank, folder):
    """A layer whose input, or whose gradient, is gathered as planes: bits of a rule, and errors of the own rows."""
    folder = Path(folder) / str(rank)
    folder.mkdir()
    found = {}
    for mode in ("column", "row"):

        def run(recipe, mode=mode):
            torch.manual_seed(0)
            options = {"parallel_mode": mode, "tp_group": dist.group.WORLD, "tp_size": 2, "sequence_parallel": True}
            layer = te.Linear(64, 64, name="fc1", bias=False, **options)
            layer.bound_recipe = cg.GemmRecipe.load(recipe)
            x = batch(64, seed=rank)[:, : 64 if mode == "column" else 32].clone().requires_grad_()
            torch.manual_seed(3)
            y = layer(x)
            y.retain_grad()
            y.square().sum().backward()
            return [y.detach(), x.grad, layer.weight.grad], (x.detach() if mode == "column" else y.grad)

        expected, shared = run(f"{HYBRID}; fc1: dgrad: hp")[0], run("mxfp8")[1]
        with session({"DisableQuantizationGEMM": {"gemms": ["dgrad"]}}, folder):
            found[mode, "same"] = equal(run(HYBRID)[0], expected)
        settings = {"tensors": ["activation", "gradient"], "stats": ["mse", "mse_columnwise"]}
        with session({"LogFp8TensorStats": settings}, folder) as logged:
            run("mxfp8")
            debug_api.step()
        found[mode, "rows"], found[mode, "logged"] = shared, logged.values
    return found


def test_rows_that_are_gathered_as_planes_are_seen_as_those_of_this_rank(tmp_path):
    (tmp_path / "logs").mkdir()
    results = ranks.run(sequence_parallel_on_ranks, 2, tmp_path, str(tmp_path / "logs"))
    for mode, name in (("column", "activation"), ("row", "gradient")):
        whole = torch.cat([found[mode, "rows"] for found in results])
        quantized = cg.quantize(whole, "mxfp8")
        for found in results:
            assert found[mode, "same"] and len(found[mode, "logged"]) == 4
            for suffix, direction in (("", cg.ROWWISE), ("_columnwise", COLUMNWISE)):
                error = (quantized.dequantize(direction=direction) - whole).double().square().mean()
                assert found[mode, "logged"][f"fc1_{name}_mse{suffix}", 0] == pytest.approx(float(error), rel=1e-5)


# ---- names -----------------------------------------------------------------------------------------------------


def names_in(model, run, tmp_path, infer=False):
    with session({"LogTensorStats": {"tensors": ["activation"], "stats": ["max"]}}, tmp_path, layers=".*") as logged:
        if infer:
            debug_api.infer_and_assign_layer_names(model)
        run(model)
        debug_api.step()
    return {name.removesuffix("_activation_max") for name in logged.names()}


def test_layers_of_a_transformer_have_the_names_of_transformer_engine(tmp_path):
    def run(model):
        model(torch.randn(4, 2, 32))

    parts = ("self_attention.layernorm_linear_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    model = te.TransformerLayer(32, 64, 2, name="transformer_layer")
    assert names_in(model, run, tmp_path) == {f"transformer_layer.{part}" for part in parts}
    paths = [part.replace("layernorm_linear_qkv", "layernorm_qkv") for part in parts]
    assert names_in(model, run, tmp_path, infer=True) == {f"model.{path}" for path in paths}
    assert model.self_attention.proj.name == "transformer_layer.self_attention.proj"


def test_layers_without_names_are_numbered(tmp_path):
    model = torch.nn.Sequential(te.Linear(64, 64), te.LayerNormMLP(64, 32))
    found = names_in(model, lambda model: [model(batch()), model(batch())], tmp_path)
    assert found == {"Layer_1", "Layer_2.fc1", "Layer_2.fc2"}


def test_inferred_names_do_not_change_what_the_rules_of_a_recipe_are_for(tmp_path):
    expected = trained(converted("mxfp8; fc1: hp"))
    model = converted("mxfp8; fc1: hp")
    with session(
        {"LogTensorStats": {"tensors": ["activation"], "stats": ["max"]}}, tmp_path, layers=r"model\.fc1"
    ) as logged:
        debug_api.infer_and_assign_layer_names(model)
        assert equal(trained(model, step=debug_api.step), expected)
    assert logged.names() == {"model.fc1_activation_max"} and model.fc1.name == "fc1"


def test_groups_are_numbered_and_may_have_no_rows(tmp_path):
    layer = te.GroupedLinear(3, 64, 32, name="experts")
    with session({"LogTensorStats": {"tensors": ["activation"], "stats": ["max"]}}, tmp_path, layers=".*") as logged:
        with te.autocast(recipe=recipes.MXFP8BlockScaling()):
            layer(batch(60), [20, 0, 40])
        debug_api.step()
    rows = {f"experts.gemm_{g}_activation_max": part.max() for g, part in ((0, batch(60)[:20]), (2, batch(60)[20:]))}
    assert logged.values == {(name, 0): float(value) for name, value in rows.items()}


# ---- features of users -----------------------------------------------------------------------------------------

CUSTOM = """
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import Registry, api_method
from crossgrain.compat.transformer_engine.debug.features.api import TEConfigAPIMapper
from crossgrain.compat.transformer_engine.debug.features.utils import next_enabled_iter


@Registry.register_feature(namespace="transformer_engine")
class CountAbove(TEConfigAPIMapper):
    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return next_enabled_iter(None, None, None, config["freq"], iteration)

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor,
                       rowwise_quantized_tensor=None, columnwise_quantized_tensor=None, quantizer=None):
        assert rowwise_quantized_tensor is columnwise_quantized_tensor and quantizer is not None
        decoded = rowwise_quantized_tensor.dequantize()[: tensor.shape[0], : tensor.shape[1]]
        for name, numbers in (("count", tensor), ("quantized_count", decoded)):
            count = int((numbers > config["above"]).sum())
            MetricLogger.log_scalar(f"{layer_name}_{tensor_name}_{name}", count, iteration)

    @api_method
    def inspect_tensor_postquantize_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return gemm == "wgrad"

    @api_method
    def inspect_tensor_postquantize(self, config, layer_name, tensor_name, gemm, tensor, rowwise, iteration, tp_group):
        assert gemm == "wgrad" and not rowwise
        MetricLogger.log_scalar(f"{layer_name}_{tensor_name}_later", tensor.shape[0], iteration)


@Registry.register_feature(namespace="transformer_engine")
class Negate(TEConfigAPIMapper):
    @api_method
    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return iteration == 1, 1 if iteration < 1 else None

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, out=None):
        return default_quantizer(-tensor)
"""


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "count_above.py").write_text(CUSTOM)
    return str(tmp_path / "own")


def test_features_of_users_look_at_tensors_and_make_operands(custom, tmp_path):
    features = {
        "CountAbove": {"tensors": ["activation"], "above": 1.5, "freq": 2},
        "Negate": {"gemms": ["fprop"], "tensors": ["activation"]},
    }
    model, x = converted("mxfp8"), batch()
    expected = model.fc1(x)
    with session(features, tmp_path, feature_dirs=[custom]) as logged:
        found = []
        for _ in range(3):
            found.append(model.fc1(x))
            debug_api.step()
    bias = model.fc1.bias
    assert torch.equal(found[0], expected) and torch.equal(found[2], expected)
    torch.testing.assert_close(found[1] - bias, -(expected - bias))  # the bias is rounded with the sum
    decoded = cg.quantize(torch.nn.functional.pad(x, (0, 0, 0, 24)), "mxfp8").dequantize()
    assert logged.values["fc1_activation_count", 2] == int((x > 1.5).sum())
    assert logged.values["fc1_activation_quantized_count", 2] == int((decoded > 1.5).sum())
    assert logged.iterations("fc1_activation_count") == [0, 2]
    assert logged.iterations("fc1_activation_later") == [0, 1, 2]


# ---- what is said ----------------------------------------------------------------------------------------------


def problem(features, folder, run=lambda: converted("mxfp8")(batch()), **options):
    with session(features, folder, **options):
        run()
        debug_api.step()


@pytest.mark.parametrize(
    "features, message",
    [
        (
            {"LogTensorStats": {"tensors": ["activation"], "stats": ["median"]}},
            "LogTensorStats .*no statistic 'median'",
        ),
        (
            {"LogFp8TensorStats": {"tensors": ["output"], "stats": ["mse"]}},
            "it has no tensor 'output', only activation",
        ),
        ({"LogNvfp4TensorStats": {"tensors": ["weight"], "stats": ["scale_inv_min"]}}, "no statistic 'scale_inv_min'"),
        ({"FakeQuant": {"gemms": ["fprop"], "tensors": ["weight"], "quant_format": "FP3"}}, "no quant_format 'FP3'"),
        ({"DisableQuantizationGEMM": {"gemms": ["fgrad"]}}, "it has no gemm 'fgrad', only fprop, dgrad, wgrad"),
        ({"DisableQuantizationLayer": {"gemms": ["fprop"]}}, "takes no settings beside 'enabled', got gemms"),
    ],
)
def test_unknown_settings_are_errors_that_name_feature_and_layers(features, message, tmp_path):
    with pytest.raises(ValueError, match=message) as found:
        problem(features, tmp_path)
    assert "for layers layer_name_regex_pattern: .*fc1$" in str(found.value)


def test_unknown_features_are_errors(tmp_path):
    with pytest.raises(AssertionError, match="Could not find feature 'DumpTensor'"):
        problem({"DumpTensor": {}}, tmp_path)
    with pytest.raises(RuntimeError, match="not active: call nvdlfw_inspect.api.initialize"):
        compat.debug.session.current()


def test_unknown_calls_are_errors(tmp_path):
    with session({"DisableQuantizationLayer": {}}, tmp_path):
        with pytest.raises(ValueError, match="transformer_engine has no call 'fp8_gemm'; there are"):
            debug_api.transformer_engine.fp8_gemm("fc1", gemm="fprop", iteration=0)
        with pytest.raises(ValueError, match="modify_tensor_enabled needs the argument gemm"):
            debug_api.transformer_engine.modify_tensor_enabled("fc1", tensor_name="weight", iteration=0)
        assert debug_api.transformer_engine.fp8_gemm_enabled("fc1", gemm="fprop", iteration=0) == (False, 1)
        assert debug_api.transformer_engine.fp8_gemm_enabled("fc2", gemm="fprop", iteration=0) == (True, None)


@pytest.mark.parametrize(
    "recipe, feature, stats, message",
    [
        ("nvfp4", "LogFp8TensorStats", ["mse"], "mse of activation is not logged: its rowwise plane is nvfp4"),
        ("mxfp8", "LogNvfp4TensorStats", ["mse"], "nvfp4_mse of activation is not logged: its rowwise plane is mxfp8"),
        ("hp", "LogFp8TensorStats", ["mse"], "its rowwise operand is in high precision: use LogTensorStats"),
        ("mxfp8", "LogFp8TensorStats", ["fp8_delayed_scaling_mse"], "its scale would follow from earlier steps"),
        ("mxfp8", "LogFp8TensorStats", ["overflows%"], "only fp8_delayed_scaling has overflows%"),
        ("mxfp8; fc1: fprop: hp", "LogFp8TensorStats", ["underflows%"], "operand is in high precision"),
    ],
)
def test_what_cannot_be_logged_is_said_once(recipe, feature, stats, message, tmp_path):
    model = converted(recipe)

    def two_steps():
        for _ in range(2):
            model(batch())
            debug_api.step()

    expected = pytest.warns(UserWarning, match=f"{feature} of layer 'fc1'.*{message}")
    with session({feature: {"tensors": ["activation"], "stats": stats}}, tmp_path) as logged, expected as said:
        two_steps()
    assert len(said) == 1 and not logged.values


def test_planes_that_were_not_made_are_said(tmp_path):
    features = {"LogFp8TensorStats": {"tensors": ["activation"], "stats": ["mse", "mse_columnwise"]}}
    with torch.no_grad(), session(features, tmp_path) as logged:
        with pytest.warns(
            UserWarning, match="mse_columnwise of activation is not logged: no GEMM has read its columnwise"
        ):
            converted("mxfp8")(batch())
        debug_api.step()
    assert logged.names() == {"fc1_activation_mse"}


def test_tensors_that_never_come_are_said(tmp_path):
    with pytest.warns(UserWarning, match="look at dgrad of layer 'fc1', but there was none in a step"):
        problem(
            {"LogTensorStats": {"tensors": ["dgrad"], "stats": ["max"]}},
            tmp_path,
            lambda: converted("mxfp8")(batch()).sum().backward(),  # the input needs no gradient
        )


def test_sections_without_layers_are_said(tmp_path):
    with pytest.warns(UserWarning, match="layer_name_regex_pattern: fc3, but no layer .* there were fc1, fc2"):
        problem({"DisableQuantizationLayer": {}}, tmp_path, layers="fc3")


def test_tensors_beside_other_gemms_are_said(tmp_path):
    with pytest.warns(UserWarning, match="activation has no effect, because no GEMM .* fprop and wgrad would"):
        problem(
            {"FakeQuant": {"gemms": ["dgrad"], "tensors": ["weight", "activation"], "quant_format": "FP8E4M3"}},
            tmp_path,
        )


def test_statistics_that_wait_for_a_step_at_the_end_are_said(tmp_path):
    features = {"LogTensorStats": {"tensors": ["activation"], "stats": ["max"]}}
    expected = pytest.warns(
        UserWarning, match=r"statistics wait for debug_api.step\(\), which logs them; they are lost"
    )
    with expected, session(features, tmp_path) as logged:
        converted("mxfp8")(batch())
    assert not logged.values


def test_backward_after_the_end_is_as_ever_if_features_only_look(tmp_path):
    model = converted("mxfp8")
    with session({"LogTensorStats": {"tensors": ["gradient"], "stats": ["max"]}}, tmp_path):
        y = model(batch())
    y.sum().backward()
    assert model.fc1.weight.grad is not None


def test_nothing_is_imported_before_it_is_needed():
    code = """
import sys
import crossgrain.compat
crossgrain.compat.install()
import transformer_engine.pytorch, transformer_engine.debug.features
layer = transformer_engine.pytorch.Linear(32, 32)
assert "nvdlfw_inspect" not in sys.modules and "crossgrain.compat.debug" not in sys.modules, "imported"
from transformer_engine.debug.features.api import TEConfigAPIMapper
assert "nvdlfw_inspect" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
