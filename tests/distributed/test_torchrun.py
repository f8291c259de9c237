"""Programs as users start them, by torchrun: shards of layers that ranks share, experts, checkpoints."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from crossgrain.distributed import checkpoint
from crossgrain.optim import FusedAdam

from ..common.ranks import digest, quantized_model, train

ROOT = Path(__file__).parents[2]


def printed_by(ranks, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def trained(ranks, tensor_parallel):
    options = ("--tensor-parallel", str(tensor_parallel), "--steps", "3", "--layers", "1")
    printed = printed_by(ranks, "examples/train_fsdp2_tp.py", *options)
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", printed).groups())
    return first, last, float(re.search(r"gathers ([\d.]+) MB", printed)[1])


def test_shards_of_shared_layers_begin_with_the_loss_of_whole_ones():
    """Halves of a batch have the mean loss of the batch, to the digits printed; later steps round otherwise."""
    whole, _, nothing = trained(ranks=2, tensor_parallel=2)
    first, last, gathered = trained(ranks=4, tensor_parallel=2)
    assert first == whole and last < first
    assert nothing == 0 and gathered > 0


def test_ranks_that_cannot_be_divided_are_refused():
    command = [sys.executable, str(ROOT / "examples/train_fsdp2_tp.py"), "--tensor-parallel", "2", "--steps", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "1 ranks cannot be divided into groups of 2" in done.stderr


def test_experts_on_two_ranks_begin_with_the_loss_of_one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    recipe = "mxfp8, input.source: dequantized"
    alone = runpy.run_path(str(ROOT / "examples/moe.py"))["train"](1, recipe, sends_quantized=True)[0]
    printed = printed_by(2, "examples/moe.py", "--steps", "1", "--recipe", recipe)
    assert f"step 0: loss {alone[0]:.6f}\n" in printed
    tokens, outputs, gradients = map(int, re.search(r"gradients of outputs: \[(\d+), (\d+), (\d+)\]", printed).groups())
    rows = gradients // (64 * 4)
    assert tokens == rows * (64 + 2) and outputs == 64 * 2 * (64 * 4), "codes and scales of tokens; 64 have two outputs"


SAVING = """
import sys

import torch.distributed as dist

from crossgrain.distributed import checkpoint
from crossgrain.optim import FusedAdam
from tests.common.ranks import digest, mesh_of, quantized_model, shard, train

dist.init_process_group("gloo")
model = shard(quantized_model("mxfp8"), mesh_of(2))
optimizer = FusedAdam(model.parameters(), master_weights=True)
train(model, optimizer, 2)
checkpoint.save(sys.argv[1], 2, model=model, optimizer=optimizer)
found = digest(model), train(model, optimizer, 2)
if dist.get_rank() == 0:
    print(found)
dist.destroy_process_group()
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_two_ranks_save_one_process_loads(tmp_path):
    program = tmp_path / "saving.py"
    program.write_text(SAVING)
    printed = printed_by(2, str(program), str(tmp_path / "run"))
    model = quantized_model("mxfp8", seed=1)
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    assert checkpoint.load(tmp_path / "run", model=model, optimizer=optimizer).step == 2
    assert printed.strip() == str((digest(model), train(model, optimizer, 2)))
