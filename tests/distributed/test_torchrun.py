"""A program as users start it, by torchrun: shards of layers that ranks share."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
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
