"""A recipe for chosen GEMMs of chosen layers has a short text, and gives exactly these GEMMs their formats."""

import random

import pytest

from crossgrain.gemm.operands import GEMMS
from crossgrain.recipe import GemmRecipe, compact, recipe_of_sites
from crossgrain.recipe.binding import Layer
from crossgrain.recipe.compact import deciding_rule
from crossgrain.recipe.format_spec import FormatSpec
from crossgrain.recipe.layer_formats import operands_of

PROJECTIONS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
BACKWARD = {"dgrad": "nvfp4(sr)", "wgrad": "nvfp4(rht, sr)"}
HEAD = Layer("lm_head")


def llama(blocks: int) -> list[Layer]:
    return [Layer(f"model.layers.{i}.{part}") for i in range(blocks) for part in PROJECTIONS]


def number(layer: Layer) -> int:
    return int(layer.name.split(".")[2])


def formats_of(recipe: GemmRecipe, layer: Layer) -> dict:
    chosen = recipe.layer_formats(layer.name, layer.module_type)
    return {
        **{place: str(own.value) for place, own in chosen.formats},
        **{tensor: own.value for tensor, own in chosen.sources},
        "nonfinite": chosen.nonfinite and chosen.nonfinite.value,
    }


def assert_exact(recipe: GemmRecipe, base: GemmRecipe, wanted: dict[tuple[str, str], str], layers: list[Layer]) -> None:
    assert GemmRecipe.load(str(recipe)) == recipe
    assert recipe.rules[len(recipe.rules) - len(base.rules) :] == base.rules
    assert recipe.set_options == base.set_options and recipe.settings == base.settings
    for layer in layers:
        expected = formats_of(base, layer)
        for gemm in GEMMS:
            text = wanted.get((layer.name, gemm))
            if text is not None:
                operands = operands_of(FormatSpec.parse(text), gemm)
                expected.update({(gemm, tensor): str(spec) for tensor, spec in operands.items()})
        assert formats_of(recipe, layer) == expected, layer
        if expected != formats_of(base, layer):
            assert recipe.names_layer(layer.name)  # so that convert changes heads, too


def test_backward_of_all_layers_and_forward_of_a_third_is_a_short_text() -> None:
    layers = [*llama(80), HEAD]
    wanted = {(layer.name, gemm): text for layer in layers[:-1] for gemm, text in BACKWARD.items()}
    wanted |= {(layer.name, "fprop"): "nvfp4" for layer in layers[:-1] if number(layer) % 3 == 0}
    base = GemmRecipe.load("mxfp8; lm_head: hp")
    recipe = recipe_of_sites(base, wanted, layers)
    assert_exact(recipe, base, wanted, layers)
    assert len(recipe.rules) == 3 and len(str(recipe)) < 300  # 747 sites in full have 40,000 characters
    assert "*_proj: dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)" in str(recipe)


def test_a_few_exceptions_are_taken_back() -> None:
    layers = llama(60)
    kept = ["model.layers.7.mlp.down_proj", "model.layers.41.self_attn.q_proj"]
    wanted = {(layer.name, gemm): "nvfp4" for layer in layers for gemm in GEMMS if layer.name not in kept}
    for text in ("all: mxfp8, fprop.weight: mxfp8(2d)", "all: mxfp8, weight.source: dequantized"):
        base = GemmRecipe.load(text)
        recipe = recipe_of_sites(base, wanted, layers)
        assert_exact(recipe, base, wanted, layers)
        assert [rule.pattern for rule in recipe.rules] == ["*_proj", "|".join(kept)]
    assert "*_proj: fprop: nvfp4, dgrad: nvfp4, wgrad: nvfp4;" in str(recipe)  # a format alone would reset the sources
    plain = recipe_of_sites(GemmRecipe.load("mxfp8"), wanted, layers)
    assert "*_proj: all: nvfp4;" in str(plain)  # 'nvfp4' alone would be the preset


@pytest.mark.parametrize(
    "base",
    [
        "mxfp8",
        "mxfp8; lm_head: hp",
        "mxfp8-fwd-nvfp4-bwd",
        "all: mxfp8, nonfinite: raise; *.q_proj: hp; *.1.*: fprop: mxfp8(2d); *.up: weight.source: dequantized",
        "all: mxfp8, input.source: dequantized, attention: fp8; first 1 block (model.layers.0): all: nvfp4",
        "fprop: mxfp8, fprop.weight: nvfp4, dgrad: hp, wgrad: hp, allow_mixed: true; *.k_proj: fprop.input: nvfp4",
    ],
)
def test_any_choice_is_exact(base: str) -> None:
    rng = random.Random(base)
    recipe = GemmRecipe.load(base)
    texts = {"fprop": ["nvfp4", "mxfp4"], "dgrad": ["nvfp4(sr)", "mxfp4", "hp"], "wgrad": ["nvfp4(rht, sr)", "nvfp4"]}
    for _ in range(8):
        layers = [*llama(rng.choice([1, 3, 12])), HEAD, Layer("experts.up", "grouped_linear"), Layer("core", "dpa")]
        likely = {gemm: rng.choice([0, 0.1, 0.5, 0.9, 1]) for gemm in GEMMS}
        wanted = {
            (layer.name, gemm): rng.choice(texts[gemm])
            for layer in layers[:-1]
            for gemm in GEMMS
            if rng.random() < likely[gemm] and deciding_rule(recipe, layer, gemm) is None
        }
        assert_exact(recipe_of_sites(recipe, wanted, layers), recipe, wanted, layers)


def test_what_a_rule_of_the_base_decides_is_kept() -> None:
    layers = [*llama(2), HEAD]
    base = GemmRecipe.load("mxfp8; lm_head: hp")
    same = recipe_of_sites(base, {("lm_head", "fprop"): "hp"}, layers)
    assert same == base
    with pytest.raises(
        ValueError, match=r"fprop of 'lm_head' cannot be nvfp4: rule 1 \(lm_head\) of the base decides it"
    ):
        recipe_of_sites(base, {("lm_head", "fprop"): "nvfp4"}, layers)
    assert deciding_rule(base, layers[0], "fprop") is None


def test_patterns_may_match_what_later_rules_decide() -> None:
    layers = llama(30)
    base = GemmRecipe.load("mxfp8; first 2 blocks (model.layers.0|model.layers.1): fprop: hp")
    wanted = {(layer.name, "fprop"): "nvfp4" for layer in layers if number(layer) > 1}
    recipe = recipe_of_sites(base, wanted, layers)
    assert_exact(recipe, base, wanted, layers)
    assert recipe.rules[0].pattern == "*_proj"


def test_blocks_are_written_as_such_if_another_rule_names_their_layers() -> None:
    """The parts of these blocks have nothing in common that could be a pattern."""
    layers = [Layer(f"blocks.{i}.{part}") for i in range(4) for part in ("qkv", "fc")]
    wanted = {(layer.name, "dgrad"): "nvfp4" for layer in layers} | {
        (layer.name, "fprop"): "nvfp4" for layer in layers[2:6]
    }
    base = GemmRecipe.load("mxfp8")
    recipe = recipe_of_sites(base, wanted, layers)
    assert_exact(recipe, base, wanted, layers)
    assert [rule.pattern for rule in recipe.rules] == ["*.qkv|*.fc", "blocks.[12].*"]
    alone = recipe_of_sites(base, {site: text for site, text in wanted.items() if site[1] == "fprop"}, layers)
    assert [rule.pattern for rule in alone.rules] == ["blocks.[12].qkv|blocks.[12].fc"]


def test_wrong_sites_and_formats_are_named() -> None:
    base, layers = GemmRecipe.load("mxfp8"), [Layer("a")]
    with pytest.raises(KeyError, match="there is no layer 'b' in the list of layers"):
        recipe_of_sites(base, {("b", "fprop"): "nvfp4"}, layers)
    with pytest.raises(KeyError, match="there is no GEMM 'bprop'"):
        recipe_of_sites(base, {("a", "bprop"): "nvfp4"}, layers)
    with pytest.raises(ValueError, match="sr is meant for the gradient operand, which fprop does not have"):
        recipe_of_sites(base, {("a", "fprop"): "nvfp4(sr)"}, layers)
    with pytest.raises(ValueError, match="no rules were found that give 'a.b' its format alone"):
        recipe_of_sites(base, {("a b", "fprop"): "nvfp4"}, [Layer("a b"), Layer("a.b")])
    with pytest.raises(ValueError, match="depends on the model"):
        recipe_of_sites(GemmRecipe.load("mxfp8; first 1 block: hp"), {("a", "fprop"): "nvfp4"}, layers)


def test_names_are_listed_if_patterns_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result is checked layer by layer, whatever the patterns are."""
    monkeypatch.setattr(compact, "patterns_for", lambda wanted, others, naming: ["*"])
    layers = llama(2)
    wanted = {(layer.name, "fprop"): "nvfp4" for layer in layers[:3]}
    recipe = recipe_of_sites(GemmRecipe.load("mxfp8"), wanted, layers)
    assert [rule.pattern for rule in recipe.rules] == ["|".join(layer.name for layer in layers[:3])]
    assert_exact(recipe, GemmRecipe.load("mxfp8"), wanted, layers)
