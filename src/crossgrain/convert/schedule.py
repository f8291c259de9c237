"""`ScheduledConversion`: convert a model with a recipe that changes during training.

conversion = crossgrain.ScheduledConversion(model, "nvfp4; last 10 % of steps: mxfp8", total_steps)
for batch in batches:
    ...
    optimizer.step()
    conversion.step()
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..planes import COLUMNWISE, ROWWISE
from ..recipe import GemmRecipe, Phase, RecipeSchedule
from ..recipe.binding import layers_of
from ..recipe.layer_formats import LayerFormats
from ..tensor import QuantizedTensor
from .choice import Choice
from .model import convert
from .report import ConvertReport
from .selection import follows_recipes


class ScheduledConversion:
    """Converts a model, and converts it again when a phase of a schedule begins.

    Layers and parameters stay the same objects, as in `convert`. Histories of delayed scaling are kept where formats
    stay the same. If creating it raises, nothing has changed.

    Args:
        model: the model to change.
        schedule: a schedule, the name of a preset, one line of text or a file.
        total_steps: number of all steps of the training run; needed if a phase is a percentage or is at the end.
        skip: as in `convert`; in all phases.
        include: as in `convert`; in all phases.
        norms: as in `convert`.
        inputs: as in `convert`.
        strict: as in `convert`.

    Raises:
        ValueError: the schedule does not fit the model in one of its phases, or needs the number of all steps; or a
            weight that is kept quantized would have to change its format.

    Attributes:
        schedule: the schedule.
        total_steps: number of all steps, or None.
        steps_done: number of steps that are done, which is the number of the next step.
        report: what the last conversion has converted.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> conversion = cg.ScheduledConversion(model, "nvfp4; last 1 steps: mxfp8", total_steps=2)
        >>> conversion.step()  # the second step has another recipe
        True
        >>> str(model[0].bound_recipe)
        'fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8'
    """

    report: ConvertReport

    def __init__(
        self,
        model: nn.Module,
        schedule: RecipeSchedule | GemmRecipe | str | os.PathLike[str] | Mapping[str, Any],
        total_steps: int | None = None,
        *,
        skip: Choice | Iterable[Choice] = (),
        include: Choice | Iterable[Choice] = (),
        norms: bool = False,
        inputs: Any = None,
        strict: bool = False,
    ) -> None:
        self.model, self.schedule, self.total_steps = model, RecipeSchedule.load(schedule), total_steps
        self.steps_done = 0
        self._options: dict[str, Any] = {
            name: value if isinstance(value, str | type) or callable(value) else list(value)
            for name, value in (("skip", skip), ("include", include))
        }
        self._options |= {"norms": norms, "inputs": inputs, "strict": strict}
        self._phases = self.schedule.phases(total_steps)
        self._starts = [phase.start for phase in self._phases]
        self._index = 0
        _check_phases(model, self._phases)
        self._convert()

    @property
    def phase(self) -> Phase:
        """The phase of the next step, with its recipe."""
        return self._phases[self._index]

    def step(self) -> bool:
        """Count a step that is done. Call it after each step of the optimizer.

        Returns:
            Whether another phase has begun, so that the model was converted again.
        """
        return self.set_step(self.steps_done + 1)

    def set_step(self, steps_done: int) -> bool:
        """Say how many steps are done. If that is another phase than before, the model is converted again.

        Returns:
            Whether the model was converted again.

        Raises:
            ValueError: the number is negative.
        """
        if steps_done < 0:
            raise ValueError(f"the number of steps that are done must not be negative, got {steps_done}")
        index = bisect_right(self._starts, steps_done) - 1
        changes = index != self._index
        before, self._index = self._index, index
        if changes:
            try:
                self._convert()
            except BaseException:
                self._index = before
                raise
        self.steps_done = steps_done
        return changes

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the schedule as text, and the numbers of steps."""
        return {"schedule": str(self.schedule), "total_steps": self.total_steps, "steps_done": self.steps_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved: convert the model for its phase, if it is another one.

        Raises:
            ValueError: the state is of another schedule, or of another number of all steps.
        """
        try:
            schedule, total, done = state["schedule"], state["total_steps"], state["steps_done"]
        except KeyError as error:
            raise ValueError(f"this is not the state of a ScheduledConversion: it has no {error}") from None
        if RecipeSchedule.load(schedule) != self.schedule:
            raise ValueError(
                f"the state was saved with the schedule '{schedule}', but this one is '{self.schedule}'. Use the same "
                "schedule; or, to continue with another one, call set_step with the number of steps that are done"
            )
        if self.schedule.needs_total and total != self.total_steps:
            raise ValueError(
                f"the state was saved with total_steps={total}, but here it is {self.total_steps}, so phases would "
                "begin at other steps. Use the same number; or, to continue with another one, call set_step with the "
                "number of steps that are done"
            )
        self.set_step(done)

    def _convert(self) -> None:
        self.report = convert(self.model, self.phase.recipe, **self._options)
        for module in self.model.modules():
            clear: Any = getattr(module, "clear_weight_cache", None)
            if clear is not None and follows_recipes(module):
                clear()

    def __repr__(self) -> str:
        return (
            f"ScheduledConversion(schedule='{self.schedule}', total_steps={self.total_steps}, "
            f"steps_done={self.steps_done}, phase={self.phase.label})"
        )


def _check_phases(model: nn.Module, phases: tuple[Phase, ...]) -> None:
    """Raise if a later phase does not fit the model, so that training does not stop when it begins."""
    for phase in phases:
        try:
            recipe = phase.recipe.with_blocks_of(model)
        except ValueError as error:
            raise ValueError(f"phase from step {phase.start} ({phase.label}): {error}") from None
        if phase is phases[0]:
            first = recipe
            continue
        for path, module in model.named_modules():
            if not any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters(recurse=False)):
                continue
            for layer in layers_of(module):
                name = ".".join(filter(None, (path, layer.name)))
                formats = [_of_weight(each.layer_formats(name, layer.module_type)) for each in (first, recipe)]
                if formats[0] != formats[1]:
                    raise ValueError(
                        f"{name} keeps its weight quantized, and its format would change from {formats[0]} to "
                        f"{formats[1]} at step {phase.start} ({phase.label}). A schedule does not round weights a "
                        "second time: keep the weights in high precision; or convert with one recipe, and call "
                        "crossgrain.requantize_(model, recipe, optimizer) at that step, which uses the masters of the "
                        "optimizer, and then convert again"
                    )


def _of_weight(formats: LayerFormats) -> str:
    rows, columns = (formats.format_in("weight", direction).value for direction in (ROWWISE, COLUMNWISE))
    source: str = formats.source("weight").value
    return f"{rows} rowwise, {columns} columnwise" + f" ({source})" * (source != "original")
