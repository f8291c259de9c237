"""crossgrain plan: screens that fit, JSON that parses, assumptions that are printed, mistakes that are pointed at."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import crossgrain as cg
from crossgrain_command.app import app

MODEL = "layers=2, width=256, heads=4, mlp=512, vocab=1024, context=128"


def invoke(*arguments, columns=80):
    command = ["plan", *(str(argument) for argument in arguments)]
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, command)


def run(*arguments, columns=80):
    result = invoke(*arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout


def flat(text):
    return " ".join(text.replace("- ", "").split())


@pytest.mark.parametrize("columns", [80, 120])
def test_one_recipe(columns):
    shown = run(
        "--model", "llama3-70b", "--recipe", "mxfp8-fwd-nvfp4-bwd", "--gpus", 64, "--device", "b200", columns=columns
    )
    assert max(map(len, shown.splitlines())) <= columns and "…" not in shown
    made = cg.plan("llama3-70b", "mxfp8-fwd-nvfp4-bwd", gpus=64, device="b200")
    for sentence in made.assumptions:
        assert sentence.replace("- ", "") in flat(shown)
    for words in ("mxfp8 rowwise", "nvfp4 columnwise", "reduce-scatter gradients", "step, nothing overlaps", "fits: "):
        assert words in shown


@pytest.mark.parametrize("columns", [80, 120])
def test_several_recipes_are_compared(columns):
    long = "nvfp4; first 2 blocks: mxfp8"
    shown = run(
        "--model", "llama3-405b", "-r", f"hp,mxfp8-fwd-nvfp4-bwd,{long}", "--gpus", 64, "--tp", 8, columns=columns
    )  # fmt: skip
    assert max(map(len, shown.splitlines())) <= columns and "…" not in shown
    names = [line[:20].strip() for line in shown.splitlines()]
    assert {"hp", "mxfp8-fwd-nvfp4-bwd", "recipe C"} <= set(names)
    assert "recipe C: " in shown and "first 2 blocks" in flat(shown)
    assert shown.count("Each GPU (b200) has") == 1, "assumptions that all share are printed once"


def test_what_does_not_fit_is_marked():
    tight = ("--model", MODEL, "--device", "b200, memory=0.001")
    assert "does not fit: " in run(*tight, "-r", "mxfp8")
    rows = [line for line in run(*tight, "-r", "hp,mxfp8").splitlines() if line.startswith(("hp ", "mxfp8 "))]
    assert len(rows) == 2 and all("!" in row for row in rows)


def test_every_option_reaches_the_plan():
    given = {
        "gpus": 8, "sequence": 64, "batch": 2, "micro-batches": 3, "sharding": "fsdp", "tp": 2, "gather": "planes",
        "parameters": "high_precision", "dtype": "fp16", "gradient-dtype": "fp32", "reduce-dtype": "bf16",
        "master": "fp16", "moments": "bf16, fp8", "gemm-rate": 0.5, "wire-rate": 0.25, "device": "gb200",
    }  # fmt: skip
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    shown = json.loads(run("--model", MODEL, "-r", "mxfp8", *options, "--no-reshard", "--recompute", "--json"))
    setup = shown["setup"]
    renamed = {"tp": "tensor_parallel", "gemm-rate": "gemm_efficiency", "wire-rate": "wire_efficiency"}
    expected = {renamed.get(name, name).replace("-", "_"): value for name, value in given.items()}
    expected |= {"moments": ["bf16", "fp8"], "reshard_after_forward": False, "recompute": True}
    assert setup.pop("device")["name"] == expected.pop("device")
    assert setup == expected


def test_json_is_a_list_for_several_recipes():
    found = json.loads(run("--model", MODEL, "-r", "hp,mxfp8", "--json"))
    assert [entry["label"] for entry in found] == ["hp", "mxfp8"]
    assert found[1]["memory"]["total"] == cg.plan(MODEL, "mxfp8").memory.total


@pytest.mark.parametrize(
    "options, message",
    [
        (["--model", "lama3-70b", "-r", "mxfp8"], "no model 'lama3-70b'; did you mean 'llama3-70b'?"),
        (["--model", "gpt2", "-r", "mxfp8", "--gpus", 6, "--tp", 4], "6 GPUs cannot be divided into groups"),
        (["--model", "gpt2", "-r", "mxfp8", "--device", "b20"], "did you mean 'b200'?"),
        (["--model", "gpt2", "-r", "mxfp8; lm_haed: hp"], "near misses: lm_head"),
        (["--model", "gpt2", "-r", "mxfp9"], "did you mean"),
    ],
)
def test_mistakes(options, message):
    result = invoke(*options)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in flat(result.stderr)


def test_the_example_in_the_docs_is_what_the_command_prints():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "planning.md").read_text()
    examples = re.findall(r"`crossgrain plan ([^`]*)`:\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for options, shown in examples:
        printed = [line.rstrip() for line in run(*shlex.split(options)).splitlines()]
        assert printed[: len(shown.splitlines())] == shown.splitlines()
