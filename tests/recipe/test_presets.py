"""Each preset pairs, and asks for what the factory of the same meaning makes."""

from pathlib import Path

import pytest

from crossgrain.gemm.operands import TENSORS
from crossgrain.recipe import PRESETS, SCHEDULES, GemmRecipe, QuantizerRole, check_pairs, factories, preset_table, zoo
from crossgrain.recipe.format_spec import aliases, format_names, options_of

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"

FACTORIES = {
    "hp": factories.high_precision_factory,
    "fp8": factories.current_scaling_factory,
    "fp8-delayed": factories.delayed_scaling_factory,
    "fp8-block": factories.float8_block_scaling_factory,
    "mxfp8": factories.mxfp8_factory,
    "nvfp4": factories.nvfp4_factory,
    "nvfp4-1d-weight": zoo.nvfp4_1d_weight_factory,
    "hp-fwd-mxfp8-bwd": zoo.high_precision_fwd_mxfp8_bwd_factory,
    "mxfp8-fwd-nvfp4-bwd": zoo.mxfp8_fwd_nvfp4_bwd_factory,
    "mxfp8-fwd-hp-bwd": zoo.mxfp8_fwd_high_precision_bwd_factory,
    "nvfp4-fwd-mxfp8-bwd": zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory,
    "nvfp4-fwd-hp-bwd": zoo.nvfp4_row_scaled_fwd_high_precision_bwd_factory,
    "nvfp4-fp8-attention": zoo.nvfp4_linear_fp8_dpa_factory,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_compile_and_pair(name: str) -> None:
    recipe = GemmRecipe.load(name)
    quantizers = {tensor: recipe.qfactory(QuantizerRole("linear", tensor)) for tensor in TENSORS}
    if recipe.allow_mixed:  # which only those have that need it
        with pytest.raises(ValueError, match="set allow_mixed"):
            check_pairs(quantizers)
    else:
        check_pairs(quantizers)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_recipes_that_can_be_written_down(name: str) -> None:
    recipe = GemmRecipe.load(name)
    assert GemmRecipe.load(str(recipe)) == GemmRecipe.load(PRESETS[name].line) == recipe
    assert recipe.allow_mixed == name.endswith("-qat-weights") and PRESETS[name].description


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", FACTORIES)
def test_presets_ask_for_what_their_factories_make(name: str, tensor: str) -> None:
    role = QuantizerRole("grouped_linear", tensor, "fc")  # for which every factory has an answer
    made, wanted = GemmRecipe.load(name).qfactory(role), FACTORIES[name](role)
    assert type(made) is type(wanted) and made == wanted


@pytest.mark.parametrize(
    "role",
    [
        *(QuantizerRole("dpa", tensor, "core") for tensor in ("qkv", "s", "do", "dp")),
        QuantizerRole(name="core.dpa_output"),
        QuantizerRole(name="core.dpa_grad_input"),
    ],
    ids=str,
)
def test_attention_in_fp8_is_that_of_the_factory(role: QuantizerRole) -> None:
    preset = "nvfp4-fp8-attention"
    made, wanted = GemmRecipe.load(preset).qfactory(role), FACTORIES[preset](role)
    assert type(made) is type(wanted) and made == wanted


def test_the_table_and_the_documentation_have_every_preset() -> None:
    table, page = preset_table(), DOCS.read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        assert f"{name} " in table and preset.line in table
        assert f"| `{name}` | `{preset.line}` | {preset.description} |" in page


def test_the_documentation_has_every_schedule() -> None:
    table, page = preset_table(), (DOCS.parents[1] / "how-to" / "schedules.md").read_text(encoding="utf-8")
    for name, preset in SCHEDULES.items():
        assert f"{name} " in table and preset.line in table
        assert f"| `{name}` | `{preset.line}` | {preset.description} |" in page


def test_the_documentation_has_every_format_and_option() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for name in format_names():
        options = options_of(name)
        assert f"`{name}`" in page
        assert all(f"`{option}" in page for option in options)
    assert {"bf16", "identity", "fp8_e5m2"} <= set(aliases())
