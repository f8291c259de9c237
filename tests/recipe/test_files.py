"""Recipes in YAML and JSON files, and as mappings."""

import builtins
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from crossgrain.recipe.gemm_recipe import GemmRecipe

from ..common.recipes import recipes

RECIPE = GemmRecipe.load(
    "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr), fprop.weight: mxfp8(2d), weight.source: dequantized, "
    "blocks: layers; *.lm_head: hp; first 2 blocks: fprop: mxfp8(2d), dgrad: mxfp8; *.lm_head: mxfp8"
)


@given(recipes())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_file_holds_exactly_the_recipe(tmp_path: Path, recipe: GemmRecipe) -> None:
    for suffix in ("yaml", "yml", "json"):
        path = tmp_path / f"recipe.{suffix}"
        recipe.save(path)
        assert GemmRecipe.load(path) == recipe
        assert GemmRecipe.load(str(path)) == recipe


@given(recipes())
@settings(deadline=None)
def test_a_mapping_holds_exactly_the_recipe(recipe: GemmRecipe) -> None:
    assert GemmRecipe.from_dict(recipe.to_dict()) == recipe
    assert GemmRecipe.load(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_a_file_is_pleasant_to_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    RECIPE.save(path)
    assert path.read_text() == (
        "fprop: mxfp8\n"
        "dgrad: nvfp4(sr)\n"
        "wgrad: nvfp4(rht, sr)\n"
        "fprop.weight: mxfp8(2d)\n"
        "weight.source: dequantized\n"
        "blocks: layers\n"
        "rules:\n"
        "- '*.lm_head': hp\n"
        "- first 2 blocks:\n"
        "    fprop: mxfp8(2d)\n"
        "    dgrad: mxfp8\n"
        "- '*.lm_head': mxfp8\n"
    )


def test_rules_may_be_a_mapping_and_a_preset_the_base(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: nvfp4\nallow_mixed: true\nrules:\n  '*.lm_head': hp\n  last 1 block: {wgrad: mxfp8}\n")
    assert GemmRecipe.load(path) == GemmRecipe.load(
        "nvfp4, allow_mixed: true; *.lm_head: hp; last 1 block: wgrad: mxfp8"
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("- fprop", "is a list, but a recipe is a mapping"),
        ("fprop: mxfp8\n*.head: hp", "put a pattern that begins with * in quotes"),
        ("fporp: mxfp8", "fporp: there is no setting 'fporp'; did you mean 'fprop'?"),
        ("fprop: mxfp9", "fprop: there is no format 'mxfp9'; did you mean 'mxfp8'?"),
        ("preset: nvfp5", "no preset 'nvfp5'; did you mean 'nvfp4'?"),
        ("preset: hp\nrules: hp", "rules must be a list of entries like"),
        ("preset: hp\nrules: [{a b: hp}]", "rule 1: 'a b' is not a pattern"),
        ("preset: hp\nrules: [{a: hp}, {b: {fprop: nvfp4(sr)}}]", "rule 2: sr is meant for the gradient"),
        ("preset: hp\nrules: [{a: {}}]", "rule 1: the rule 'a' sets nothing"),
        ("fprop: 8\ndgrad: hp\nwgrad: hp", "a format must be written as text"),
    ],
)
def test_errors_say_the_file_and_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="broken.yaml") as error:
        GemmRecipe.load(path)
    assert message in str(error.value)


def test_json_must_be_json_without_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="broken.json is not JSON"):
        GemmRecipe.load(path)
    path.write_text('{"fprop": "hp", "fprop": "mxfp8"}')
    with pytest.raises(ValueError, match="the key 'fprop' appears twice"):
        GemmRecipe.load(path)


def test_the_suffix_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must end with one of .yaml, .yml, .json"):
        RECIPE.save(tmp_path / "recipe.txt")
    with pytest.raises(FileNotFoundError):
        GemmRecipe.load(tmp_path / "absent.json")


def test_without_pyyaml_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_yaml(name: str, *args: object, **kwargs: object) -> object:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(ImportError, match=r"pip install 'crossgrain\[yaml\]'.; JSON works without"):
        RECIPE.save(tmp_path / "recipe.yaml")
    RECIPE.save(tmp_path / "recipe.json")
    assert GemmRecipe.load(tmp_path / "recipe.json") == RECIPE


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 5000 + "1" + "}" * 5000])
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path, text, suffix):
    path = tmp_path / f"recipe.{suffix}"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"recipe.{suffix} is nested too deeply to be a recipe"):
        GemmRecipe.load(path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00fprop")
    with pytest.raises(ValueError, match="recipe.yaml is not a text in UTF-8"):
        GemmRecipe.load(path)
