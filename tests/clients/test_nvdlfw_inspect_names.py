"""Debug features of Transformer Engine: names of layers, and features of users."""

import pytest
import torch

import crossgrain as cg
from crossgrain import compat

from .inspecting import batch, converted, debug_api, equal, session, trained

te = compat.transformer_engine.pytorch
recipes = compat.transformer_engine.common.recipe


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
