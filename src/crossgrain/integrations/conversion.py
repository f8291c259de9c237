"""How a model was converted, as plain data that is saved beside it: `Conversion`, and the file `crossgrain.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..convert import ConvertReport, convert
from ..files.durable import whole_file
from ..recipe import Recipe, RecipeSchedule, as_recipe
from ..recipe.portable import recipe_from_text, recipe_to_text
from ..runtime.version import PACKAGE_VERSION

FILE = "crossgrain" + ".json"  # in one piece, it would look like the name of a module of crossgrain
VERSION = 1

Choices = Any  # what `crossgrain.convert` takes as skip and include: patterns, types, functions, or several of them


@dataclass(frozen=True)
class Conversion:
    """What `crossgrain.convert` was asked for.

    Attributes:
        recipe: the text of the recipe, or of a schedule of recipes.
        skip: patterns of layers that were left; None if there were types or functions, which cannot be written.
        include: patterns of layers that were converted although they are not by default; None as for ``skip``.
        norms: whether norms were converted.
    """

    recipe: str
    skip: tuple[str, ...] | None = ()
    include: tuple[str, ...] | None = ()
    norms: bool = False

    @classmethod
    def of(cls, recipe: Any, skip: Choices, include: Choices, norms: bool) -> Conversion:
        """Describe the arguments of `crossgrain.convert`."""
        text = str(recipe) if isinstance(recipe, RecipeSchedule) else recipe_to_text(as_recipe(recipe))
        return cls(text, _as_patterns(skip), _as_patterns(include), norms)

    def convert(
        self, model: nn.Module, skip: Choices = None, include: Choices = None, schedule: Any = None
    ) -> ConvertReport:
        """Convert a model in the same way.

        Args:
            model: the model to change.
            skip: layers to leave, if they could not be written.
            include: layers to convert although they are not by default, if they could not be written.
            schedule: the state of `ScheduledConversion`, if the recipe is a schedule: it says which step is next.

        Raises:
            ValueError: what could not be written is not given.
        """
        chosen: dict[str, Any] = {}
        for name, saved, given in (("skip", self.skip, skip), ("include", self.include, include)):
            if saved is None and given is None:
                raise ValueError(
                    f"the model was converted with types or functions as {name}, which were not saved; pass {name}="
                )
            chosen[name] = saved if given is None else given
        recipe = self.read_recipe()
        if isinstance(recipe, RecipeSchedule):
            if not isinstance(schedule, Mapping) or "steps_done" not in schedule:
                raise ValueError(f"the step at which the schedule {self.recipe!r} was saved is not known")
            recipe = recipe.recipe_at(schedule["steps_done"], schedule.get("total_steps"))
        return convert(model, recipe, norms=self.norms, **chosen)

    def read_recipe(self) -> Recipe | RecipeSchedule:
        """The recipe itself, or the schedule."""
        return read_recipe(self.recipe)

    def difference(self, saved: Conversion | None) -> str | None:
        """What is different in a conversion that was saved; None if it is the same.

        Choices that could not be written are taken to be the same.
        """
        if saved is None:
            return f"the checkpoint was made without crossgrain, and the recipe is {self.recipe!r} now"
        for name in ("recipe", "skip", "include", "norms"):
            before, now = getattr(saved, name), getattr(self, name)
            if None not in (before, now) and before != now:
                return f"the checkpoint was made with {name} {_shown(before)}, and it is {_shown(now)} now"
        return None

    def check_same(self, saved: Conversion | None, allow_other_recipe: bool) -> None:
        """Raise a ValueError that says what is different in a conversion that was saved, unless that is allowed."""
        difference = self.difference(saved)
        if difference and not allow_other_recipe:
            raise ValueError(
                f"{difference}. Training would not go on as it would have without the interruption. Use what the "
                "checkpoint was made with, or pass allow_other_recipe=True if the change is intended"
            )

    # ---- as plain data -------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """All of it as JSON data."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_plain(cls, plain: Any) -> Conversion:
        """Read what `plain` has returned.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(plain, Mapping) or not isinstance(plain.get("recipe"), str):
            raise ValueError(f"this does not describe how a model was converted: {str(plain)[:200]}")
        unknown = sorted(set(plain) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"unknown entries in the description of how a model was converted: {', '.join(unknown)}")
        choices = {}
        for name in ("skip", "include"):
            value = plain.get(name, ())
            if value is not None and not (isinstance(value, list | tuple) and all(isinstance(s, str) for s in value)):
                raise ValueError(f"{name} must be a list of patterns, got {value!r}")
            choices[name] = None if value is None else tuple(value)
        return cls(plain["recipe"], norms=bool(plain.get("norms", False)), **choices)

    def save(self, directory: str | os.PathLike[str], schedule: Any = None) -> None:
        """Write `crossgrain.json` into a directory, whole or not at all.

        Args:
            directory: where; it must exist.
            schedule: the state of a schedule of recipes, as JSON data.
        """
        content = {
            "version": VERSION,
            "crossgrain": PACKAGE_VERSION,
            **self.plain(),
            "schedule": schedule,
        }
        with whole_file(Path(directory) / FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> tuple[Conversion, Any]:
        """Read `crossgrain.json` of a directory.

        Returns:
            The conversion, and the state of the schedule or None.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or of another version.
        """
        path = Path(directory) / FILE
        if not path.exists():
            raise FileNotFoundError(
                f"{directory} has no {FILE}: it was not saved by a model that an integration of crossgrain converted"
            )
        try:
            content = json.loads(path.read_text())
            version = content.pop("version")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if version != VERSION:
            raise ValueError(f"{path} has version {version!r}, but only version {VERSION} can be read")
        content.pop("crossgrain", None)
        schedule = content.pop("schedule", None)
        try:
            return cls.from_plain(content), schedule
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def read_recipe(recipe: Any) -> Recipe | RecipeSchedule:
    """What users give as a recipe: a schedule if it changes during training, else a recipe.

    Args:
        recipe: a recipe or a schedule, the name of a preset, a line, a file, or the text of a recipe in a checkpoint.
    """
    if isinstance(recipe, str) and recipe.lstrip().startswith("{"):
        return recipe_from_text(recipe)
    if isinstance(recipe, Recipe):
        return recipe
    schedule = RecipeSchedule.load(recipe)
    return schedule if schedule.changes else as_recipe(recipe)


def _as_patterns(choices: Choices) -> tuple[str, ...] | None:
    if isinstance(choices, str):
        return (choices,)
    if not isinstance(choices, Iterable) or isinstance(choices, type):
        return None
    choices = tuple(choices)
    return choices if all(isinstance(each, str) for each in choices) else None


def _shown(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
