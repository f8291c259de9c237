"""`crossgrain export` on directories of Hugging Face models and on our own checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import crossgrain as cg
from crossgrain_command.app import app

from ..common.saved_models import assert_same_contents
from ..common.tiny_models import tiny_llama
from ..export.models import read

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

RECIPE = "nvfp4; lm_head: hp"


def llama() -> torch.nn.Module:
    return tiny_llama(hidden_size=64, intermediate_size=128)


@pytest.fixture
def hf(tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_a_hugging_face_directory(hf, tmp_path):
    printed = run(tmp_path / "out", "--hf", hf, "--recipe", RECIPE, "--format", "modelopt")
    assert "quantized weights: 14 in nvfp4_2d" in printed and "note: no inputs were observed" in printed
    torch.manual_seed(0)
    model = llama()
    cg.convert(model, RECIPE)
    cg.export(model, tmp_path / "ours", format="modelopt")
    assert_same_contents(dict(read(tmp_path / "out")), dict(read(tmp_path / "ours")))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert "exists already" in run(tmp_path / "out", "--hf", hf, "-r", RECIPE, code=2)
    run(tmp_path / "out", "--hf", hf, "-r", RECIPE, "--overwrite", "--dtype", "bfloat16")
    assert read(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["training", "safetensors"])
def test_a_checkpoint_of_ours(kind, hf, tmp_path):
    model = llama()
    cg.convert(model, RECIPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    if kind == "training":
        cg.files.save_checkpoint(tmp_path / "run", 3, model=model)
        path = tmp_path / "run"
    else:
        path = tmp_path / "model.safetensors"
        cg.files.save_safetensors(model, path)
    printed = json.loads(run(tmp_path / "out", "--hf", hf, "--checkpoint", path, "--json"))
    assert printed["format"] == "compressed-tensors" and len(printed["quantized"]) == 14
    cg.export(model, tmp_path / "ours", format="compressed-tensors")
    assert_same_contents(dict(read(tmp_path / "out")), dict(read(tmp_path / "ours")))


def test_inputs_are_observed(hf, tmp_path):
    save_file({"input_ids": torch.arange(16).view(2, 8)}, tmp_path / "batch.safetensors")
    run(tmp_path / "out", "--hf", hf, "-r", RECIPE, "-f", "modelopt", "--inputs", tmp_path / "batch.safetensors")
    assert "model.layers.0.mlp.up_proj.input_scale" in read(tmp_path / "out")


def test_mistakes_are_sentences(hf, tmp_path):
    out = tmp_path / "out"
    assert "--recipe is needed" in run(out, "--hf", hf, code=2)
    assert "it has no config.json" in run(out, "--hf", tmp_path, "-r", RECIPE, code=2)
    assert "format must be one of" in run(out, "--hf", hf, "-r", RECIPE, "-f", "onnx", code=2)
    assert "--dtype must be one of" in run(out, "--hf", hf, "-r", RECIPE, "--dtype", "int8", code=2)
    assert "modelopt holds fp8, nvfp4" in run(out, "--hf", hf, "-r", "mxfp8; lm_head: hp", "-f", "modelopt", code=2)
    assert not out.exists()
