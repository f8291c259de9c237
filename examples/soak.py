"""Two training runs that must agree in every bit: one left alone, and one to which everything happens.

Both train quantized parameters with FusedAdam, and change the recipe half way. The second also validates,
recomputes its activations, and again and again saves a checkpoint, throws everything away and goes on
from the file with new objects. Its memory must not grow.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain import files
from crossgrain.gpt.data import even_batch, random_batch
from crossgrain.lab import load_text

RECIPES = ("fp8-delayed", "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)")
WIDTH, CONTEXT, BATCH = 32, 32, 4
ALLOWED_GROWTH = 16 * 2**20  # bytes of the process, whose allocator keeps some of what is freed


class Events(NamedTuple):
    """Every so many steps; 0 is never."""

    validate: int = 0
    resume: int = 0
    recompute: bool = False


class Model(nn.Module):
    """Bytes in, bytes out, with dropout."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(
            cg.TransformerLayer(
                WIDTH, 4 * WIDTH, 2, hidden_dropout=0.1, attention_dropout=0.1, fuse_qkv_params=True,
                self_attn_mask_type="causal", attn_input_format="bshd",
            ) for _ in range(2)
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        x = self.embed(values)
        for layer in self.layers:
            x = cg.checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        logits: Tensor = self.head(x)
        return logits


class Training:
    """All that a run is made of, so that it can be thrown away."""

    def __init__(self, recipe: str, recompute: bool) -> None:
        self.recipe = recipe
        with cg.quantized_model_init(recipe=recipe):
            self.model = Model(recompute)
        self.optimizer = cg.optim.FusedAdam(self.model.parameters(), lr=1e-3, master_weights=True)

    def loss(self, values: Tensor, following: Tensor) -> Tensor:
        with cg.autocast(recipe=self.recipe):
            logits = self.model(values)
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def step(self, number: int) -> float:
        """On a batch that depends on the step alone."""
        batch = random_batch(load_text().train, BATCH, CONTEXT, torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def validate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = self.loss(*even_batch(load_text().validation, BATCH, CONTEXT))
        self.model.train()
        return loss.item()

    def change_recipe(self, recipe: str) -> None:
        self.recipe = recipe
        cg.requantize_(self.model, recipe, self.optimizer)

    def save(self, directory: Path, step: int) -> None:
        files.save_checkpoint(directory, step, model=self.model, optimizer=self.optimizer, recipe=self.recipe, keep=2)

    def load(self, directory: Path) -> None:
        files.load_checkpoint(directory, model=self.model, optimizer=self.optimizer)


def losses_of(steps: int, events: Events, directory: Path, after_resume: Callable[[int], None]) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    training, losses = Training(RECIPES[0], events.recompute), []
    for number in range(steps):
        if number == steps // 2:
            training.change_recipe(RECIPES[1])
        if events.resume and number and number % events.resume == 0:
            training.save(directory, number)
            recipe = training.recipe
            del training
            torch.manual_seed(number)  # whatever the new objects start from
            training = Training(recipe, events.recompute)
            training.load(directory)
            after_resume(number)
        losses.append(training.step(number))
        if events.validate and number % events.validate == 0:
            training.validate()
    return losses


class Memory:
    """What is alive after each resume: tensors known to Python exactly, and the process as a whole."""

    def __init__(self) -> None:
        self.tensors: dict[int, int] = {}
        self.process: dict[int, int] = {}

    def look(self, step: int) -> None:
        gc.collect()
        self.tensors[step] = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.process[step] = pages * os.sysconf("SC_PAGE_SIZE")

    def check(self, steps: int) -> int:
        """Raise if it grew; returns by how many bytes the process did. The halves have other formats."""
        for half in (range(steps // 2), range(steps // 2, steps)):
            counts = [count for step, count in self.tensors.items() if step in half]
            if counts and max(counts) > counts[0]:
                raise AssertionError(f"the number of tensors grew from resume to resume: {counts}")
        sizes = [size for step, size in self.process.items() if step >= steps // 2]
        growth = sizes[-1] - sizes[0] if sizes else 0
        if growth > ALLOWED_GROWTH:
            raise AssertionError(f"the process grew by {growth / 2**20:.1f} MiB in the second half: {self.process}")
        return growth


@contextmanager
def place(directory: str | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--validate", type=int, default=50, metavar="EVERY")
    parser.add_argument("--resume", type=int, default=200, metavar="EVERY")
    parser.add_argument("--directory", help="for checkpoints; a temporary one if not given")
    arguments = parser.parse_args()
    memory = Memory()
    with place(arguments.directory) as directory:
        alone = losses_of(arguments.steps, Events(), directory, memory.look)
        events = Events(arguments.validate, arguments.resume, recompute=True)
        eventful = losses_of(arguments.steps, events, directory, memory.look)
    for step, (one, other) in enumerate(zip(alone, eventful, strict=True)):
        if one != other:
            raise AssertionError(f"the runs part at step {step}: {one} and {other}")
    growth, resumes = memory.check(arguments.steps), len(memory.tensors)
    print(
        f"{arguments.steps} steps twice, {resumes} resumes, and every loss the same: {alone[0]:.4f} to {alone[-1]:.4f}"
    )
    print(f"tensors alive after each resume: {sorted(set(memory.tensors.values()))}")
    print(f"the process grew by {growth / 2**20:.1f} MiB between the first and the last resume of the second half")


if __name__ == "__main__":
    main()
