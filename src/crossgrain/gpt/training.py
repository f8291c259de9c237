"""Train the small GPT with one recipe. The same seed gives every recipe the same initial weights and the same data."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..convert import ScheduledConversion, convert
from ..files import Checkpoint, load_checkpoint, save_checkpoint
from ..files.random_state import get_random_state, set_random_state
from ..recipe import Recipe, RecipeSchedule
from ..runtime.random_numbers import forked_generators
from .data import even_batch, load_text, random_batch
from .model import GPT, GPTConfig

_EXTRA = "crossgrain_gpt"  # in checkpoints
_UNTIMED = 3  # steps in which kernels are compiled and caches fill


@dataclass(frozen=True)
class Preset:
    """A size of model, and how it is trained.

    Examples:
        >>> cg.gpt.PRESETS["tiny"].batch
        16
    """

    model: GPTConfig
    batch: int
    steps: int
    learning_rate: float
    validations: int = 10  # over the run; the last one is after the last step
    validation_batch: int = 32


PRESETS = {
    "tiny": Preset(GPTConfig(layers=2, width=64, heads=2, context=64), batch=16, steps=120, learning_rate=2e-3),
    "small": Preset(GPTConfig(layers=4, width=128, heads=4, context=128), batch=16, steps=500, learning_rate=2e-3),
    "medium": Preset(GPTConfig(layers=6, width=256, heads=4, context=256), batch=16, steps=1000, learning_rate=1e-3),
    "large": Preset(GPTConfig(layers=12, width=512, heads=8, context=512), batch=16, steps=2000, learning_rate=6e-4),
}


@dataclass
class Run:
    """The results of one training run. ``recipe`` is None for plain fp32.

    Examples:
        >>> from dataclasses import replace
        >>> preset = replace(cg.gpt.PRESETS["tiny"], steps=2, batch=1, validations=1, validation_batch=1)
        >>> run = cg.gpt.Trainer(preset, None, seed=0).train()
        >>> run.recipe is None, [step for step, loss in run.validation]
        (True, [2])
    """

    recipe: str | None
    seed: int
    losses: list[float] = field(default_factory=list)  # of every step, on its own batch
    validation: list[tuple[int, float]] = field(default_factory=list)  # steps done, nats per byte
    step_seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0  # between forward and backward, without parameters
    interrupted: bool = False

    @property
    def validation_loss(self) -> float:
        """The last validation loss, in nats per byte; NaN before the first validation."""
        return self.validation[-1][1] if self.validation else math.nan

    @property
    def seconds_per_step(self) -> float:
        """Time of a step: the lower quartile, because other work on the machine changes it less than the mean."""
        timed = self.step_seconds[_UNTIMED:] or self.step_seconds
        return sorted(timed)[len(timed) // 4] if timed else math.nan


class Trainer:
    """Trains a GPT: ``Trainer(PRESETS["tiny"], recipe, seed=0).train()``.

    Args:
        preset: size of the model, and how to train it.
        recipe: the recipe or schedule to convert the model with; None for fp32.
        seed: of the initial weights, the data and stochastic rounding.

    Attributes:
        model: the GPT.
        optimizer: its optimizer.
        run: the results so far.

    Examples:
        >>> from dataclasses import replace
        >>> preset = replace(cg.gpt.PRESETS["tiny"], steps=2, batch=1, validations=1, validation_batch=1)
        >>> run = cg.gpt.Trainer(preset, cg.GemmRecipe.load("mxfp8"), seed=0).train()
        >>> len(run.losses)
        2
    """

    def __init__(self, preset: Preset, recipe: Recipe | RecipeSchedule | None, seed: int) -> None:
        self.preset = preset
        self.run = Run(None if recipe is None else str(recipe), seed)
        with _random_numbers(seed):
            self.model = GPT(preset.model)
        self._schedule: ScheduledConversion | None = None
        if isinstance(recipe, RecipeSchedule):
            self._schedule = ScheduledConversion(self.model, recipe, preset.steps)
        elif recipe is not None:
            convert(self.model, recipe)
        self._data = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=preset.learning_rate, betas=(0.9, 0.95))
        self._random_state: dict[str, Any] | None = None  # where a run that was saved goes on
        self._validation_data = even_batch(load_text().validation, preset.validation_batch, preset.model.context)

    def train(self, on_step: Callable[[Run], None] | None = None) -> Run:
        """Run all steps, and call ``on_step`` after each. Ctrl-C ends it early and keeps the results so far."""
        run = self.run
        try:
            if self._random_state is None:
                run.saved_bytes = saved_bytes(self.model, *self._batch_without_trace())
            with self._random_numbers():
                self._steps(on_step)
        except KeyboardInterrupt:
            run.interrupted = True
            if not run.validation or run.validation[-1][0] < len(run.losses):
                run.validation.append((len(run.losses), self.validate()))
        return run

    def _steps(self, on_step: Callable[[Run], None] | None) -> None:
        run, steps = self.run, self.preset.steps
        every = max(1, steps // self.preset.validations)
        while len(run.losses) < steps:
            self._step()
            done = len(run.losses)
            if done % every == 0 or done == steps:
                run.validation.append((done, self.validate()))
            if on_step is not None:
                on_step(run)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save(self, root: str | os.PathLike[str]) -> Path:
        """Save a checkpoint to ``root/step-<steps done>``; see `crossgrain.files.save_checkpoint`."""
        run = self.run
        contents = {
            "preset": asdict(self.preset),
            "schedule": None if self._schedule is None else str(self._schedule.schedule),
            "seed": run.seed,
            "losses": run.losses,
            "validation": [list(pair) for pair in run.validation],
            "saved_bytes": run.saved_bytes,
            "data": self._data.get_state(),
        }
        return save_checkpoint(root, len(run.losses), extras={_EXTRA: contents}, **self._objects())

    @classmethod
    def resumed(cls, path: str | os.PathLike[str]) -> Trainer:
        """A trainer that goes on, bit for bit, where `save` has saved one.

        Args:
            path: a checkpoint, or a directory of checkpoints, of which the latest is loaded.

        Raises:
            FileNotFoundError: there is no checkpoint.
            DamagedFileError: a file of the checkpoint is missing, truncated or modified.
            ValueError: it is not a checkpoint of this GPT.
        """
        found = load_checkpoint(path, random_state=False)
        contents = _contents(found)
        preset = Preset(**{**contents["preset"], "model": GPTConfig(**contents["preset"]["model"])})
        schedule = contents["schedule"]
        recipe = found.recipe() if schedule is None else RecipeSchedule.load(schedule)
        trainer = cls(preset, recipe, contents["seed"])
        before = get_random_state()
        try:
            load_checkpoint(found.path, **trainer._objects())
            trainer._random_state = get_random_state()
        finally:
            set_random_state(before)
        trainer._data.set_state(contents["data"])
        run = trainer.run
        run.losses, run.saved_bytes = list(contents["losses"]), contents["saved_bytes"]
        run.validation = [(step, loss) for step, loss in contents["validation"]]
        return trainer

    def train_to(self, steps: int) -> None:
        """Do steps until so many are done, without validation, and stay there.

        Raises:
            ValueError: more steps are done already.
        """
        if steps < len(self.run.losses):
            raise ValueError(f"{len(self.run.losses)} steps are done already, which is more than {steps}")
        with self._random_numbers():
            while len(self.run.losses) < steps:
                self._step()
            self._random_state = get_random_state()

    @property
    def random_state(self) -> dict[str, Any]:
        """The states of the random number generators before the next step."""
        with self._random_numbers():
            return get_random_state()

    def _objects(self) -> dict[str, Any]:
        objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        return objects if self._schedule is None else {**objects, "schedule": self._schedule}

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Use the random numbers of this run, which stochastic rounding draws, inside the block."""
        before = get_random_state()
        try:
            with _random_numbers(self.run.seed):
                if self._random_state is not None:
                    set_random_state(self._random_state)
                yield
        finally:
            set_random_state(before)

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on the validation text, in nats per byte. Does not change the training."""
        self.model.eval()
        loss = self.model.loss(*self._validation_data).item()
        self.model.train()
        return loss

    def _step(self) -> None:
        begin = time.perf_counter()
        loss = self.model.loss(*self.next_batch())
        self.optimizer.zero_grad()
        loss.backward()
        self.update()
        if self._schedule is not None:
            self._schedule.step()
        self.run.losses.append(loss.item())
        self.run.step_seconds.append(time.perf_counter() - begin)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The batch of the next step. Each call goes on in the data."""
        return random_batch(load_text().train, self.preset.batch, self.preset.model.context, self._data)

    def update(self) -> None:
        """Clip the gradients and update the weights, at the learning rate of the next step."""
        self._set_learning_rate()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _set_learning_rate(self) -> None:
        """Increase it over the first tenth of the steps, then decrease it to a tenth along a cosine."""
        step, steps = len(self.run.losses), self.preset.steps
        warmup = max(1, steps // 10)
        up = min(1.0, (step + 1) / warmup)
        down = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = self.preset.learning_rate * up * down

    def _batch_without_trace(self) -> tuple[Tensor, Tensor]:
        state = self._data.get_state()
        batch = self.next_batch()
        self._data.set_state(state)
        return batch


def losses_in(path: str | os.PathLike[str]) -> list[float]:
    """The losses of all steps before a checkpoint of `Trainer.save`.

    Raises:
        ValueError: it is not a checkpoint of this GPT.
    """
    return list(_contents(load_checkpoint(path, random_state=False))["losses"])


def _contents(found: Checkpoint) -> dict[str, Any]:
    contents: dict[str, Any] | None = found.extras.get(_EXTRA)
    if contents is None:
        raise ValueError(f"{found.path} was not saved by crossgrain train: it is no checkpoint of its small GPT")
    return contents


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Use the random numbers of this seed inside the block, and restore the generator after it."""
    with forked_generators():
        torch.manual_seed(seed)
        yield


def saved_bytes(model: GPT, values: Tensor, following: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward of one batch, without the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with forked_generators(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(values, following)
    del loss
    return sum(storage.nbytes() for storage in storages.values())
