"""Debug features of Transformer Engine: nothing is ignored without a word."""

import subprocess
import sys

import pytest
import torch

from crossgrain import compat

from ..common.logs import warned
from .inspecting import batch, converted, debug_api, session


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

    expected = warned(f"{feature} of layer 'fc1'.*{message}")
    with session({feature: {"tensors": ["activation"], "stats": stats}}, tmp_path) as logged, expected as said:
        two_steps()
    assert len(said) == 1 and not logged.values


def test_planes_that_were_not_made_are_said(tmp_path):
    features = {"LogFp8TensorStats": {"tensors": ["activation"], "stats": ["mse", "mse_columnwise"]}}
    with torch.no_grad(), session(features, tmp_path) as logged:
        with warned("mse_columnwise of activation is not logged: no GEMM has read its columnwise"):
            converted("mxfp8")(batch())
        debug_api.step()
    assert logged.names() == {"fc1_activation_mse"}


def test_tensors_that_never_come_are_said(tmp_path):
    with warned("look at dgrad of layer 'fc1', but there was none in a step"):
        problem(
            {"LogTensorStats": {"tensors": ["dgrad"], "stats": ["max"]}},
            tmp_path,
            lambda: converted("mxfp8")(batch()).sum().backward(),  # the input needs no gradient
        )


def test_sections_without_layers_are_said(tmp_path):
    with warned("layer_name_regex_pattern: fc3, but no layer .* there were fc1, fc2"):
        problem({"DisableQuantizationLayer": {}}, tmp_path, layers="fc3")


def test_tensors_beside_other_gemms_are_said(tmp_path):
    with warned("activation has no effect, because no GEMM .* fprop and wgrad would"):
        problem(
            {"FakeQuant": {"gemms": ["dgrad"], "tensors": ["weight", "activation"], "quant_format": "FP8E4M3"}},
            tmp_path,
        )


def test_statistics_that_wait_for_a_step_at_the_end_are_said(tmp_path):
    features = {"LogTensorStats": {"tensors": ["activation"], "stats": ["max"]}}
    expected = warned(r"statistics wait for debug_api.step\(\), which logs them; they are lost")
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
