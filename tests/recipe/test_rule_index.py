"""RuleIndex finds the rules for a layer without trying each of them, and finds what trying each of them finds."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crossgrain.recipe import GemmRecipe
from crossgrain.recipe.format_spec import FormatSpec
from crossgrain.recipe.rule_index import Place, RuleIndex
from crossgrain.recipe.rules import Blocks, Glob, Matcher, ModuleType, parse_matcher

WORDS = st.sampled_from(
    ["a", "b", "1", "12", "*", "a*", "*b", "?", "[ab]", "[!a]", "[1.a]", "[a.1.b]", "[a", "a]", "[]a]"]
)
PATTERNS = st.lists(WORDS, min_size=1, max_size=4).map(".".join)
NAMES = st.lists(st.sampled_from(["a", "b", "1", "12", "ab", "[a", "a]"]), max_size=4).map(".".join)
OTHERS = [ModuleType("linear"), Blocks("first", 1, ("a.1", "b"))]


@given(st.lists(st.lists(PATTERNS, min_size=1, max_size=3).map(lambda p: Glob(tuple(p))), max_size=8), NAMES)
@settings(deadline=None, max_examples=300)
def test_the_index_finds_what_trying_every_pattern_finds(globs: list[Matcher], name: str) -> None:
    matchers = [*globs, *OTHERS]
    index = RuleIndex(matchers)
    for module_type in ("linear", "dpa"):
        assert index.rules(name, module_type) == [
            i for i, matcher in enumerate(matchers) if matcher.matches(name, module_type)
        ]
        assert index.places(name, module_type) == [
            place for place, single in index.singles() if single.matches(name, module_type)
        ]
    patterns = [pattern for glob in globs for pattern in glob.patterns]  # type: ignore[union-attr]
    named = [pattern for pattern in patterns if pattern.rpartition(".")[2] != "*"]
    assert index.names(name) == Glob(tuple(named)).matches(name, "linear")


def test_every_alternative_has_a_place() -> None:
    index = RuleIndex([parse_matcher("x|*.q"), parse_matcher("first 2 blocks (a)")])
    assert index.places("q", "linear") == [Place(0, 1)]
    assert [(place, str(single)) for place, single in index.singles()] == [
        (Place(0, 0), "x"),
        (Place(0, 1), "*.q"),
        (Place(1, 0), "first 2 blocks (a)"),
    ]


def test_blocks_without_paths_are_an_error_for_every_layer() -> None:
    with pytest.raises(ValueError, match="depends on the model"):
        RuleIndex([parse_matcher("x"), parse_matcher("first 2 blocks")]).rules("x", "linear")


# ---- recipes with many rules -----------------------------------------------------------------------

NAMES_OF_LAYERS = [
    f"model.layers.{i}.{part}" for i in range(125) for part in ("q", "k", "v", "o", "gate", "up", "down", "x")
]


def test_no_rule_is_tried_for_layers_that_it_cannot_be_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = GemmRecipe.load("; ".join(["mxfp8", *(f"*.{name.partition('.')[2]}*: hp" for name in NAMES_OF_LAYERS)]))
    index = recipe.rule_index
    tried = [len(entries) for entries in index._everywhere._by_word.values()]
    assert sum(tried) == len(NAMES_OF_LAYERS) and max(tried) <= 8  # those of one block
    monkeypatch.setattr(Glob, "matches", None)  # trying a rule by itself would be an error
    for name in NAMES_OF_LAYERS:
        assert recipe.layer_formats(name).format("fprop", "weight").value.format == "hp"
        assert recipe.names_layer(name)


def test_every_format_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = FormatSpec._quantizer

    def counted(spec: FormatSpec) -> object:
        made.append(spec)
        return make(spec)

    monkeypatch.setattr(FormatSpec, "_quantizer", counted)
    different = [f"{name}: fprop: fp8(eps=3.25e-{i % 50 + 1}), dgrad: fp8" for i, name in enumerate(NAMES_OF_LAYERS)]
    recipe = GemmRecipe("mxfp8", "mxfp8", "mxfp8", rules=different)
    for name in NAMES_OF_LAYERS:
        recipe.layer_formats(name)
    assert len(made) <= 2 * (50 + 2)  # in two directions


def test_what_a_recipe_has_found_is_not_a_part_of_it() -> None:
    recipe = GemmRecipe.load("mxfp8; first 1 block: hp; *.q: nvfp4")
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}) for _ in range(2))
    plain = pickle.dumps(recipe)
    bound = recipe.for_model(model)
    assert str(bound.layer_formats("layers.0.k").format("fprop", "input").value) == "hp"
    again = bound.for_model(model, blocks="layers.1")  # its first child is q, which the last rule is for
    assert str(again.layer_formats("layers.0.k").format("fprop", "input").value) == "mxfp8"
    assert hash(recipe) == hash(pickle.loads(plain)) and pickle.dumps(recipe) == plain
    assert recipe.options() == pickle.loads(plain).options()
