"""Programs as users start them on several ranks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed_by(ranks: int, *arguments: str) -> str:
    """What a program prints that torchrun starts on so many ranks; its arguments are those of torchrun."""
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
