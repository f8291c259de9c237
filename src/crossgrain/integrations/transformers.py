"""`CrossgrainCallback` for `transformers.Trainer` and its subclasses.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[CrossgrainCallback("nvfp4", skip="first 2 blocks")])
    trainer.train()

`InspectorCallback` looks at what it quantizes. `convert_from` converts a model like the one whose `save_pretrained`
wrote a directory.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import nn

from ..convert import ConvertReport, ScheduledConversion, convert
from ..files.random_state import get_random_state, set_random_state
from ..lab.inspect import Inspector
from ..lab.inspect.inspector import Where
from ..recipe import Recipe, RecipeSchedule
from .conversion import FILE, Choices, Conversion, read_recipe
from .inspection import InspectedTraining
from .needs import not_installed
from .wrappers import is_bound_to, is_converted, unwrapped, why_too_late

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise not_installed("transformers", "hf", error) from error

from .pretrained import convert_from, load_original_names, save_with_pretrained
from .saturation import Saturation

__all__ = ["CrossgrainCallback", "InspectorCallback", "convert_from"]

# So many steps that every phase that is a number of steps is a small part of them.
_MANY_STEPS = 10**12

# The models that callbacks have converted, and how.
_CONVERTED: weakref.WeakKeyDictionary[nn.Module, tuple[Conversion, ConvertReport]] = weakref.WeakKeyDictionary()


class CrossgrainCallback(TrainerCallback, ExportableState):
    """Converts the model of a `transformers.Trainer`, and saves the recipe with each checkpoint.

    The model is converted when the Trainer is created, before anything is wrapped or loaded. A callback that is added
    later (``trainer.add_callback``), or a model that ``model_init`` creates again, is converted when training begins.

    Every checkpoint and every directory that `save_pretrained` writes gets a `crossgrain.json`. A run that is resumed
    must have the same recipe and choices. Evaluation during training does not change the random numbers of training;
    histories of delayed scaling are not written in evaluation anyway.

    Args:
        recipe: a recipe, the name of a preset, a one-line recipe or a file, as for `crossgrain.convert`; or a schedule
            of recipes, as for `crossgrain.ScheduledConversion`. Its steps are those of the Trainer.
        skip: layers not to convert, as for `crossgrain.convert`.
        include: layers to convert that are not by default, as for `crossgrain.convert`.
        norms: convert norms too.
        log_every: add statistics to every n-th log of the Trainer; 0 for none. ``crossgrain/quantized_share`` is the
            share of the multiply-adds with weights that is quantized. With delayed scaling,
            ``crossgrain/saturated`` is the share of inputs and weights of layers whose largest numbers were cut off in
            the last forward of the step, because the scale did not expect them.
        allow_other_recipe: resume also if the checkpoint was made with another recipe, or with none.

    Attributes:
        report: what `crossgrain.convert` has done; None before.
    """

    def __init__(
        self,
        recipe: Recipe | RecipeSchedule | str,
        *,
        skip: Choices = (),
        include: Choices = (),
        norms: bool = False,
        log_every: int = 1,
        allow_other_recipe: bool = False,
    ) -> None:
        if skip is None or include is None:
            raise ValueError(
                "skip and include that are types or functions cannot be restored from a checkpoint: do not set "
                "restore_callback_states_from_checkpoint, and pass the callback with them"
            )
        if log_every < 0:
            raise ValueError(f"log_every must be 0 or more, got {log_every}")
        self.recipe = read_recipe(recipe)
        self.conversion = Conversion.of(self.recipe, skip, include, norms)
        self.report: ConvertReport | None = None
        self._choices: dict[str, Any] = {"skip": skip, "include": include, "norms": norms}
        self._log_every = log_every
        self._logs = 0
        self._scheduled: ScheduledConversion | None = None
        self._allow_other_recipe = allow_other_recipe
        self._before_evaluation: dict[str, Any] | None = None  # random numbers
        self._saturation = Saturation()

    # ---- conversion ----------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None:
            self._convert(model, state, args.max_steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        resumed = state.global_step > 0
        saved, schedule = self._saved_in(state) if resumed else (None, None)
        if resumed:
            self.conversion.check_same(saved, self._allow_other_recipe)
        self._convert_late(model, state, resumed)
        if isinstance(self.recipe, RecipeSchedule):
            self._scheduled = ScheduledConversion(unwrapped(model), self.recipe, state.max_steps, **self._choices)
            if schedule is not None and not self._allow_other_recipe:
                self._scheduled.load_state_dict(schedule)
            self._follow_schedule(state)
        state.stateful_callbacks[type(self).__name__] = self.state()

    def _convert_late(self, model: nn.Module, state: Any, resumed: bool) -> None:
        """Convert a model that the Trainer did not have when it was created."""
        conversion, report = _CONVERTED.get(unwrapped(model), (None, None))
        if report is not None and self.conversion == conversion and is_bound_to(unwrapped(model), report.recipe):
            self.report = report  # by this callback, or by the one that the Trainer has restored it from
            return
        problem = why_too_late(model)
        if problem is None and resumed and self._may_keep_histories() and not is_converted(unwrapped(model)):
            problem = "its histories of delayed scaling were not loaded with the checkpoint"
        if problem:
            raise RuntimeError(
                f"the model can no longer be converted: {problem}. Pass the CrossgrainCallback in callbacks= of the "
                "Trainer, which converts the model when it is created, or call crossgrain.convert before that"
            )
        self._convert(model, state, state.max_steps)

    def _convert(self, model: nn.Module, state: Any, steps: int) -> None:
        model, recipe = unwrapped(model), self.recipe
        if isinstance(recipe, RecipeSchedule):
            recipe = recipe.recipe_at(0, steps if steps > 0 else _MANY_STEPS)  # what is right when training begins
        self.report = convert(model, recipe, **self._choices)
        _CONVERTED[model] = self.conversion, self.report
        load_original_names(model)
        save_with_pretrained(model, self._save)
        if state.is_world_process_zero:
            print(self.report)

    def _follow_schedule(self, state: Any) -> None:
        if self._scheduled is not None:
            if self._scheduled.set_step(state.global_step) and state.is_world_process_zero:
                print(f"step {state.global_step}: {self._scheduled.phase.label}\n{self._scheduled.report}")
            self.report = self._scheduled.report

    def _may_keep_histories(self) -> bool:
        if isinstance(self.recipe, RecipeSchedule):
            return any(phase.recipe.may_keep_histories() for phase in self.recipe.phases(_MANY_STEPS))
        return self.recipe.may_keep_histories()

    def _saved_in(self, state: Any) -> tuple[Conversion | None, Any]:
        saved = state.stateful_callbacks.get(type(self).__name__)
        saved = saved[0] if isinstance(saved, list) else saved
        if saved is None:
            return None, None
        plain = saved["args"]
        conversion = Conversion.from_plain({name: plain[name] for name in self.conversion.plain()})
        return conversion, saved["attributes"].get("saved_schedule")

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What `trainer_state.json` keeps: arguments that make an equal callback."""
        schedule = None if self._scheduled is None else self._scheduled.state_dict()
        return {
            "args": {**self.conversion.plain(), "log_every": self._log_every},
            "attributes": {"saved_schedule": schedule},
        }

    def _save(self, directory: Path) -> None:
        self.conversion.save(directory, None if self._scheduled is None else self._scheduled.state_dict())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and directory.is_dir() and not (directory / FILE).exists():
            self._save(directory)  # a model without save_pretrained

    # ---- evaluation does not disturb training --------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._before_evaluation = None
        self._measure(model)

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._measure(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._log_every:
            self._saturation.end(unwrapped(model))
        self._follow_schedule(state)
        self._expect_evaluation(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._expect_evaluation(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before_evaluation is not None:
            set_random_state(self._before_evaluation)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before_evaluation = None

    def _expect_evaluation(self, control: Any) -> None:
        if control.should_evaluate:
            self._before_evaluation = get_random_state()

    # ---- statistics ----------------------------------------------------------------------------

    def _measure(self, model: nn.Module) -> None:
        if self._log_every and self._may_keep_histories():
            self._saturation.begin(unwrapped(model))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not self._log_every or self.report is None or not logs or "loss" not in logs:
            return
        self._logs += 1
        if (self._logs - 1) % self._log_every:
            return
        found = {"crossgrain/quantized_share": round(self.report.quantized_share, 4)}
        if self._saturation.share is not None:
            found["crossgrain/saturated"] = round(self._saturation.share, 4)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


class InspectorCallback(TrainerCallback):
    """Looks at all tensors that a model quantizes, every few optimizer steps of a `transformers.Trainer`.

    >>> callbacks=[CrossgrainCallback("nvfp4"), InspectorCallback("stats.jsonl", every=500, what_if=["mxfp8"])]

    Steps are those of the Trainer, also after a resumption. Evaluation is not looked at.

    Args:
        to: where to write, as for `crossgrain.lab.Inspector`.
        **options: further arguments of the Inspector: ``every``, ``what_if``, ``rows``, ``draws``, ``layers``.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(self, to: Where = None, **options: Any) -> None:
        self._training = InspectedTraining(to, options)

    @property
    def inspector(self) -> Inspector | None:
        """The Inspector of the run, with its report; None before training begins."""
        return self._training.inspector

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._training.begin(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end()
