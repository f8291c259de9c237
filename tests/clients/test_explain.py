"""``crossgrain explain --hf``: shares of a model of transformers without weights."""

import json

import pytest
from typer.testing import CliRunner

from crossgrain_command.app import app

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")


def run(*arguments, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """The configuration of Mixtral 8x7B, which would need 90 GB with weights."""
    directory = tmp_path_factory.mktemp("mixtral")
    transformers.MixtralConfig(architectures=["MixtralForCausalLM"]).save_pretrained(directory)
    return directory


def test_shares_of_a_large_model(mixtral):
    shown = run("--recipe", "nvfp4; first 2 blocks: mxfp8", "--hf", mixtral)
    assert "99 % of the multiply-adds with weights (of a token, by shapes) are quantized" in shown
    assert "- converted 12 layers (6.19 %) to mxfp8:" in shown and "model.layers.0-1.mlp.experts.down_proj" in shown
    assert "- left 1 layer (1.03 %): lm_head: by default, output heads stay in high precision" in shown


def test_as_json(mixtral):
    found = json.loads(run("--recipe", "mxfp8", "--hf", mixtral / "config.json", "--json"))
    assert found["quantized_share"] == pytest.approx(0.99, abs=0.001)
    assert {each["path"] for each in found["left"]} >= {"lm_head", "model.layers.31.mlp.gate.weight"}
    assert any(row["layer"] == "model.layers.0.mlp.experts.gate_up_proj" for row in found["rows"])


def test_phases_of_a_schedule(mixtral):
    shown = run("--recipe", "nvfp4; last 10 % of steps: hp", "--hf", mixtral)
    assert "99 % of the multiply-adds" in shown and "0 % of the multiply-adds" in shown


def test_a_model_that_its_configuration_does_not_name(tmp_path):
    transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    assert "lm_head" in run("--recipe", "mxfp8", "--hf", tmp_path)


def test_mistakes_are_named(mixtral, tmp_path):
    assert "there is no such file or directory" in run("--recipe", "mxfp8", "--hf", tmp_path / "none", code=2)
    assert "exclude each other" in run("--recipe", "mxfp8", "--hf", mixtral, "--model", "tiny", code=2)
    assert "'*.fc9' matches no layer" in run("--recipe", "mxfp8; *.fc9: hp", "--hf", mixtral, code=2)


def test_what_is_left_without_being_asked_for_is_said(tmp_path):
    config = transformers.ResNetConfig(architectures=["ResNetForImageClassification"], embedding_size=8)
    config.save_pretrained(tmp_path)
    shown = " ".join(run("--recipe", "mxfp8", "--hf", tmp_path).split())
    assert "of the multiply-adds with weights of this ResNetForImageClassification stay in high precision" in shown
