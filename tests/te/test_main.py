"""A program written for Transformer Engine: the same bits as with crossgrain's own names."""

import os
import subprocess
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]

TRAIN = """
import sys
import torch
{imports}

def digest(tensors):
    return [float.hex(float(t.detach().double().square().sum())) for t in tensors]

def mixed(role):
    if role is not None and role.tensor_type == "weight":
        return te.HybridQuantizer(
            rowwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E4M3),
            columnwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E5M2),
        )
    return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

for name, make in {{
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": lambda: recipe.CustomRecipe(qfactory=mixed),
}}.items():
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=name == "mxfp8", recipe=make()):
        model = torch.nn.Sequential(te.LayerNormLinear(64, 64, {device}), te.LayerNormMLP(64, 128, {device}))
    optimizer = optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=name == "mxfp8")
    for step in range(2):
        with te.autocast(enabled=True, recipe=make()):
            loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(name, step, float.hex(loss.item()), *digest(model.parameters()))
"""
THEIRS = """
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import optimizers
assert sys.argv[1:] == ["--steps", "2"], sys.argv
"""
OURS = """
import crossgrain as te
from crossgrain import optim as optimizers, recipe
"""


def test_a_script_trains_to_the_same_bits(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(imports=THEIRS, device='device="cuda"'))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "crossgrain.te", script, "--steps", "2"]
    theirs = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert theirs.returncode == 0, theirs.stderr
    exec(compile(TRAIN.format(imports=OURS, device=""), "ours", "exec"), {"__name__": "ours"})
    lines = capsys.readouterr().out
    assert len(lines.splitlines()) == 8 and theirs.stdout == lines
    assert theirs.stderr.count('the device "cuda" was requested') == (not torch.cuda.is_available())
