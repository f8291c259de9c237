"""Debug features of Transformer Engine: in which steps, in which files, and over which ranks statistics are logged."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import compat
from crossgrain.compat.debug import FEATURES
from crossgrain.planes import COLUMNWISE

from ..common import ranks
from .inspecting import batch, debug_api, equal, plain, session

te = compat.transformer_engine.pytorch
HYBRID = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"
PLAIN = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]


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
