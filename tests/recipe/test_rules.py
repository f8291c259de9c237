"""Rules: which layers they are for, what wins, and what a model makes of them."""

import pytest
from torch import nn

from crossgrain.gemm.operands import TENSORS
from crossgrain.nn import Linear, name_layers
from crossgrain.recipe import gemm_recipe
from crossgrain.recipe.binding import Layer, layers_of
from crossgrain.recipe.gemm_recipe import GemmRecipe
from crossgrain.recipe.presets import PRESETS
from crossgrain.recipe.roles import QuantizerRole
from crossgrain.recipe.rules import Blocks, Glob, ModuleType, parse_matcher

from ..common.recipes import Model


def formats(recipe: GemmRecipe | str, name: str, module_type: str = "linear") -> list[str]:
    """Of the operands, in the order fprop input, weight; dgrad grad_output, weight; wgrad grad_output, input."""
    plan = GemmRecipe.load(recipe).layer_formats(name, module_type)
    operands = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")
    return [str(plan.format(*operand.split(".")).value) for operand in operands]


# ---- matching --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, name, expected",
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        ("*.lm_head", "model.lm_head", True),
        ("*.lm_head", "lm_head", True),
        ("*.lm_*", "lm_head", True),
        ("*.head", "lm_head", False),
        ("*.fc.w", "fc.w", False),
        ("*.*", "", False),
        ("layers.*.fc1", "layers.0.mlp.fc1", True),
        ("layers.[0-3].*", "layers.2.fc", True),
        ("layers.[0-3].*", "layers.12.fc", False),
        ("*.q|*.k", "a.k", True),
        ("*.Q", "a.q", False),
        ("*", "", True),
    ],
)
def test_globs_match_the_whole_path(pattern: str, name: str, expected: bool) -> None:
    assert parse_matcher(pattern).matches(name, "linear") is expected


def test_matchers_by_text() -> None:
    assert parse_matcher(" first 2  blocks ") == Blocks("first", 2)
    assert parse_matcher("last 1 block") == Blocks("last", 1)
    assert parse_matcher("first 2 blocks (a.0|a.1)") == Blocks("first", 2, ("a.0", "a.1"))
    assert parse_matcher("type=grouped_linear") == ModuleType("grouped_linear")
    assert parse_matcher("a.*|b") == Glob(("a.*", "b"))


def test_a_block_is_a_whole_part_of_the_path() -> None:
    blocks = Blocks("first", 1, ("layers.1",))
    assert blocks.matches("layers.1.fc", "") and blocks.matches("layers.1", "")
    assert not blocks.matches("layers.11.fc", "")


def test_types_select_by_role() -> None:
    recipe = "mxfp8; type=grouped_linear: hp"
    assert formats(recipe, "experts", "grouped_linear") == ["hp"] * 6
    assert formats(recipe, "experts", "linear") == ["mxfp8"] * 6


# ---- merging ---------------------------------------------------------------------------------------


def test_later_rules_win() -> None:
    assert formats("mxfp8; *.a: hp; *.a: mxfp4", "x.a") == formats("mxfp4", "x.a")
    assert formats("mxfp8; x.*: nvfp4; *.a: hp", "x.a") == ["hp"] * 6
    assert formats("mxfp8; *.a: hp; x.*: all: nvfp4", "x.a") == ["nvfp4"] * 6


def test_a_preset_means_the_same_in_a_rule_as_at_the_beginning() -> None:
    base = "fprop: mxfp8, dgrad: hp, wgrad: hp, input.source: dequantized, weight.source: dequantized"
    for name in PRESETS:
        if "attention" in PRESETS[name].line:
            continue
        if GemmRecipe.load(name).set_options:
            with pytest.raises(ValueError, match="Begin the recipe with it"):
                GemmRecipe.load(f"{base}; x: {name}")
            continue
        whole, ruled = GemmRecipe.load(name), GemmRecipe.load(f"{base}; x: {name}")
        from_dict = GemmRecipe.from_dict({"preset": "mxfp8", "rules": {"x": name}})
        for tensor in TENSORS:
            role = QuantizerRole("linear", tensor, "x")
            expected = repr(whole.qfactory(role))
            assert repr(ruled.qfactory(role)) == repr(from_dict.qfactory(role)) == expected, (name, tensor)
        assert GemmRecipe.load(str(ruled)) == ruled
        assert GemmRecipe.from_dict(ruled.to_dict()) == ruled


def test_after_a_key_there_is_a_format() -> None:
    recipe = GemmRecipe.load("hp; x: all: nvfp4")
    assert str(recipe).endswith("x: all: nvfp4")
    assert GemmRecipe.load(str(recipe)) == recipe == GemmRecipe.from_dict(recipe.to_dict())
    assert recipe != GemmRecipe.load("hp; x: nvfp4")
    assert formats("hp; x: nvfp4, dgrad: mxfp8", "x")[2:4] == ["mxfp8", "mxfp8"]
    assert formats("hp; x: mxfp8-fwd-nvfp4-bwd, fprop: hp", "x")[:2] == ["hp", "hp"]


def test_a_rule_for_some_gemms_leaves_the_others() -> None:
    assert formats("mxfp8; *.a: dgrad: hp", "x.a") == ["mxfp8", "mxfp8", "hp", "hp", "mxfp8", "mxfp8"]


def test_a_rule_for_a_gemm_replaces_operands_set_before() -> None:
    line = "mxfp8, fprop.weight: mxfp8(2d); *.a: fprop: mxfp8(e5m2)"
    with pytest.raises(ValueError, match="meant for the gradient operand"):
        GemmRecipe.load(line)
    assert formats("mxfp8, fprop.weight: mxfp8(2d); *.a: fprop: nvfp4", "x.a")[:2] == ["nvfp4", "nvfp4"]


def test_within_a_rule_the_operand_wins() -> None:
    for line in ("fprop.weight: mxfp4, fprop: mxfp8", "fprop: mxfp8, fprop.weight: mxfp4"):
        assert formats(f"hp; *.a: {line}", "x.a")[:2] == ["mxfp8", "mxfp4"]


def test_a_format_for_everything_also_resets_the_sources() -> None:
    recipe = GemmRecipe.load("nvfp4, weight.source: dequantized; *.a: mxfp8; *.b: fprop: mxfp8, dgrad: mxfp8")
    assert recipe.layer_formats("x.a").source("weight").value == "original"
    assert recipe.layer_formats("x.b").source("weight").value == "dequantized"


def test_a_format_for_everything_leaves_attention() -> None:
    recipe = GemmRecipe.load("nvfp4, attention: fp8; *: hp; *.core: attention: mxfp8")
    assert str(recipe.layer_formats("x").format("attention", "qkv").value) == "fp8"
    assert str(recipe.layer_formats("x.core").format("attention", "qkv").value) == "mxfp8"


# ---- binding ---------------------------------------------------------------------------------------


def test_blocks_have_to_be_bound_to_a_model() -> None:
    recipe = GemmRecipe.load("mxfp8; first 1 block: hp")
    with pytest.raises(ValueError, match=r"'first 1 block': .* use recipe.for_model\(model\)"):
        recipe.qfactory(QuantizerRole("linear", "weight", "layers.0.fc"))


def test_binding_finds_the_blocks() -> None:
    recipe = GemmRecipe.load("nvfp4; first 1 block: mxfp8; last 2 blocks: hp").for_model(Model(5))
    assert str(recipe).endswith("; first 1 block (layers.0): mxfp8; last 2 blocks (layers.3|layers.4): hp")
    assert formats(recipe, "layers.0.mlp.2") == ["mxfp8"] * 6
    assert formats(recipe, "layers.4.attn.q") == ["hp"] * 6
    assert formats(recipe, "layers.1.attn.q") == formats(recipe, "head.lm") == formats("nvfp4", "")
    assert GemmRecipe.load(str(recipe)) == recipe


def test_a_bound_recipe_can_be_bound_to_another_model() -> None:
    recipe = GemmRecipe.load("nvfp4; last 1 block: hp").for_model(Model(5))
    assert "layers.7" in str(recipe.for_model(Model(8)))


def test_blocks_may_be_layers_themselves() -> None:
    recipe = GemmRecipe.load("mxfp8; last 1 block: hp").for_model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    assert str(recipe).endswith("last 1 block (2): hp")


def test_the_outermost_of_equally_long_stacks_counts() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    assert "(0)" in str(GemmRecipe.load("mxfp8; first 1 block: hp").for_model(model))


def test_a_numbered_dictionary_is_a_stack_and_a_named_one_is_not() -> None:
    recipe = GemmRecipe.load("mxfp8; first 1 block: hp")
    parts = [nn.Linear(4, 4) for _ in range(3)]
    assert "(4)" in str(recipe.for_model(nn.ModuleDict({str(4 + i): part for i, part in enumerate(parts)})))
    with pytest.raises(ValueError, match="numbered ModuleDict"):
        recipe.for_model(nn.ModuleDict(zip("qkv", parts, strict=True)))


def test_blocks_can_be_said() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": Model(2).layers}), "decoder": Model(2).layers})
    recipe = GemmRecipe.load("mxfp8; first 1 block: hp")
    with pytest.raises(ValueError, match="encoder.layers and decoder have 2 blocks each; choose one of them"):
        recipe.for_model(model)
    assert "(decoder.0)" in str(recipe.for_model(model, blocks="decoder"))
    assert "(encoder.layers.0)" in str(GemmRecipe.load("mxfp8, blocks: encoder.l*; first 1 block: hp").for_model(model))
    both = nn.ModuleDict({"a": Model(2), "b": Model(3)})
    assert "(a.layers.0|b.layers.0)" in str(recipe.for_model(both, blocks="*.layers"))
    with pytest.raises(ValueError, match="blocks='encoder.leyers' matches no module .* near misses: encoder.layers"):
        recipe.for_model(model, blocks="encoder.leyers")


def test_a_model_without_blocks_or_with_too_few() -> None:
    with pytest.raises(ValueError, match="has no ModuleList, Sequential or numbered ModuleDict"):
        GemmRecipe.load("mxfp8; first 1 block: hp").for_model(nn.ModuleDict({"fc": nn.Linear(4, 4)}))
    with pytest.raises(ValueError, match="'last 9 blocks': layers has only 4 blocks"):
        GemmRecipe.load("mxfp8; last 9 blocks: hp").for_model(Model())


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("*.ln", "'[*].ln' matches no layer of this Model; near misses: head.lm"),
        ("layer.0.mlp.0", "near misses: layers.0.mlp.0"),
        ("layers.0", "layers.0 is not a layer; use 'layers.0.[*]' for the layers inside it"),
        ("*.lm|*.qq", "'[*].qq' matches no layer"),
        ("zzzzzzzzzzzzzzzz", "it has layers.0.attn.q, layers.0.attn.k, layers.0.mlp.0, .*, [.][.][.]"),
        ("type=grouped_linear", "'type=grouped_linear' matches no layer .* the module types of its layers are linear"),
    ],
)
def test_a_pattern_that_matches_nothing_lists_near_misses(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GemmRecipe.load(f"mxfp8; {pattern}: hp").for_model(Model())


def test_binding_checks_the_pairs_of_every_layer() -> None:
    recipe = GemmRecipe.load("mxfp8; *.q: fprop: nvfp4; *.k|*.q: fprop.input: nvfp4")
    with pytest.raises(ValueError, match="layer 'layers.0.attn.k': fprop multiplies"):
        recipe.for_model(Model())


# ---- modules with roles ----------------------------------------------------------------------------


class Experts(nn.Module):
    """A module that says itself what it holds, as those of this library do."""

    def __init__(self, *parts: str, module_type: str = "grouped_linear") -> None:
        super().__init__()
        self.name: str | None = None
        self.parts, self.module_type = parts, module_type

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list:
        names = [f"{self.name or ''}.{part}".strip(".") for part in self.parts] or [self.name or ""]
        roles = [QuantizerRole(self.module_type, tensor, name) for name in names for tensor in ("input", "weight")]
        return [*roles, None]


def test_modules_with_roles_are_layers() -> None:
    model = nn.ModuleDict({"moe": Experts(), "mlp": Experts("fc1", "fc2", module_type="linear"), "act": nn.ReLU()})
    expected = [Layer("moe", "grouped_linear"), Layer("mlp.fc1"), Layer("mlp.fc2")]
    assert layers_of(model) == expected
    for name in model:
        model[name].name = name
    assert layers_of(model) == expected
    recipe = GemmRecipe.load("mxfp8; type=grouped_linear: hp; *.fc2: all: nvfp4").for_model(model)
    role = model["mlp"].get_quantizer_roles(fwd=True, num_quantizers=6)[-2]
    assert role.name == "mlp.fc2" and recipe.qfactory(role) == GemmRecipe.load("all: nvfp4").qfactory(role)


def test_a_module_that_is_not_called_by_its_path_is_refused() -> None:
    model = nn.ModuleDict({"moe": Experts()})
    with pytest.raises(ValueError, match=r"Experts at 'moe' has the name None, .*name_layers\(model\)"):
        GemmRecipe.load("mxfp8; moe: hp").for_model(model)
    GemmRecipe.load("mxfp8; type=grouped_linear: hp").for_model(model)  # where paths do not matter


def test_layers_of_this_library_are_found_and_named() -> None:
    model = nn.Sequential(Linear(32, 32), nn.GELU(), Linear(32, 32))
    assert layers_of(model) == [Layer("0"), Layer("2")]
    name_layers(model)
    recipe = GemmRecipe.load("mxfp8; 2: hp").for_model(model)
    role = model[2].get_quantizer_roles(fwd=True, num_quantizers=3)[0]
    assert recipe.qfactory(role) == GemmRecipe.load("hp").qfactory(role)


def test_many_rules_are_checked_once_for_each_thing_that_they_say() -> None:
    """Not one by one against all before: the number of rules may be that of the layers of a large model."""
    lines = [f"layers.{i}: {('nvfp4', 'hp', 'fp8_block')[i % 3]}" for i in range(1000)]
    before = gemm_recipe._checked_formats.cache_info().misses
    recipe = GemmRecipe.load("; ".join(["all: mxfp8", *lines]))
    assert gemm_recipe._checked_formats.cache_info().misses - before <= 8
    assert len(recipe.rules) == 1000
    assert GemmRecipe.load(str(recipe)) == recipe


def test_a_rule_is_checked_with_those_before_it() -> None:
    """It may not pair with the default and still be meant for layers that another rule matches as well."""
    with pytest.raises(ValueError, match=r"rule 1 \(b\)"):
        GemmRecipe.load("all: mxfp8; b: fprop.weight: fp8")
    GemmRecipe.load("all: mxfp8; *: fprop: fp8; b: fprop.weight: fp8")
    with pytest.raises(ValueError, match=r"rule 1 \(b\)"):
        GemmRecipe.load("all: mxfp8; b: fprop.weight: fp8; *: fprop: fp8")


# ---- percentages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, blocks, expected",
    [
        ("last 15 % of blocks", 62, 9),  # 9.3
        ("first 10% of blocks", 5, 1),  # 0.5 is rounded up
        ("first 1 % of blocks", 5, 1),  # one block at least
        ("last 50 % of blocks", 5, 3),
        ("last 12.5 % of blocks", 8, 1),
        ("first 100 % of blocks", 4, 4),
    ],
)
def test_a_percentage_of_blocks(pattern: str, blocks: int, expected: int) -> None:
    recipe = GemmRecipe.load(f"nvfp4; {pattern}: hp")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))
    bound = recipe.for_model(model)
    chosen = bound.rules[0].matcher.paths
    ordered = [str(i) for i in range(blocks)]
    assert chosen == tuple(ordered[:expected] if pattern.startswith("first") else ordered[-expected:])
    for each in (recipe, bound):
        assert GemmRecipe.load(str(each)) == GemmRecipe.from_dict(each.to_dict()) == each
    assert (
        recipe.explain(model).rows[0 if pattern.startswith("first") else -1].why == f"rule 1 ({parse_matcher(pattern)})"
    )


def test_percentages_outside_of_their_range_are_refused() -> None:
    for wrong in ("0", "100.5", "0.0"):
        with pytest.raises(ValueError, match="above 0 and at most 100"):
            parse_matcher(f"last {wrong} % of blocks")
