"""Programs as users start them, by torchrun: shards of layers that ranks share, experts, checkpoints."""

import os
import re
import runpy
import subprocess
import sys

import pytest
from torch.distributed.device_mesh import init_device_mesh

from crossgrain.distributed import checkpoint
from crossgrain.optim import FusedAdam

from ..common.ranks import digest, quantized_model, run, train
from ..common.torchrun import ROOT, printed_by

# One start of torchrun serves all tests here: its processes import everything only once.
pytestmark = pytest.mark.xdist_group("torchrun")

RECIPE = "mxfp8, input.source: dequantized"
SHARDED_RECIPE = "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"

# The interpreter is not shut down: a thread of gloo may still be freeing what the last backward pass has sent, for
# which it takes the GIL, and torch aborts a process whose threads ask for it then. Such threads end with the process,
# because torch keeps its groups.
PROGRAMS = f"""
import os
import runpy
import sys

import torch.distributed as dist

folder, end = sys.argv[1], dist.destroy_process_group
dist.destroy_process_group = lambda: None  # what the first program begins, the others go on with
for name, *arguments in [
    ("examples/train_fsdp2_tp.py", "--tensor-parallel", "2", "--steps", "3", "--layers", "1"),
    ("examples/moe.py", "--steps", "1", "--recipe", {RECIPE!r}),
    (folder + "/saving.py", folder + "/run"),
]:
    sys.argv = [name, *arguments]
    runpy.run_path(name, run_name="__main__")
    dist.init_process_group = lambda backend: None
end()
sys.stdout.flush()
os._exit(0)
"""

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
    print("saved:", found)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("torchrun")


@pytest.fixture(scope="module")
def printed(folder):
    """What two ranks print that torchrun starts."""
    (folder / "saving.py").write_text(SAVING)
    (folder / "programs.py").write_text(PROGRAMS)
    return printed_by(2, str(folder / "programs.py"), str(folder))


def _train_in_shards(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return runpy.run_path(str(ROOT / "examples/train_fsdp2_tp.py"))["train"](mesh, 3, SHARDED_RECIPE, 1)


def test_shards_of_shared_layers_begin_with_the_loss_of_whole_ones(printed, tmp_path):
    """Halves of a batch have the mean loss of the batch, to the digits printed; later steps round otherwise."""
    whole, last_of_whole = map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", printed).groups())
    nothing = float(re.search(r"gathers ([\d.]+) MB", printed)[1])
    (first, *_, last), gathered = run(_train_in_shards, 4, tmp_path)[0]
    assert f"{first:.4f}" == f"{whole:.4f}" and last < first and last_of_whole < whole
    assert nothing == 0 and gathered > 0


def test_ranks_that_cannot_be_divided_are_refused():
    command = [sys.executable, str(ROOT / "examples/train_fsdp2_tp.py"), "--tensor-parallel", "2", "--steps", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "1 ranks cannot be divided into groups of 2" in done.stderr


def test_experts_on_two_ranks_begin_with_the_loss_of_one_process(printed, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    alone = runpy.run_path(str(ROOT / "examples/moe.py"))["train"](1, RECIPE, sends_quantized=True)[0]
    assert f"step 0: loss {alone[0]:.6f}\n" in printed
    tokens, outputs, gradients = map(int, re.search(r"gradients of outputs: \[(\d+), (\d+), (\d+)\]", printed).groups())
    rows = gradients // (64 * 4)
    assert tokens == rows * (64 + 2) and outputs == 64 * 2 * (64 * 4), "codes and scales of tokens; 64 have two outputs"


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_two_ranks_save_one_process_loads(printed, folder):
    model = quantized_model("mxfp8", seed=1)
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    assert checkpoint.load(folder / "run", model=model, optimizer=optimizer).step == 2
    assert f"saved: {(digest(model), train(model, optimizer, 2))}\n" in printed
