"""What a layout cannot hold is refused before anything is written, with the layer and the way out."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.export.checks import kind_of

from .models import ONLY_FORWARD, mlp

KINDS = {
    "nvfp4": "nvfp4",
    "nvfp4_2d": "nvfp4",
    "nvfp4_max256": "nvfp4",
    "nvfp4_2d_max256": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "mxfp8_2d": "mxfp8",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "fp8_block_2d": "fp8_block_2d",
}


def test_every_format_is_known_or_refused():
    for fmt in cg.formats.formats():
        assert kind_of(fmt) == KINDS.get(fmt.name), fmt.name
    rotated = cg.get_format("nvfp4").with_rotation(0)
    assert kind_of(rotated) is None


@pytest.mark.parametrize(
    "recipe, message",
    [
        ("nvfp4_ue5m3", "0.weight .*: it is nvfp4_ue5m3 in fprop, and {} holds"),
        ("mxfp6_e2m3", "0.weight .*: it is mxfp6_e2m3 in fprop"),
        ("mxint8", "0.weight .*: it is mxint8 in fprop"),
        ("hifloat8", "0.weight .*: it is hifloat8 in fprop"),
    ],
)
@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_other_formats_are_refused(recipe, message, format, tmp_path):
    model = mlp(ONLY_FORWARD.format(recipe))
    with pytest.raises(ValueError, match=message.format(format)) as refused:
        cg.export(model, tmp_path / "out", format=format)
    assert "Give the layer another format in the recipe, leave it in high precision" in str(refused.value)
    assert "3.weight" in str(refused.value)
    assert not list(tmp_path.iterdir())


def kept(quantizer: cg.Quantizer) -> nn.Module:
    with cg.quantized_model_init(recipe="nvfp4"):
        model = nn.Sequential(cg.Linear(64, 64))
    model[0].weight = nn.Parameter(quantizer(torch.randn(64, 64)))
    return model


def test_columns_alone_are_refused(tmp_path):
    model = kept(cg.NVFP4Quantizer(rowwise=False))
    with pytest.raises(ValueError, match=r"0.weight \[64, 64\]: it has only a columnwise plane, and fprop multiplies"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fmt, message",
    [
        (cg.get_format("nvfp4").with_rotation(0), "its rowwise plane is rotated"),
        (
            cg.get_format("nvfp4_row_scaled"),
            "nvfp4_row_scaled has an amax for every row, and .* has one for the tensor",
        ),
        (cg.get_format("mxfp8_e5m2"), "it is mxfp8_e5m2 in fprop"),
        (cg.get_format("fp8_e5m2"), "it is fp8_e5m2 in fprop"),
    ],
)
def test_other_weights_that_are_kept_are_refused(fmt, message, tmp_path):
    model = kept(cg.FormatQuantizer(fmt))
    with pytest.raises(ValueError, match=f"0.weight .*: {message}"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert not list(tmp_path.iterdir())


def rounded_stochastically(role: object) -> cg.Quantizer:
    return cg.NVFP4Quantizer(stochastic_rounding=True)


def test_stochastic_weights_are_refused(tmp_path):
    model = mlp()
    cg.convert(model, cg.recipe.CustomRecipe(qfactory=rounded_stochastically))
    with pytest.raises(ValueError, match="0.weight .*: its weight is rounded stochastically in fprop"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")


def test_many_problems_are_a_short_list(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
    cg.convert(model, ONLY_FORWARD.format("mxint8"))
    with pytest.raises(ValueError, match="and 3 more"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")


def test_two_formats_are_refused_where_there_is_one(tmp_path):
    model = mlp("fp8; 3: nvfp4")
    with pytest.raises(ValueError, match="3.weight: it is nvfp4 in fprop, but 0.weight is fp8, and modelopt has one"):
        cg.export(model, tmp_path / "out", format="modelopt", inputs=[torch.randn(2, 64)])


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-block"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(recipe, bad, tmp_path):
    model = mlp(recipe)
    with torch.no_grad():
        model[3].weight[5, 7] = bad
    with pytest.raises(ValueError, match="3: the weight holds NaNs or infinities"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert not list(tmp_path.iterdir())


def test_bytes_that_stand_for_nan_are_refused(tmp_path):
    for fmt, part in (("nvfp4", "scale"), ("mxfp4", "scale"), ("mxfp8", "scale"), ("mxfp8", "data"), ("fp8", "data")):
        model = kept(cg.FormatQuantizer(cg.get_format(fmt)))
        getattr(model[0].weight.plane(cg.ROWWISE), part)[0, 0] = 0xFF
        with pytest.raises(ValueError, match="0.weight: the weight holds NaNs or infinities"):
            cg.export(model, tmp_path / "out", format="compressed-tensors")
