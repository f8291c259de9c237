"""What explanations say."""

import io

from crossgrain.recipe.explain import ExplainRow, collapsed
from crossgrain.recipe.gemm_recipe import GemmRecipe

from ..common.recipes import Model

RECIPE = GemmRecipe.load(
    "nvfp4(2d, rht, sr), dgrad.weight: nvfp4, weight.source: dequantized; *.lm: hp; first 1 block: fprop: mxfp8"
)


def test_rows_say_everything_about_every_operand_of_every_layer() -> None:
    rows = RECIPE.explain(Model()).rows
    assert len(rows) == 6 * (4 * 4 + 1)
    assert rows[:4] == [
        ExplainRow("layers.0.attn.q", "input", "rowwise", "fprop", "mxfp8", "original", "rule 2 (first 1 block)"),
        ExplainRow("layers.0.attn.q", "weight", "rowwise", "fprop", "mxfp8", "original", "rule 2 (first 1 block)"),
        ExplainRow("layers.0.attn.q", "grad_output", "rowwise", "dgrad", "nvfp4(sr)", "original", "default"),
        ExplainRow("layers.0.attn.q", "weight", "columnwise", "dgrad", "nvfp4", "dequantized", "default: dgrad.weight"),
    ]
    assert {row.format for row in rows if row.layer == "head.lm"} == {"hp"}
    assert {row.why for row in rows if row.layer == "head.lm"} == {"rule 1 (*.lm)"}


def test_layers_that_are_treated_alike_are_shown_once() -> None:
    text = str(RECIPE.explain(Model()))
    assert "\nlayers.0.attn.q, layers.0.attn.k, layers.0.mlp.0,2 x2\nfprop      input        rowwise     mxfp8" in text
    assert "\nlayers.1-3.attn.q x3, layers.1-3.attn.k x3, layers.1-3.mlp.0,2 x6\n" in text
    assert "\nhead.lm\n" in text
    assert text.count("fprop  ") == 3
    assert "layers.*.attn.q x4" in str(GemmRecipe.load("mxfp8").explain(Model()))


def test_every_layer_can_be_listed() -> None:
    text = str(RECIPE.explain(Model(), every_layer=True))
    assert text.count("fprop  ") == 17
    assert "\nlayers.3.mlp.2\n" in text


def test_without_a_model_it_shows_the_default_and_each_rule() -> None:
    explanation = RECIPE.explain()
    assert [layers for layers, _ in explanation.sections()] == [
        ["default"],
        ["rule 1 (*.lm)"],
        ["rule 2 (first 1 block)"],
    ]
    formats = [row.format for row in explanation.rows if row.layer == "rule 2 (first 1 block)"]
    assert formats == ["mxfp8", "mxfp8", "nvfp4(sr)", "nvfp4", "nvfp4(rht, sr)", "nvfp4(rht)"]


def test_attention_is_explained_if_it_is_in_the_recipe() -> None:
    assert "attention" not in str(GemmRecipe.load("mxfp8").explain())
    rows = GemmRecipe.load("mxfp8, attention: fp8(e5m2)").explain().rows
    assert [(row.role, row.format) for row in rows if row.gemm == "attention"][:4] == [
        ("qkv", "fp8"),
        ("s", "fp8"),
        ("o", "fp8"),
        ("do", "fp8(e5m2)"),
    ]


def test_the_text_fits_into_100_columns() -> None:
    long = GemmRecipe.load(
        "all: fp8(e5m2, delayed(history=1000, algo=most_recent, margin=3, reduce=false)), "
        "fprop.weight: fp8(pow2, eps=1e-06); *.a_very_long_name_of_a_layer.and_its_child|*.another: dgrad.weight: fp8"
    )
    for text in (str(long.explain()), str(RECIPE.explain(Model(40)))):
        assert max(map(len, text.splitlines())) <= 100


def test_rich_renders_the_same_rows() -> None:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=120).print(RECIPE.explain(Model()))
    assert "layers.1-3.attn.q x3" in out.getvalue()
    assert "rule 2 (first 1 block)" in out.getvalue() and "nvfp4(rht, sr)" in out.getvalue()


def test_names_are_collapsed_to_what_they_have_in_common() -> None:
    known = [f"h.{i}.fc{k}" for i in range(12) for k in (1, 2)]
    assert collapsed(known, known) == ["h.*.fc1 x12", "h.*.fc2 x12"]
    assert collapsed(["h.0.fc1", "h.1.fc1", "h.5.fc1"], known) == ["h.0-1,5.fc1 x3"]
    assert collapsed(["h.0.fc1", "out"], [*known, "out"]) == ["h.0.fc1", "out"]
    assert collapsed(["h.0"], ["h.0"]) == ["h.0"]


def test_an_override_of_backward_decides_over_the_formats() -> None:
    recipe = GemmRecipe.load("nvfp4(2d, rht, sr), backward_override: dequantized")
    rows = {(row.gemm, row.role): row for row in recipe.explain().rows}
    assert rows["fprop", "weight"].format == "nvfp4(2d)"
    assert {row.format for (gemm, _), row in rows.items() if gemm != "fprop"} == {"hp"}
    assert [rows["wgrad", name].source for name in ("grad_output", "input")] == ["original", "dequantized"]
    assert rows["dgrad", "weight"].why == "backward_override: dequantized"
