"""`GPTCheckpoint`: the small GPT after some training in fp32, as a start for measurements and for paired branches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import convert
from ..gpt.data import even_batch, load_text, random_batch
from ..gpt.model import GPT, GPTConfig
from ..recipe import GemmRecipe
from ..runtime.random_numbers import forked_generators
from .start import Start

Batch = tuple[Tensor, Tensor]

_WARM_UP = 0.1  # share of the steps in which the learning rate rises
_DATA_OF_BRANCHES = 1000  # added to the seed, so that branches see other data than the training before
_DATA_OF_BATCHES = 100_000


class GPTCheckpoint:
    """A `GPT` with the state of its optimizer. What is made from it does not change it; only `train` does.

    Args:
        config: size of the model.
        batch: sequences of a batch.
        learning_rate: the learning rate at the end of the training, from which branches go on.
        seed: of the initial weights and the data.
        include: layers that recipes change although they stay in high precision by default: "head", or nothing.
    """

    def __init__(
        self, config: GPTConfig, batch: int, learning_rate: float, seed: int = 0, include: tuple[str, ...] = ()
    ) -> None:
        self.config, self.batch, self.learning_rate, self.include = config, batch, learning_rate, include
        self._data = torch.Generator().manual_seed(seed)
        self.steps = 0
        with forked_generators():
            torch.manual_seed(seed)
            model = GPT(config)
        optimizer = self._optimizer(model)
        self._states: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def train(self, steps: int, on_step: Callable[[int, float], None] | None = None) -> None:
        """Train on in fp32, at a constant learning rate after the first steps. ``on_step`` gets step and loss."""
        model, optimizer = self.restored()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * min(1.0, (self.steps + 1) / (_WARM_UP * steps))
            loss = _step(model, optimizer, self._batch(self._data))
            self.steps += 1
            if on_step is not None:
                on_step(step + 1, loss)
        self._states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def restored(self) -> tuple[GPT, torch.optim.Optimizer]:
        """A new model and a new optimizer in the state of this checkpoint."""
        with forked_generators():
            model = GPT(self.config)
        model.load_state_dict(self._states["model"])
        optimizer = self._optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(self._states["optimizer"]))  # torch would share the tensors
        return model, optimizer

    def batches(self, count: int, seed: int = 0) -> list[Batch]:
        """Batches of training text for a measurement."""
        data = torch.Generator().manual_seed(_DATA_OF_BATCHES + seed)
        return [self._batch(data) for _ in range(count)]

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, in nats per byte: what `sensitivity` calls ``loss_fn``."""
        assert isinstance(model, GPT)
        return model.loss(*batch)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The loss of the checkpoint on validation text, in fp32."""
        model, _ = self.restored()
        return float(model.loss(*even_batch(load_text().validation, 32, self.config.context)))

    def branch(self, steps: int) -> Callable[[GemmRecipe | None, int], Iterator[float]]:
        """A branch for `verify`: trains on from here for some steps, with the learning rate going to 0."""

        def run(recipe: GemmRecipe | None, seed: int) -> Iterator[float]:
            model, optimizer = self.restored()
            if recipe is not None:
                convert(model, recipe, include=self.include)
            data = torch.Generator().manual_seed(_DATA_OF_BRANCHES + seed)
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate * (1 - step / steps)
                yield _step(model, optimizer, self._batch(data))

        return run

    def start(self, batches: int = 8, steps: int = 60) -> Start:
        """This checkpoint as a start for the lab, with branches of some steps."""
        model, optimizer = self.restored()
        config = self.config
        name = f"GPT of {config.layers} layers of {config.width}, after {self.steps} steps"
        data, branch = self.batches(batches), self.branch(steps)
        return Start(model, data, self.loss, optimizer, branch, include=self.include, steps=steps, name=name)

    def save(self, path: Path) -> None:
        """Write the states to a file."""
        torch.save({**self._states, "steps": self.steps, "data": self._data.get_state()}, path)

    def load(self, path: Path) -> None:
        """Read the states that `save` wrote."""
        states = torch.load(path, weights_only=True)
        self.steps = states.pop("steps")
        self._data.set_state(states.pop("data"))
        self._states = states

    def _optimizer(self, model: GPT) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))

    def _batch(self, generator: torch.Generator) -> Batch:
        return random_batch(load_text().train, self.batch, self.config.context, generator)


def _step(model: GPT, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = model.loss(*batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
