"""What is exported are the bytes that fprop multiplies, and nothing in the model changes."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import kernels
from crossgrain.export.walk import bytes_of as plane_bytes

from ..common.saved_models import assert_same_contents
from . import decoder
from .models import ONLY_FORWARD, bytes_of, mlp, multiplied, read

RECIPES = {
    "nvfp4": None,
    ONLY_FORWARD.format("nvfp4"): None,
    ONLY_FORWARD.format("nvfp4(4over6)"): None,
    "mxfp4": None,
    "mxfp8": None,
    "fp8": None,
    "fp8-delayed": None,
    "fp8-block": (128, 128),
    ONLY_FORWARD.format("fp8_block"): (1, 128),
    "fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8": None,
}


def exported(model, directory, format="compressed-tensors", **options):
    report = cg.export(model, directory, format=format, **options)
    return report, read(directory)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_are_those_that_fprop_multiplies(recipe, dtype, tmp_path, monkeypatch):
    model = mlp(recipe, dtype=dtype)
    x = torch.randn(32, 64, dtype=dtype)
    if "delayed" in recipe:
        for _ in range(2):  # scales that were learnt, not 1
            model(10 * x).sum().backward()
    report, stored = exported(model, tmp_path / "out")
    planes = multiplied(model, x, monkeypatch)
    assert list(report.quantized) == ["0.weight", "3.weight"]
    for name, plane in zip(report.quantized, planes, strict=True):
        found = plane_bytes(plane, 0, plane.shape)
        codes = stored.get(f"{name}_packed", stored.get(name))
        assert torch.equal(codes.view(torch.uint8), found.codes)
        scales = stored[f"{name}_scale"]
        assert torch.equal(scales.reshape(-1).view(torch.uint8), found.scales.reshape(-1).view(torch.uint8))
        decoded = decoder.compressed(stored, name, RECIPES[recipe])
        ours = kernels.decode(plane, torch.float32).numpy()
        if found.amax is None:
            assert np.array_equal(decoded, ours)
        else:  # readers divide by 2688 / amax, we multiply by amax / 2688: each rounds twice, by 2**-24
            np.testing.assert_allclose(decoded, ours, rtol=2**-21)
    for name in ("0.bias", "2.weight", "2.bias"):
        assert torch.equal(stored[name], model.state_dict()[name]) and stored[name].dtype == dtype


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed", "fprop: fp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"])
def test_the_model_and_the_random_numbers_stay_what_they_are(recipe, tmp_path):
    model = mlp(recipe)
    model(torch.randn(32, 64)).sum().backward()
    before, random = bytes_of(model), torch.get_rng_state()
    cg.export(model, tmp_path / "out", format="compressed-tensors", inputs=[torch.randn(4, 64)])
    torch.set_rng_state(random)
    cg.export(model, tmp_path / "again", format="compressed-tensors")
    assert torch.equal(random, torch.get_rng_state())
    assert_same_contents(bytes_of(model), before)
    assert model.training


def columns_rounded_stochastically(role: cg.QuantizerRole | None) -> cg.Quantizer:
    column = cg.NVFP4Quantizer(stochastic_rounding=role is not None and role.tensor_type == "weight")
    return cg.HybridQuantizer(rowwise_quantizer=cg.NVFP4Quantizer(), columnwise_quantizer=column)


def test_no_random_number_is_drawn_for_columns(tmp_path):
    model = mlp()
    cg.convert(model, cg.recipe.CustomRecipe(qfactory=columns_rounded_stochastically))
    random = torch.get_rng_state()
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert torch.equal(random, torch.get_rng_state())


def test_weights_that_are_kept_quantized_are_exported_as_they_are(tmp_path):
    recipe = "fprop: nvfp4, dgrad: mxfp8, wgrad: mxfp8"
    with cg.quantized_model_init(recipe=recipe):
        model = nn.Sequential(cg.Linear(64, 32), cg.Linear(32, 64))
    for bound in (False, True):  # also without a recipe: then the layers multiply what they decode
        if bound:
            cg.convert(model, recipe)
        report, stored = exported(model, tmp_path / f"bound-{bound}")
        assert set(report.quantized.values()) == {"nvfp4"}
        for i in range(2):
            plane = model[i].weight.plane(cg.ROWWISE)
            assert torch.equal(stored[f"{i}.weight_packed"], plane.operand_codes())


def test_a_recipe_of_an_autocast_is_given(tmp_path):
    model = nn.Sequential(cg.Linear(64, 32))
    with pytest.raises(ValueError, match="nothing to store as compressed-tensors: convert the model first"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
    report, _ = exported(model, tmp_path / "out", recipe="mxfp8")
    assert report.quantized == {"0.weight": "mxfp8"}


def test_layers_in_high_precision_are_stored_as_they_are_and_ignored(tmp_path):
    model = mlp("mxfp8; 3: hp")
    report, stored = exported(model, tmp_path / "out")
    assert list(report.quantized) == ["0.weight"]
    assert torch.equal(stored["3.weight"], model[3].weight)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["3"]


def test_layers_of_several_formats_are_groups(tmp_path):
    model = mlp("mxfp8; 3: nvfp4")
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    groups = {tuple(group["targets"]): group["format"] for group in config["config_groups"].values()}
    assert groups == {("0",): "mxfp8-quantized", ("3",): "nvfp4-pack-quantized"}
    with pytest.raises(ValueError, match="3.weight: it is nvfp4 in fprop, but 0.weight is mxfp8|holds fp8, nvfp4"):
        cg.export(model, tmp_path / "other", format="modelopt")


def test_parameters_that_form_one_gemm_are_layers_of_their_own(tmp_path):
    model = nn.Sequential(cg.Linear(64, 96, parameters_split={"query": 64, "key": 16, "value": 16}))
    cg.convert(model, "nvfp4")
    _, stored = exported(model, tmp_path / "out")
    whole = cg.NVFP4Quantizer(with_2d_quantization=True)(
        torch.cat([model[0].query_weight, model[0].key_weight, model[0].value_weight])
    )
    codes = torch.cat([stored[f"0.{part}.weight_packed"] for part in ("query", "key", "value")])
    assert torch.equal(codes, whole.plane(cg.ROWWISE).operand_codes())
    assert stored["0.key.bias"].shape == (16,)


def test_an_mlp_with_a_norm_has_two_weights(tmp_path):
    model = nn.Sequential(cg.LayerNormMLP(64, 128))
    cg.convert(model, "mxfp8")
    report, stored = exported(model, tmp_path / "out")
    assert list(report.quantized) == ["0.fc1.weight", "0.fc2.weight"]
    assert {"0.layer_norm_weight", "0.layer_norm_bias", "0.fc1.bias", "0.fc2.bias"} <= stored.keys()
    with pytest.raises(ValueError, match="0.fc1.weight: the input of this GEMM is computed inside the layer"):
        cg.export(model, tmp_path / "other", format="compressed-tensors", inputs=[torch.randn(2, 64)])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_every_group_is_a_layer(stacked, kept, tmp_path):
    with cg.quantized_model_init(enabled=kept, recipe="nvfp4"):
        layer = cg.GroupedLinear(3, 64, 32, single_grouped_weight=stacked, single_grouped_bias=stacked)
    model = nn.ModuleDict({"experts": layer})
    with torch.no_grad():
        for bias in [layer.bias] if stacked else [layer.bias0, layer.bias1, layer.bias2]:
            bias.normal_()
    cg.convert(model, "nvfp4")
    _, stored = exported(model, tmp_path / "out")
    for g, weight in enumerate(layer._group_weights()):
        own = weight if kept else cg.NVFP4Quantizer(with_2d_quantization=True)(weight)
        assert torch.equal(stored[f"experts.{g}.weight_packed"], own.plane(cg.ROWWISE).operand_codes())
        assert torch.equal(stored[f"experts.{g}.bias"], layer.bias[g] if stacked else getattr(layer, f"bias{g}"))


def test_an_operation_is_a_layer(tmp_path):
    model = nn.Sequential(cg.ops.Linear(64, 32))
    cg.convert(model, "mxfp4")
    report, stored = exported(model, tmp_path / "out")
    assert list(report.quantized) == ["0.weight"] and stored["0.bias"].shape == (32,)


def test_rows_of_padding_are_not_exported(tmp_path, monkeypatch):
    model = mlp("nvfp4", hidden=40)  # 40 rows are padded to 48, and 40 columns too
    with pytest.raises(ValueError, match=r"3.weight \[64, 40\]: its 40 columns are padded to whole blocks of 16"):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert not list(tmp_path.iterdir())
    model = mlp("nvfp4; 3: hp", hidden=40)
    _, stored = exported(model, tmp_path / "out")
    plane = multiplied(model, torch.randn(4, 64), monkeypatch)[0]
    assert plane.shape == (48, 64) and stored["0.weight_packed"].shape == (40, 32)
    assert torch.equal(stored["0.weight_packed"], plane.operand_codes()[:40])
    assert torch.equal(stored["0.weight_scale"].view(torch.uint8), plane.operand_scales()[:40])


def test_blocks_that_may_be_smaller_at_the_end_need_no_padding(tmp_path, monkeypatch):
    model = mlp("fp8-block", width=72, hidden=200)
    _, stored = exported(model, tmp_path / "out")
    for name, plane in zip(("0.weight", "3.weight"), multiplied(model, torch.randn(4, 72), monkeypatch), strict=True):
        ours = kernels.decode(plane, torch.float32).numpy()
        assert np.array_equal(decoder.compressed(stored, name, (128, 128)), ours)


def test_shards_and_their_index(tmp_path):
    model = mlp("mxfp8")
    whole = exported(model, tmp_path / "whole")[1]
    report, stored = exported(model, tmp_path / "out", max_shard_bytes=9000)
    assert [file for file in report.files if file.startswith("model-")] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert stored.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(stored[name].view(torch.uint8), whole[name].view(torch.uint8)) for name in whole)
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1"):
        cg.export(model, tmp_path / "no", format="plain", max_shard_bytes=0)


def test_other_tensors_may_be_cast(tmp_path):
    model = mlp("mxfp8")
    _, stored = exported(model, tmp_path / "out", dtype=torch.bfloat16)
    assert stored["2.weight"].dtype == torch.bfloat16
    with torch.no_grad():
        model[2].weight[0] = 1e38
    with pytest.raises(ValueError, match="2.weight holds numbers beyond the range of float16"):
        cg.export(model, tmp_path / "no", format="compressed-tensors", dtype=torch.float16)
    assert not (tmp_path / "no").exists()


def test_names_may_be_changed(tmp_path):
    model = mlp("mxfp8")
    _, stored = exported(model, tmp_path / "out", rename=lambda name: f"model.{name}")
    assert "model.0.weight_scale" in stored and "model.2.bias" in stored
    _, stored = exported(model, tmp_path / "table", rename={"0.weight": "up.weight"})
    assert "up.weight_scale" in stored and "3.weight" in stored
    with pytest.raises(ValueError, match="two tensors would be called same"):
        cg.export(model, tmp_path / "no", format="compressed-tensors", rename=lambda name: "same")


class Tied(nn.Module):
    """As a Hugging Face model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.body = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embed.weight
        self.all_tied_weights_keys = {"lm_head.weight": "embed.weight"}
        self.config = Config()


class Config:
    def to_json_string(self) -> str:
        return json.dumps(
            {"model_type": "tied", "tie_word_embeddings": True, "dtype": "float16", "quantization_config": {}}
        )


def test_a_tied_head_in_high_precision_is_stored_once(tmp_path):
    model = Tied()
    cg.convert(model, "mxfp8; lm_head: hp")
    report, stored = exported(model, tmp_path / "out")
    assert "lm_head.weight" not in stored and torch.equal(stored["embed.weight"], model.embed.weight)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["architectures"] == ["Tied"]
    assert config["dtype"] == "float32" and not report.notes


def test_a_tied_head_that_is_quantized_is_untied(tmp_path):
    model = Tied()
    cg.convert(model, "mxfp8", include="lm_head")
    report, stored = exported(model, tmp_path / "out")
    assert torch.equal(stored["embed.weight"], model.embed.weight)
    assert stored["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight is quantized and no longer tied" in report.notes[0]


def test_a_layer_in_two_places_is_stored_under_both_names(tmp_path):
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.GELU(), layer)
    cg.convert(model, "mxfp8")
    _, stored = exported(model, tmp_path / "out")
    assert torch.equal(stored["0.weight"].view(torch.uint8), stored["2.weight"].view(torch.uint8))


def test_engines_that_join_layers_are_mentioned(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q_proj", "k_proj", "v_proj")})
    for recipe, count in (("nvfp4", 1), ("fp8", 1), ("mxfp8", 0)):
        cg.convert(model, recipe)
        report, _ = exported(model, tmp_path / recipe)
        assert len(report.notes) == count
        assert all("each of these layers has its own scale" in note for note in report.notes)


def test_assets_are_copied_but_no_weights(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "config.json", "model.safetensors", "pytorch_model.bin", "x.index.json", ".hidden"):
        (source / name).write_text(name)
    (source / "folder").mkdir()
    report, _ = exported(mlp("mxfp8"), tmp_path / "out", assets=source)
    assert report.files == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        cg.export(mlp("mxfp8"), tmp_path / "no", format="plain", assets=tmp_path / "nowhere")
    assert not (tmp_path / "no").exists()


def test_a_config_may_be_given(tmp_path):
    cg.export(mlp("mxfp8"), tmp_path / "out", format="compressed-tensors", config={"model_type": "mine"})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mine"
    path = tmp_path / "config.json"
    path.write_text('{"model_type": NaN}')
    with pytest.raises(ValueError, match="NaN is not a number in JSON"):
        cg.export(mlp("mxfp8"), tmp_path / "no", format="compressed-tensors", config=path)


def test_plain_tensors_are_those_of_export_plain(tmp_path):
    model = mlp("nvfp4")
    stored = exported(model, tmp_path / "out", "plain")[1]
    cg.files.export_plain(model, tmp_path / "plain.safetensors")
    expected = cg.files.read_safetensors(tmp_path / "plain.safetensors").state_dict
    assert_same_contents(dict(stored), dict(expected))
    assert stored["0.weight"].dtype == torch.bfloat16


def test_the_report_says_what_was_written(tmp_path):
    report = cg.export(mlp("mxfp8; 3: nvfp4"), tmp_path / "out", format="compressed_tensors")
    assert str(report).splitlines()[1:] == [
        "quantized weights: 1 in mxfp8, 1 in nvfp4_2d",
        "tensors in high precision: 3",
    ]
    with pytest.raises(ValueError, match="format must be one of compressed-tensors, modelopt, gpt-oss, gguf, plain"):
        cg.export(mlp(), tmp_path / "no", format="onnx")


def test_a_model_without_values_is_refused(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(cg.Linear(64, 64))
    with pytest.raises(ValueError, match="0: the weight is on the meta device"):
        cg.export(model, tmp_path / "out", format="compressed-tensors", recipe="mxfp8")


def test_a_deep_copy_exports_the_same(tmp_path):
    model = mlp("nvfp4")
    first, second = (exported(m, tmp_path / str(i))[1] for i, m in enumerate((model, copy.deepcopy(model))))
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def test_names_of_wrappers_are_left_out(tmp_path):
    model = mlp("mxfp8")
    expected = exported(model, tmp_path / "out")[1]
    compiled = torch.compile(model, backend="eager")
    assert exported(compiled, tmp_path / "compiled")[1].keys() == expected.keys()
    model[0] = torch.compile(model[0], backend="eager")
    report, stored = exported(model, tmp_path / "inside")
    assert stored.keys() == expected.keys() and list(report.quantized) == ["0.weight", "3.weight"]


def test_stacks_of_experts_in_high_precision_are_listed(tmp_path):
    model = nn.ModuleDict({"layer": nn.Linear(64, 64), "experts": nn.Module()})
    model["experts"].gate_up_proj = nn.Parameter(torch.randn(2, 32, 64))
    cg.convert(model, "mxfp8")
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["experts"]


def test_parts_that_begin_inside_a_tile_are_refused(tmp_path):
    model = nn.Sequential(cg.Linear(128, 256, parameters_split={"query": 128, "key": 64, "value": 64}))
    cg.convert(model, "fp8-block")
    with pytest.raises(
        ValueError, match=r"0.value.weight \[64, 128\]: .* begins at row 192, inside a tile of 128 rows"
    ):
        cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert not list(tmp_path.iterdir())


class SplitExperts(cg.GroupedLinear):
    """Experts whose weight is two layers for other programs."""

    def exported_weights(self):
        half = self.out_features // 2
        for g in range(self.num_gemms):
            yield f"{g}.gate_proj.weight", "weight", g, g, 0, half
            yield f"{g}.up_proj.weight", "weight", g, g, half, 2 * half


def test_a_module_may_say_what_its_weights_are(tmp_path):
    def experts() -> nn.Module:
        model = nn.Sequential(SplitExperts(2, 64, 32, bias=False, single_grouped_weight=True))
        cg.convert(model, "mxfp4")
        return model

    model = experts()
    report, stored = exported(model, tmp_path / "out")
    assert list(report.quantized)[:2] == ["0.0.gate_proj.weight", "0.0.up_proj.weight"]
    for g, weight in enumerate(model[0].weight.detach()):
        whole = cg.quantize(weight, "mxfp4").plane(cg.ROWWISE)
        codes = torch.cat([stored[f"0.{g}.{half}.weight_packed"] for half in ("gate_proj", "up_proj")])
        assert torch.equal(codes, whole.operand_codes())
    for keep_quantized in (True, False):  # decoded MXFP4 is quantized to the same bytes again
        other = experts()
        cg.load_exported(other, tmp_path / "out", keep_quantized=keep_quantized)
        again = exported(other, tmp_path / f"again-{keep_quantized}")[1]
        assert all(torch.equal(again[name], stored[name]) for name in stored)
