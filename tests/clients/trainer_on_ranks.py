"""A program for torchrun: a `Trainer` with a `CrossgrainCallback`, which prints a digest of the model on each rank.

python -m torch.distributed.run --nproc-per-node 2 -m tests.clients.trainer_on_ranks RECIPE DIRECTORY [CHECKPOINT]
"""

from __future__ import annotations

import hashlib
import sys

import torch

from crossgrain.integrations.transformers import CrossgrainCallback

from .test_transformers import model_of, trainer_of

if __name__ == "__main__":
    recipe, directory, *checkpoint = sys.argv[1:]
    model = model_of()
    trainer = trainer_of(directory, model, CrossgrainCallback(recipe))
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    print(f"{type(trainer.model_wrapped).__name__} {found.hexdigest()}\n", end="", flush=True)
