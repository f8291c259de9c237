"""Environment variables of Transformer Engine: obeyed, or named in a warning."""

import re
from pathlib import Path

import pytest
import torch

import crossgrain as cg
from crossgrain.compat import environment
from crossgrain.compat import transformer_engine as te
from crossgrain.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from crossgrain.recipe.zoo import nvfp4_linear_fp8_dpa_factory

from ..common.logs import logged, silent, warned

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "transformer_engine.md"


def entered(recipe):
    with te.pytorch.autocast(recipe=recipe):
        cg.Linear(32, 32)(torch.randn(32, 32))


def test_the_page_has_the_same_table():
    section = DOCS.read_text().partition("## Environment variables")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (obeyed|no effect) \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(v.name, "obeyed" if v.obeyed else "no effect", v.here) for v in environment.VARIABLES]


def test_the_page_has_one_list_of_what_is_available_with_reasons():
    section = DOCS.read_text().partition("## What is available")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    states = [row[1] for row in rows]
    assert states == sorted(states, key=["supported", "different", "not here"].index)
    assert set(states) == {"supported", "different", "not here"}
    assert all(len(row) == 4 and row[3] for row in rows)


@pytest.mark.parametrize("variable", [v for v in environment.VARIABLES if not v.obeyed], ids=lambda v: v.name)
def test_a_variable_without_effect_is_named_once(variable, monkeypatch):
    for value in variable.neutral:
        monkeypatch.setenv(variable.name, value)
        with silent():
            entered(Float8CurrentScaling())
    monkeypatch.setenv(variable.name, "other")  # read at use: it was set after everything was imported
    message = re.escape(f"{variable.name}=other has no effect here: {variable.here}")
    with warned(message):
        entered(Float8CurrentScaling())
    with silent():
        entered(Float8CurrentScaling())


def test_the_recipe_in_force_may_be_named_for_attention(monkeypatch):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    with silent():
        entered(DelayedScaling())
    asked = DelayedScaling(fp8_dpa=True)
    assert environment.with_attention_of_environment(asked) is asked


def test_other_names_for_attention_are_warned_about_once(monkeypatch):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "NVFP4BlockScaling")
    with warned("RECIPE=NVFP4BlockScaling has no effect: it must be F16, Delayed"):
        entered(MXFP8BlockScaling())
    with silent():
        entered(MXFP8BlockScaling())
    monkeypatch.setenv("NVTE_DPA_FP8_FORMAT", "E3M4")
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    with pytest.raises(ValueError, match="NVTE_DPA_FP8_FORMAT must be HYBRID, E4M3 or E5M2, got 'E3M4'"):
        entered(NVFP4BlockScaling(fp8_dpa=True))


def attended(recipe):
    """Outputs and gradients of three steps: histories of delayed scaling count."""
    torch.manual_seed(0)
    attention, found = te.pytorch.DotProductAttention(2, 16, attn_mask_type="no_mask"), []
    for _ in range(3):
        q, k, v = (torch.randn(32, 1, 2, 16, requires_grad=True) for _ in range(3))
        with te.pytorch.autocast(recipe=recipe):
            y = attention(q, k, v)
        y.backward(torch.randn_like(y))
        found += [y.detach(), q.grad, k.grad, v.grad]
    return found


SHORT = {"amax_history_len": 1, "amax_compute_algo": "most_recent"}
CURRENT_AND_DELAYED = cg.recipe.CustomRecipe(nvfp4_linear_fp8_dpa_factory, fp8_dpa=True)  # E4M3 forward, E5M2 backward
HYBRID = {"fp8_format": cg.recipe.FP8Format.HYBRID}
E4M3 = {"fp8_format": cg.recipe.FP8Format.E4M3}
TO_MXFP8 = {"_RECIPE": "MXFP8BlockScaling"}
SWITCHED = {
    "current to delayed": (
        Float8CurrentScaling,
        {},
        {"_RECIPE": "DelayedScaling"},
        DelayedScaling(fp8_dpa=True, **SHORT),
    ),
    "mxfp8 to delayed": (
        MXFP8BlockScaling,
        {},
        {"_RECIPE": "DelayedScaling", "DS_AMAX_HISTLEN": "4", "DS_AMAX_ALGO": "max"},
        DelayedScaling(fp8_dpa=True, amax_history_len=4, **E4M3),
    ),
    "nvfp4 to delayed": (
        NVFP4BlockScaling,
        {},
        {"_RECIPE": "DelayedScaling", "_FORMAT": "E4M3"},
        DelayedScaling(fp8_dpa=True, **SHORT, **E4M3),
    ),
    "delayed to mxfp8": (DelayedScaling, {}, TO_MXFP8, MXFP8BlockScaling(fp8_dpa=True, **HYBRID)),
    "current to mxfp8": (Float8CurrentScaling, E4M3, TO_MXFP8, MXFP8BlockScaling(fp8_dpa=True, **E4M3)),
    "nvfp4 to mxfp8": (NVFP4BlockScaling, {}, TO_MXFP8, MXFP8BlockScaling(fp8_dpa=True, **HYBRID)),
    "current": (Float8CurrentScaling, {}, {}, CURRENT_AND_DELAYED),
    "current by name": (Float8CurrentScaling, {}, {"_RECIPE": "Float8CurrentScaling"}, CURRENT_AND_DELAYED),
    "delayed to current": (DelayedScaling, SHORT, {"_RECIPE": "Float8CurrentScaling"}, CURRENT_AND_DELAYED),
    "mxfp8 to current": (MXFP8BlockScaling, HYBRID, {"_RECIPE": "Float8CurrentScaling"}, CURRENT_AND_DELAYED),
    "nvfp4 to current": (NVFP4BlockScaling, {}, {"_RECIPE": "Float8CurrentScaling"}, CURRENT_AND_DELAYED),
}


@pytest.mark.parametrize("case", SWITCHED)
def test_attention_has_the_recipe_that_is_named(case, monkeypatch):
    of_layers, options, variables, of_attention = SWITCHED[case]
    expected = attended(of_attention)
    for name, value in variables.items():
        monkeypatch.setenv(f"NVTE_DPA_FP8{name}", value)
    with logged() as records:
        found = attended(of_layers(fp8_dpa=True, **options))
    assert not [record.getMessage() for record in records if "environment variable" in record.getMessage()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_layers_keep_their_recipe_while_attention_has_another(monkeypatch):
    recipe, x = MXFP8BlockScaling(fp8_dpa=True), torch.randn(32, 32)
    layer = cg.Linear(32, 32)
    with te.pytorch.autocast(recipe=recipe):
        expected = layer(x)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    with te.pytorch.autocast(recipe=recipe):
        assert torch.equal(layer(x), expected)
    assert recipe.for_attention() is recipe, "the recipe of the caller stays as it is"


def test_f16_leaves_attention_in_high_precision(monkeypatch):
    attention = te.pytorch.DotProductAttention(2, 16, attn_mask_type="no_mask")
    q, k, v = (torch.randn(16, 1, 2, 16) for _ in range(3))
    recipe = MXFP8BlockScaling(fp8_dpa=True)

    def result():
        with te.pytorch.autocast(recipe=recipe):
            return attention(q, k, v)

    plain, quantized = attention(q, k, v), result()
    assert not torch.equal(quantized, plain)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "F16")
    assert torch.equal(result(), plain)
    assert recipe.fp8_dpa, "the recipe of the caller stays as it is"
    monkeypatch.delenv("NVTE_DPA_FP8_RECIPE")
    assert torch.equal(result(), quantized)


def test_settings_of_attention_that_a_client_replaces_count_as_variables(monkeypatch):
    """Transformer Engine reads them once, so its clients replace what it has read."""
    dpa = te.pytorch.attention.dot_product_attention.dot_product_attention
    mha = te.pytorch.attention.multi_head_attention
    with monkeypatch.context() as patched:
        patched.setattr(dpa, "_dpa_fp8_format", cg.recipe.FP8Format.E4M3)
        patched.setattr(dpa, "_dpa_fp8_recipe", "DelayedScaling")
        patched.setattr(dpa, "_dpa_fp8ds_amax_histlen", 7)
        patched.setattr(dpa, "_dpa_fp8ds_amax_algo", "max")
        patched.setattr(dpa, "_dpa_fp8ds_reduce_amax", False)
        patched.setattr(mha, "_dpa_fp8_recipe_mha", True)
        with warned("RECIPE_MHA=1 has no effect here"):
            entered(Float8CurrentScaling())
        made = environment.with_attention_of_environment(NVFP4BlockScaling(fp8_dpa=True)).for_attention()
        assert made == DelayedScaling(fp8_dpa=True, amax_history_len=7, reduce_amax=False, **E4M3)
        patched.setattr(dpa, "_dpa_fp8_recipe", "F16")
        assert mha._dpa_fp8_recipe == "F16"
        asked = MXFP8BlockScaling(fp8_dpa=True)
        assert not environment.with_attention_of_environment(asked).fp8_dpa
    assert environment.with_attention_of_environment(asked) is asked


OBEYED = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("1", Float8CurrentScaling, "use_power_2_scales"),
    "NVTE_NVFP4_DISABLE_RHT": ("1", NVFP4BlockScaling, "disable_rht"),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": ("1", NVFP4BlockScaling, "disable_stochastic_rounding"),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("1", NVFP4BlockScaling, "disable_2d_quantization"),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": ("1", NVFP4BlockScaling, "row_scaled_activation"),
    "NVTE_NVFP4_4OVER6": ("weights", NVFP4BlockScaling, "nvfp4_4over6"),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": ("none", NVFP4BlockScaling, "nvfp4_4over6_e4m3_use_256"),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ("MSE", NVFP4BlockScaling, "nvfp4_4over6_err_mode"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("1", cg.recipe.Float8BlockScaling, "use_f32_scales"),
    "NVTE_BACKWARD_OVERRIDE": ("dequantized", Float8CurrentScaling, "backward_override"),
}


def test_defaults_of_recipes_follow_the_variables(monkeypatch):
    named = {v.name: v.here for v in environment.VARIABLES if v.here.startswith("the default of")}
    assert set(named) == set(OBEYED)
    for name, (value, recipe, field) in OBEYED.items():
        assert f"`{field}`" in named[name]
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert getattr(recipe(), field) == (True if value == "1" else value)
        assert getattr(recipe(), field) != (True if value == "1" else value)
