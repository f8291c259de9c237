"""Megatron-core's GPT with the layers of Transformer Engine, which are crossgrain's, in one process."""

import os
import re
import subprocess
import sys

import pytest
import torch

from ..common.megatron_runs import STEPS, losses
from .conftest import EXAMPLE

RECIPES = ["tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4", "hybrid"]


def test_high_precision_layers_compute_what_megatrons_own_do(megatron):
    """Both begin with the same bits. Norms and attention add up in another order, in float32: about 1e-7 a step."""
    [(local, ours, same_start)] = megatron(both_specs, 1)
    assert same_start
    assert ours == pytest.approx(local, rel=2e-6)
    assert ours[-1] < 0.8 * ours[0]


NORMS = {"input_layernorm": "self_attention.linear_qkv.layer_norm", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm"}


def both_specs(rank):
    import small_gpt

    found, parameters = [], []
    for local in (True, False):
        options = small_gpt.Options(local_spec=local, bf16=False)
        model, optimizer = small_gpt.build(options)
        parameters.append({name: value.detach().clone() for name, value in model.named_parameters()})
        found.append([loss for loss, _ in small_gpt.run(model, optimizer, options, STEPS)])
    local, ours = parameters
    for old, new in NORMS.items():
        local = {name.replace(f"{old}.", f"{new}_"): value for name, value in local.items()}
    return *found, local.keys() == ours.keys() and all(torch.equal(local[name], ours[name]) for name in ours)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_train(recipe, megatron):
    """Close to high precision, and not the same: something is quantized."""
    [plain], [found] = megatron(losses, 1, {}), megatron(losses, 1, {"recipe": recipe})
    assert found == pytest.approx(plain, rel=0.02)
    assert all(ours != theirs for ours, theirs in zip(found, plain, strict=True))


def test_the_command_of_the_example_prints_these_losses(megatron):
    [expected] = megatron(losses, 1, {"recipe": "mxfp8"})
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, str(EXAMPLE / "train.py"), "--recipe", "mxfp8", "--steps", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r"step \d: loss (\S+),", done.stdout) == [f"{loss:.6f}" for loss in expected]
