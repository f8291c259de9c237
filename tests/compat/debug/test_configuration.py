"""Settings of features are checked before anything runs."""

import pytest

from crossgrain.compat.debug.configuration import ConfigurationError, check_features

from ...common.logs import silent, warned

LOG = {"enabled": True, "tensors": ["activation"], "stats": ["max"]}
FAKE = {"enabled": True, "gemms": ["fprop"], "tensors": ["activation"], "quant_format": "FP8E4M3"}


@pytest.mark.parametrize(
    "feature, settings",
    [
        ("LogTensorStats", {**LOG, "freq": 2, "start_step": 1, "end_step": 5, "tensors": ["output", "wgrad", "dgrad"]}),
        ("LogTensorStats", {"enabled": True, "tensors_struct": [{"tensor": "weight", "stats": ["min"], "freq": 3}]}),
        ("LogTensorStats", {**LOG, "start_end_list": [[0, 20], [80, 100]]}),
        ("LogTensorStats", {"enabled": False, "anything": 1}),
        ("LogFp8TensorStats", {**LOG, "stats": ["mxfp8_mse_columnwise", "underflows%"]}),
        ("LogNvfp4TensorStats", {**LOG, "stats": ["underflows%", "mse"]}),
        ("FakeQuant", FAKE),
        ("FakeQuant", {**FAKE, "quant_format": "nvfp4", "tensors": ["output"]}),
        ("FakeQuant", {**FAKE, "margin": 2}),
        (
            "FakeQuant",
            {
                "enabled": True,
                "quant_format": "FP8E5M2",
                "gemms_struct": [
                    {"gemm": "fprop", "tensors": ["activation", "weight"]},
                    {"gemm": "dgrad", "tensors_struct": [{"tensor": "gradient", "quant_format": "MXFP8E4M3"}]},
                ],
            },
        ),
        ("PerTensorScaling", {"enabled": True, "gemms": ["dgrad"], "tensors": ["weight", "gradient"], "margin": 1}),
        ("DisableQuantizationGEMM", {"enabled": True, "gemms": ["dgrad", "wgrad"]}),
        ("DisableFP8GEMM", {"enabled": True, "gemms": ["dgrad"]}),
        ("DisableQuantizationLayer", {"enabled": True}),
        ("DisableFP8Layer", {"enabled": True}),
        ("FeatureOfAUser", {"enabled": True, "anything": 1}),
    ],
)
def test_settings_of_transformer_engine_are_accepted(feature, settings):
    with silent():
        check_features({feature: settings}, "fc1")


@pytest.mark.parametrize(
    "feature, settings, message",
    [
        ("LogTensorStats", {"stats": ["max"]}, "'enabled: True' or 'enabled: False' is missing"),
        ("LogTensorStats", {**LOG, "stats": ["median"]}, "no statistic 'median'"),
        ("LogTensorStats", {**LOG, "stats": []}, "stats of activation must be a list that is not empty"),
        ("LogTensorStats", {**LOG, "stats": "max"}, "stats of activation must be a list that is not empty, got 'max'"),
        ("LogTensorStats", {**LOG, "tensors": ["activations"]}, "no tensor 'activations', only activation, weight"),
        ("LogTensorStats", {"enabled": True, "stats": ["max"]}, "either tensors, a list of names, or tensors_struct"),
        ("LogTensorStats", {**LOG, "tensors_struct": []}, "either tensors, a list of names, or tensors_struct"),
        ("LogTensorStats", {**LOG, "frequency": 3}, "no setting 'frequency'; there are stats, freq"),
        ("LogTensorStats", {**LOG, "freq": 0}, "freq must be a number of steps, at least 1, got 0"),
        ("LogTensorStats", {**LOG, "start_step": "5"}, "start_step must be a step, got '5'"),
        ("LogTensorStats", {**LOG, "start_end_list": [[0, 2, 4]]}, "start_end_list must be a list of pairs of steps"),
        ("LogFp8TensorStats", {**LOG, "tensors": ["output"], "stats": ["mse"]}, "no tensor 'output', only activation"),
        ("LogNvfp4TensorStats", {**LOG, "stats": ["scale_inv_min"]}, "no statistic 'scale_inv_min'"),
        ("FakeQuant", {**FAKE, "gemms": ["fgrad"]}, "no gemm 'fgrad', only fprop, dgrad, wgrad"),
        ("FakeQuant", {**FAKE, "gemms": []}, "gemms must be a list that is not empty"),
        ("FakeQuant", {**FAKE, "gemms_struct": [{"gemm": "fprop"}]}, "either gemms, a list of names, or gemms_struct"),
        ("FakeQuant", {**FAKE, "quant_format": "FP7"}, "no quant_format 'FP7'; there are FP8E4M3"),
        ("FakeQuant", {key: value for key, value in FAKE.items() if key != "quant_format"}, "quant_format is missing"),
        ("FakeQuant", {**FAKE, "quant_format": "MXFP8E4M3", "margin": 1}, "margin is only for formats with one scale"),
        ("FakeQuant", {**FAKE, "margin": 0.5}, "margin must be a whole number, got 0.5"),
        ("PerTensorScaling", {"enabled": True, "gemms": ["fprop"], "tensors": ["output"]}, "no tensor 'output'"),
        ("DisableQuantizationGEMM", {"enabled": True, "gemms": ["fprop"], "tensors": ["weight"]}, "'tensors'"),
        ("DisableQuantizationLayer", {"enabled": True, "gemms": ["fprop"]}, "no settings beside 'enabled', got gemms"),
        (
            "FakeQuant",
            {"enabled": True, "gemms_struct": ["fprop"], "tensors": ["weight"], "quant_format": "FP8E4M3"},
            "each item of gemms_struct must be a mapping with 'gemm', got 'fprop'",
        ),
    ],
)
def test_what_does_not_exist_is_an_error_that_names_the_feature_and_the_layers(feature, settings, message):
    with pytest.raises(ConfigurationError, match=f"^{feature} for layers fc1.*{message}"):
        check_features({feature: settings}, "fc1")


def test_tensors_that_no_gemm_beside_them_reads_are_warned_about():
    settings = {"enabled": True, "gemms": ["dgrad"], "tensors": ["weight", "activation"]}
    with warned("PerTensorScaling for layers fc1: activation has no effect.*fprop and wgrad"):
        check_features({"PerTensorScaling": settings}, "fc1")
