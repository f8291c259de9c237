"""Names of statistics, in configurations and in logs."""

import pytest

from crossgrain.compat.debug.stat_names import fp8_stat, nvfp4_stat, tensor_stat
from crossgrain.planes import COLUMNWISE, ROWWISE


@pytest.mark.parametrize("name", ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"])
def test_statistics_of_tensors_are_called_as_they_are_asked_for(name):
    assert tensor_stat(name, "output").name == name


def test_the_blockwise_range_has_its_blocks_in_its_name():
    given = {"max_blockwise_dynamic_range": {"block_size": 16, "dims": 2}}
    assert tensor_stat(given, "gradient").name == "max_blockwise_dynamic_range_block_size_16_dims_2"
    assert tensor_stat(given, "weight").name.endswith("dims_2_max_over_orientations")
    assert tensor_stat("max_blockwise_dynamic_range", "output").name.endswith("block_size_32_dims_1")


@pytest.mark.parametrize(
    "given, kind, recipe, direction",
    [
        ("underflows%", "underflows%", "", ROWWISE),
        ("mse_columnwise", "mse", "", COLUMNWISE),
        ("fp8_delayed_scaling_overflows%", "overflows%", "fp8_delayed_scaling", ROWWISE),
        ("fp8_current_scaling_scale_inv_min", "scale_inv_min", "fp8_current_scaling", ROWWISE),
        ("mxfp8_scale_inv_max_columnwise", "scale_inv_max", "mxfp8", COLUMNWISE),
        ("fp8_block_scaling_mse", "mse", "fp8_block_scaling", ROWWISE),
    ],
)
def test_statistics_of_8_bits_name_a_recipe_and_a_direction(given, kind, recipe, direction):
    stat = fp8_stat(given)
    assert (stat.name, stat.kind, stat.recipe, stat.direction) == (given, kind, recipe, direction)


def test_statistics_of_4_bits_have_a_prefix_in_logs():
    stat = nvfp4_stat("mse_columnwise")
    assert (stat.name, stat.kind, stat.direction) == ("nvfp4_mse_columnwise", "mse", COLUMNWISE)


@pytest.mark.parametrize(
    "parse, given, message",
    [
        (lambda given: tensor_stat(given, "output"), "median", "no statistic 'median'; there are min, max"),
        (lambda given: tensor_stat(given, "output"), 3, "no statistic 3"),
        (
            lambda given: tensor_stat(given, "output"),
            {"max_blockwise_dynamic_range": {"dims": 3}},
            "takes a block_size of at least 1, and dims 1 or 2",
        ),
        (
            lambda given: tensor_stat(given, "output"),
            {"max_blockwise_dynamic_range": {"size": 3}},
            "takes a block_size of at least 1",
        ),
        (lambda given: tensor_stat(given, "output"), {"max": {}, "min": {}}, "there is no statistic"),
        (fp8_stat, "nvfp4_mse", "no statistic 'nvfp4_mse'; there are underflows%"),
        (fp8_stat, "mxfp8", "no statistic 'mxfp8'"),
        (fp8_stat, "mxfp8_overflows%", "only fp8_delayed_scaling has overflows%"),
        (nvfp4_stat, "mxfp8_mse", "no statistic 'mxfp8_mse'; there are underflows%, mse"),
        (nvfp4_stat, "scale_inv_min", "no statistic 'scale_inv_min'"),
    ],
)
def test_what_does_not_exist_is_refused(parse, given, message):
    with pytest.raises(ValueError, match=message):
        parse(given)
